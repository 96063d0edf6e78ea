"""The tiles in use at head dims 64 and 128 compile for Hopper without a GPU: few spills, and wgmmas not serialised."""

import pytest

from tests.attention.offline import report

COMPILE = """
import json, sys
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from cs336_systems.attention.flash import backward, forward
from cs336_systems.attention.flash.tiles import tile_for

kernel_name, d_head = sys.argv[1], int(sys.argv[2])
kernel = {"forward": forward.flash_forward_kernel, "dkdv": backward.flash_dkdv_kernel,
          "dq": backward.flash_dq_kernel}[kernel_name]
tile = tile_for(kernel_name, d_head, 2)
constants = dict(D=d_head, BLOCK_Q=tile.block_q, BLOCK_K=tile.block_k, BLOCK_D=triton.next_power_of_2(d_head),
                 CAUSAL=True, PRECISION="ieee", group=1)
pointers = dict.fromkeys(("q", "k", "v", "o", "do", "dq", "dk", "dv"), "*bf16")
pointers |= dict.fromkeys(("lse", "lse_log2", "delta"), "*fp32")
signature, aligned = {}, {}
for i, name in enumerate(kernel.arg_names):
    kind = "constexpr" if name in constants else pointers.get(name, "fp32" if name.startswith("scale") else "i32")
    signature[name] = kind
    if kind[0] == "*" or name.startswith("stride") or name in ("n_queries", "n_keys"):
        aligned[(i,)] = [["tt.divisibility", 16]]
options = dict(num_warps=tile.num_warps, num_stages=tile.num_stages)
compiled = triton.compile(ASTSource(kernel, signature, constants, aligned), GPUTarget("cuda", 90, 32), options)
print(json.dumps({"ptx": compiled.asm["ptx"], "metadata": {"shared": compiled.metadata.shared}}))
"""


@pytest.mark.slow
@pytest.mark.parametrize(("kernel", "d_head", "most_spilled_bytes"), [("dkdv", 64, 128), ("dkdv", 128, 16)])
def test_tile_compiles_for_hopper(kernel: str, d_head: int, most_spilled_bytes: int) -> None:
    found = report(COMPILE, kernel, d_head)
    assert found["stack_frame"] <= most_spilled_bytes
    assert found["wgmma"] > 0
    assert not found["serialised"]
    assert found["shared"] <= 227 * 1024
