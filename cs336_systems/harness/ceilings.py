"""The speed limits that this machine reaches today: a large matrix product and a large copy, measured in the run.

A datasheet's peak assumes clocks that a power limit may not allow, and an unknown device has no datasheet at all. Every
sweep therefore measures its own ceilings first, with the same clock, on random data (zeros draw less power and run
faster). Shares of these ceilings stand beside shares of the peak.
"""

from dataclasses import dataclass

import torch

from cs336_systems.config import Precision
from cs336_systems.harness.clock import time_kernel
from cs336_systems.training.precision import matmul_precision

_MATMUL_DTYPES = {"fp32": torch.float32, "tf32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
_COUNTS = {"cuda": {"warmup": 5, "samples": 20}, "cpu": {"warmup": 3, "samples": 10}}


@dataclass(frozen=True)
class Ceilings:
    """Samples of the two ceilings."""

    matmul_tflops: list[float]
    copy_gb_per_s: list[float]
    """Bytes read plus bytes written, in 1e9 bytes per second."""


def measure_ceilings(precision: Precision, device: torch.device) -> Ceilings:
    """Square matmul in the precision's matmul dtype (8192, CPU: 2048) and a copy (``measure_copy``)."""
    size = 8192 if device.type == "cuda" else 2048
    dtype = _MATMUL_DTYPES[precision.matmul_dtype]
    a, b = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    with matmul_precision(precision):
        matmul_ms = time_kernel(lambda: a @ b, device=device, **_COUNTS[device.type])
    return Ceilings([2 * size**3 / ms / 1e9 for ms in matmul_ms], measure_copy(device))


def measure_copy(device: torch.device) -> list[float]:
    """Bytes read plus bytes written, in 1e9 bytes per second, of a copy of 2 GiB (CPU: 256 MiB)."""
    source = torch.randn(2**29 if device.type == "cuda" else 2**26, device=device)
    target = torch.empty_like(source)
    copy_ms = time_kernel(lambda: target.copy_(source), device=device, **_COUNTS[device.type])
    return [2 * source.nbytes / ms / 1e6 for ms in copy_ms]
