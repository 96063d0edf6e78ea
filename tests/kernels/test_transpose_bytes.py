"""Bytes transposed: the kernel and the definition, shapes that end within tiles, refusals, and how wide it reads."""

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings

from cs336_systems.kernels import quantize_reference
from cs336_systems.kernels.quantize import transpose_bytes, transpose_bytes_op
from tests.attention.offline import ON_HOPPER, report

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def bytes_of(n_rows: int, width: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(256, (n_rows, width), generator=torch.Generator().manual_seed(seed)).to(DEVICE, torch.uint8)


@settings(deadline=None, max_examples=15)
@given(n_rows=st.integers(0, 20), width=st.integers(0, 20), seed=st.integers(0, 3))
@pytest.mark.usefixtures("poisoned")
def test_every_byte_goes_where_it_belongs(n_rows: int, width: int, seed: int) -> None:
    x = bytes_of(16 * n_rows, 16 * width, seed)
    for transposed in (transpose_bytes(x), quantize_reference.transpose_bytes(x)):
        assert transposed.is_contiguous()
        assert torch.equal(transposed, x.t())


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_fp8_stays_fp8_and_nan_its_own_bits(dtype: torch.dtype) -> None:
    x = torch.arange(256, dtype=torch.uint8, device=DEVICE).view(16, 16)
    found = transpose_bytes(x.view(dtype))
    assert found.dtype == dtype
    assert torch.equal(found.view(torch.uint8), x.t())


def test_a_slice_is_transposed_as_it_is() -> None:
    x = bytes_of(32, 64)
    assert torch.equal(transpose_bytes(x[:, 16:48]), x[:, 16:48].t())
    assert torch.equal(transpose_bytes(x.t()), x)


def test_refusals(monkeypatch: pytest.MonkeyPatch) -> None:
    for each in (transpose_bytes, quantize_reference.transpose_bytes):
        with pytest.raises(ValueError, match=r"dimensions 16 divides, got \(16, 24\)"):
            each(torch.zeros(16, 24, dtype=torch.uint8))
        with pytest.raises(ValueError, match="bytes are transposed, got torch.bfloat16"):
            each(torch.zeros(16, 16, dtype=torch.bfloat16))
    monkeypatch.setattr("triton.JITFunction", object)  # what a kernel is without the interpreter
    with pytest.raises(ValueError, match=r"needs a CUDA device .* got a tensor on cpu"):
        transpose_bytes(torch.zeros(16, 16, dtype=torch.uint8))


@pytest.mark.slow
def test_the_operator_passes_opcheck() -> None:
    torch.library.opcheck(transpose_bytes_op, (bytes_of(32, 16),))


COMPILE = (
    ON_HOPPER
    + """
import importlib, json
transpose = importlib.import_module("cs336_systems.kernels.quantize")
transpose.transpose_bytes_op(torch.zeros(512, 4096, dtype=torch.uint8))
kernel = compiled["transpose_bytes_kernel"]
lines = kernel.asm["ptx"].splitlines()
wide = [line for line in lines if ".global.v4.b32" in line]
metadata = {"loads": sum("ld." in line for line in wide), "stores": sum("st." in line for line in wide)}
metadata |= {"global": sum("ld.global" in line or "st.global" in line for line in lines)}
metadata |= {"bytes": sum("shared.b8" in line for line in lines)}
print(json.dumps({"ptx": kernel.asm["ptx"], "metadata": metadata}))
"""
)


@pytest.mark.slow
def test_it_compiles_to_wide_accesses() -> None:
    """16 bytes of each thread, both ways, and whole words through shared memory."""
    found = report(COMPILE)
    assert found["spill_stores"] == found["stack_frame"] == 0
    assert found["loads"] == found["stores"] == found["global"] // 2 > 0
    assert found["bytes"] == 0
