"""What does low precision do? What a sum of equal terms comes to, and which dtype each tensor has under autocast.

**Autocast**: dtypes are noted by hooks in the handout's running toy model, forward and loss under autocast. Autocast
chooses by device type, and the CPU's choices differ from CUDA's (layer norm and softmax stay narrow). CUDA's rules are
shown on any machine: fake tensors carry device and dtype but no data. Backward does not run on them, as autograd's
engine asks for the device; a gradient has the dtype of its parameter, which autograd enforces.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import pandas as pd
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from cs336_systems.training.precision import DTYPES

EXPERIMENTS = (
    ("in order", "fp32", "fp32"),
    ("in order", "fp16", "fp16"),
    ("in order", "fp32", "fp16"),
    ("in order, terms cast up", "fp32", "fp16"),
    ("in order", "bf16", "bf16"),
)
"""(how, accumulator, terms); the first four are the handout's."""


def in_order(n: int, term: Tensor, accumulator: torch.dtype) -> float:
    """total = total + term, n times; torch promotes a narrower term to the accumulator's dtype."""
    total = torch.tensor(0.0, dtype=accumulator)
    for _ in range(n):
        total = total + term
    return total.item()


def sums(terms: Sequence[int] = (1000, 10_000), value: float = 0.01) -> pd.DataFrame:
    """One line per number of terms and experiment, for terms of one ``value``.

    Raises:
        ValueError: no terms, or a term or sum that fp16 cannot hold.
    """
    if not terms or min(terms) < 1:
        raise ValueError(f"--terms must be positive, got {list(terms)}")
    fp16 = torch.finfo(torch.float16)
    if not fp16.tiny <= value <= max(terms) * value <= fp16.max / 2:
        raise ValueError(
            f"--term and its sum must lie between fp16's {fp16.tiny:.2g} and {fp16.max / 2:g}, got {value:g}"
        )
    lines = []
    for n in terms:
        for how, accumulator, narrow in EXPERIMENTS:
            term = torch.tensor(value, dtype=DTYPES[narrow])
            found = in_order(n, term.to(DTYPES[accumulator]) if "cast up" in how else term, DTYPES[accumulator])
            lines.append((n, how, accumulator, narrow, n * value, found, found / (n * value) - 1))
    columns = ["terms", "how", "accumulator", "dtype", "exact", "result", "relative_error"]
    return pd.DataFrame(lines, columns=columns)


class ToyModel(nn.Module):
    """The handout's model: (batch, n_in) -> logits (batch, n_classes)."""

    def __init__(self, n_in: int, n_classes: int) -> None:
        super().__init__()
        self.fc1 = nn.Linear(n_in, 10, bias=False)
        self.ln = nn.LayerNorm(10)
        self.fc2 = nn.Linear(10, n_classes, bias=False)
        self.relu = nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(self.ln(self.relu(self.fc1(x))))


def toy_dtypes(device: str, dtype: torch.dtype) -> dict[str, str]:
    """The dtype of each of the toy model's tensors under autocast, by name; ``pretended-cuda`` needs no GPU."""
    if device == "pretended-cuda":
        with FakeTensorMode(), torch.device("cuda"), cuda_autocast(dtype):
            return _noted_dtypes()
    with torch.device(device), torch.autocast(device, dtype):
        return _noted_dtypes()


def _noted_dtypes() -> dict[str, str]:
    model = ToyModel(n_in=16, n_classes=5)
    seen = {"parameters": {parameter.dtype for parameter in model.parameters()}}
    for name, module in (("first layer", model.fc1), ("relu", model.relu), ("LayerNorm", model.ln)):
        found = seen.setdefault(f"{name}, output", set())
        module.register_forward_hook(lambda module, inputs, output, found=found: found.add(output.dtype))
    logits = model(torch.randn(8, 16))
    seen["logits"] = {logits.dtype}
    seen["loss"] = {F.cross_entropy(logits, torch.zeros(8, dtype=torch.int64)).dtype}
    seen["gradients"] = seen["parameters"]
    return {name: ", ".join(sorted(str(dtype).removeprefix("torch.") for dtype in seen[name])) for name in seen}


@contextmanager
def cuda_autocast(dtype: torch.dtype) -> Iterator[None]:
    """CUDA's autocast, also where ``torch.autocast`` finds no CUDA device and disables itself."""
    before = (torch.is_autocast_enabled("cuda"), torch.get_autocast_dtype("cuda"), torch.is_autocast_cache_enabled())
    torch.set_autocast_enabled("cuda", True)
    torch.set_autocast_dtype("cuda", dtype)
    torch.set_autocast_cache_enabled(False)
    try:
        yield
    finally:
        torch.set_autocast_enabled("cuda", before[0])
        torch.set_autocast_dtype("cuda", before[1])
        torch.set_autocast_cache_enabled(before[2])
