"""Caps on a machine without a GPU: the host's."""

from types import SimpleNamespace

import pytest
import torch

from cs336_systems.streaming import fence as fences
from cs336_systems.streaming.fence import GIB, Fence, check_cpu_caps

CPU = torch.device("cpu")


@pytest.mark.slow
def test_the_resident_set_is_measured_and_compared():
    used = Fence(CPU, GIB, 2**50).check()
    assert used.device == used.context == 0
    assert used.host > 50 * 2**20
    with pytest.raises(RuntimeError, match="GiB of the host were in use, the cap is 0.01 GiB"):
        Fence(CPU, GIB, GIB // 100).check()


@pytest.mark.slow
def test_what_a_run_before_has_given_back_does_not_count():
    n_bytes = 2**29
    slab = torch.ones(n_bytes, dtype=torch.uint8)
    with_it = Fence(CPU, GIB, 2**50).in_use().host
    del slab
    fence = Fence(CPU, GIB, 2**50)
    assert fence.in_use().host < with_it - n_bytes // 2
    slab = torch.ones(2 * n_bytes, dtype=torch.uint8)
    del slab
    assert fence.in_use().host > with_it  # the highest since


def test_a_cap_above_what_the_device_has_is_refused(monkeypatch):
    monkeypatch.setattr(torch.cuda, "init", lambda: None)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(total_memory=80 * GIB))
    with pytest.raises(ValueError, match=r"^a cap of 200\.00 GiB is more than the device's 80\.00 GiB$"):
        Fence(torch.device("cuda"), 200 * GIB, GIB)


@pytest.mark.parametrize("caps", [(8 * GIB, GIB), (GIB, 8 * GIB), (5 * GIB, 4 * GIB)])
def test_caps_above_what_a_cpu_has_are_refused(monkeypatch, caps):
    monkeypatch.setattr(fences, "allowed_host_bytes", lambda: 8 * GIB)
    check_cpu_caps(7 * GIB, GIB)
    with pytest.raises(ValueError, match=r"^caps of 9\.00 GiB together are more than the 8\.00 GiB of memory that are"):
        check_cpu_caps(*caps)
