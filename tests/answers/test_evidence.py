"""What committed rows must prove: where they come from, and that their samples say what they say."""

import itertools
import subprocess

import pytest

from cs336_systems.answers.evidence import (
    contradictions,
    gpu_test_problems,
    history,
    missing_provenance,
    problems_of,
    row_problems,
)
from cs336_systems.harness.record import Metric
from tests.report.rows import make_cell, make_frame, ms

COMMIT = "0123456789abcdef0123456789abcdef01234567"
WHERE = {"gpu": "NVIDIA H200", "device": "cuda", "commit": COMMIT, "argv": "benchmark_model.py", "dirty": False}
TIMES = (1.0, 2.0, 4.0, 9.0)
MFU = Metric("mfu", "%", [50 / time for time in TIMES], derived=True)
ROWS = make_frame(make_cell(ms("step", *TIMES), MFU, **WHERE), make_cell(status="oom", **WHERE))


def test_rows_of_known_commits_whose_samples_agree_prove_themselves():
    assert problems_of(ROWS, {COMMIT}) == problems_of(ROWS, None) == []


@pytest.mark.parametrize("column", ["gpu", "commit", "argv", "timestamp", "torch"])
def test_every_column_of_provenance_is_asked_for(column):
    assert missing_provenance(ROWS.assign(**{column: ""})) == [f"line 2: 3 of 3 rows do not say their {column}"]


def test_a_cpus_rows_name_their_host_instead():
    rows = make_frame(make_cell(ms("step", 1.0), **(WHERE | {"gpu": "", "device": "cpu"})))
    assert missing_provenance(rows) == []
    assert missing_provenance(rows.assign(host="")) == ["line 2: 1 of 1 rows do not say their host"]


@pytest.mark.parametrize("statistic", ["median", "mean", "std", "p10", "p90", "n"])
def test_each_statistic_is_held_against_the_samples(statistic):
    rows = ROWS.copy()
    rows.loc[0, statistic] *= 1.01
    (problem,) = contradictions(rows)
    assert problem.startswith(f"line 2: in 1 of 3 rows, here {statistic} is ")
    rows.loc[0, statistic] = float("nan")
    assert len(contradictions(rows)) == 1


def test_samples_that_were_changed_contradict_their_statistics_and_those_of_the_rate():
    rows = ROWS.assign(samples=[[9.0, 99.0, 99.0], [], []])
    found = contradictions(rows)
    assert [sentence.split(" is ")[0].split()[-1] for sentence in found] == ["median", "mean", "std", "p10", "p90", "n"]
    assert found[0].startswith("line 2: in 1 of 3 rows") and found[1].startswith("line 2: in 2 of 3 rows")


@pytest.mark.parametrize("statistic", ["mean", "std", "p10", "p90", "n"])
def test_a_rate_is_held_against_the_samples_of_its_time(statistic):
    rows = ROWS.copy()
    rows.loc[1, statistic] *= 1.01
    (problem,) = contradictions(rows)
    assert problem.startswith(f"line 3: in 1 of 3 rows, here {statistic} is ")


def test_one_or_two_samples_are_held_against_themselves():
    metrics = [Metric("busy", "ms", samples, derived=True) for samples in ([5.0], [7.0, -3.0])]
    rows = make_frame(make_cell(*metrics, **WHERE))
    assert contradictions(rows) == []
    for row, statistic in itertools.product((0, 1), ("mean", "std", "p10")):
        forged = rows.copy()
        forged.loc[row, statistic] = 6.0
        assert contradictions(forged)[0].startswith(f"line {row + 2}: in 1 of 2 rows")


def test_rows_that_keep_no_samples_and_follow_from_none_are_named_but_for_values_of_rounds():
    rows = make_frame(make_cell(Metric("peak_memory", "GiB", TIMES, derived=True), **WHERE))
    assert contradictions(rows) == ["line 2: 1 of 1 rows keep no samples, and follow from none"]
    assert contradictions(rows.assign(n=float("nan"))) == contradictions(rows)
    assert contradictions(rows.assign(metric="exposed")) == []


def test_rounding_to_seven_digits_contradicts_nothing():
    rows = make_frame(make_cell(ms("step", 1 / 3, 1 / 7, 123.456789012), **WHERE))
    assert contradictions(rows) == []


@pytest.mark.parametrize("dirty", [True, "True", ""])
def test_rows_of_changed_sources_are_named(dirty):
    (problem,) = problems_of(ROWS.assign(dirty=[False, False, dirty]), None)
    assert problem.startswith("line 4: 1 of 3 rows are of a checkout with uncommitted changes")


def test_commits_are_looked_up_where_there_is_a_history():
    rows = ROWS.assign(commit=[COMMIT, COMMIT, "f" * 40])
    assert problems_of(rows, None) == []
    expected = f"line 4: 1 of 3 rows are of commits that are not in the history, here {'f' * 40}"
    assert problems_of(rows, {COMMIT}) == [expected]


def test_rows_are_found_in_results_and_digests_and_named_by_file(tmp_path):
    for part in ("results/cpu/grid/benchmark_model.csv", "digests/h200/nsys/profile_model.csv"):
        (tmp_path / part).parent.mkdir(parents=True)
        ROWS.assign(commit="").to_csv(tmp_path / part, index=False)
    (tmp_path / "results/h200").mkdir()
    (tmp_path / "results/h200/torn.csv").write_text("schema_version,benchmark\n1,be")
    found = row_problems(tmp_path, None)
    assert [sentence.split(",")[0] for sentence in found[:2]] == [
        "digests/h200/nsys/profile_model.csv",
        "results/cpu/grid/benchmark_model.csv",
    ]
    assert found[2].startswith("results/h200/torn.csv: ") and "torn line" in found[2]


def test_runs_of_gpu_tests_name_commits_of_the_history(tmp_path):
    assert gpu_test_problems(tmp_path, {COMMIT}) == []
    lines = ("date,commit,tests,outcome", "d,0123456,t,o", "d,before its first commit,t,o", 'd,"abcdef0, mended",t,o')
    (tmp_path / "gpu_tests.csv").write_text("\n".join(lines) + "\n")
    assert gpu_test_problems(tmp_path, {COMMIT}) == ["gpu_tests.csv, line 4: commit abcdef0 is not in the history"]
    assert gpu_test_problems(tmp_path, None) == []


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
