"""What a launch remembers is what Triton would choose, for every kind of argument by which it chooses."""

import pytest
import torch

from cs336_systems.kernels.linear_cross_entropy import linear_cross_entropy
from cs336_systems.kernels.quantize import quantize, transpose_bytes
from cs336_systems.kernels.rms_norm import rms_norm
from tests.attention.offline import ON_HOPPER, run_apart
from tests.kernels.against_fp64 import check_refused

SCRIPT = """
import triton.language as tl
from cs336_systems.kernels import launching

def by_triton(kernel, *arguments, **options):
    run(kernel, *arguments, grid=(7,), warmup=False, **options)
    return launched[-1]


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


x = torch.zeros(64, dtype=torch.bfloat16)
usual = {"BLOCK": 16, "CLIP": True, "num_warps": 4}
calls = [(scaled, (pointer, 17, 0.5), usual) for pointer in (x, x[1:], x[8:], x.float())]
calls += [(scaled, (x, n, 0.5), usual) for n in (1, 16, 2**31)]
calls += [(scaled, (x, 17, 0.5), usual | other) for other in ({"BLOCK": 32}, {"CLIP": False}, {"num_warps": 8})]
calls += [(shifted, (x, 17, 0.5), usual)]
for _ in range(2):
    for kernel, arguments, options in calls:
        launching.launch(kernel, (7,), *arguments, **options)
        given, chosen = launched[-1], by_triton(kernel, *arguments, **options)
        assert given.function is chosen.function, (arguments, options)
        assert given.grid == (7, 1, 1)
        assert given.arguments == (*arguments, *[options[name] for name in ("BLOCK", "CLIP")])
assert len(launching._remembered) == len(calls) - 1  # x[8:] is as well aligned as x

launching.launch(scaled, (7,), x, 17, 2.0, **usual)  # nothing depends on the value of a float
assert launched[-1].arguments == (x, 17, 2.0, 16, True)


Hopper.get_current_device = staticmethod(lambda: 1)
launching.launch(scaled, (7,), x, 17, 2.0, **usual)
assert launched[-1].function is not launched[-2].function  # that was on the other device
assert launched[-1].function is by_triton(scaled, x, 17, 2.0, **usual).function

launching.MAX_REMEMBERED = len(launching._remembered)
launching.launch(scaled, (7,), x, 5, 0.5, BLOCK=16, CLIP=True)
assert len(launching._remembered) == 1

Launcher.global_scratch_size = 1
try:
    launching.launch(scaled, (7,), x, 6, 0.5, BLOCK=64, CLIP=True)
    raise AssertionError("launched without the scratch memory that it needs")
except RuntimeError as error:
    assert "scaled needs scratch memory" in str(error)
"""


@pytest.mark.slow
def test_what_is_remembered_is_what_triton_chooses() -> None:
    run_apart(ON_HOPPER + SCRIPT)


def test_a_gpu_is_needed_where_kernels_are_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("triton.JITFunction", object)  # the type of a kernel without the interpreter
    x, gain, said = torch.zeros(16, 16), torch.zeros(16), "needs a CUDA device, .* on cpu"
    check_refused(
        (lambda: rms_norm(x, gain, 1e-5), said),
        (lambda: quantize(x, torch.ones(()), torch.float8_e4m3fn), said),
        (lambda: transpose_bytes(x.to(torch.float8_e4m3fn)), said),
        (lambda: linear_cross_entropy(x, x, torch.zeros(16, dtype=torch.int64), fused=True), said),
    )
