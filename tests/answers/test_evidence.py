"""Evidence and adoption: rows and logs prove themselves, files stay sealed, a run's files move whole or not."""

import gzip
import itertools
import subprocess

import pandas as pd
import pytest

from cs336_systems.answers import evidence
from cs336_systems.answers.committed import Committed, NotMeasured
from cs336_systems.answers.evidence import (
    broken_seals,
    carry_out,
    history,
    plan,
    problems,
    row_problems,
    run_problems,
    seal,
)
from cs336_systems.harness.record import Metric, RowFile, read_rows
from cs336_systems.pretraining.run_log import LOG, LogFile, RunLog, read_run
from cs336_systems.pretraining.run_records import Device, End, Evaluation, Options, Step
from tests.report.rows import SETTINGS, make_cell, make_frame, ms

COMMIT = "0123456789abcdef0123456789abcdef01234567"
WHERE = {"gpu": "NVIDIA H200", "device": "cuda", "commit": COMMIT, "argv": "benchmark_model.py", "dirty": False}
TIMES = (1.0, 2.0, 4.0, 9.0)
MFU = Metric("mfu", "%", [50 / time for time in TIMES], derived=True)
ROWS = make_frame(make_cell(ms("step", *TIMES), MFU, **WHERE), make_cell(status="oom", **WHERE))
NAMES = ("results/h200/grid/rows.csv", "digests/h200/nsys/kernels.csv", "figures/grid.png", "gpu_tests.csv")


def test_rows_of_known_commits_whose_samples_agree_prove_themselves():
    assert row_problems(ROWS, {COMMIT}) == row_problems(ROWS, None) == []


@pytest.mark.parametrize("column", ["gpu", "commit", "argv", "timestamp", "torch"])
def test_every_column_of_provenance_is_asked_for(column):
    assert f"line 2: 3 of 3 rows do not say their {column}" in row_problems(ROWS.assign(**{column: ""}), None)


def test_a_cpus_rows_name_their_host_instead():
    rows = make_frame(make_cell(ms("step", 1.0), **(WHERE | {"gpu": "", "device": "cpu"})))
    assert row_problems(rows, None) == []
    assert row_problems(rows.assign(host=""), None) == ["line 2: 1 of 1 rows do not say their host"]


def test_each_statistic_is_held_against_the_samples_and_a_rate_against_those_of_its_time():
    for row, statistic in itertools.product((0, 1), ("median", "mean", "std", "p10", "p90", "n")):
        if (row, statistic) == (1, "median"):
            continue  # the amount of work of a rate is not known
        rows = ROWS.copy()
        rows.loc[row, statistic] *= 1.01
        (problem,) = row_problems(rows, None)
        assert problem.startswith(f"line {row + 2}: in 1 of 3 rows, here {statistic} is ")


def test_one_or_two_samples_are_held_against_themselves():
    metrics = [Metric("busy", "ms", samples, derived=True) for samples in ([5.0], [7.0, -3.0])]
    rows = make_frame(make_cell(*metrics, **WHERE))
    assert row_problems(rows, None) == []
    for row, statistic in itertools.product((0, 1), ("mean", "std", "p10")):
        forged = rows.copy()
        forged.loc[row, statistic] = 6.0
        assert row_problems(forged, None)[0].startswith(f"line {row + 2}: in 1 of 2 rows")


def test_rows_that_keep_no_samples_and_follow_from_none_are_named_but_for_values_of_rounds():
    rows = make_frame(make_cell(Metric("peak_memory", "GiB", TIMES, derived=True), **WHERE))
    assert row_problems(rows, None) == ["line 2: 1 of 1 rows keep no samples, and follow from none"]
    assert row_problems(rows.assign(n=float("nan")), None) == row_problems(rows, None)
    assert row_problems(rows.assign(metric="exposed"), None) == []


def test_rounding_to_seven_digits_contradicts_nothing():
    rows = make_frame(make_cell(ms("step", 1 / 3, 1 / 7, 123.456789012), **WHERE))
    assert row_problems(rows, None) == []


@pytest.mark.parametrize("dirty", [True, "True", ""])
def test_rows_of_changed_sources_are_named(dirty):
    (problem,) = row_problems(ROWS.assign(dirty=[False, False, dirty]), None)
    assert problem.startswith("line 4: 1 of 3 rows are of a checkout with uncommitted changes")


def test_commits_are_looked_up_where_there_is_a_history():
    rows = ROWS.assign(commit=[COMMIT, COMMIT, "f" * 40])
    assert row_problems(rows, None) == []
    expected = f"line 4: 1 of 3 rows are of commits that are not in the history, here {'f' * 40}"
    assert row_problems(rows, {COMMIT}) == [expected]


def test_problems_are_named_by_file_of_results_digests_and_runs(tmp_path):
    for part in ("results/cpu/grid/benchmark_model.csv", "digests/h200/nsys/profile_model.csv"):
        (tmp_path / part).parent.mkdir(parents=True)
        ROWS.assign(commit="").to_csv(tmp_path / part, index=False)
    (tmp_path / "results/h200").mkdir()
    (tmp_path / "results/h200/torn.csv").write_text("schema_version,benchmark\n1,be")
    (tmp_path / "gpu_tests.csv").write_text(
        'date,commit,tests,outcome\nd,0123456,t,o\nd,first,t,o\nd,"abcdef0, mended",t,o\n'
    )
    found = " ".join(problems(tmp_path, {COMMIT}))
    for name in ("results/cpu/grid/benchmark_model.csv: line 2", "digests/h200/nsys/profile_model.csv: line 2"):
        assert name in found
    assert "results/h200/torn.csv: " in found
    assert "gpu_tests.csv, line 4: commit abcdef0 is not in the history" in found and "line 2: commit" not in found


def test_history_is_that_of_a_whole_checkout_alone(tmp_path):
    def git(*arguments):
        identity = ("-c", "user.name=a", "-c", "user.email=a@b.c")
        found = subprocess.run(["git", *identity, *arguments], check=True, capture_output=True, text=True, cwd=tmp_path)
        return found.stdout.strip()

    assert history(tmp_path) is None
    git("init", "whole")
    for message in ("first", "second"):
        git("-C", "whole", "commit", "--allow-empty", "-m", message)
    head = git("-C", "whole", "rev-parse", "HEAD")
    commits = history(tmp_path / "whole")
    assert len(commits) == 2 and head in commits
    (tmp_path / "whole" / "exported").mkdir()
    assert history(tmp_path / "whole" / "exported") is None
    git("clone", "--depth", "1", f"file://{tmp_path}/whole", "shallow")
    assert history(tmp_path / "shallow") is None


@pytest.fixture
def sealed(tmp_path):
    for name in NAMES:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(name)
    seal(tmp_path, [tmp_path / name for name in NAMES])
    return tmp_path


def test_the_list_is_one_that_sha256sum_reads(sealed):
    subprocess.run(["sha256sum", "-c", "SHA256SUMS"], cwd=sealed, check=True, capture_output=True)
    (sealed / "README.md").write_text("x")
    assert broken_seals(sealed) == []


@pytest.mark.parametrize("name", NAMES)
def test_a_changed_a_missing_and_an_unlisted_file_are_named(sealed, name):
    (sealed / name).write_text("forged")
    assert [sentence.split(" was changed since")[0] for sentence in broken_seals(sealed)] == [name]
    (sealed / name).unlink()
    assert broken_seals(sealed) == [f"{name} is listed in SHA256SUMS and missing"]
    seal(sealed, [sealed / name])
    assert broken_seals(sealed) == []
    (sealed / name).write_text("back")
    assert broken_seals(sealed)[0].startswith(f"{name} is not listed")
    assert broken_seals(sealed, rendered=[name]) == []


def write(path, *milliseconds, day=1, **values):
    file = RowFile(path, SETTINGS)
    for time in milliseconds:
        file.append(make_cell(ms("step", time), timestamp=f"2026-01-{day:02}T00:00:00+00:00", **(WHERE | values)))
    return path


@pytest.fixture
def run(tmp_path):
    return tmp_path / "run7"


@pytest.fixture
def profiles(tmp_path):
    return tmp_path / "profiles"


def adopted(run, profiles, **how):
    moves = plan(run, profiles, how.pop("machine", "h200"), replace=how.pop("replace", False))
    carry_out(moves, profiles)
    return moves


def medians(profiles, name="benchmark_model.csv"):
    return list(read_rows(profiles / "results" / "h200" / "grid" / name)["median"])


def test_rows_and_digests_go_to_their_parts_and_raw_recordings_stay(run, profiles):
    write(run / "grid" / "benchmark_model.csv", 1.0)
    (run / "grid" / "benchmark_model_frontier.png").write_bytes(b"drawn from the rows")
    write(run / "nsys" / "profile_model.csv", 2.0)
    for name in ("small-nsys.md", "small-nsys-kernels.csv", "small-nsys-step.png", "small.nsys-rep", "t.json.gz"):
        (run / "nsys" / name).write_bytes(b"x")
    drawn_again = ("memory-2.7b-b4-c128-fp32-step.png", "memory-2.7b-b4-c128-fp32-step-active.png")
    (run / "memory").mkdir()
    for name in (*drawn_again, "memory-2.7b-b4-c128-fp32-step.pickle.gz"):
        (run / "memory" / name).write_bytes(b"x")
    adopted(run, profiles)
    found = {path.relative_to(profiles).as_posix() for path in profiles.rglob("*") if path.is_file()}
    digests = ("profile_model.csv", "small-nsys-kernels.csv", "small-nsys-step.png")
    adopted_files = {"results/h200/grid/benchmark_model.csv"} | {f"digests/h200/nsys/{name}" for name in digests}
    adopted_files |= {f"digests/h200/memory/{name}" for name in drawn_again}
    assert found == adopted_files | {"SHA256SUMS"}
    assert {line.split()[1] for line in (profiles / "SHA256SUMS").read_text().splitlines()} == adopted_files
    assert broken_seals(profiles) == []


def test_newer_rows_are_appended_and_adopting_again_changes_nothing(run, profiles):
    source = write(run / "grid" / "benchmark_model.csv", 1.0)
    adopted(run, profiles)
    write(source, 2.0, 3.0, day=2)
    (move,) = adopted(run, profiles)
    assert move.what == "2 of 3 rows appended"
    assert medians(profiles) == [1.0, 2.0, 3.0]
    assert broken_seals(profiles) == []
    assert (profiles / "results/h200/grid/benchmark_model.csv").read_bytes() == source.read_bytes()
    assert adopted(run, profiles)[0].what == "all there already"
    assert medians(profiles) == [1.0, 2.0, 3.0]


@pytest.mark.parametrize("day", [1, 2])
def test_rows_that_differ_and_are_no_newer_are_refused_unless_told(run, profiles, day):
    write(profiles / "results" / "h200" / "grid" / "benchmark_model.csv", 1.0, day=2)
    write(run / "grid" / "benchmark_model.csv", 9.0, day=day)
    (move,) = plan(run, profiles, "h200", replace=False)
    assert str(move).startswith("refused: ") and "no newer" in str(move)
    with pytest.raises(ValueError, match="nothing was moved"):
        carry_out([move], profiles)
    assert medians(profiles) == [1.0]
    adopted(run, profiles, replace=True)
    assert medians(profiles) == [9.0]


@pytest.mark.parametrize(
    ("values", "reason"),
    [
        ({"dirty": True}, "uncommitted changes"),
        ({"commit": ""}, "do not say their commit"),
        ({"gpu": "NVIDIA B200"}, "rows of NVIDIA B200, not of h200"),
        ({"device": "cpu", "gpu": ""}, "rows of cpu, not of h200"),
    ],
)
def test_rows_that_cannot_be_committed_keep_everything_back(run, profiles, values, reason):
    write(run / "fine" / "benchmark_model.csv", 1.0)
    write(run / "grid" / "benchmark_model.csv", 1.0, **values)
    moves = plan(run, profiles, "h200", replace=True)
    assert [move.refused for move in moves] == [False, True]
    assert reason in moves[1].what
    with pytest.raises(ValueError, match="refused"):
        carry_out(moves, profiles)
    assert not profiles.exists()


def test_a_machine_is_named_after_its_gpu_or_is_a_cpu(run, profiles):
    write(run / "collectives" / "benchmark_collectives.csv", 1.0, device="cpu", gpu="")
    adopted(run, profiles, machine="cpu")
    assert (profiles / "results" / "cpu" / "collectives" / "benchmark_collectives.csv").exists()


def test_rows_join_earlier_ones_with_columns_in_another_order_and_none_for_nccl(run, profiles):
    write(run / "grid" / "benchmark_model.csv", 2.0, day=2, nccl='{"version": "2.28.9"}')
    committed = profiles / "results" / "h200" / "grid" / "benchmark_model.csv"
    write(committed, 1.0)
    earlier = pd.read_csv(committed, dtype=str, keep_default_na=False).drop(columns="nccl")
    earlier = earlier[[*earlier.columns[:1], *earlier.columns[:0:-1]]]
    earlier.to_csv(committed, index=False)
    (move,) = adopted(run, profiles)
    assert move.what == "1 of 1 rows appended"
    assert medians(profiles) == [1.0, 2.0]
    assert list(read_rows(committed)["nccl"]) == ["", '{"version": "2.28.9"}']
    assert adopted(run, profiles)[0].what == "all there already"


def test_earlier_rows_say_what_later_ones_could_be_asked(run, profiles):
    """In the committed file, as they are read."""
    write(run / "grid" / "benchmark_model.csv", 2.0, day=2)
    committed = profiles / "results" / "h200" / "grid" / "benchmark_model.csv"
    write(committed, 1.0)
    earlier = pd.read_csv(committed, dtype=str, keep_default_na=False).drop(columns=["offload", "fp8_skip_last"])
    earlier.to_csv(committed, index=False)
    (move,) = adopted(run, profiles)
    assert move.what == "1 of 1 rows appended"
    assert medians(profiles) == [1.0, 2.0]
    text = pd.read_csv(committed, dtype=str, keep_default_na=False)
    assert list(text["offload"]) == ["none", "none"] and list(text["fp8_skip_last"]) == ["0", "0"]


def test_torn_files_and_other_columns_are_refused(run, profiles):
    source = write(run / "grid" / "benchmark_model.csv", 1.0)
    committed = profiles / "results" / "h200" / "grid" / "benchmark_model.csv"
    RowFile(committed, ["size"]).append(make_cell(ms("step", 1.0), **WHERE))
    assert "other columns" in plan(run, profiles, "h200", replace=False)[0].what
    source.write_bytes(source.read_bytes()[:-5])
    assert "torn line" in plan(run, profiles, "h200", replace=True)[0].what


def test_large_rows_are_compressed_and_stay_so_and_large_pages_refused(run, profiles, monkeypatch):
    source = write(run / "grid" / "benchmark_model.csv", 1.0)
    adopted(run, profiles)
    monkeypatch.setattr(evidence, "LARGEST", 600)
    write(source, 2.0, day=2)
    adopted(run, profiles)
    folder = profiles / "results" / "h200" / "grid"
    assert [path.name for path in folder.iterdir()] == ["benchmark_model.csv.gz"]
    write(source, 3.0, day=3)
    adopted(run, profiles)
    assert medians(profiles, "benchmark_model.csv.gz") == [1.0, 2.0, 3.0]
    assert broken_seals(profiles) == []
    assert gzip.decompress((folder / "benchmark_model.csv.gz").read_bytes()) == source.read_bytes()
    (run / "grid" / "page.png").write_text("x" * 1001)
    assert [move.refused for move in plan(run, profiles, "h200", replace=True)] == [False, True]


def test_pages_that_differ_are_refused_unless_told(run, profiles):
    (run / "nsys").mkdir(parents=True)
    page, committed = run / "nsys" / "page.png", profiles / "digests" / "h200" / "nsys" / "page.png"
    page.write_text("one")
    assert adopted(run, profiles)[0].what == "new"
    assert adopted(run, profiles)[0].what == "there already"
    page.write_text("two")
    assert plan(run, profiles, "h200", replace=False)[0].refused
    adopted(run, profiles, replace=True)
    assert committed.read_text() == "two"


def test_a_file_is_whole_or_as_it_was(run, profiles, monkeypatch):
    source = write(run / "grid" / "benchmark_model.csv", 1.0)
    adopted(run, profiles)
    write(source, 2.0, day=2)

    def full(descriptor):
        raise OSError("disk full")

    monkeypatch.setattr("os.fsync", full)
    moves = plan(run, profiles, "h200", replace=False)
    with pytest.raises(OSError, match="disk full"):
        carry_out(moves, profiles)
    assert medians(profiles) == [1.0]
    assert len(list((profiles / "results" / "h200" / "grid").iterdir())) == 1


def test_a_folder_without_parts_is_an_error(run, profiles):
    with pytest.raises(ValueError, match="holds no folder of a part"):
        plan(run, profiles, "h200", replace=False)


def written(folder, n_steps=5, device="NVIDIA H200", **provenance):
    folder.mkdir(parents=True)
    with RunLog(LogFile.open(folder / LOG, resume=False)) as log:
        log.write(Options({}, {}, n_steps))
        log.write(Device(device, 1, None, {"commit": COMMIT, "dirty": False} | provenance))
        for step in range(n_steps):
            log.write(Step(step, 0.5, 1000, 3.0 - step / 10, 1.0, 1e-3))
        log.write(Evaluation(n_steps, 2.75, 1000, 0.1))
        log.write(End(n_steps, "done"))
    return folder


def test_a_log_is_adopted_and_read_again_whatever_lies_beside_it(tmp_path):
    beside = written(tmp_path / "run" / "first")
    for name in ("log.png", "run.json", "tokenizer.json"):
        (beside / name).write_bytes(b"x")
    (beside / "step-00000005").mkdir()
    profiles = tmp_path / "profiles"
    carry_out(plan(tmp_path / "run", profiles, "h200", replace=False), profiles)
    files = {path.relative_to(profiles).as_posix() for path in profiles.rglob("*") if path.is_file()}
    assert files == {"runs/h200/first/log.jsonl", "SHA256SUMS"}
    assert len(Committed(profiles, "h200").run("first").steps) == 5
    assert problems(profiles, {COMMIT}) == []
    with pytest.raises(NotMeasured, match="runs/h200/second"):
        Committed(profiles, "h200").run("second")


@pytest.mark.parametrize(
    ("how", "problem"),
    [
        ({"dirty": True}, "uncommitted changes"),
        ({"commit": ""}, "commit unknown"),
        ({"device": "NVIDIA L4"}, "a run on NVIDIA L4, not on h200"),
    ],
)
def test_a_log_without_provenance_or_of_another_machine_is_refused(tmp_path, how, problem):
    written(tmp_path / "run" / "first", **how)
    (move,) = plan(tmp_path / "run", tmp_path / "profiles", "h200", replace=False)
    assert move.refused and problem in move.what


def test_a_changed_log_and_a_forged_commit_are_named(tmp_path):
    profiles = tmp_path / "profiles"
    written(tmp_path / "run" / "first")
    carry_out(plan(tmp_path / "run", profiles, "h200", replace=False), profiles)
    path = profiles / "runs" / "h200" / "first" / LOG
    (forged,) = problems(profiles, {"cd" * 20})
    assert forged == f"runs/h200/first/log.jsonl: is of commit {COMMIT}, which is not in the history"
    path.write_text(path.read_text().replace('"loss": 2.8', '"loss": 2.7'))
    assert "was changed since" in broken_seals(profiles)[0]
    path.write_bytes(path.read_bytes()[:-5])
    assert run_problems(read_run(path), None) == ["its last line is not whole"]
