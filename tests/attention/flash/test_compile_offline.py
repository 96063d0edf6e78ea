"""The tiles in use at head dims 64 and 128 compile for Hopper without a GPU: few spills, and wgmmas not serialised.

In a process of its own, since the one that runs the tests may be interpreting the kernels.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
COMPILE = """
import json, os, re, subprocess, sys, tempfile
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
ptxas = os.path.join(os.path.dirname(triton.__file__), "backends", "nvidia", "bin", "ptxas")
with tempfile.NamedTemporaryFile("w", suffix=".ptx") as ptx:
    ptx.write(compiled.asm["ptx"])
    ptx.flush()
    command = [ptxas, "-arch=sm_90a", "-v", ptx.name, "-o", os.devnull]
    log = subprocess.run(command, capture_output=True, text=True, check=True).stderr
print(json.dumps({"spilled": int(re.search(r"(\\d+) bytes stack frame", log)[1]), "serialised": "serialized" in log,
                  "registers": int(re.search(r"Used (\\d+) registers", log)[1]), "shared": compiled.metadata.shared,
                  "wgmma": compiled.asm["ptx"].count("wgmma.mma_async")}))
"""


@pytest.mark.parametrize(("kernel", "d_head", "most_spilled_bytes"), [("dkdv", 64, 128), ("dkdv", 128, 16)])
def test_tile_compiles_for_hopper(kernel: str, d_head: int, most_spilled_bytes: int) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    result = subprocess.run(
        [sys.executable, "-c", COMPILE, kernel, str(d_head)],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env=environment,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    report = json.loads(result.stdout)
    print(kernel, d_head, report)
    assert report["spilled"] <= most_spilled_bytes
    assert report["wgmma"] > 0
    assert not report["serialised"]
    assert report["shared"] <= 227 * 1024
