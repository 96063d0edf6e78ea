"""Caps on a machine without a GPU: the host's."""

import pytest
import torch

from cs336_systems.streaming.fence import GIB, Fence

CPU = torch.device("cpu")


def test_the_resident_set_is_measured_and_compared():
    used = Fence(CPU, GIB, 2**50).check()
    assert used.device == used.context == 0
    assert used.host > 50 * 2**20
    with pytest.raises(RuntimeError, match="GiB of the host were in use, the cap is 0.01 GiB"):
        Fence(CPU, GIB, GIB // 100).check()
