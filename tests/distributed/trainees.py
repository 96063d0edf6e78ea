"""Small models with their optimizers under every wrapper, each of which holds what checkpoints stumble over."""

import torch
from torch import nn

from cs336_systems.distributed import FSDP, FlatDDP, ShardedOptimizer
from cs336_systems.distributed.sharded_optimizer import REDUCE_SCATTER
from cs336_systems.training import AdamW

SHARDED = {"owned": None, "scattered": REDUCE_SCATTER}
OPTIMIZERS = {
    "fsdp": lambda parameters: torch.optim.AdamW(parameters, lr=0.05, betas=(0.8, 0.9)),
    "fsdp, ours": lambda parameters: AdamW(parameters, lr=0.05),
    "ddp, fused": lambda parameters: torch.optim.AdamW(parameters, lr=0.05, fused=True),
}
KINDS = (*OPTIMIZERS, *SHARDED)


class Paths(nn.Module):
    """Two linear layers with one weight."""

    def __init__(self, n_in):
        super().__init__()
        self.by_path = nn.ModuleDict({name: nn.Linear(n_in, 1) for name in ("in/out", "in/in")})
        self.by_path["in/in"].weight = self.by_path["in/out"].weight

    def forward(self, x):
        return self.by_path["in/out"](x) * self.by_path["in/in"](x)


class Trainee:
    """A model whose shards begin within rows, its optimizer, and steps on each rank's own data.

    Its first weight is columns first in memory, and a buffer counts steps.
    Under FSDP it also has a weight of one row, of which most ranks have nothing, tied to another, in modules whose
    names look like paths.
    """

    bucket_size_mb = 2e-4

    def __init__(self, kind, seed=0, widths=(5, 7, 3), paths=True):
        torch.manual_seed(seed)
        n_in, hidden, n_out = widths
        layers = nn.Sequential(nn.Linear(n_in, hidden), nn.Tanh(), nn.Linear(hidden, n_out, bias=False))
        layers[0].weight.data = layers[0].weight.data.t().contiguous().t()
        layers.register_buffer("steps", torch.zeros(2, dtype=torch.int64))
        if kind.startswith("fsdp") and paths:
            layers.append(Paths(n_out))
        self.layers = self.model = layers
        self.averaged = kind.startswith(("fsdp", "ddp")) or kind == "owned"
        if self.averaged:
            self.model = (FSDP if kind.startswith("fsdp") else FlatDDP)(layers)
        if kind in SHARDED:
            options = {"lr": 0.05, "bucket_size_mb": self.bucket_size_mb, "reduce_gradients": SHARDED[kind]}
            self.optimizer = ShardedOptimizer(self.model.parameters(), torch.optim.AdamW, **options)
        else:
            self.optimizer = OPTIMIZERS[kind](self.model.parameters())

    def steps(self, rank, numbers):
        for number in numbers:
            generator = torch.Generator().manual_seed(10 * number + rank)
            self.model(torch.randn(4, self.layers[0].in_features, generator=generator)).square().mean().backward()
            if self.averaged:
                self.model.finish_gradient_synchronization()
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.layers.steps += 1

    def values(self):
        """Whole parameters, by name; a collective."""
        if isinstance(self.model, FSDP):
            return {name: whole.clone() for name, whole in self.model.gather_full_params().items()}
        return {name: parameter.detach().clone() for name, parameter in self.layers.named_parameters()}
