"""One step of two ranks is one step of one process on both batches, whatever wraps the model or holds the state.

So are steps of two micro-batches on each rank, which average their gradients over the ranks once.
"""

from dataclasses import dataclass, field, replace

import pytest
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from cs336_systems.case import Parallel, TrainingCase, Unsupported
from cs336_systems.config import MODEL_SIZES
from cs336_systems.distributed.fsdp import FSDP
from cs336_systems.distributed.process_group import Rank, joined
from cs336_systems.distributed.spawn import spawn
from cs336_systems.harness.traffic import Traffic
from cs336_systems.training import assemble, random_batch

CONFIG = replace(MODEL_SIZES["tiny"], name="tinier", d_model=32, d_ff=64, vocab_size=97, context_length=16)
WAYS = (
    *(Parallel(wrapper) for wrapper in ("naive", "flat", "overlapped", "bucketed", "torch-ddp", "fsdp", "fsdp2")),
    *(Parallel("bucketed", optimizer_state=state, bucket_size_mb=0.01) for state in ("owned", "torch-zero")),
    Parallel("none", optimizer_state="scattered", bucket_size_mb=0.01),
    Parallel("fsdp2", on_host=True),
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


Trained = list[tuple[list[Tensor], list[int]]]
"""Of each way the weights after two steps, and the bytes of each reduction of a third."""


def train_all(rank: Rank) -> dict[int, Trained]:
    """By the number of micro-batches."""
    case = Shared.of(CONFIG, seed=3)
    return {n: [train(replace(case, how=how, batch_size=2 // n, accumulate=n), rank) for how in WAYS] for n in (1, 2)}


def train(case: Shared, rank: Rank) -> tuple[list[Tensor], list[int]]:
    step = assemble(case, rank)
    for _ in range(2):
        step(*random_batch(case, rank))
    weights = [weight.clone() for weight in whole(step.model)]
    *passes, update = step.phases("step", *random_batch(case, rank)).values()
    with Traffic() as traffic:
        for phase in passes:
            phase()
    update()  # unwatched: the mode would meet tensors on which torch's FSDP2 tries operators out
    return weights, [event.n_bytes for event in traffic.sent if "reduce" in event.kind]


@pytest.fixture(scope="module")
def trained() -> dict[int, Trained]:
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


each_way = pytest.mark.parametrize("number", range(len(WAYS)), ids=[f"{w.wrapper}-{w.optimizer_state}" for w in WAYS])


@each_way
@pytest.mark.parametrize("accumulate", [1, 2])
def test_two_ranks_train_what_one_process_trains(trained, alone, number, accumulate):
    start = [p.detach() for p in assemble(TrainingCase.of(CONFIG, seed=3)).model.parameters()]
    moved = sum((a - s).square().sum() for a, s in zip(alone, start, strict=True)).sqrt()
    apart = sum((a - t).square().sum() for a, t in zip(alone, trained[accumulate][number][0], strict=True)).sqrt()
    assert apart < 1e-3 * moved, f"{apart:.2e} apart after moving {moved:.2e}"


@each_way
def test_gradients_of_two_micro_batches_are_sent_once(trained, number):
    assert trained[2][number][1] == trained[1][number][1] != []


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


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["full", "keep-attention"])
@pytest.mark.parametrize("wrapper", ["fsdp", "fsdp2"])
def test_equal_blocks_are_compiled_once(wrapper, policy, monkeypatch):
    """One graph for all four blocks and one for the loss, beside gathers that run outside of them; the same weights."""
    really_compile = torch.compile
    monkeypatch.setattr(torch, "compile", lambda *args, **kwargs: really_compile(*args, **kwargs, backend="aot_eager"))
    config = replace(CONFIG, name="of four", n_layers=4)
    case = Shared.of(config, how=Parallel(wrapper), compile="on", checkpoint=policy, attention="sdpa-flash")
    torch.compiler.reset()
    torch._dynamo.utils.counters.clear()
    with joined() as rank:
        compiled, _ = train(case, rank)
        assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 2
        eager, _ = train(replace(case, compile="off", checkpoint="none"), rank)
    torch.testing.assert_close(compiled, eager)
    torch.compiler.reset()
