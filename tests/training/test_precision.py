"""What each ``--dtype`` sets in torch, that it is undone, and which devices are refused."""

import pytest
import torch

from cs336_systems.config import PRECISIONS
from cs336_systems.training.precision import (
    autocast,
    unsupported_reason,
)

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("fp32", None),
        ("tf32", None),
        ("bf16", None),
        ("autocast-bf16", torch.bfloat16),
        ("autocast-fp16", torch.float16),
    ],
)
def test_autocast_is_on_inside_with_its_dtype_and_off_after(name, dtype):
    with autocast(PRECISIONS[name], CPU):
        assert torch.is_autocast_enabled("cpu") == (dtype is not None)
        if dtype is not None:
            assert torch.get_autocast_dtype("cpu") == dtype
            assert dtype.itemsize == PRECISIONS[name].matmul_bytes
        product = torch.ones(2, 2) @ torch.ones(2, 2)
    assert product.dtype == (dtype or torch.float32)
    assert not torch.is_autocast_enabled("cpu")


@pytest.mark.parametrize(
    ("capability", "refused"),
    [
        ((9, 0), []),
        ((8, 0), []),
        ((7, 5), ["tf32", "bf16", "autocast-bf16"]),
        ((6, 1), ["tf32", "bf16", "autocast-bf16", "autocast-fp16"]),
    ],
)
def test_older_gpus_are_refused_by_name_and_capability(monkeypatch, capability, refused):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Some GPU")
    reasons = {name: unsupported_reason(precision, CUDA) for name, precision in PRECISIONS.items()}
    assert [name for name, reason in reasons.items() if reason] == refused
    for name in refused:
        assert reasons[name].startswith(f"{name} needs compute capability ")
        assert reasons[name].endswith(f"or newer, Some GPU has {capability[0]}.{capability[1]}")
