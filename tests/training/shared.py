"""A tiny model, cases of ranks that share its step, parameters for optimizers, and how results are compared."""

from collections.abc import Iterable
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor, nn

from cs336_systems.case import TrainingCase
from cs336_systems.config import MODEL_SIZES
from cs336_systems.ranks import Parallel
from cs336_systems.training import TrainStep

CONFIG = replace(MODEL_SIZES["tiny"], name="tinier", d_model=32, d_ff=64, vocab_size=97, context_length=16)


@dataclass(frozen=True)
class Shared(TrainingCase):
    """A case of ranks that share its step."""

    how: Parallel = field(default_factory=Parallel)

    @property
    def parallel(self) -> Parallel:
        return self.how


def batch(seed: int = 0) -> tuple[Tensor, Tensor]:
    """Token ids and targets of two sequences."""
    generator = torch.Generator().manual_seed(seed)
    ids, targets = torch.randint(CONFIG.vocab_size, (2, 2, 16), generator=generator)
    return ids, targets


def passes(step: TrainStep, batch: tuple[Tensor, Tensor]) -> list[Tensor]:
    """The gradients before the optimizer."""
    for name, phase in step.phases("step", *batch).items():
        if name != "optimizer":
            phase()
    return [parameter.grad for parameter in step.model.parameters()]


def parameters(shapes: list[tuple[int, ...]], dtype: torch.dtype, device: str = "cpu") -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    return [nn.Parameter(torch.randn(shape, generator=generator).to(device, dtype)) for shape in shapes]


def set_gradients(params: list[nn.Parameter], step: int) -> None:
    """Gradients of very different sizes, the same in every dtype up to rounding."""
    generator = torch.Generator().manual_seed(1000 + step)
    for parameter in params:
        gradient = torch.randn(parameter.shape, generator=generator)
        parameter.grad = (gradient * 10.0 ** torch.randint(-3, 2, (), generator=generator)).to(parameter)


def run(optimizer: torch.optim.Optimizer, params: list[nn.Parameter], steps: range) -> None:
    for step in steps:
        set_gradients(params, step)
        optimizer.step()


def flat(params: list[nn.Parameter]) -> Tensor:
    return torch.cat([parameter.detach().double().flatten() for parameter in params])


def same_bits(left: Iterable[Tensor], right: Iterable[Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(left, right, strict=True))
