"""One step of two ranks is one step of one process on both batches, whatever wraps the model or holds the state."""

from dataclasses import dataclass, field, replace

import pytest
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from cs336_systems.case import Parallel, TrainingCase, Unsupported
from cs336_systems.config import MODEL_SIZES
from cs336_systems.distributed.fsdp import FSDP
from cs336_systems.distributed.process_group import Rank
from cs336_systems.distributed.spawn import spawn
from cs336_systems.training import assemble, random_batch

CONFIG = replace(MODEL_SIZES["tiny"], name="tinier", d_model=32, d_ff=64, vocab_size=97, context_length=16)
WAYS = (
    *(Parallel(wrapper) for wrapper in ("naive", "flat", "overlapped", "bucketed", "torch-ddp", "fsdp", "fsdp2")),
    *(Parallel("bucketed", optimizer_state=state, bucket_size_mb=0.01) for state in ("owned", "torch-zero")),
    Parallel("none", optimizer_state="scattered", bucket_size_mb=0.01),
)


@dataclass(frozen=True)
class Shared(TrainingCase):
    how: Parallel = field(default_factory=Parallel)

    @property
    def parallel(self) -> Parallel:
        return self.how


def whole(model: torch.nn.Module) -> list[Tensor]:
    """Every parameter whole, in the model's order."""
    if isinstance(model, FSDP):
        return list(model.gather_full_params().values())
    return [p.full_tensor() if isinstance(p, DTensor) else p.detach() for p in model.parameters()]


def train_all(rank: Rank) -> list[list[Tensor]]:
    trained = []
    for how in WAYS:
        case = Shared.of(CONFIG, how=how, batch_size=2, seed=3)
        step = assemble(case, rank)
        for _ in range(2):
            step(*random_batch(case, rank))
        trained.append(whole(step.model))
    return trained


@pytest.fixture(scope="module")
def trained() -> list[list[Tensor]]:
    return spawn(train_all, 2, timeout_s=120)[0]


@pytest.fixture(scope="module")
def alone() -> list[Tensor]:
    """The same two steps of one process that sees both ranks' batches."""
    case = TrainingCase.of(CONFIG, batch_size=2, seed=3)
    ranks = [Rank(number, number, 2, torch.device("cpu"), "gloo") for number in range(2)]
    batches = [random_batch(case, rank) for rank in ranks]
    assert not torch.equal(batches[0][0], batches[1][0]), "ranks have batches of their own"
    step = assemble(case)
    for _ in range(2):
        step(*(torch.cat(parts) for parts in zip(*batches, strict=True)))
    return whole(step.model)


@pytest.mark.parametrize("number", range(len(WAYS)), ids=[f"{w.wrapper}-{w.optimizer_state}" for w in WAYS])
def test_two_ranks_train_what_one_process_trains(trained, alone, number):
    start = [p.detach() for p in assemble(TrainingCase.of(CONFIG, seed=3)).model.parameters()]
    moved = sum((a - s).square().sum() for a, s in zip(alone, start, strict=True)).sqrt()
    apart = sum((a - t).square().sum() for a, t in zip(alone, trained[number], strict=True)).sqrt()
    assert apart < 1e-3 * moved, f"{apart:.2e} apart after moving {moved:.2e}"


def test_what_cannot_be_wrapped_is_refused():
    with pytest.raises(ValueError, match="unknown wrapper 'magic': known are none, naive"):
        assemble(Shared.of(CONFIG, how=Parallel("magic")))
    with pytest.raises(ValueError, match="'bucketed' needs a process group, this process has joined none"):
        assemble(Shared.of(CONFIG, how=Parallel("bucketed")))
    with pytest.raises(ValueError, match="unknown place of optimizer state 'attic'"):
        assemble(Shared.of(CONFIG, how=Parallel(optimizer_state="attic")))


def test_what_a_device_lacks_is_unsupported():
    with pytest.raises(Unsupported, match="attention flash: flash is compiled for CUDA devices"):
        assemble(TrainingCase.of(CONFIG, attention="flash"))
