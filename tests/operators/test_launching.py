"""What a launch remembers is what Triton would choose, for every kind of argument by which it chooses."""

import subprocess
import sys
from pathlib import Path

import pytest

from cs336_systems.operators.launching import ceil_div, next_power_of_2
from tests.attention.offline import ON_HOPPER, without_interpreter

SCRIPT = """
import triton.language as tl
from triton.compiler.compiler import CompiledKernel
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from cs336_systems.operators import launching

launched = []
CompiledKernel.__getitem__ = lambda compiled, grid: lambda *arguments: launched.append((compiled, grid, arguments))


@triton.jit
def scaled(x, n, factor, BLOCK: tl.constexpr, CLIP: tl.constexpr):
    at = tl.arange(0, BLOCK)
    value = tl.load(x + at, mask=at < n) * factor
    tl.store(x + at, tl.minimum(value, 1.0) if CLIP else value, mask=at < n)


@triton.jit
def shifted(x, n, shift, BLOCK: tl.constexpr, CLIP: tl.constexpr):
    at = tl.arange(0, BLOCK)
    value = tl.load(x + at, mask=at < n) + shift
    tl.store(x + at, tl.minimum(value, 1.0) if CLIP else value, mask=at < n)


@gluon.jit
def described(x, n):
    gl.static_print(x.block_shape, x.dtype)


def describe(dtype, rows, swizzle=128):
    box = [rows, 64]
    layout = gl.NVMMASharedLayout(swizzle_byte_width=swizzle, element_bitwidth=8 * dtype.itemsize, rank=2)
    return TensorDescriptor(torch.empty(0, dtype=dtype), [256, 64], [64, 1], box, layout)


x = torch.zeros(64, dtype=torch.bfloat16)
usual = {"BLOCK": 16, "CLIP": True, "num_warps": 4}
calls = [(scaled, (pointer, 17, 0.5), usual) for pointer in (x, x[1:], x[8:], x.float())]
calls += [(scaled, (x, n, 0.5), usual) for n in (1, 16, 2**31)]
calls += [(scaled, (x, 17, 0.5), usual | other) for other in ({"BLOCK": 32}, {"CLIP": False}, {"num_warps": 8})]
calls += [
    (described, (describe(dtype, rows), 3), {}) for dtype in (torch.bfloat16, torch.float32) for rows in (8, 16)
]
calls += [(described, (describe(torch.bfloat16, 8, swizzle=64), 3), {}), (shifted, (x, 17, 0.5), usual)]
for _ in range(2):
    for kernel, arguments, options in calls:
        before = len(launched)
        launching.launch(kernel, (7,), *arguments, **options)
        chosen = kernel[(7,)](*arguments, **options)
        for form, grid, given in launched[before:]:
            assert form is chosen, (arguments, options)
            assert grid == (7, 1, 1)
            assert given == (*arguments, *[options[name] for name in ("BLOCK", "CLIP") if name in options])
assert len(launched) == len(calls) + 1, len(launched)  # of the first round, x[8:] is as well aligned as x

launching.launch(scaled, (7,), x, 17, 2.0, **usual)  # nothing depends on the value of a float
assert launched[-1][2] == (x, 17, 2.0, 16, True)

Hopper.get_current_device = staticmethod(lambda: 1)
launching.launch(scaled, (7,), x, 17, 2.0, **usual)
launching.launch(scaled, (7,), x, 17, 2.0, **usual)
assert launched[-1][0] is scaled[(7,)](x, 17, 2.0, **usual)
assert launched[-1][0] is not launched[-2][0]  # that was on the other device

launching.MAX_REMEMBERED = len(launching._remembered)
launching.launch(scaled, (7,), x, 5, 0.5, BLOCK=16, CLIP=True)
assert len(launching._remembered) == 1
"""


@pytest.mark.slow
def test_what_is_remembered_is_what_triton_chooses(tmp_path: Path) -> None:
    script = tmp_path / "script.py"  # Triton reads the sources of its kernels
    script.write_text(ON_HOPPER + SCRIPT)
    result = subprocess.run(
        [sys.executable, script], capture_output=True, text=True, env=without_interpreter(), check=False
    )
    assert result.returncode == 0, result.stderr


def test_host_arithmetic() -> None:
    assert [ceil_div(n, 64) for n in (1, 64, 65)] == [1, 1, 2]
    assert [next_power_of_2(n) for n in (1, 2, 3, 64, 65)] == [1, 2, 4, 64, 128]
