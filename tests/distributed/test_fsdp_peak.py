"""What one rank asks for at most, ours beside FSDP2, to the byte: of a world of four of which there is one rank.

Nothing arrives from the others (torch's fake process group), so that no communication of a CPU's takes memory, and
storages are followed through every operator. On a GPU what the allocator rounds up hides differences of this size.
"""

import pytest
import torch
import torch.distributed as dist
from torch.multiprocessing.reductions import StorageWeakRef
from torch.testing._internal.distributed import fake_pg  # noqa: F401 (makes the backend known)
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from cs336_systems.case import Parallel, TrainingCase
from cs336_systems.config import ModelConfig
from cs336_systems.distributed import fsdp, fsdp_agreement, fsdp_parameters
from cs336_systems.distributed.process_group import Rank
from cs336_systems.training import assemble, random_batch

WORLD_SIZE = 4


class Storages(TorchDispatchMode):
    """Follows the storages that operators read and write: bytes alive after each, and at most."""

    def __init__(self, alive):
        super().__init__()
        self.alive = {}
        self.peak_bytes = 0
        self.follow(alive)

    def follow(self, values):
        for value in tree_leaves(values):
            if isinstance(value, torch.Tensor):
                storage = getattr(value, "_local_tensor", value).untyped_storage()  # of a DTensor this rank's part
                self.alive.setdefault(storage._cdata, StorageWeakRef(storage))

    def now(self):
        self.alive = {address: reference for address, reference in self.alive.items() if not reference.expired()}
        storages = (torch.UntypedStorage._new_with_weak_ptr(reference.cdata) for reference in self.alive.values())
        return sum(storage.nbytes() for storage in storages if storage is not None)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if any(cls.__torch_dispatch__ is not torch.Tensor.__torch_dispatch__ for cls in types):
            return NotImplemented  # a DTensor's operator becomes others, which come here
        result = func(*args, **(kwargs or {}))
        self.follow((result, args, kwargs))
        self.peak_bytes = max(self.peak_bytes, self.now())
        return result


@pytest.fixture
def one_of_four(monkeypatch):
    """Rank 0 of the fake world, with the collectives of NCCL; the other ranks agree to everything."""
    monkeypatch.setattr(fsdp, "check_same_across_ranks", lambda *_: None)
    monkeypatch.setattr(fsdp_agreement.Agreement, "check", lambda self, what, flags=(): list(flags))
    monkeypatch.setattr(
        fsdp_parameters,
        "all_gather",
        lambda group, outputs, inputs: group.allgather_into_tensor_coalesced(outputs, inputs),
    )
    dist.init_process_group("fake", rank=0, world_size=WORLD_SIZE, store=dist.HashStore())
    yield Rank(0, 0, WORLD_SIZE, torch.device("cpu"), "fake")
    dist.destroy_process_group()


def peak_bytes(rank, wrapper, config, compute_dtype):
    """Of a second step, states included."""

    class Case(TrainingCase):
        parallel = Parallel(wrapper, compute_dtype=compute_dtype)

    case = Case.of(config, batch_size=2, optimizer="torch-fused")
    step, batch = assemble(case, rank), random_batch(case, rank)
    phases = step.phases("step", *batch).values()
    for phase in phases:
        phase()
    states = [list(state.values()) for state in step.optimizer.state.values()]
    with Storages([list(step.model.parameters()), list(step.model.buffers()), states, batch]) as storages:
        for phase in phases:
            phase()
    return storages.peak_bytes


FEW_TOKENS = ModelConfig("", d_model=128, d_ff=512, n_layers=6, n_heads=2, vocab_size=512, context_length=16)
"""The peak is where gradients are cast, or would be if weights were gathered first."""
MANY_LOGITS = ModelConfig("", d_model=64, d_ff=256, n_layers=3, n_heads=2, vocab_size=4096, context_length=64)
"""The peak is in the backward of the loss."""


@pytest.mark.parametrize("compute_dtype", ["same", "bf16"])
@pytest.mark.parametrize("config", [FEW_TOKENS, MANY_LOGITS], ids=["few tokens", "many logits"])
def test_the_peak_is_fsdp2s_and_what_ours_does_not_shard(one_of_four, config, compute_dtype):
    ours, theirs = (peak_bytes(one_of_four, wrapper, config, compute_dtype) for wrapper in ("fsdp", "fsdp2"))
    norms = (2 * config.n_layers + 1) * config.d_model  # vectors, which are whole on every rank: 16 bytes with states
    assert ours <= theirs + 16 * norms * (WORLD_SIZE - 1) // WORLD_SIZE
