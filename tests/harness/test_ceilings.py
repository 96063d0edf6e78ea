"""Ceilings of this machine: FLOPs and bytes as torch counts them, over the time of a clock around each operation."""

import time

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from cs336_systems.config import PRECISIONS
from cs336_systems.harness import ceilings
from cs336_systems.harness.clock import time_kernel


class CopiedBytes(TorchDispatchMode):
    """Counts what copies read and write."""

    n_bytes = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.aten.copy_.default:
            self.n_bytes += sum(arg.nbytes for arg in args if isinstance(arg, Tensor))
        return func(*args, **(kwargs or {}))


@pytest.mark.timing
def test_ceilings_are_work_over_time(monkeypatch):
    watched = []

    def watch(operation, *, samples, **options):
        with FlopCounterMode(display=False) as flops, CopiedBytes() as copied:
            operation()
        seconds = []

        def clocked():
            start = time.perf_counter()
            operation()
            seconds.append(time.perf_counter() - start)

        samples_ms = time_kernel(clocked, samples=samples, **options)
        watched.append((flops.get_total_flops(), copied.n_bytes, seconds[-samples:]))
        return samples_ms

    monkeypatch.setattr(ceilings, "time_kernel", watch)
    precision = torch.get_float32_matmul_precision()
    found = ceilings.measure_ceilings(PRECISIONS["fp32"], torch.device("cpu"))
    (flops, _, matmul_s), (_, n_bytes, copy_s) = watched
    matmul, copy = found
    assert (matmul.name, matmul.unit, copy.name, copy.unit) == ("matmul_ceiling", "TFLOP/s", "copy_ceiling", "GB/s")
    assert len(matmul.samples) == len(copy.samples) == 10
    assert matmul.samples == pytest.approx([flops / s / 1e12 for s in matmul_s], rel=0.05)
    assert copy.samples == pytest.approx([n_bytes / s / 1e9 for s in copy_s], rel=0.05)
    assert torch.get_float32_matmul_precision() == precision
