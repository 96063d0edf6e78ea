"""Kernels compiled for Hopper without a GPU, and what ptxas says of them."""

import json
import os
import re
import subprocess
import sys
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

import triton

ROOT = Path(__file__).resolve().parents[2]
PTXAS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "ptxas"


ON_HOPPER = """
import torch, triton
from collections import namedtuple
from types import SimpleNamespace
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.driver import wrap_handle_tensordesc
from triton.runtime.jit import JITFunction

Launch = namedtuple("Launch", "grid stream function hooks arguments")
launched = []

class Launcher:
    launch_cooperative_grid = launch_pdl = global_scratch_size = profile_scratch_size = 0

    def __init__(self, source, metadata):
        signature = dict(enumerate(source.signature.values()))
        self.launch = wrap_handle_tensordesc(Launched(), signature, getattr(metadata, "tensordesc_meta", None))

    def __call__(self, x, y, z, stream, function, *arguments):
        self.launch(x, y, z, stream, function, False, False, None, None, *arguments)

class Launched:
    def __call__(self, x, y, z, stream, function, *arguments):
        # Of eight arguments: cooperative, dependent, two scratch memories, the kernel's metadata, then hooks.
        launched.append(Launch((x, y, z), stream, function, arguments[5:8], arguments[8:]))

class Hopper:
    get_current_target = staticmethod(lambda: GPUTarget("cuda", 90, 32))
    get_current_device = staticmethod(lambda: 0)
    get_current_stream = staticmethod(lambda device: 0)
    launcher_cls = Launcher
    utils = SimpleNamespace(
        get_device_properties=lambda device: {"max_shared_mem": 227 * 1024},
        load_binary=lambda *_: (object(), object(), 0, 0, 1024),
        fill_tma_descriptor=lambda *fields: fields,
    )

triton.runtime.driver.set_active(Hopper())
compiled, run = {}, JITFunction.run

def compile_only(kernel, *arguments, grid, warmup, **options):
    compiled[kernel.fn.__name__] = run(kernel, *arguments, grid=grid, warmup=True, **options)
    return compiled[kernel.fn.__name__]

JITFunction.run = compile_only
"""
"""How a script begins that launches kernels on a Hopper device which is not there.

``compiled`` holds them by name, ``launched`` what the launcher in C would have been given, its tensor maps as tuples of
what they would say.
"""


SERVER = """
import json, os, runpy, sys, traceback
import torch, triton

for order in sys.stdin:
    script, *sys.argv[1:] = json.loads(order)
    if child := os.fork():
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
        continue
    for number, name in ((1, "stdout"), (2, "stderr")):
        os.dup2(os.open(os.path.join(os.path.dirname(script), name), os.O_WRONLY | os.O_CREAT), number)
    try:
        runpy.run_path(script, run_name="__main__")
        code = 0
    except BaseException:
        traceback.print_exc()
        code = 1
    sys.stdout.flush()
    os._exit(code)
"""


@cache
def server() -> subprocess.Popen[str]:
    """A process without the interpreter that forks one per script, so that torch and Triton are imported only once."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    return subprocess.Popen(
        [sys.executable, "-c", SERVER],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        env=environment | {"PYTHONPATH": str(ROOT)},
    )


def run_apart(script: str, *arguments: object) -> str:
    """What a script prints in a process of its own, whatever the one that runs the tests does with kernels."""
    stdin, stdout = server().stdin, server().stdout
    assert stdin is not None
    assert stdout is not None
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "script.py")  # a file, as Triton reads the sources of kernels
        path.write_text(script)
        stdin.write(json.dumps([str(path), *map(str, arguments)]) + "\n")
        stdin.flush()
        code = stdout.readline().strip()
        assert code == "0", f"exit code {code}\n{Path(folder, 'stderr').read_text()}"
        return Path(folder, "stdout").read_text()


def assembled(ptx: str) -> dict[str, Any]:
    """What ptxas says of PTX, and what this holds.

    ``spill_stores`` and ``stack_frame`` (bytes), ``registers`` (per thread), ``serialised`` and ``wgmma`` (how many).
    """
    with tempfile.NamedTemporaryFile("w", suffix=".ptx") as file:
        file.write(ptx)
        file.flush()
        command = [str(PTXAS), "-arch=sm_90a", "-v", file.name, "-o", os.devnull]
        log = subprocess.run(command, capture_output=True, text=True, check=True).stderr

    def number(pattern: str) -> int:
        found = re.search(pattern, log)
        assert found, log
        return int(found[1])

    return {
        "spill_stores": number(r"(\d+) bytes spill stores"),
        "stack_frame": number(r"(\d+) bytes stack frame"),
        "registers": number(r"Used (\d+) registers"),
        "serialised": "serialized" in log,
        "wgmma": ptx.count("wgmma.mma_async"),
    }
