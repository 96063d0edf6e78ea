"""What each ``--dtype`` sets in torch, that it is undone, and which devices are refused."""

import pytest
import torch

from cs336_systems.config import PRECISIONS
from cs336_systems.training.precision import (
    autocast,
    matmul_precision,
    needs_loss_scaling,
    parameter_dtype,
    unsupported_reason,
)

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


@pytest.fixture(autouse=True)
def callers_setting():
    before = torch.get_float32_matmul_precision()
    yield
    torch.set_float32_matmul_precision(before)


def test_parameters_are_narrow_only_in_bf16():
    dtypes = {name: parameter_dtype(precision) for name, precision in PRECISIONS.items()}
    assert dtypes == {
        "fp32": torch.float32,
        "tf32": torch.float32,
        "bf16": torch.bfloat16,
        "autocast-bf16": torch.float32,
        "autocast-fp16": torch.float32,
    }
    assert all(dtypes[name].itemsize == precision.parameter_bytes for name, precision in PRECISIONS.items())


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


@pytest.mark.parametrize("before", ["highest", "high", "medium"])
@pytest.mark.parametrize("name", PRECISIONS)
def test_tf32_is_allowed_inside_for_tf32_alone_and_the_callers_setting_returns(name, before):
    torch.set_float32_matmul_precision(before)
    with matmul_precision(PRECISIONS[name]):
        assert torch.get_float32_matmul_precision() == ("high" if name == "tf32" else "highest")
    assert torch.get_float32_matmul_precision() == before


def test_the_callers_setting_returns_when_the_body_raises():
    torch.set_float32_matmul_precision("medium")
    with pytest.raises(KeyError, match="from the body"), matmul_precision(PRECISIONS["tf32"]):
        raise KeyError("from the body")
    assert torch.get_float32_matmul_precision() == "medium"


def test_only_fp16_needs_loss_scaling():
    assert [name for name, precision in PRECISIONS.items() if needs_loss_scaling(precision)] == ["autocast-fp16"]


def test_a_cpu_runs_everything_but_tf32():
    reasons = {name: unsupported_reason(precision, CPU) for name, precision in PRECISIONS.items()}
    assert reasons.pop("tf32") == "tf32 needs a CUDA device with tensor cores, the CPU has none"
    assert set(reasons.values()) == {None}


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
