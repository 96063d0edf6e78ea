"""Kernels compile for Hopper without a GPU: nothing spills, registers leave room for programs, accesses are wide."""

from typing import Any

import pytest

from tests.attention.offline import ON_HOPPER, report

BEGIN = """
import json, re
from importlib import import_module
modules = ("absmax add_rows launching linear_cross_entropy norm_rotate products quantize quantize_parts "
           "quantize_reference rms_norm rms_norm_kernels rms_norm_quantize rotary swiglu swiglu_quantize").split()
globals().update((name, import_module("cs336_systems.kernels." + name)) for name in modules)
rms_norm_kernels.n_multiprocessors = products.n_multiprocessors = lambda device: 132
launching.check_device = lambda *_: None  # which others check by
quantize.check_device = lambda *_: None
bf16, fp8 = torch.bfloat16, torch.float8_e4m3fn

def zeros(*shape, dtype=bf16):
    return torch.zeros(*shape, dtype=dtype)

def ones(*shape):
    return torch.zeros(*shape)
"""
END = """
kernel = compiled[NAME]
lines = kernel.asm["ptx"].splitlines()
texts = ("ld.global", "st.global", "ld.global.v4.b32", "st.global.v4.b32", "st.global.v2.b32", "st.global.b32", "fma",
         "st.global.b8", "st.shared.b8", "ld.shared.b8", "cvt.rn.satfinite", "bar.sync", "cp.async.cg", "atom.global")
metadata = {text: sum(text in line for line in lines) for text in texts}
metadata |= {"threads": 32 * kernel.metadata.num_warps, "shared": kernel.metadata.shared}
layouts = dict(re.findall(r"^(#\\w+) = (.*)$", kernel.asm["ttgir"], re.M))
over_rows = re.findall(r'"tt.reduce".*?axis = 1.*?: [(]tensor<(\\w+xf32), (#\\w+)>', kernel.asm["ttgir"], re.S)
metadata["reduced"] = sorted({f"{shape} {layouts[layout]}" for shape, layout in over_rows})
print(json.dumps({"ptx": kernel.asm["ptx"], "metadata": metadata}))
"""


def compiled(kernel: str, launch: str, programs_of: int | None = None) -> dict[str, Any]:
    """What the kernel that ``launch`` launches compiles to; so many threads fit a multiprocessor's registers."""
    found = report(ON_HOPPER + BEGIN + launch + "\n" + END.replace("NAME", repr(kernel)))
    assert found["spill_stores"] == found["stack_frame"] == 0
    assert found["registers"] * max(programs_of or 0, found["threads"]) <= 65536
    assert found["st.global.b8"] == found["st.shared.b8"] == 0
    return found


NORM = "x = zeros(48, {}); rms_norm."
QUANTIZE = "x = zeros(512, 4096); quantize.quantize"
HEADS = "qkv, gain = zeros(32, 6144), zeros(128)\nhow = gain, gain, 1e-6, *ones(2, 32, 64), 32, 8\nnorm_rotate."
PARTS = """
part = quantize_reference.Part(zeros(8192, dtype={}), zeros(8192, dtype=torch.uint8), 0, ones(()))
quantizer = quantize_parts.PartsQuantizer([part], fp8, bf16)
quantizer.quantize_(quantizer.absmax())"""
ROWS_OF_LOSS = """
logits, targets = zeros(2, 50272)[:, :50257], zeros(2, dtype=torch.int64)  # a vocabulary that is odd
options = dict(ignore_index=-100, z_loss=0.0, gradient=True)
linear_cross_entropy.launch_rows(logits, targets, ones(2), ones(2), scale=ones(2), **options)"""
WIDE = {
    # two blocks of 1,024 elements; a head and its angles; vectors of a row
    "swiglu_forward_kernel": ("swiglu.forward_op(zeros(40, 22016))", 2048, 4, 2),
    "swiglu_backward_kernel": ("swiglu.backward_in_place_op(zeros(40, 11008), zeros(40, 22016), True)", 1024, 6, 6),
    "rotary_kernel": ("rotary.rotate_(zeros(32, 3200), *ones(2, 32, 40), 24, 8, False)", 1536, 6, 2),
    "transpose_bytes_kernel": ("quantize.transpose_bytes(zeros(512, 4096, dtype=torch.uint8))", None, 4, 4),
    "scale_kernel": ("linear_cross_entropy.scale_op(zeros(50257, 16), ones(()))", None, 4, 4),
}
"""Launch, threads that must fit a multiprocessor, and loads and stores, all of 16 bytes."""


@pytest.mark.slow
@pytest.mark.parametrize("kernel", WIDE)
def test_every_access_is_wide(kernel: str) -> None:
    launch, threads, loads, stores = WIDE[kernel]
    found = compiled(kernel, launch, threads)
    assert found["ld.global.v4.b32"] == loads and found["ld.global"] - loads == (kernel == "scale_kernel")
    assert found["st.global"] == found["st.global.v4.b32"] == stores
    assert found["bar.sync"] == 1 or kernel != "swiglu_backward_kernel"
    assert not found["fma"] or kernel != "rotary_kernel"


@pytest.mark.slow
@pytest.mark.parametrize(("form", "transposed"), [("tensor", False), ("row", True), ("block", True), ("square", True)])
def test_quantization_reads_and_writes_16_bytes_and_only_scales_by_4(form: str, transposed: bool) -> None:
    maxima = "ones(()), None" if form == "tensor" else "ones(512, 1), ones(1, 4096)"
    if form in ("tensor", "row"):
        found = compiled("quantize_kernel", f"{QUANTIZE}_op(x, {maxima}, fp8, True, {transposed})")
    else:
        found = compiled(
            "quantize_blocks_kernel", f"{QUANTIZE}_blocks_op(x, fp8, {form == 'square'}, True, {transposed})"
        )
    elements = found["cvt.rn.satfinite"] * (2 if form in ("tensor", "square") or not transposed else 1)
    assert found["ld.global.v4.b32"] - (form == "row" and transposed) * 4 == elements // 8
    assert found["st.global.v4.b32"] == elements // 16 * (2 if transposed else 1)
    assert found["st.global.b32"] <= 5


@pytest.mark.slow
def test_what_is_quantized_where_it_is_made_goes_by_wide_accesses() -> None:
    """SwiGLU's gradients: a thread loads 16 bytes, stores 8 of a row and 16 of a column, as two programs fit."""
    arguments = "zeros(512, 4096), zeros(512, 8192), ones(64, 16), ones(()), fp8, True, ones(()), fp8"
    launch = f"swiglu_quantize.swiglu_backward_quantize_op({arguments})"
    found = compiled("swiglu_backward_quantize_kernel", launch, 512)
    elements = found["cvt.rn.satfinite"] * 2 // 3  # of a thread, of each matrix
    assert found["ld.global.v4.b32"] == 3 * elements // 8
    assert found["st.global.v2.b32"] == 2 * elements // 8
    assert found["st.global.v4.b32"] == 3 * elements // 16
    arguments = "zeros(512, 4096), zeros(4096), ones(512), ones(()), fp8, True, True"
    found = compiled("rms_norm_quantize_kernel", f"rms_norm_quantize.rms_norm_quantize_op({arguments})")
    assert found["registers"] * found["threads"] * 2 <= 65536
    assert found["ld.global.v4.b32"] >= found["cvt.rn.satfinite"] * 2 // 8
    for kernel, dtype, loads, stores in (
        ("parts_absmax_kernel", "torch.float32", 8, 0),
        ("quantize_parts_kernel", "bf16", 4, 2),
    ):
        found = compiled(kernel, PARTS.format(dtype))  # of the 32 elements of a thread
        assert (found["ld.global.v4.b32"], found["st.global.v4.b32"]) == (loads, stores)


@pytest.mark.slow
@pytest.mark.parametrize("d", [1024, 8192])
def test_norms_reduce_rows_alike_forward_and_backward(d: int) -> None:
    norm = NORM.format(d)
    forward = compiled("rms_norm_forward_kernel", f"{norm}add_rms_norm_forward(x, x, zeros({d}), 1e-5)")
    backward = compiled("rms_norm_backward_kernel", f"{norm}rms_norm_backward(x, x, zeros({d}), None, x, 1e-5)")
    assert forward["reduced"] == backward["reduced"] and len(forward["reduced"]) == 1
    for one, threads in ((forward, 512), (backward, 256)):
        programs = max(1, threads // one["threads"])
        assert one["registers"] * one["threads"] * programs <= 65536
        assert (one["shared"] + 1024) * programs <= 228 * 1024
        assert (one["cp.async.cg"] > 0) == (one is backward)
        assert one["fma"] == 0


WRITERS = {
    "rms_norm_forward_kernel": (512, f"{NORM.format(4096)}rms_norm_forward(x, zeros(4096), 1e-5, SLOT)"),
    "rms_norm_backward_kernel": (256, f"{NORM.format(4096)}rms_norm_backward(x, x, zeros(4096), None, x, 1e-5, SLOT)"),
    "swiglu_forward_kernel": (1024, "swiglu.forward_op(zeros(512, 8192), SLOT)"),
    "swiglu_backward_kernel": (768, "swiglu.backward_in_place_op(zeros(512, 4096), zeros(512, 8192), True, SLOT)"),
    "rotary_kernel": (1024, "rotary.rotate_(zeros(512, 4096), *ones(2, 512, 64), 16, 8, True, SLOT)"),
}


@pytest.mark.slow
@pytest.mark.parametrize("kernel", WRITERS)
def test_the_largest_magnitude_costs_one_atomic_and_no_access(kernel: str) -> None:
    threads, launch = WRITERS[kernel]
    plain, found = (compiled(kernel, launch.replace("SLOT", slot), threads) for slot in ("None", "ones(())"))
    assert [plain[access] for access in ("ld.global", "st.global")] == [found["ld.global"], found["st.global"]]
    assert (plain["atom.global"], found["atom.global"]) == (0, 1)
    assert plain["reduced"] == found["reduced"]
    assert found["ld.global.v4.b32"] > 0


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kernel", "launch", "registers"),
    [
        ("cross_entropy_rows_kernel", ROWS_OF_LOSS, 64),
        ("add_rows_kernel", "add_rows.add_rows_(zeros(30, 256), zeros(64, dtype=torch.int64), zeros(64, 256))", 128),
        ("norm_rotate_kernel", f"{HEADS}norm_rotate(qkv, *how)", 64),
        ("norm_rotate_backward_kernel", f"{HEADS}norm_rotate_backward_(qkv.clone(), qkv, *how)", 128),
        ("absmax_kernel", "absmax.absmax(zeros(512, 4096))", 64),
    ],
)
def test_registers_leave_room_and_loads_are_wide(kernel: str, launch: str, registers: int) -> None:
    found = compiled(kernel, launch)
    assert found["registers"] <= registers
    assert found["ld.global.v4.b32"] >= (8 if kernel == "cross_entropy_rows_kernel" else 1)


@pytest.mark.slow
@pytest.mark.parametrize("gated", [False, True])
def test_matmuls_on_hopper(gated: bool) -> None:
    launch = f"""
shapes = (32768, 896), (9728, 896), (32768, 9728), (32768, {4864 if gated else 9728})
strides = tuple((shape[1], 1) for shape in shapes)
products._prepared(shapes, strides, 4 * (bf16,), torch.device("cpu"), {gated})"""
    found = compiled("product_kernel", launch)
    assert not found["serialised"]
    assert found["shared"] <= 227 * 1024
    assert found["wgmma"] == 2 * (4 + 4)  # of both consumers, first step and others
