"""Expected times against jobs that fail at random, optima against a search."""

import random
import statistics

import pytest

from cs336_systems.costs.parallelism.failures import DAY, Job, ReplicatedJob, mean_time_between_failures

JOBS = [Job(3600.0, 10.0), Job(8640.0, 60.0, 300.0), Job(864.0, 60.0, 300.0), Job(600.0, 1500.0)]


def played(job: Job, interval: float, random_: random.Random) -> float:
    """Seconds until one segment is done, with failures drawn one by one."""
    elapsed, needed = 0.0, interval + job.save_s
    while True:
        gap = random_.expovariate(1 / job.mtbf_s)
        if gap >= needed:
            return elapsed + needed
        elapsed += gap
        while (gap := random_.expovariate(1 / job.mtbf_s)) < job.restart_s:
            elapsed += gap
        elapsed += job.restart_s


@pytest.mark.parametrize("job", JOBS[1:3])
def test_expected_time_is_that_of_jobs_that_fail_at_random(job):
    random_ = random.Random(0)
    times = [played(job, job.young_s, random_) for _ in range(20_000)]
    error = statistics.stdev(times) / len(times) ** 0.5
    assert abs(statistics.fmean(times) - job.expected_segment_s(job.young_s)) < 4 * error


@pytest.mark.parametrize("job", JOBS)
def test_the_optimum_is_where_a_search_finds_it(job):
    searched = max((job.mtbf_s * i / 20_000 for i in range(1, 40_000)), key=job.goodput)
    assert job.optimal_s == pytest.approx(searched, abs=job.mtbf_s / 20_000)


def test_young_and_daly_approach_it_as_failures_become_rare():
    errors = []
    for mtbf in (1e3, 1e4, 1e5, 1e6):
        job = Job(mtbf, 60.0, 300.0)
        young, daly = (abs(found / job.optimal_s - 1) for found in (job.young_s, job.daly_s))
        assert daly < young
        assert job.goodput(job.optimal_s) >= max(job.goodput(job.young_s), job.goodput(job.daly_s))
        errors.append((young, daly))
    assert errors == sorted(errors, reverse=True)
    assert errors[0][1] < 0.01
    assert errors[-1][0] < 0.01


def test_more_nodes_fail_more_often():
    assert mean_time_between_failures(1) == 100 * DAY
    assert mean_time_between_failures(1000) == pytest.approx(2.4 * 3600)
    assert mean_time_between_failures(100, 20) == pytest.approx(DAY / 2)


def shares(job: ReplicatedJob, n_steps: int, random_: random.Random) -> list[float]:
    """Goodput of each of some stretches of ``n_steps`` steps, with failures of replicas drawn one by one."""
    found = []
    for _ in range(40):
        elapsed, learned, away = 0.0, 0, [0.0] * job.n_replicas
        for _ in range(n_steps):
            while (gap := random_.expovariate(1 / job.mtbf_s)) < job.step_s:
                failed = elapsed + gap
                away[random_.randrange(job.n_replicas)] = failed + job.back_s
                elapsed = failed + job.stop_s
            learned += sum(until <= elapsed for until in away)
            elapsed += job.step_s
        found.append(learned * job.step_s / (job.n_replicas * elapsed))
    return found


@pytest.mark.parametrize(
    "job", [ReplicatedJob(8.0, 4, 0.2, 1.6, 1.6), ReplicatedJob(50.0, 4, 1.0, 5.0, 40.0)], ids=["in time", "late"]
)
def test_goodput_of_replicas_is_that_of_replicas_that_fail_at_random(job):
    found = shares(job, 2000, random.Random(0))
    error = statistics.stdev(found) / len(found) ** 0.5
    assert abs(statistics.fmean(found) - job.goodput) < max(4 * error, 0.01 * (job.back_s > job.stop_s))


def test_bad_input():
    for wrong in ((0.0, 4, 1.0, 1.0, 1.0), (1.0, 1, 1.0, 1.0, 1.0), (1.0, 2, 1.0, -1.0, 1.0)):
        with pytest.raises(ValueError, match=r"got (0.0|1|-1.0)"):
            ReplicatedJob(*wrong)
    for wrong in ((0, 1), (1, 0), (1, 1, -1)):
        with pytest.raises(ValueError, match="got (0|-1)"):
            Job(*wrong)
    for call in (lambda: mean_time_between_failures(0), lambda: mean_time_between_failures(1, 0)):
        with pytest.raises(ValueError, match="got 0"):
            call()
    with pytest.raises(ValueError, match="interval must be positive, got 0"):
        Job(1, 1).goodput(0)
