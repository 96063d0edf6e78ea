"""The speed limits that this machine reaches today: a large matrix product and a large copy, measured in the run.

A datasheet's peak assumes clocks that a power limit may not allow, and an unknown device has no datasheet at all. Every
sweep therefore measures its own ceilings first, with the same clock, on random data (zeros draw less power and run
faster). Shares of these ceilings stand beside shares of the peak.
"""

import torch

from cs336_systems.config import Precision
from cs336_systems.harness.clock import time_kernel
from cs336_systems.harness.record import Metric
from cs336_systems.training.precision import matmul_dtype, matmul_precision


def measure_ceilings(precision: Precision, device: torch.device) -> list[Metric]:
    """Square matmul in the precision's matmul dtype (8192, CPU: 2048) and a copy of 2 GiB (CPU: 256 MiB).

    The copy's rate counts bytes read plus bytes written.
    """
    on_gpu = device.type == "cuda"
    size = 8192 if on_gpu else 2048
    a, b = (torch.randn(size, size, device=device).to(matmul_dtype(precision)) for _ in range(2))
    warmup, samples = (5, 20) if on_gpu else (3, 10)
    with matmul_precision(precision):
        matmul_ms = time_kernel(lambda: a @ b, device=device, warmup=warmup, samples=samples)

    source = torch.randn(2**29 if on_gpu else 2**26, device=device)
    target = torch.empty_like(source)
    copy_ms = time_kernel(lambda: target.copy_(source), device=device, warmup=warmup, samples=samples)
    moved = 2 * source.numel() * source.element_size()
    return [
        Metric("matmul_ceiling", "TFLOP/s", [2 * size**3 / ms / 1e9 for ms in matmul_ms]),
        Metric("copy_ceiling", "GB/s", [moved / ms / 1e6 for ms in copy_ms]),
    ]
