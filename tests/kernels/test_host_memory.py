"""Host memory: what imitated control groups leave free; slabs hand out aligned views, are pinned and given back."""

import mmap
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch

from cs336_systems.kernels import host_memory
from cs336_systems.kernels.host_memory import (
    ALIGNMENT,
    control_group_headroom,
    device_slab,
    host_slab,
    to_device,
)

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)
PAGE = 4096
MEMBERSHIP = "5:cpu:/elsewhere\n4:memory:/jobs/7\n0::/jobs/7\n"


def test_what_would_come_from_the_host_into_a_captured_graph_is_named(monkeypatch):
    monkeypatch.setattr("torch.cuda.is_current_stream_capturing", lambda: True)
    with pytest.raises(RuntimeError, match="hyperparameters or targets .* host .* give targets on the device"):
        to_device(torch.zeros(1), CUDA)


def control_group(root, files):
    for name, text in (files | {"membership": MEMBERSHIP}).items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return control_group_headroom(root, root / "membership")


def below(folder, files):
    """The same files in a group further down the hierarchy."""
    return {
        name.replace("memory/", f"memory/{folder}/") if "/" in name else f"{folder}/{name}": text
        for name, text in files.items()
    }


def v2(limit, current, stat="anon 10\ninactive_file 280\nactive_file 20\n"):
    return {"memory.max": f"{limit}\n", "memory.current": f"{current}\n", "memory.stat": stat}


def v1(limit, usage, stat="cache 9\ninactive_file 1\ntotal_inactive_file 370\ntotal_active_file 30\n"):
    return {
        "memory/memory.limit_in_bytes": f"{limit}\n",
        "memory/memory.usage_in_bytes": f"{usage}\n",
        "memory/memory.stat": stat,
    }


@pytest.mark.parametrize(
    ("files", "headroom"),
    [
        (v2(5000, 2000), 5000 - 2000 + 300),
        (v1(7000, 1000), 7000 - 1000 + 400),
        (v1(2**63 - mmap.PAGESIZE, 1000), None),
        (v2(5000, 2000) | below("jobs/7", v2(4000, 2500)), 1800),
        (below("jobs/8", v2(5000, 2000)), None),
        (v2("rubbish", "rubbish"), None),
    ],
)
def test_headroom_of_a_control_group(tmp_path, files, headroom):
    assert control_group(tmp_path, files) == headroom


def test_tensors_lie_one_after_the_other_and_aligned():
    slab = host_slab(PAGE, CPU)
    first, second = slab.take((3, 5), torch.float32), slab.take((7,), torch.bfloat16)
    assert (first.shape, first.dtype, second.shape, second.dtype) == ((3, 5), torch.float32, (7,), torch.bfloat16)
    assert [x.data_ptr() - slab.memory.data_ptr() for x in (first, second)] == [0, ALIGNMENT]
    assert slab.n_taken == 2 * ALIGNMENT
    second.fill_(3)
    assert not first.any()
    torch.testing.assert_close(slab.view(ALIGNMENT, (7,), torch.bfloat16), second)


@pytest.mark.parametrize("make", [host_slab, device_slab])
def test_what_does_not_fit_is_refused(make):
    slab = make(2 * ALIGNMENT, CPU)
    slab.take((ALIGNMENT + 1,), torch.uint8)
    with pytest.raises(ValueError, match="bytes 512 to 516 are no aligned piece of a slab of 512 bytes"):
        slab.take((1,), torch.float32)


def test_more_than_there_is_is_refused(monkeypatch):
    monkeypatch.setattr(host_memory, "allowed_host_bytes", lambda: 3 * 2**30)
    with pytest.raises(RuntimeError, match="a host slab of 4.00 GiB is asked for, and 3.00 GiB are free here"):
        host_slab(4 * 2**30, CPU)
    assert host_slab(0, CPU).n_bytes == 0


class Cudart:
    """Stands for the CUDA runtime."""

    def __init__(self, error: int) -> None:
        self.error, self.registered = error, {}

    def cudaHostRegister(self, address, n_bytes, flags):
        self.registered[address] = n_bytes
        return self.error

    def cudaHostUnregister(self, address):
        del self.registered[address]

    def cudaGetErrorString(self, error):
        return "out of memory"


def with_runtime(monkeypatch, error: int) -> Cudart:
    cudart = Cudart(error)
    monkeypatch.setattr(torch, "cuda", SimpleNamespace(cudart=lambda: cudart, device=lambda _: nullcontext()))
    return cudart


def test_pinned_until_the_last_view_is_gone(monkeypatch):
    cudart = with_runtime(monkeypatch, error=0)
    slab = host_slab(3 * PAGE, CUDA)
    assert cudart.registered == {slab.memory.data_ptr(): 3 * PAGE}
    view = slab.take((PAGE,), torch.uint8)
    del slab
    assert cudart.registered and view.sum() == 0
    del view
    assert not cudart.registered


def test_memory_that_cannot_be_pinned(monkeypatch):
    with_runtime(monkeypatch, error=2)
    with pytest.raises(RuntimeError, match="a host slab of 0.00 GiB cannot be pinned: out of memory"):
        host_slab(PAGE, CUDA)


@pytest.mark.gpu
def test_copies_to_and_from_a_gpu():
    device = torch.device("cuda", torch.cuda.current_device())
    host, there = host_slab(2**26, device), device_slab(2**26, device)
    assert host.memory.is_pinned()
    host.memory[::4097] = 7
    there.memory.copy_(host.memory, non_blocking=True)
    back = host_slab(2**26, device)
    back.memory.copy_(there.memory, non_blocking=True)
    torch.cuda.synchronize()
    assert torch.equal(back.memory, host.memory)
