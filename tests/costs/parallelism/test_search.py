"""The search by its properties, by all layouts of a small job, and at its refusals."""

from dataclasses import replace
from itertools import pairwise

import pytest

from cs336_systems.config import ModelConfig, resolve_size
from cs336_systems.costs.parallelism import seconds
from cs336_systems.costs.parallelism.schedules import VEE
from cs336_systems.costs.parallelism.search import USABLE, Candidate, Job, Search, divisors
from cs336_systems.hardware import GIB, find_hardware, hardware_named
from cs336_systems.ranks import SCHEDULES

H100 = hardware_named("h100")
SMALL = ModelConfig("small", d_model=4096, d_ff=14_336, n_layers=8, n_heads=32, n_kv_heads=8, vocab_size=32_000)
JOB = Job(SMALL, 8192, 32 * 8192, 16, H100, 24 * GIB)
LARGE = Job(resolve_size("llama3-70b"), 8192, 64 * 8192, 64, H100, 80 * GIB)


@pytest.fixture(scope="module")
def found():
    return Search.of(JOB)


@pytest.fixture(scope="module")
def large():
    return Search.of(LARGE)


def test_divisors():
    assert divisors(1) == [1] and divisors(12) == [1, 2, 3, 4, 6, 12] and divisors(16) == [1, 2, 4, 8, 16]


def test_every_layout_uses_all_gpus_and_the_whole_batch_once(found):
    layouts = [layout for _, layout in found.peaks]
    assert len(set(layouts)) == len(layouts) > 1000
    for layout in layouts:
        assert layout.n_ranks == 16
        assert layout.data * layout.micro_batch * layout.n_micro_batches == 32
    assert {layout.zero for layout in layouts} == {0, 1, 2, 3}
    assert {layout.zero for layout in layouts if layout.pipeline > 1} == {0, 1, 3}
    assert {layout.pipeline for layout in layouts if layout.schedule in VEE} == {2, 4}  # eight blocks, two chunks each
    assert {layout.schedule for layout in layouts if layout.pipeline > 1} == set(SCHEDULES)
    assert {layout.pipeline for layout in layouts} == {1, 2, 4, 8}  # there are eight blocks
    assert {layout.tensor for layout in layouts} == {1, 2, 4, 8}  # and eight heads of keys
    assert {layout.context for layout in layouts} == {1, 2, 4, 8, 16}


def test_the_best_is_the_best_of_all_simulated(found):
    steps = [JOB.seconds(layout).total for peak, layout in found.peaks if peak <= JOB.budget_bytes]
    assert found.n_fitting == len(steps) < len(found.peaks)
    three = found.best(3)
    assert three[0].seconds.total == pytest.approx(min(steps), rel=5e-3)
    assert [each.rank for each in three] == sorted(each.rank for each in three)
    no_stages = found.best(1, lambda layout: layout.pipeline == 1)[0]
    assert no_stages.layout.pipeline == 1 and no_stages.seconds.bubble == 0
    assert found.best(1, lambda layout: layout.tensor == 3) == []


def test_looser_bounds_find_the_same_layouts(found, monkeypatch):
    """As with a schedule whose least bubble is not known."""

    def staged(layout) -> bool:
        return layout.pipeline > 1

    fitting = [(peak, layout) for peak, layout in found.peaks if peak <= JOB.budget_bytes and staged(layout)]
    every = [Candidate(layout, peak, JOB.seconds(layout)) for peak, layout in fitting]
    five = sorted(every, key=lambda each: each.rank)[:5]
    assert found.best(5, staged) == five
    monkeypatch.setattr(seconds, "least_bubble", lambda *_: 0.0)
    assert Search(JOB, found.peaks).best(5, staged) == five


def test_bounds_are_no_longer_than_steps(large):
    for _, layout in large.peaks[::97]:
        bound, exact = (LARGE.seconds(layout, simulated=way) for way in (False, True))
        assert bound.total <= exact.total * (1 + 1e-9), layout


def test_more_of_anything_never_makes_the_best_slower(large):
    def best(**more) -> float:
        return large.of_job(replace(LARGE, **more)).best()[0].seconds.total

    by_memory = [best(device_bytes=gib * GIB) for gib in (40, 60, 80, 120, 200)]
    by_network = [best(network_bytes_per_s=rate * 1e9) for rate in (5, 25, 50, 100, 400)]
    for steps in (by_memory, by_network):
        assert all(after <= 1.005 * before for before, after in pairwise(steps))
        assert steps[-1] < 0.99 * steps[0]


def test_bf16_states_leave_room(large):
    lean = Search.of(replace(LARGE, moments=(("exp_avg", 2), ("exp_avg_sq", 2))))
    assert lean.n_fitting > large.n_fitting


def test_a_job_on_one_gpu_has_one_mesh():
    job = replace(JOB, n_gpus=1, batch_tokens=8192, device_bytes=80 * GIB, moments=(("exp_avg", 2), ("exp_avg_sq", 2)))
    found = Search.of(job)
    assert [str(layout) for _, layout in found.peaks] == [
        f"one GPU, ZeRO 0, {keep}, 1 micro-batch of 1" for keep in ("input", "attention", "products")
    ]
    best = found.best()[0]
    assert best.layout.keep == "products"
    assert job.mfu(best.seconds.total) == pytest.approx(0.6, abs=0.05)


def test_what_does_not_fit_is_refused_with_the_least_that_would(large):
    lean = replace(LARGE, device_bytes=12 * GIB)
    found = large.of_job(lean)
    with pytest.raises(ValueError, match="needs at least") as refusal:
        found.check_fits()
    least = float(str(refusal.value).split("at least ")[1].split(" GiB")[0])
    assert least == pytest.approx(min(peak for peak, _ in found.peaks) / USABLE / GIB, rel=1e-3)
    found.of_job(replace(lean, device_bytes=1.001 * least * GIB)).check_fits()


def test_what_cannot_be_divided_is_refused_with_numbers_that_can():
    with pytest.raises(ValueError, match=r"no division of 4000 GPUs .* 512 sequences .* are 3968 and 4032"):
        Search.of(replace(LARGE, batch_tokens=2**22, n_gpus=4000))
    with pytest.raises(ValueError, match="5000 tokens is no whole number of sequences of 8192"):
        replace(JOB, batch_tokens=5000)
    with pytest.raises(ValueError, match="n_gpus must be positive, got 0"):
        replace(JOB, n_gpus=0)
    with pytest.raises(ValueError, match="no peaks are published for CPU"):
        replace(JOB, hardware=find_hardware("cpu"))
