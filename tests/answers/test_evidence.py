"""Evidence and adoption: rows and logs prove themselves, files stay sealed, a run's files move whole or not."""

import gzip
import itertools
import subprocess
from unittest.mock import Mock

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
from cs336_systems.pretraining.run_records import Device, End, Evaluation, LoggedStep, Session
from tests.report.rows import SETTINGS, make_cell, make_frame, ms

COMMIT = "0123456789abcdef0123456789abcdef01234567"
WHERE = {"gpu": "NVIDIA H200", "device": "cuda", "commit": COMMIT, "argv": "benchmark_model.py", "dirty": False}
TIMES = (1.0, 2.0, 4.0, 9.0)
MFU = Metric("mfu", "%", [50 / time for time in TIMES], derived=True)
ROWS = make_frame(make_cell(ms("step", *TIMES), MFU, **WHERE), make_cell(status="oom", **WHERE))
GRID = "results/h200/grid/benchmark_model.csv"


def test_rows_of_known_commits_whose_samples_agree_prove_themselves():
    assert row_problems(ROWS, {COMMIT}) == row_problems(ROWS, None) == []
    rounded = make_frame(make_cell(ms("step", 1 / 3, 1 / 7, 123.456789012), **WHERE))
    assert row_problems(rounded, None) == []


def test_provenance_is_asked_for_and_commits_are_looked_up():
    for column in ("gpu", "commit", "argv", "timestamp", "torch"):
        assert f"line 2: 3 of 3 rows do not say their {column}" in row_problems(ROWS.assign(**{column: ""}), None)
    for dirty in (True, "True", ""):
        assert row_problems(ROWS.assign(dirty=[False, False, dirty]), None)[0].startswith("line 4: 1 of 3 rows")
    (unknown,) = row_problems(ROWS.assign(commit=[COMMIT, COMMIT, "f" * 40]), {COMMIT})
    assert unknown.startswith("line 4: 1 of 3") and unknown.endswith("f" * 40)
    on_cpu = make_frame(make_cell(ms("step", 1.0), **(WHERE | {"gpu": "", "device": "cpu"})))
    assert row_problems(on_cpu, None) == []
    assert row_problems(on_cpu.assign(host=""), None) == ["line 2: 1 of 1 rows do not say their host"]


def test_few_samples_follow_from_their_statistics():
    few = make_frame(make_cell(*(Metric("busy", "ms", each, derived=True) for each in ([5.0], [7.0, -3.0])), **WHERE))
    assert row_problems(few, None) == []
    for row, statistic in itertools.product((0, 1), ("mean", "std", "p10")):
        forged = few.copy()
        forged.loc[row, statistic] = 6.0
        assert row_problems(forged, None)[0].startswith(f"line {row + 2}: in 1 of 2 rows")


def test_rows_without_samples_and_samples_that_are_not_finite_are_named():
    rows = make_frame(make_cell(Metric("peak_memory", "GiB", TIMES, derived=True), **WHERE))
    assert row_problems(rows, None) == ["line 2: 1 of 1 rows keep no samples, and follow from none"]
    assert row_problems(rows.assign(metric="exposed"), None) == []  # values of rounds, which rows do not tell apart
    with pytest.raises(ValueError, match="line 2 on are not finite"):
        row_problems(make_frame(make_cell(ms("step", 1.0), **WHERE)).assign(samples=[[float("nan")]]), None)


def test_problems_are_named_by_file_and_line(tmp_path):
    for part in ("results/cpu/grid/benchmark_model.csv", "digests/h200/nsys/profile_model.csv"):
        (tmp_path / part).parent.mkdir(parents=True)
        ROWS.assign(commit="").to_csv(tmp_path / part, index=False)
    (tmp_path / "gpu_tests.csv").write_text('date,commit,tests,outcome\nd,0123456,t,o\nd,"abcdef0, mended",t,o\n')
    found = " ".join(problems(tmp_path, {COMMIT}))
    for name in ("results/cpu/grid/benchmark_model.csv: line 2", "digests/h200/nsys/profile_model.csv: line 2"):
        assert name in found
    assert "gpu_tests.csv, line 2" not in found
    assert "gpu_tests.csv, line 3: commit abcdef0 is not in the history" in found
    (tmp_path / "gpu_tests.csv").write_text("date,commit,tests,outcome\nd,1e10000,t,o\n")
    assert "commit 1e10000 is not in the history" in " ".join(problems(tmp_path, {COMMIT}))


def test_history_is_that_of_a_whole_checkout_alone(tmp_path):
    def git(*arguments):
        identity = ("-c", "user.name=a", "-c", "user.email=a@b.c")
        found = subprocess.run(["git", *identity, *arguments], check=True, capture_output=True, text=True, cwd=tmp_path)
        return found.stdout.strip()

    assert history(tmp_path) is None
    git("init", "whole")
    for message in ("first", "second"):
        git("-C", "whole", "commit", "--allow-empty", "-m", message)
    commits = history(tmp_path / "whole")
    assert len(commits) == 2 and git("-C", "whole", "rev-parse", "HEAD") in commits
    (tmp_path / "whole" / "exported").mkdir()
    git("clone", "--depth", "1", f"file://{tmp_path}/whole", "shallow")
    assert history(tmp_path / "whole" / "exported") is history(tmp_path / "shallow") is None


def test_a_changed_a_missing_and_an_unlisted_file_are_named(tmp_path):
    for name in (names := ("results/h200/grid/rows.csv", "figures/grid.png", "gpu_tests.csv")):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(name)
    seal(tmp_path, [tmp_path / name for name in names])
    subprocess.run(["sha256sum", "-c", "SHA256SUMS"], cwd=tmp_path, check=True, capture_output=True)
    (tmp_path / "README.md").write_text("not sealed")
    assert broken_seals(tmp_path) == []
    first, second = names[:2]
    (tmp_path / first).write_text("forged")
    (tmp_path / second).unlink()
    (tmp_path / "figures/new.png").write_text("new")
    found = broken_seals(tmp_path)
    assert [sentence.split()[0] for sentence in found] == [second, "figures/new.png", first]
    assert "missing" in found[0] and "is not listed" in found[1] and "was changed since" in found[2]
    assert broken_seals(tmp_path, rendered=[first, "figures/new.png"]) == found[:1]


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


def adopted(run, profiles):
    moves = plan(run, profiles, "h200")
    carry_out(moves, profiles)
    return moves


def medians(profiles):
    return list(read_rows(profiles / GRID)["median"])


def files(profiles):
    return {path.relative_to(profiles).as_posix() for path in profiles.rglob("*") if path.is_file()}


def test_rows_and_digests_go_to_their_parts_and_raw_recordings_stay(run, profiles):
    write(run / "grid" / "benchmark_model.csv", 1.0)
    (run / "grid" / "benchmark_model_frontier.png").write_bytes(b"drawn from the rows")
    write(run / "nsys" / "profile_model.csv", 2.0)
    for name in ("small-nsys.md", "small-nsys-kernels.csv", "small-nsys-step.png", "small.nsys-rep", "t.json.gz"):
        (run / "nsys" / name).write_bytes(b"x")
    adopted(run, profiles)
    digests = ("profile_model.csv", "small-nsys-kernels.csv", "small-nsys-step.png")
    assert files(profiles) == {GRID, "SHA256SUMS", *(f"digests/h200/nsys/{name}" for name in digests)}
    assert broken_seals(profiles) == []


def test_newer_rows_are_appended_adopting_again_changes_nothing_and_older_ones_are_refused(run, profiles):
    source = write(run / "grid" / "benchmark_model.csv", 1.0)
    adopted(run, profiles)
    write(source, 2.0, 3.0, day=2)
    assert adopted(run, profiles)[0].what == "2 of 3 rows appended"
    assert (profiles / GRID).read_bytes() == source.read_bytes() and broken_seals(profiles) == []
    assert adopted(run, profiles)[0].what == "all there already"
    for day in (1, 2):
        source.unlink()
        write(source, 9.0, day=day)
        (move,) = plan(run, profiles, "h200")
        assert move.refused and "no newer" in str(move)
        with pytest.raises(ValueError, match="nothing was moved"):
            carry_out([move], profiles)
        assert medians(profiles) == [1.0, 2.0, 3.0]


@pytest.mark.slow
def test_rows_that_cannot_be_committed_keep_everything_back(run, profiles):
    write(run / "fine" / "benchmark_model.csv", 1.0)
    for values, reason in (
        ({"dirty": True}, "uncommitted changes"),
        ({"gpu": "NVIDIA B200"}, "measured on NVIDIA B200, not on h200"),
        ({"device": "cpu", "gpu": ""}, "measured on cpu, not on h200"),
    ):
        source = write(run / "grid" / "benchmark_model.csv", 1.0, **values)
        moves = plan(run, profiles, "h200")
        assert [move.refused for move in moves] == [False, True] and reason in moves[1].what
        with pytest.raises(ValueError, match="refused"):
            carry_out(moves, profiles)
        assert not profiles.exists()
        source.unlink()


def test_rows_join_earlier_ones_of_other_or_blank_columns_or_another_order(run, profiles):
    write(run / "grid" / "benchmark_model.csv", 2.0, day=2, nccl='{"version": "2.28.9"}')
    write(profiles / GRID, 1.0)
    earlier = pd.read_csv(profiles / GRID, dtype=str, keep_default_na=False).drop(columns=["nccl", "offload"])
    earlier[[*earlier.columns[:1], *earlier.columns[:0:-1]]].assign(retired="").to_csv(profiles / GRID, index=False)
    assert adopted(run, profiles)[0].what == "1 of 1 rows appended"
    text = pd.read_csv(profiles / GRID, dtype=str, keep_default_na=False)
    assert medians(profiles) == [1.0, 2.0] and list(text["offload"]) == ["none", "none"]
    assert list(text["nccl"]) == ["", '{"version": "2.28.9"}']
    assert adopted(run, profiles)[0].what == "all there already"


def test_torn_files_other_columns_large_and_differing_pictures(run, profiles, monkeypatch):
    source = write(run / "grid" / "benchmark_model.csv", 1.0)
    RowFile(profiles / GRID, ["size"]).append(make_cell(ms("step", 1.0), **WHERE))
    assert "other columns" in plan(run, profiles, "h200")[0].what
    source.write_bytes(source.read_bytes()[:-5])
    assert "torn line" in plan(run, profiles, "h200")[0].what
    source.unlink()
    (run / "grid" / "page.png").write_text("one")
    assert [adopted(run, profiles)[0].what for _ in range(2)] == ["new", "there already"]
    (run / "grid" / "page.png").write_text("two")
    assert plan(run, profiles, "h200")[0].refused
    (profiles / "digests/h200/grid/page.png").unlink()
    adopted(run, profiles)
    assert (profiles / "digests/h200/grid/page.png").read_text() == "two"
    (profiles / "digests/h200/grid/page.png").unlink()
    monkeypatch.setattr(evidence, "LARGEST", 2)
    assert plan(run, profiles, "h200")[0].refused


def test_large_rows_are_compressed_and_stay_so(run, profiles, monkeypatch):
    source = write(run / "grid" / "benchmark_model.csv", 1.0)
    adopted(run, profiles)
    monkeypatch.setattr(evidence, "LARGEST", 600)
    for day in (2, 3):
        write(source, float(day), day=day)
        adopted(run, profiles)
    assert files(profiles) == {f"{GRID}.gz", "SHA256SUMS"} and broken_seals(profiles) == []
    assert gzip.decompress((profiles / f"{GRID}.gz").read_bytes()) == source.read_bytes()


def test_a_file_is_whole_or_as_it_was(run, profiles, monkeypatch):
    source = write(run / "grid" / "benchmark_model.csv", 1.0)
    adopted(run, profiles)
    write(source, 2.0, day=2)
    monkeypatch.setattr("os.fsync", Mock(side_effect=OSError("disk full")))
    with pytest.raises(OSError, match="disk full"):
        adopted(run, profiles)
    assert medians(profiles) == [1.0] and files(profiles) == {GRID, "SHA256SUMS"}


def written(folder, seconds=0.5, device="NVIDIA H200", **provenance):
    folder.mkdir(parents=True, exist_ok=True)
    (folder / LOG).unlink(missing_ok=True)
    with RunLog(LogFile(folder / LOG)) as log:
        log.write(Session({}, {}, 20))
        log.write(Device(device, 1, None, {"commit": COMMIT, "dirty": False} | provenance))
        for step in range(20):
            log.write(LoggedStep(step, seconds, 1000, 3.0 - step / 10, 1.0, 1e-3, at=0.5 * step))
        log.write(Evaluation(20, 2.75, 1000, 0.1, at=9.6))
        log.write(End(20, "done"))
    return folder


def test_a_log_is_adopted_and_proves_itself(tmp_path, profiles):
    beside = written(tmp_path / "run" / "first")
    for name in ("log.png", "run.json", "tokenizer.json"):
        (beside / name).write_bytes(b"x")
    (beside / "step-00000005").mkdir()
    adopted(tmp_path / "run", profiles)
    name = f"runs/h200/first/{LOG}"
    assert files(profiles) == {name, "SHA256SUMS"} and problems(profiles, {COMMIT}) == []
    assert len(Committed(profiles, "h200").run("first").steps) == 20
    with pytest.raises(NotMeasured, match="runs/h200/second"):
        Committed(profiles, "h200").run("second")
    assert problems(profiles, {"cd" * 20}) == [f"{name}: is of commit {COMMIT}, which is not in the history"]
    (profiles / name).write_text((profiles / name).read_text().replace('"loss": 2.8', '"loss": 2.7'))
    assert "was changed since" in broken_seals(profiles)[0]
    (profiles / name).write_bytes((profiles / name).read_bytes()[:-5])
    assert run_problems(read_run(profiles / name), None) == ["its last line is not whole"]


def test_a_log_of_other_seconds_than_its_stamps_without_provenance_or_of_another_machine_is_refused(tmp_path, profiles):
    for how, problem in (
        ({"seconds": 0.3}, "9.6 s apart, and its steps and evaluations took 5.8 s"),
        ({"dirty": True}, "uncommitted changes"),
        ({"commit": ""}, "commit unknown"),
        ({"device": "NVIDIA L4"}, "measured on NVIDIA L4, not on h200"),
    ):
        written(tmp_path / "run" / "first", **how)
        (move,) = plan(tmp_path / "run", profiles, "h200")
        assert move.refused and problem in move.what
