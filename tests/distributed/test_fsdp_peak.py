"""One rank of four has no more alive at once under our FSDP than under FSDP2, to the byte.

On a GPU the allocator's rounding hides differences of this size. Here nothing arrives (torch's fake process group), and
collectives are asked for as on GPUs, so that no communication of a CPU takes memory.
"""

import gc
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
import torch.distributed as dist
import torch.testing._internal.distributed.fake_pg  # registers the backend

from cs336_systems.case import TrainingCase
from cs336_systems.config import ModelConfig
from cs336_systems.distributed.process_group import Rank
from cs336_systems.ranks import Parallel
from cs336_systems.training import assemble, random_batch
from tests.live_bytes import LiveBytes

WORLD_SIZE = 4
FEW_TOKENS = ModelConfig("", d_model=128, d_ff=512, n_layers=2, n_heads=2, vocab_size=512, context_length=16)
"""The peak is where gradients are cast, or would be if weights were gathered first."""
MANY_LOGITS = ModelConfig("", d_model=64, d_ff=256, n_layers=3, n_heads=2, vocab_size=4096, context_length=64)
"""The peak is in the backward of the loss."""


class RealBytes(LiveBytes):
    """Storages on ``meta`` take no memory."""

    def _add(self, storage: torch.UntypedStorage) -> None:
        if storage.device.type != "meta":
            super()._add(storage)


@contextmanager
def one_rank() -> Iterator[LiveBytes]:
    """Inside, this process is rank 0, with which the others agree in everything; Python's collector, a help, is off."""
    live, resize = RealBytes(), torch.UntypedStorage.resize_

    def watched_resize(storage: torch.UntypedStorage, size: int) -> None:
        resize(storage, size)
        live.resize(storage)

    gc.collect()
    gc.disable()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.UntypedStorage, "resize_", watched_resize)
        dist.init_process_group("fake", store=dist.HashStore(), rank=0, world_size=WORLD_SIZE)
        try:
            yield live
        finally:
            dist.destroy_process_group()
            gc.enable()


def peak_bytes(wrapper, config, compute_dtype):
    """The peak of a second step, states included."""

    class Case(TrainingCase):
        parallel = Parallel(wrapper, compute_dtype=compute_dtype)

    case = Case.of(config, batch_size=2, optimizer="torch-fused")
    rank = Rank(0, 0, WORLD_SIZE, torch.device("cpu"), "fake")
    with one_rank() as live:
        step, batch = assemble(case, rank), random_batch(case, rank)
        phases = step.phases("step", *batch).values()
        for phase in phases:
            phase()
        states = list(step.optimizer.state.values())
        live.add([list(step.model.parameters()), list(step.model.buffers()), states, batch])
        with live:
            for phase in phases:
                phase()
        return live.peak


@pytest.mark.slow
@pytest.mark.parametrize(
    ("config", "compute_dtype"), [(FEW_TOKENS, "bf16"), (MANY_LOGITS, "same")], ids=["few tokens", "many logits"]
)
def test_the_peak_is_fsdp2s_and_what_ours_does_not_shard(config, compute_dtype):
    ours, theirs = (peak_bytes(wrapper, config, compute_dtype) for wrapper in ("fsdp", "fsdp2"))
    norms = (2 * config.n_layers + 1) * config.d_model  # vectors, which are whole on every rank: 16 bytes with states
    assert ours <= theirs + 16 * norms * (WORLD_SIZE - 1) // WORLD_SIZE
