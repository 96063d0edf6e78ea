"""Small modules that hold what distributed wrappers stumble over. All outputs are smooth, so that parity is sharp."""

import torch
from torch import nn


class Toy(nn.Module):
    """(batch, 6) -> (batch, 3), with a tied weight, a frozen one, a scalar, biases and buffers of three dtypes."""

    def __init__(self, dtype=torch.float32):
        super().__init__()
        self.enter = nn.Linear(6, 8, dtype=dtype)
        self.first = nn.Linear(8, 8, bias=False, dtype=dtype)
        self.second = nn.Linear(8, 8, bias=False, dtype=dtype)
        self.second.weight = self.first.weight
        self.frozen = nn.Linear(8, 8, dtype=dtype).requires_grad_(False)
        self.scale = nn.Parameter(torch.rand((), dtype=dtype))
        self.leave = nn.Linear(8, 3, dtype=dtype)
        self.register_buffer("offset", torch.rand(8, dtype=dtype))
        self.register_buffer("count", torch.randint(10, ()))
        self.register_buffer("mask", torch.rand(3) > 0.5)

    def forward(self, x):
        x = torch.tanh(self.enter(x)) + self.offset
        x = torch.tanh(self.second(torch.tanh(self.frozen(torch.tanh(self.first(x))))))
        return self.leave(x * self.scale)


class Branches(nn.Module):
    """A trunk and three branches of which each forward uses those it is told to: (batch, 4) -> (batch, 4)."""

    def __init__(self):
        super().__init__()
        self.trunk = nn.Linear(4, 4)
        self.branches = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))

    def forward(self, x, used):
        x = self.trunk(x)
        return x + sum((self.branches[i](x) for i in used), torch.zeros(()))


class Mixed(nn.Module):
    """Layers of three dtypes in turn: (batch, 4) fp32 -> (batch, 4) fp64."""

    def __init__(self):
        super().__init__()
        dtypes = (torch.float32, torch.bfloat16, torch.float32, torch.float64, torch.bfloat16, torch.float64)
        self.layers = nn.ModuleList(nn.Linear(4, 4, dtype=dtype) for dtype in dtypes)

    def forward(self, x):
        for layer in self.layers:
            x = torch.tanh(layer(x.to(layer.weight.dtype)))
        return x
