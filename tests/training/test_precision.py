"""What each ``--dtype`` sets in torch, that it is undone, and which devices are refused."""

import pytest
import torch

from cs336_systems.config import PRECISIONS
from cs336_systems.training.precision import unsupported_reason


@pytest.mark.parametrize(("capability", "refused"), [((8, 0), []), ((7, 5), ["tf32", "bf16", "autocast-bf16"])])
def test_older_gpus_are_refused_by_name_and_capability(monkeypatch, capability, refused):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Some GPU")
    reasons = {name: unsupported_reason(precision, torch.device("cuda")) for name, precision in PRECISIONS.items()}
    assert [name for name, reason in reasons.items() if reason] == refused
    for name in refused:
        assert reasons[name].startswith(f"{name} needs compute capability ")
        assert reasons[name].endswith(f"or newer, Some GPU has {capability[0]}.{capability[1]}")
