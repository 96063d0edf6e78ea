"""Kernels compile for Hopper without a GPU: nothing spills, registers leave room for programs, accesses are wide.

One process compiles every launch once, and each test reads what it needs from it.
"""

import json
import re
from collections import Counter
from functools import cache
from typing import Any

import pytest

from tests.attention.offline import ON_HOPPER, assembled, run_apart

pytestmark = pytest.mark.slow

BEGIN = """
import json, sys
from importlib import import_module
modules = ("absmax adamw add_rows cross_entropy_rows grad_norm launching lora lora_reference merge_attention "
           "norm_rotate products quantize quantize_parts quantize_reference rms_norm rms_norm_quantize rotary swiglu "
           "swiglu_quantize").split()
globals().update((name, import_module("cs336_systems.kernels." + name)) for name in modules)
for module in [globals()[name] for name in modules]:
    for name, other in (("n_multiprocessors", 132), ("check_device", None), ("needs_other_device", False)):
        if hasattr(module, name):
            setattr(module, name, lambda *_, other=other: other)
bf16, fp32, fp8 = torch.bfloat16, torch.float32, torch.float8_e4m3fn

def zeros(*shape, dtype=bf16):
    return torch.zeros(*shape, dtype=dtype)

def ones(*shape):
    return torch.zeros(*shape)

def update(p, g, m, **fields):
    tensors = (torch.zeros(10000, dtype=dtype) for dtype in (p, g, m, m))
    one = adamw.Update(*tensors, torch.tensor(0), 0.1, (0.9, 0.99), 1e-8, 0.1, **fields)
    adamw.adamw_([one])

def part(dtype):
    part = quantize_reference.Part(zeros(8192, dtype=dtype), zeros(8192, dtype=torch.uint8), 0, ones(()))
    return quantize_parts.PartsQuantizer([part], fp8, bf16)

def product(swiglu, rank=0):
    shapes = (32768, 896), (9728, 896), (32768, 9728), (32768, 4864 if swiglu else 9728)
    shapes += ((32768, 2 * rank), (9728, rank)) if rank else shapes[:2]
    strides = tuple((shape[1], 1) for shape in shapes)
    products._prepared(shapes, strides, 6 * (bf16,), torch.device("cpu"), swiglu)

def scaled(*shape, fp8=False):
    values = zeros(*shape, dtype=torch.float8_e4m3fn if fp8 else bf16)
    return lora_reference.Scaled(values, ones(()) if fp8 else None)

def low(*widths):
    return lora_reference.LowRank(zeros(2048, 16 * len(widths)), zeros(sum(widths), 16), widths)

found = {}
for key, launch in json.loads(sys.argv[1]).items():
    compiled.clear()
    exec(launch)
    kernel = compiled[key.split()[0] + "_kernel"]
    found[key] = kernel.asm["ptx"], 32 * kernel.metadata.num_warps, kernel.metadata.shared
print(json.dumps(found))
"""
QUANTIZE, NORM = "quantize.quantize", "rms_norm.rms_norm"
HEADS = (
    "qkv, gain = zeros(32, 6144), zeros(128)\nhow = gain, gain, 1e-6, *ones(2, 32, 64), 32, 8\nnorm_rotate.norm_rotate"
)
LAUNCHES = {
    "swiglu_forward": "swiglu.swiglu_forward(zeros(40, 22016))",
    "swiglu_backward": "swiglu.swiglu_backward_(zeros(40, 11008), zeros(40, 22016), with_product=True)",
    "rotary": "rotary.rotate_(zeros(32, 3200), *ones(2, 32, 40), 24, 8)",
    "rms_norm_forward": f"{NORM}_forward(zeros(48, 4096), zeros(4096), 1e-5)",
    "rms_norm_backward": f"{NORM}_backward(*2 * [zeros(48, 4096)], zeros(4096), ones(48), zeros(48, 4096))",
    "swiglu_forward absmax": "swiglu.swiglu_forward(zeros(40, 22016), ones(()))",
    "swiglu_backward absmax": (
        "swiglu.swiglu_backward_(zeros(40, 11008), zeros(40, 22016), with_product=True, absmax=ones(()))"
    ),
    "rotary absmax": "rotary.rotate_(zeros(32, 3200), *ones(2, 32, 40), 24, 8, False, ones(()))",
    "rms_norm_forward absmax": f"{NORM}_forward(zeros(48, 4096), zeros(4096), 1e-5, ones(()))",
    "rms_norm_backward absmax": (
        f"{NORM}_backward(*2 * [zeros(48, 4096)], zeros(4096), ones(48), zeros(48, 4096), ones(()))"
    ),
    "rms_norm_forward long": f"{NORM}_forward(zeros(48, 8192), zeros(8192), 1e-5)",
    "rms_norm_backward long": f"{NORM}_backward(*2 * [zeros(48, 8192)], zeros(8192), ones(48), zeros(48, 8192))",
    "transpose_bytes": "quantize.transpose_bytes(zeros(512, 4096, dtype=torch.uint8))",
    "scale": "cross_entropy_rows.scale_(zeros(50257, 16), ones(()))",
    "scale added": "cross_entropy_rows.scale_(zeros(50257, 16), ones(()), zeros(50257, 16))",
    "quantize tensor": f"{QUANTIZE}(zeros(512, 4096), ones(()), fp8)",
    "quantize row": (f"{QUANTIZE}(zeros(512, 4096), ones(512, 1), fp8, absmax_t=ones(1, 4096), transposed=True)"),
    "quantize_blocks block": f"{QUANTIZE}_blocks(zeros(512, 4096), fp8, transposed=True)",
    "quantize_blocks square": f"{QUANTIZE}_blocks(zeros(512, 4096), fp8, square=True, transposed=True)",
    "swiglu_backward_quantize": (
        "x, slopes = zeros(512, 4096), ones(64, 16)\n"
        "swiglu_quantize.swiglu_backward_quantize(x, zeros(512, 8192), slopes, ones(()), fp8, z_absmax=ones(()))"
    ),
    "rms_norm_quantize": (
        "how = zeros(512, 4096), zeros(4096), ones(512), ones(()), fp8\n"
        "rms_norm_quantize.rms_norm_quantize(*how, transposed=True)"
    ),
    "parts_absmax": "part(fp32).absmax()",
    "quantize_parts": "part(bf16).quantize_(ones(1))",
    "cross_entropy_rows": (
        "logits, targets = zeros(2, 50272)[:, :50257], zeros(2, dtype=torch.int64)  # a vocabulary that is odd\n"
        "options = dict(scale=ones(2), z_loss=0.0, gradient=True)\n"
        "cross_entropy_rows.launch_rows(logits, targets, ones(2), ones(2), **options)"
    ),
    "add_rows": "add_rows.add_rows_(zeros(30, 256), zeros(64, dtype=torch.int64), zeros(64, 256))",
    "merge_attention": (
        "o, lse = torch.zeros(2, 1, 64, 32, 128, dtype=bf16).transpose(2, 3), ones(2, 1, 32, 64)\n"
        "merge_attention.merge_attention_(o[0], lse[0], o[1], lse[1])"
    ),
    "norm_rotate": f"{HEADS}(qkv, *how)",
    "norm_rotate_backward": f"{HEADS}_backward_(qkv.clone(), qkv, *how)",
    "absmax": "absmax.absmax(zeros(512, 4096))",
    "product": "product(False)",
    "product swiglu": "product(True)",
    "product lora": "product(True, 16)",
    "shrink": "lora.shrink(scaled(2048, 3584), zeros(48, 3584).T, (3584,), 2.0)",
    "shrink parts": "lora.shrink(scaled(2048, 37888), zeros(37888, 16), (18944, 18944), 2.0)",
    "shrink fp8": "lora.shrink(scaled(2048, 37888, fp8=True), zeros(37888, 16), (18944, 18944), 2.0)",
    "factor_gradients fp8": (
        "h, x, dy = zeros(2048, 16), scaled(18944, 2048, fp8=True), scaled(2048, 3584, fp8=True)\n"
        "x = lora_reference.Scaled(x.values.T, x.scale)\n"
        "lora.factor_gradients_(zeros(16, 18944), zeros(3584, 16), x, dy, h, h, (3584,), True)"
    ),
    "expand": "lora.expand_(zeros(2048, 4608), low(3584, 512, 512))",
    "factor_gradients": (
        "h, x, dy = zeros(2048, 48), scaled(2048, 3584), scaled(2048, 4608)\n"
        "lora.factor_gradients_(zeros(48, 3584), zeros(4608, 16), x, dy, h, h, (3584, 512, 512), True)"
    ),
    "swiglu_backward lora": (
        "tensors, factor = (zeros(2048, 18944), zeros(2048, 37888)), zeros(16, 18944).T\n"
        "low = lora_reference.LowRank(zeros(2048, 16), factor, (18944,))\n"
        "swiglu.swiglu_backward_(*tensors, with_product=True, low=low)"
    ),
    "update bf16": "update(bf16, bf16, bf16)",
    "update fp32": "update(fp32, fp32, fp32)",
    "update master": "update(bf16, bf16, fp32, master=ones(10000))",
    "sum_of_squares": "grad_norm.grad_norm([zeros(70000)])",
}
"""By the kernel's name and its form, the launch that compiles it."""
COUNTED = (
    *("ld.global", "st.global", "ld.global.v4.b32", "st.global.v4.b32", "st.global.v2.b32", "st.global.b32"),
    *("fma", "st.global.b8", "st.shared.b8", "cvt.rn.satfinite", "bar.sync", "cp.async.cg", "atom.global", "mma.sync"),
)


@cache
def compiled() -> dict[str, tuple[str, int, int]]:
    """By launch, the kernel's PTX, threads of a program and bytes of shared memory."""
    return json.loads(run_apart(ON_HOPPER + BEGIN, json.dumps(LAUNCHES)))


@cache
def found_of(key: str) -> dict[str, Any]:
    """What the kernel compiles to: lines that hold each of ``COUNTED``, registers, threads, shared memory."""
    ptx, threads, shared = compiled()[key]
    lines = ptx.splitlines()
    found = assembled(ptx) | {"threads": threads, "shared": shared}
    found |= {text: sum(text in line for line in lines) for text in COUNTED}
    assert found["spill_stores"] == found["stack_frame"] == 0
    assert found["registers"] * threads <= 65536
    assert found["st.global.b8"] == found["st.shared.b8"] == 0
    return found


def fits(key: str, threads: int) -> dict[str, Any]:
    """Its findings; so many threads fit a multiprocessor's registers."""
    found = found_of(key)
    assert found["registers"] * max(threads, found["threads"]) <= 65536
    return found


@pytest.mark.parametrize(
    ("key", "threads", "loads", "stores"),
    [  # two blocks of 1,024 elements; a head and its angles; vectors of a row
        *(("swiglu_forward", 2048, 4, 2), ("swiglu_backward", 1024, 6, 6), ("rotary", 1536, 6, 2)),
        *(("transpose_bytes", 0, 4, 4), ("scale", 0, 4, 4)),
    ],
)
def test_every_access_is_wide(key: str, threads: int, loads: int, stores: int) -> None:
    found = fits(key, threads)
    assert found["ld.global.v4.b32"] == loads and found["ld.global"] - loads == (key == "scale")
    assert found["st.global"] == found["st.global.v4.b32"] == stores
    assert found["bar.sync"] == 1 or key != "swiglu_backward"
    assert not found["fma"] or key != "rotary"


def test_merged_outputs_are_read_and_written_wide() -> None:
    found = fits("merge_attention", 1024)
    assert (found["ld.global.v4.b32"], found["st.global.v4.b32"]) == (8, 4)


@pytest.mark.parametrize(
    ("key", "threads"),
    [
        *(("rms_norm_forward", 512), ("rms_norm_backward", 256), ("swiglu_forward", 1024), ("swiglu_backward", 768)),
        ("rotary", 1024),
    ],
)
def test_the_largest_magnitude_costs_one_atomic_and_no_access(key: str, threads: int) -> None:
    plain, found = fits(key, threads), fits(f"{key} absmax", threads)
    assert [plain[access] for access in ("ld.global", "st.global")] == [found["ld.global"], found["st.global"]]
    assert (plain["atom.global"], found["atom.global"]) == (0, 1)
    assert found["ld.global.v4.b32"] > 0


@pytest.mark.parametrize(("key", "threads"), [("rms_norm_forward", 512), ("rms_norm_backward", 256)])
@pytest.mark.parametrize("form", ["", " long"])
def test_norms_leave_room_for_programs_and_copy_ahead_in_backward(key: str, threads: int, form: str) -> None:
    found = found_of(key + form)
    programs = max(1, threads // found["threads"])
    assert found["registers"] * found["threads"] * programs <= 65536
    assert (found["shared"] + 1024) * programs <= 228 * 1024
    assert (found["cp.async.cg"] > 0) == ("backward" in key)
    assert found["fma"] == 0


@pytest.mark.parametrize("key", [key for key in LAUNCHES if key.startswith("quantize ") or "_blocks" in key])
def test_quantization_reads_and_writes_16_bytes_and_only_scales_by_4(key: str) -> None:
    found, form = found_of(key), key.split()[1]
    elements = found["cvt.rn.satfinite"] * (2 if form in ("tensor", "square") else 1)
    assert found["ld.global.v4.b32"] - (form == "row") * 4 == elements // 8
    assert found["st.global.v4.b32"] == elements // 16 * (1 if form == "tensor" else 2)
    assert found["st.global.b32"] <= 5


def test_what_is_quantized_where_it_is_made_goes_by_wide_accesses() -> None:
    """SwiGLU's gradients: a thread loads 16 bytes, stores 8 of a row and 16 of a column, as two programs fit."""
    found = fits("swiglu_backward_quantize", 512)
    elements = found["cvt.rn.satfinite"] * 2 // 3  # of a thread, of each matrix
    assert found["ld.global.v4.b32"] == 3 * elements // 8
    assert found["st.global.v2.b32"] == 2 * elements // 8
    assert found["st.global.v4.b32"] == 3 * elements // 16
    found = found_of("rms_norm_quantize")
    assert found["registers"] * found["threads"] * 2 <= 65536
    assert found["ld.global.v4.b32"] >= found["cvt.rn.satfinite"] * 2 // 8
    for key, loads, stores in (("parts_absmax", 8, 0), ("quantize_parts", 4, 2)):  # of the 32 elements of a thread
        found = found_of(key)
        assert (found["ld.global.v4.b32"], found["st.global.v4.b32"]) == (loads, stores)


@pytest.mark.parametrize(
    ("key", "registers"),
    [
        *(("cross_entropy_rows", 64), ("add_rows", 128), ("norm_rotate", 64), ("norm_rotate_backward", 128)),
        ("absmax", 64),
    ],
)
def test_registers_leave_room_and_loads_are_wide(key: str, registers: int) -> None:
    found = found_of(key)
    assert found["registers"] <= registers
    assert found["ld.global.v4.b32"] >= (8 if key == "cross_entropy_rows" else 1)


ADAPTERS = {"shrink": 1, "shrink parts": 2, "shrink fp8": 2, "expand": 4}
ADAPTERS |= {"factor_gradients": 4, "factor_gradients fp8": 6}
"""How many programs are to fit a multiprocessor."""


def test_adapters_copy_ahead_in_16_bytes_and_multiply_in_each_warp_alone() -> None:
    """Sixteen rows and 512 columns of shrink are eight warps' slices: 4 steps of 16 columns, by halves of 16 ranks."""
    for key, programs in ADAPTERS.items():
        found = found_of(key)
        assert found["registers"] * found["threads"] * programs <= 65536
        assert (found["shared"] + 1024) * programs <= 228 * 1024
        assert (found["cp.async.cg"] > 0) == (key != "expand")
        assert found["wgmma"] > 0 or key.startswith("shrink")
    assert found_of("shrink parts")["mma.sync"] == 4 * 2 * 2  # rows by two tiles of 16
    found = fits("swiglu_backward lora", 768)
    assert found["ld.global.v4.b32"] >= 6 and found["st.global"] == found["st.global.v4.b32"] == 6


@pytest.mark.parametrize("key", ["product", "product swiglu", "product lora"])
def test_matmuls_on_hopper(key: str) -> None:
    found = found_of(key)
    assert not found["serialised"]
    assert found["shared"] <= 227 * 1024
    assert found["wgmma"] == 2 * (4 + 4)  # of both consumers, first step and others


@pytest.mark.parametrize(
    ("key", "most_registers", "wide_loads", "wide_stores"),
    [
        ("update bf16", 96, 4, 3),  # 8 elements per thread: 16 bytes of each tensor
        ("update fp32", 64, 8, 6),
        ("update master", 96, 7, 7),
        ("sum_of_squares", 128, 6, 0),  # 16 elements: 2 of bf16, 4 of fp32
    ],
)
def test_the_optimizer_reads_and_writes_16_bytes(
    key: str, most_registers: int, wide_loads: int, wide_stores: int
) -> None:
    found = found_of(key)
    lines = [line for line in compiled()[key][0].splitlines() if ".v4" in line]
    assert found["registers"] <= most_registers
    assert [sum(f"{kind}.global" in line for line in lines) for kind in ("ld", "st")] == [wide_loads, wide_stores]


def arithmetic(ptx: str) -> list[Counter[str]]:
    """The terms in fp32 that each loop with a square root computes, over whatever it has loaded, x."""
    terms: dict[str, str] = {}
    loops = []
    for body in re.split(r"\n\$L__BB\d+_\d+:", ptx):
        found: Counter[str] = Counter()
        for name, target, operands in re.findall(r"(fma|mul|add|sub|neg|div|sqrt)\.[\w.]*f32\s+(%\w+), (.*);", body):
            of = [terms.get(operand, "x") for operand in operands.split(", ")]
            terms[target] = f"{name}({', '.join(of)})"
            found[terms[target]] += 1
        if any("sqrt" in term for term in found):
            loops.append(found)
    return loops


@pytest.mark.parametrize("key", ["update master", "update bf16"])
def test_an_element_is_updated_by_the_same_arithmetic_in_whole_blocks_and_at_ends(key: str) -> None:
    """So that it is the same bits wherever tensors are cut, for shards and on the way to host memory."""
    blocks, ends = arithmetic(compiled()[key][0])
    assert blocks == ends
    assert sum(blocks.values()) >= 8 * 12  # elements of a thread, and operations
    assert not any(term.startswith(("add", "sub")) for term in blocks), "what is left to ptxas to contract"


def test_coefficients_are_read_only_when_the_launch_that_writes_them_has_ended() -> None:
    """Both launches overlap, and nothing in Triton's language ties a load to the wait in front of it."""
    lines = compiled()["update bf16"][0].splitlines()
    wait = next(i for i, line in enumerate(lines) if "griddepcontrol.wait" in line)
    found, addresses = [], set()
    for i, line in enumerate(lines):
        target, *operands = re.findall(r"%\w+", line.split("ld.global")[0] if "ld.global" in line else line) or [""]
        if "update_kernel_param_2]" in line or ("ld.global" not in line and addresses & set(operands)):
            addresses.add(target)
        elif "ld.global" in line and addresses & set(re.findall(r"\[ (%\w+)", line)):
            found.append(i)
    assert len(found) == 8
    assert min(found) > wait
