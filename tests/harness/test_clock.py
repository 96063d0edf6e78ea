"""Clocks: how many samples, of what, and that a known duration is read as that duration."""

import time
from statistics import median

import pytest
import torch

from cs336_systems.harness.clock import WHOLE, time_kernel, time_phases

CPU = torch.device("cpu")
GPU = torch.device("cuda")

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


def nothing() -> None:
    pass


def sleep_5_ms() -> None:
    time.sleep(5e-3)


def test_phases_run_in_order_warm_up_included():
    ran = []
    phases = {name: lambda name=name: ran.append(name) for name in ("forward", "backward", "optimizer")}
    time_phases(phases, device=CPU, warmup=2, steps=3)
    assert ran == ["forward", "backward", "optimizer"] * 5


@pytest.mark.parametrize(("warmup", "steps"), [(2, 4), (0, 1), (1, 10)])
def test_sample_counts(warmup, steps):
    times = time_phases({"a": nothing, "b": nothing}, device=CPU, warmup=warmup, steps=steps)
    assert list(times.samples_ms) == ["a", "b", WHOLE]
    assert {name: len(samples) for name, samples in times.samples_ms.items()} == {"a": steps, "b": steps, WHOLE: steps}
    assert len(times.warmup_ms) == warmup


def test_parts_of_a_phase_are_one_sample():
    ran = []
    names = ("forward", "backward", "forward 2", "backward 2", "optimizer")
    phases = {name: lambda name=name: ran.append(name) for name in names}
    times = time_phases(phases, device=CPU, warmup=1, steps=2)
    assert ran == [*names] * 3
    assert list(times.samples_ms) == ["forward", "backward", "optimizer", WHOLE]
    for *parts, whole in zip(*times.samples_ms.values(), strict=True):
        assert whole == pytest.approx(sum(parts), rel=1e-12)


def test_a_step_of_one_phase_is_timed_once():
    times = time_phases({WHOLE: nothing}, device=CPU, warmup=1, steps=3)
    assert {name: len(samples) for name, samples in times.samples_ms.items()} == {WHOLE: 3}


@pytest.mark.timing
def test_parts_add_up_to_the_whole_step_by_step():
    samples = time_phases({"a": sleep_5_ms, "b": nothing, "c": sleep_5_ms}, device=CPU, warmup=0, steps=4).samples_ms
    for a, b, c, whole in zip(samples["a"], samples["b"], samples["c"], samples[WHOLE], strict=True):
        assert whole == pytest.approx(a + b + c, rel=1e-12)
        assert whole >= 10


@pytest.mark.timing
def test_a_sleep_reads_as_long_as_it_is_and_in_its_own_phase():
    samples = time_phases({"idle": nothing, "asleep": sleep_5_ms}, device=CPU, warmup=1, steps=10).samples_ms
    assert min(samples["asleep"]) >= 5
    assert median(samples["asleep"]) < 10
    assert median(samples["idle"]) < 1


@pytest.mark.timing
def test_warm_up_is_kept_apart():
    durations = iter([0.05, 0.05, 0.0, 0.0, 0.0])
    times = time_phases({"a": lambda: time.sleep(next(durations))}, device=CPU, warmup=2, steps=3)
    assert min(times.warmup_ms) >= 50
    assert median(times.samples_ms["a"]) < 25


@pytest.mark.timing
def test_what_prepares_a_call_runs_before_each_and_is_not_timed():
    calls = []

    def prepare():
        calls.append("prepare")
        time.sleep(0.02)

    samples = time_kernel(lambda: calls.append("call"), device=CPU, warmup=1, samples=5, prepare=prepare)
    assert calls == ["prepare", "call"] * 6
    assert median(samples) < 20


@pytest.mark.timing
def test_time_kernel_counts_and_durations():
    calls = []
    samples = time_kernel(lambda: (calls.append(None), sleep_5_ms()), device=CPU, warmup=3, samples=10)
    assert len(samples) == 10
    assert len(calls) == 13
    assert min(samples) >= 5
    assert median(samples) < 10


@pytest.mark.parametrize(("warmup", "count"), [(-1, 3), (2, 0), (0, -4)])
def test_bad_counts_are_refused_before_anything_runs(warmup, count):
    ran = []
    with pytest.raises(ValueError, match=f"{warmup} and {count}"):
        time_phases({"a": lambda: ran.append(None)}, device=CPU, warmup=warmup, steps=count)
    with pytest.raises(ValueError, match=f"{warmup} and {count}"):
        time_kernel(lambda: ran.append(None), device=CPU, warmup=warmup, samples=count)
    assert not ran


@pytest.mark.gpu
@needs_gpu
def test_time_kernel_agrees_with_tritons_clock():
    from triton.testing import do_bench

    a, b = (torch.randn(4096, 4096, device=GPU).bfloat16() for _ in range(2))
    ratios = []
    for _ in range(10):
        ours = median(time_kernel(lambda: a @ b, device=GPU, warmup=10, samples=100))
        ratios.append(ours / do_bench(lambda: a @ b, warmup=10, rep=50, return_mode="median"))
    assert median(ratios) == pytest.approx(1, abs=0.02), ratios


@pytest.mark.gpu
@needs_gpu
def test_a_slow_host_is_in_a_sample_unless_it_goes_first():
    a = torch.randn(1024, 1024, device=GPU)

    def operation():
        a.add_(1)
        time.sleep(0.002)
        a.add_(1)

    with_host = time_kernel(operation, device=GPU, warmup=3, samples=10)
    alone = time_kernel(operation, device=GPU, warmup=3, samples=10, host_first=True)
    assert median(with_host) > 1
    assert median(alone) < 0.2


@pytest.mark.gpu
@needs_gpu
def test_phases_hold_the_device_time_of_what_they_launched():
    a, b = (torch.randn(4096, 4096, device=GPU).bfloat16() for _ in range(2))

    def matmuls(count: int) -> None:
        for _ in range(count):
            a @ b

    phases = {"ten": lambda: matmuls(10), "twenty": lambda: matmuls(20), "none": nothing}
    samples = time_phases(phases, device=GPU, warmup=3, steps=10).samples_ms
    assert median(samples["twenty"]) / median(samples["ten"]) == pytest.approx(2, rel=0.15)
    assert median(samples["none"]) < 0.1 * median(samples["ten"])
    parts = [sum(laps) for laps in zip(samples["ten"], samples["twenty"], samples["none"], strict=True)]
    assert samples[WHOLE] == pytest.approx(parts)
