"""``benchmark_failures.py``: seconds and tokens that logs say a kill has cost, and real kills of small runs."""

import os
import signal
import subprocess
import sys
import time
from dataclasses import replace

import psutil
import pytest

from cs336_systems.costs.parallelism.failures import ReplicatedJob, mean_time_between_failures
from cs336_systems.experiments.failures import Options, goodput_figure, make_cells, tables
from cs336_systems.experiments.failures_measure import Kill, kills_of_replicas, kills_of_restarts, measure, of_the_run
from cs336_systems.harness.record import Metric
from cs336_systems.pretraining.replica_options import Fault, faults_of
from cs336_systems.pretraining.run_records import Dropped, Evaluation, LoggedCheckpoint, LoggedStep, Membership, Session
from tests.pretraining.trained import write_dataset
from tests.report.rows import rows_of

CPU = Options.default("cpu")


def step(number, at, seconds=1.0, tokens=30):
    return LoggedStep(number, seconds, tokens, 2.0, 1.0, 1e-3, at=at)


def there(number, at, healed=0.0):
    return Membership(number, ["0", "1", "2"], 0, 0, 0.1, healed, at=at)


def dropped(number, at, sequences=(6, 9)):
    return Dropped(number, "gone", sequences, True, 0.2, at=at)


def begun(first, at):
    return Session({}, {}, 5, first, at=at)


LOGS = {
    "0": [
        *(begun(0, 90.0), there(0, 90.1), step(0, 101.0), step(1, 102.0)),
        *(dropped(2, 102.9), there(2, 104.5), dropped(2, 104.6), there(2, 105.0), step(2, 106.0, 4.0)),
        *(
            step(3, 107.0),
            LoggedCheckpoint(4, 10, 0.25, 0.5, at=107.1),
            step(4, 108.0),
            Evaluation(5, 1.5, 9, 1.0, at=109.0),
        ),
    ],
    "1": [
        *(begun(0, 90.0), there(0, 90.2), step(0, 101.1), step(1, 102.1)),
        *(replace(there(3, 106.5), number=-1), begun(3, 106.6), there(4, 107.1, healed=0.3), step(4, 108.1)),
    ],
    "2": [
        *(begun(0, 90.0), there(0, 90.1), step(0, 101.2), step(1, 102.2)),
        *(dropped(2, 103.0), there(2, 104.8), step(2, 106.1, 4.0), step(3, 107.1), step(4, 108.2)),
    ],
}
"""Three replicas; 1 was killed at 102.5 in step 2, which was dropped once more, and it returned for step 4."""


def test_what_a_kill_costs_is_counted_from_the_signal_to_the_last_of_the_others():
    hits = [(Fault("kill", 1, 2), 102.5), (Fault("kill", 0, 4), 108.5)]
    (kill,) = kills_of_replicas(LOGS, hits, context_length=10)
    assert kill == Kill(*map(pytest.approx, (2.3, 3.6)), 2, 60, *map(pytest.approx, (0.5, 4.6, 0.3, 1.0)))


def test_goodput_is_the_share_of_time_that_became_steps():
    """Steps 1 to 4 in 7 s; in steps 1 and 3 nobody died and none was away, and 4 lacked a replica."""
    logs = [
        [
            replace(each, tokens=20) if getattr(each, "step", 0) == 4 and isinstance(each, LoggedStep) else each
            for each in log
        ]
        for log in LOGS.values()
    ]
    found = {metric.name: metric.samples for metric in of_the_run(logs, 5)}
    assert found["mean_step"] == [pytest.approx(1000.0)]
    assert found["run_tokens_per_s"] == [pytest.approx((30 + 30 + 30 + 20) / 7)]
    assert found["goodput"] == [pytest.approx(100 * 110 / 30 / 7)]
    assert (found["loss"], found["stall"]) == ([1.5], [0.25])
    again = [
        *(begun(0, 0.0), *(step(n, 1.0 + n) for n in range(7))),
        *(begun(4, 20.0), *(step(n, 18.0 + n) for n in range(4, 9)), Evaluation(9, 1.0, 9, 1.0, at=30.0)),
    ]
    found = {metric.name: metric.samples for metric in of_the_run([again], 9)}
    assert found["goodput"] == [pytest.approx(100 * 8 / 25)]
    with pytest.raises(RuntimeError, match="step 2 of 5 is in no log"):
        of_the_run([LOGS["1"]], 5)


def test_a_restart_loses_the_steps_after_the_checkpoint():
    log = [
        begun(0, 0.0),
        *(step(n, 1.0 + n) for n in range(7)),
        begun(4, 20.0),
        *(step(n, 18.0 + n) for n in range(4, 9)),
    ]
    assert kills_of_restarts(log, [7.5, 40.0], tokens_per_step=100) == [Kill(12.5, 14.5, 3, 300)]


def test_kills_are_random_by_seed_and_spare_the_ends():
    alone, killed, restarted = make_cells(replace(CPU, replicas=4, steps=50, kills=46, restarts=3, save_every=7))
    assert alone.train_options.fail is None and alone.train_options.agree == "every-step"
    assert [fault.step for fault in faults_of(killed.train_options.fail)] == list(range(2, 48))
    assert replace(killed, seed=1).at != killed.at
    assert (restarted.steps, [at // 7 for at, _ in restarted.at]) == (35, [1, 2, 3])
    assert restarted.train_options.agree is None
    assert all(at % 7 for at, _ in restarted.at)
    same = {cell.train_options.tokens_per_step(1) for cell in (alone, killed)}
    assert same == {restarted.train_options.tokens_per_step(4)}
    _, killed, restarted = make_cells(replace(CPU, replicas=2, ranks_per_replica=3, zero=3, steps=50, kills=40))
    asked = killed.train_options
    assert (asked.replicas, asked.ranks_per_replica, asked.zero) == (2, 3, 3)
    assert (restarted.n_ranks, restarted.train_options.zero) == (6, 3)
    assert {number for _, number in killed.at} == {0, 1}  # replicas, not ranks


@pytest.mark.parametrize(
    ("fault", "sentence"),
    [
        ({"replicas": 1}, "--replicas must be at least 2, of which one may die, got 1"),
        ({"kills": 100}, "--kills 100 of --steps 100, of which 96 can have one"),
        ({"save_every": 1}, "--save-every must leave steps to lose, at least 2, got 1"),
        ({"zero": 9}, "unknown zero 9: known are 0, 1, 2, 3"),
        ({"size": "tinny"}, "tinny"),
        ({"data": "nowhere"}, "nowhere"),
    ],
)
def test_a_run_that_cannot_be_is_refused(fault, sentence):
    with pytest.raises((ValueError, OSError), match=sentence):
        make_cells(replace(CPU, **fault))


def test_tables_predict_the_run_and_larger_jobs_from_the_median_kill():
    cells = make_cells(replace(CPU, replicas=4, steps=500, kills=2))
    of_all = {"run_tokens_per_s": [100.0], "mean_step": [200.0], "goodput": [99.0], "loss": [2.0]}
    of_killed = of_all | {"run_tokens_per_s": [90.0], "loss": [2.01], "stop": [2.0, 3.0], "healed": [6.0, 7.0]}
    of_killed |= {"next_step": [2.2, 3.2], "lost_steps": [1, 1], "lost_tokens": [10, 10]}
    of_restarted = of_all | {"stop": [30.0], "next_step": [31.0], "stall": [0.1]}
    of_restarted |= {"lost_steps": [9], "lost_tokens": [90]}
    measured = [
        [Metric(name, "", samples) for name, samples in each.items()] for each in (of_all, of_killed, of_restarted)
    ]
    rows = rows_of(cells, measured)
    runs, jobs = tables(rows)
    killed = runs.frame.iloc[1]
    predicted = ReplicatedJob(500 * 0.2 / 2, 4, 0.2, 2.5, 6.5).goodput
    assert killed["predicted %"] == f"{100 * predicted:.1f}"
    assert (killed["tokens/s of undisturbed %"], killed["change %"]) == ("90.0", "+0.500")
    assert list(jobs.frame["nodes"]) == ["1", "100", "1,000", "10,000"]
    largest = ReplicatedJob(mean_time_between_failures(10_000), 4, 0.2, 2.5, 6.5).goodput
    assert list(jobs.frame["replicas: goodput %"])[::3] == ["–", f"{100 * largest:.2f}"]
    assert float(jobs.frame["restart: goodput %"].iloc[3]) < 100 * largest
    assert goodput_figure(rows) is not None
    assert goodput_figure(rows[rows["how"] == "replicas"]) is None


@pytest.fixture
def small(tmp_path):
    """A run of some seconds, in which a process is killed early: one that is started again takes a few steps' time."""
    data = write_dataset(tmp_path / "data", 40_000)
    return replace(CPU, data=str(data), steps=20, kills=1, save_every=8, context_length=256, batch_size=8)


def found_in(cell):
    return {metric.name: metric.samples for metric in measure(cell)}


@pytest.mark.slow
def test_a_killed_replica_costs_one_step_and_nothing_of_what_is_learned(small, capfd):
    """And it is told as it happens, for a run that is cut off."""
    pytest.importorskip("torchft")
    cells = [replace(cell, seed=2) for cell in make_cells(replace(small, how=("replicas",)))]
    assert cells[1].at[0][0] == 3
    alone, killed = map(found_in, cells)
    ((step, number),) = cells[1].at
    told = capfd.readouterr().err.split("fault: ")[1].splitlines()
    places = [f"replica {1 - number}: drops step {step}", f"replica {1 - number}: has made step {step}"]
    places += ["it is started again", f"replica {number}: begins with step"]
    at = {place: next(float(line.split(" s:")[0]) for line in told if place in line) for place in places}
    assert at[places[0]] < at[places[1]] and at[places[2]] < at[places[3]]
    assert killed["lost_steps"] == [1]
    assert killed["lost_tokens"] == [2 * 8 * 256]
    assert 0 < killed["notice"][0] < killed["stop"][0] < killed["next_step"][0]
    assert killed["notice"][0] < cells[1].train_options.agree_timeout
    assert killed["healed"][0] > 0
    assert killed["goodput"][0] < alone["goodput"][0]
    # From 5.8 nats; each step in which one is away has half of the tokens, and how many those are is the machine's.
    assert killed["loss"] == pytest.approx(alone["loss"], rel=0.1)


@pytest.mark.slow
def test_a_restart_makes_steps_a_second_time(small):
    (cell,) = make_cells(replace(small, how=("restart",)))
    cell = replace(cell, seed=9)
    assert cell.at[0][0] == 12  # far from both checkpoints, which are written in the background
    found = found_in(cell)
    (lost,) = found["lost_steps"]
    assert 3 <= lost <= 6
    assert found["lost_tokens"] == [lost * 2 * 8 * 256]
    assert 0 < found["stop"][0] < found["next_step"][0]


def is_rank(process):
    """Whether the process is a rank, also one whose start is not over."""
    try:
        return "spawn_main" in " ".join(process.cmdline())
    except psutil.NoSuchProcess:  # ended since it was listed, perhaps not yet waited for
        return False


@pytest.mark.slow
def test_no_rank_that_still_starts_stays_behind_a_benchmark_that_is_killed(small):
    """It would look for the others at a port that is gone, for ten minutes."""
    restarts = ["--device", "cpu", "--how", "restart", "--data", small.data]
    command = [sys.executable, "benchmarks/benchmark_failures.py", *restarts]
    benchmark = psutil.Popen(command, stderr=subprocess.DEVNULL, start_new_session=True)
    try:
        below, until = [], time.monotonic() + 120
        while sum(map(is_rank, below)) < 2 and time.monotonic() < until:
            time.sleep(0.05)
            below = benchmark.children(recursive=True)
    finally:
        os.killpg(benchmark.pid, signal.SIGKILL)  # the fork server, too, as timeout and a shell do
        benchmark.wait()
    assert len(below) > 2
    _, alive = psutil.wait_procs(below, timeout=60)
    for each in alive:
        each.kill()
    assert not alive
