"""What the tests of the sharded optimizer train: every kind of parameter that is laid out differently, in small."""

import torch
from torch import Tensor, nn

from cs336_systems.training import AdamW

FORMS = (None, "reduce-scatter", "shard")

TINY_BUCKETS = {"bucket_size_mb": 600 / 1024**2}
"""A few tensors of the model in each bucket, so that a step has several buckets."""

OPTIMIZERS = {
    "sgd": (torch.optim.SGD, {"lr": 1e-3, "momentum": 0.9}),
    "adamw": (torch.optim.AdamW, {"lr": 0.01, "weight_decay": 0.1}),
    "ours": (AdamW, {"lr": 0.01, "weight_decay": 0.1}),
}


class Toy(nn.Module):
    """Tied, frozen, unused, bf16, transposed and scalar parameters around two linear maps: (batch, 6) -> same."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(6, 40)
        self.second = nn.Linear(40, 6)
        self.tied = nn.Linear(6, 40, bias=False)
        self.tied.weight = self.first.weight
        self.frozen = nn.Parameter(torch.randn(7), requires_grad=False)
        self.unused = nn.Parameter(torch.randn(9))
        self.narrow = nn.Parameter(torch.randn(6, dtype=torch.bfloat16))
        self.transposed = nn.Parameter(torch.randn(5, 6).t())
        self.scalar = nn.Parameter(torch.tensor(0.7))

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(self.first(x)) * self.scalar + self.tied(x)
        y = self.second(hidden) + self.narrow.float() * self.frozen.sum()
        return y @ self.transposed @ self.transposed.t()


def batch(step: int, rank: int) -> Tensor:
    """(4, 6), another on every step and rank."""
    return torch.randn(4, 6, device="cpu", generator=torch.Generator().manual_seed(100 * step + rank))


def loss_of(model: nn.Module, step: int, rank: int) -> Tensor:
    """A mean over the rank's own batch."""
    return model(batch(step, rank).to(next(model.parameters()))).square().mean()


def backward_on_all(model: nn.Module, step: int, world_size: int) -> None:
    """Leave the mean of all ranks' gradients, added in the order of ranks, without any communication."""
    model.zero_grad()
    total: list[Tensor | None] = [None] * len(list(model.parameters()))
    for rank in range(world_size):
        loss_of(model, step, rank).backward()
        for i, parameter in enumerate(model.parameters()):
            if parameter.grad is not None:
                total[i] = parameter.grad if total[i] is None else total[i] + parameter.grad
                parameter.grad = None
    for parameter, gradient in zip(model.parameters(), total, strict=True):
        parameter.grad = None if gradient is None else gradient / world_size


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range, world_size: int, rank: int) -> None:
    """Steps as users of each form write them: their own gradients for reduce-scatter, averaged ones otherwise."""
    for step in steps:
        if getattr(optimizer, "reduce_gradients", None) and world_size > 1:
            loss_of(model, step, rank).backward()
        else:
            backward_on_all(model, step, world_size)
        optimizer.step()
        optimizer.zero_grad()


def flat(model: nn.Module) -> Tensor:
    """All parameters, in fp64, which holds every other dtype exactly."""
    return torch.cat([parameter.detach().double().reshape(-1) for parameter in model.parameters()])
