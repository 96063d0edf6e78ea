"""Clocks: how many samples, of what, that a known duration is read as that duration, and rates made of them."""

from statistics import median

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from cs336_systems.config import PRECISIONS
from cs336_systems.harness import clock
from cs336_systems.harness.clock import WHOLE, time_kernel, time_phases
from tests.clock import Clock

CPU = torch.device("cpu")
GPU = torch.device("cuda")


def nothing() -> None:
    pass


@pytest.fixture
def host(monkeypatch):
    """The clock that is read."""
    host = Clock()
    monkeypatch.setattr(clock, "time", host)
    return host


def test_phases_run_in_order_and_parts_of_one_are_one_sample():
    warmup, steps = 2, 4
    ran = []
    names = ("forward", "backward", "forward 2", "backward 2", "optimizer")
    phases = {name: lambda name=name: ran.append(name) for name in names}
    times = time_phases(phases, device=CPU, warmup=warmup, steps=steps)
    assert ran == [*names] * (warmup + steps)
    assert list(times.samples_ms) == ["forward", "backward", "optimizer", WHOLE]
    assert {len(samples) for samples in times.samples_ms.values()} == {steps}
    assert len(times.warmup_ms) == warmup
    for *parts, whole in zip(*times.samples_ms.values(), strict=True):
        assert whole == pytest.approx(sum(parts), rel=1e-12)
    assert list(time_phases({WHOLE: nothing}, device=CPU, warmup=1, steps=3).samples_ms) == [WHOLE]


def test_a_sleep_reads_as_long_as_it_is_and_in_its_own_phase(host):
    phases = {"idle": nothing, "asleep": lambda: host.sleep(5e-3)}
    samples = time_phases(phases, device=CPU, warmup=1, steps=10).samples_ms
    assert samples == {"idle": [0.0] * 10, "asleep": pytest.approx([5.0] * 10), WHOLE: pytest.approx([5.0] * 10)}


def test_a_call_is_timed_without_what_prepares_it(host):
    calls = []

    def prepare():
        calls.append("prepare")
        host.sleep(0.02)

    def call():
        calls.append("call")
        host.sleep(5e-3)

    samples = time_kernel(call, device=CPU, warmup=3, samples=5, prepare=prepare)
    assert calls == ["prepare", "call"] * 8
    assert samples == pytest.approx([5.0] * 5)


@pytest.mark.parametrize(("warmup", "count"), [(-1, 3), (2, 0)])
def test_bad_counts_are_refused_before_anything_runs(warmup, count):
    ran = []
    with pytest.raises(ValueError, match=f"{warmup} and {count}"):
        time_phases({"a": lambda: ran.append(None)}, device=CPU, warmup=warmup, steps=count)
    with pytest.raises(ValueError, match=f"{warmup} and {count}"):
        time_kernel(lambda: ran.append(None), device=CPU, warmup=warmup, samples=count)
    assert not ran


@pytest.mark.slow
def test_ceilings_are_work_over_time(monkeypatch):
    """FLOPs are those that torch counts; a copy reads and writes 256 MiB."""
    counted = []

    def of_two_ms(operation, *, samples, **options):
        with FlopCounterMode(display=False) as flops:
            operation()
        counted.append(flops.get_total_flops())
        return [2.0] * samples

    monkeypatch.setattr(clock, "time_kernel", of_two_ms)
    precision = torch.get_float32_matmul_precision()
    matmul, copy = clock.measure_ceilings(PRECISIONS["fp32"], CPU)
    assert matmul.samples == pytest.approx([counted[0] / 2e-3 / 1e12] * 10)
    assert copy.samples == pytest.approx([2 * 2**28 / 2e-3 / 1e9] * 10)
    assert torch.get_float32_matmul_precision() == precision


@pytest.mark.gpu
@pytest.mark.timing
def test_time_kernel_agrees_with_tritons_clock():
    from triton.testing import do_bench

    a, b = (torch.randn(4096, 4096, device=GPU).bfloat16() for _ in range(2))
    ratios = []
    for _ in range(10):
        ours = median(time_kernel(lambda: a @ b, device=GPU, warmup=10, samples=100))
        ratios.append(ours / do_bench(lambda: a @ b, warmup=10, rep=50, return_mode="median"))
    assert median(ratios) == pytest.approx(1, abs=0.02), ratios


@pytest.mark.gpu
@pytest.mark.timing
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
