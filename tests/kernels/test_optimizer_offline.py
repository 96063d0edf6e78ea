"""The optimizer's kernels compile for Hopper without a GPU: nothing spills, and whole blocks go 16 bytes at a time."""

import json
import re
from collections import Counter

import pytest

from tests.attention.offline import report, run_apart

COMPILE = """
import json, sys
import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from cs336_systems.kernels import adamw, grad_norm

name = sys.argv[1]
table = {"rows": "*i64", "owners": "*i32"}
if name == "sum_of_squares":
    kernel, types = grad_norm.sum_of_squares_kernel, table | {"partials": "*fp32"}
    num_warps = grad_norm.WARPS
    constants = {"CHUNK": grad_norm.CHUNK, "BLOCK": grad_norm.BLOCK, "OVERLAP": True}
else:
    kernel, types = adamw.update_kernel, table | {"coefficients": "*fp32", "scale": "*fp32"}
    num_warps = adamw.WARPS
    dtypes = dict(zip("PGM", (getattr(tl, dtype) for dtype in name.split())))
    constants = {"STOCHASTIC": "bfloat16" in name, "CLEAR": True, "CHUNK": adamw.CHUNK, "BLOCK": adamw.BLOCK} | dtypes
    constants |= {"HAS_MASTER": name.endswith("master"), "WITH_ABSMAX": name.endswith("absmax"), "OVERLAP": True}
signature = {name: types.get(name, "constexpr") for name in kernel.arg_names}
aligned = {(i,): [["tt.divisibility", 16]] for i, name in enumerate(kernel.arg_names) if name in types}
compiled = triton.compile(
    ASTSource(kernel, signature, constants, aligned), GPUTarget("cuda", 90, 32), {"num_warps": num_warps}
)
ptx = compiled.asm["ptx"]
wide = {kind: sum(f"{kind}.global" in line and ".v4" in line for line in ptx.splitlines()) for kind in ("ld", "st")}
print(json.dumps({"ptx": ptx, "metadata": wide}))
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "most_registers", "wide_loads", "wide_stores"),
    [
        ("bfloat16 bfloat16 bfloat16", 96, 4, 4),  # 8 elements per thread: 16 bytes of each tensor
        ("float32 float32 float32", 64, 8, 8),
        ("bfloat16 bfloat16 float32 master", 96, 7, 8),
        ("bfloat16 bfloat16 bfloat16 absmax", 144, 4, 4),  # 80 where gradients are not cleared
        ("sum_of_squares", 128, 6, 0),  # 16 elements: 2 of bf16, 4 of fp32
    ],
)
def test_no_spills_and_wide_accesses(name: str, most_registers: int, wide_loads: int, wide_stores: int) -> None:
    found = report(COMPILE, name)
    assert found["spill_stores"] == found["stack_frame"] == 0
    assert found["registers"] <= most_registers
    assert (found["ld"], found["st"]) == (wide_loads, wide_stores)


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


@pytest.mark.slow
@pytest.mark.parametrize("name", ["bfloat16 bfloat16 bfloat16 master", "float32 bfloat16 bfloat16"])
def test_an_element_is_updated_by_the_same_arithmetic_in_whole_blocks_and_at_ends(name: str) -> None:
    """So that it is the same bits wherever tensors are cut, for shards and on the way to host memory."""
    blocks, ends = arithmetic(json.loads(run_apart(COMPILE, name))["ptx"])
    assert blocks == ends
    assert sum(blocks.values()) >= 8 * 12  # elements of a thread, and operations
    assert not any(term.startswith(("add", "sub")) for term in blocks), "what is left to ptxas to contract"


@pytest.mark.slow
def test_coefficients_are_read_only_when_the_launch_that_writes_them_has_ended() -> None:
    """Both launches overlap, and nothing in Triton's language ties a load to the wait in front of it."""
    lines = json.loads(run_apart(COMPILE, "bfloat16 bfloat16 bfloat16"))["ptx"].splitlines()
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
