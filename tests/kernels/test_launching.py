"""What a launch remembers is what Triton would choose, for every kind of argument by which it chooses."""

import pytest

from cs336_systems.kernels.launching import ceil_div, next_power_of_2
from tests.attention.offline import ON_HOPPER, run_apart

SCRIPT = """
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from cs336_systems.kernels import launching
from cs336_systems.kernels.launching import Prepared

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


@gluon.jit
def described(x, y, n, TWICE: gl.constexpr):
    gl.static_print(x.block_shape, x.dtype)


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


def describe(dtype=torch.bfloat16, rows=8, swizzle=128, size=256, stride=64, address=0):
    box = [rows, 64]
    layout = gl.NVMMASharedLayout(swizzle_byte_width=swizzle, element_bitwidth=8 * dtype.itemsize, rank=2)
    base = SimpleNamespace(dtype=dtype, data_ptr=lambda: address)
    return TensorDescriptor(base, [size, 64], [stride, 1], box, layout)


launching.MAX_KEPT_MAPS = 3
for form in ({}, {"rows": 16}, {"dtype": torch.float32}, {"swizzle": 64}, {"size": 512, "stride": 128}):
    start = Prepared(described, 7, describe(**form), x, 3, TWICE=True)
    for address in (1024, 4096, 1024, 8192, 16384, 1024):  # more than are kept
        start(0, address, x.data_ptr())
        given, chosen = launched[-1], by_triton(described, describe(**form, address=address), x, 3, TWICE=True)
        assert given.function is chosen.function, form
        assert given.grid == chosen.grid
        tensor_map, at = chosen.arguments[0], 5  # after two sizes and two strides
        assert tensor_map[0] == address
        assert given.arguments == (*chosen.arguments[:at], x.data_ptr(), *chosen.arguments[at + 1 :])
made, start = [], Prepared(described, 7, describe(), x, 3, TWICE=True)
Hopper.utils.fill_tma_descriptor = lambda *fields: made.append(fields) or fields
for address in (32, 64, 32, 64):
    start(0, address, x.data_ptr())
assert len(made) == 2

seen = []
triton.knobs.runtime.launch_enter_hook.add(lambda metadata: seen.append(metadata.get()["stream"]))
launching.launch(scaled, (7,), x, 17, 2.0, **usual)
assert launched[-1].hooks[1] is triton.knobs.runtime.launch_enter_hook
assert launched[-1].hooks[0].get()["function"] is launched[-1].function
triton.knobs.runtime.launch_enter_hook.calls.clear()
launching.launch(scaled, (7,), x, 17, 2.0, **usual)
assert launched[-1].hooks == (None, None, None)

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


def test_host_arithmetic() -> None:
    assert [ceil_div(n, 64) for n in (1, 64, 65)] == [1, 1, 2]
    assert [next_power_of_2(n) for n in (1, 2, 3, 64, 65)] == [1, 2, 4, 64, 128]
