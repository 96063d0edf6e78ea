"""The rates that this machine reaches: a large matrix product and a large copy, measured in the same run.

A datasheet's peak assumes clocks that a power limit may not allow, and an unknown device has no datasheet at all. Every
sweep therefore measures its own ceilings first, with the same clock, on random data (zeros draw less power and run
faster). Shares of these ceilings stand beside shares of the peak.
"""

from typing import Any

import torch

from cs336_systems.config import Precision
from cs336_systems.harness.clock import time_kernel
from cs336_systems.harness.record import Metric
from cs336_systems.training.precision import matmul_dtype, matmul_precision

_COUNTS: dict[str, dict[str, Any]] = {"cuda": {"warmup": 5, "samples": 20}, "cpu": {"warmup": 3, "samples": 10}}


def measure_ceilings(precision: Precision, device: torch.device) -> list[Metric]:
    """Square matmul in the precision's matmul dtype (8192, CPU: 2048) and a copy (``measure_copy``)."""
    size = 8192 if device.type == "cuda" else 2048
    a, b = (torch.randn(size, size, device=device).to(matmul_dtype(precision)) for _ in range(2))
    with matmul_precision(precision):
        matmul_ms = time_kernel(lambda: a @ b, device=device, **_COUNTS[device.type])
    product = Metric("matmul_ceiling", "TFLOP/s", [2 * size**3 / ms / 1e9 for ms in matmul_ms])
    return [product, Metric("copy_ceiling", "GB/s", measure_copy(device))]


def measure_copy(device: torch.device) -> list[float]:
    """Bytes read plus bytes written, in 1e9 bytes per second, of a copy of 2 GiB (CPU: 256 MiB)."""
    source = torch.randn(2**29 if device.type == "cuda" else 2**26, device=device)
    target = torch.empty_like(source)
    copy_ms = time_kernel(lambda: target.copy_(source), device=device, **_COUNTS[device.type])
    return [2 * source.nbytes / ms / 1e6 for ms in copy_ms]
