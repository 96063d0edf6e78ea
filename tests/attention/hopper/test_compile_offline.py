"""The schedules in use compile for Hopper without a GPU: few spills, wgmmas not serialised, fitting shared memory.

Through the launchers, in a process of their own that tells Triton of a Hopper device and stops short of the launch.
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
import torch, triton
from triton.backends.compiler import GPUTarget
from triton.runtime.jit import JITFunction
from cs336_systems.attention.hopper import backward, forward

class Hopper:
    get_current_target = staticmethod(lambda: GPUTarget("cuda", 90, 32))
    get_current_device = staticmethod(lambda: 0)
    get_current_stream = staticmethod(lambda device: 0)

triton.runtime.driver.set_active(Hopper())
compiled, launch = {}, JITFunction.run

def compile_only(kernel, *arguments, grid, warmup, **options):
    compiled[kernel.fn.__name__] = launch(kernel, *arguments, grid=grid, warmup=True, **options)

JITFunction.run = compile_only
forward.counter = backward.counter = lambda device: torch.zeros(1, dtype=torch.int32)
forward.n_multiprocessors = backward.n_multiprocessors = lambda device: 132
name, d_head = sys.argv[1], int(sys.argv[2])
q = torch.zeros(1, 2, 200, d_head, dtype=torch.bfloat16)
if name == "forward":
    forward.launch_forward(q, q, q, True, 0.1)
else:
    backward.launch_backward(q, q, q, q, torch.zeros(1, 2, 200), q, True, 0.1)
kernel = compiled[f"hopper_{name}_kernel"]
ptxas = os.path.join(os.path.dirname(triton.__file__), "backends", "nvidia", "bin", "ptxas")
with tempfile.NamedTemporaryFile("w", suffix=".ptx") as ptx:
    ptx.write(kernel.asm["ptx"])
    ptx.flush()
    command = [ptxas, "-arch=sm_90a", "-v", ptx.name, "-o", os.devnull]
    log = subprocess.run(command, capture_output=True, text=True, check=True).stderr
print(json.dumps({"spilled": int(re.search(r"(\\d+) bytes spill stores", log)[1]), "serialised": "serialized" in log,
                  "shared": kernel.metadata.shared, "warps": kernel.metadata.num_warps,
                  "wgmma": kernel.asm["ptx"].count("wgmma.mma_async")}))
"""


@pytest.mark.parametrize(
    ("kernel", "d_head", "most_spilled_bytes"),
    [("forward", 64, 0), ("forward", 128, 0), ("backward", 64, 0), ("backward", 128, 256)],
)
def test_schedule_compiles_for_hopper(kernel: str, d_head: int, most_spilled_bytes: int) -> None:
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
    assert report["warps"] in (12, 16)
    assert report["shared"] <= 227 * 1024
