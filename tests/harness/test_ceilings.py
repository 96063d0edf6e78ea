"""Ceilings of this machine: positive, finite, and of a plausible size."""

import math

import torch

from cs336_systems.config import PRECISIONS
from cs336_systems.harness.ceilings import measure_ceilings


def test_ceilings_of_this_cpu():
    precision = torch.get_float32_matmul_precision()
    ceilings = measure_ceilings(PRECISIONS["fp32"], torch.device("cpu"))
    assert len(ceilings.matmul_tflops) == len(ceilings.copy_gb_per_s) == 10
    assert all(math.isfinite(value) for value in (*ceilings.matmul_tflops, *ceilings.copy_gb_per_s))
    assert all(1e-4 < value < 50 for value in ceilings.matmul_tflops)
    assert all(0.1 < value < 5000 for value in ceilings.copy_gb_per_s)
    assert torch.get_float32_matmul_precision() == precision
