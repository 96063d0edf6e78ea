"""What does low precision do? What a sum of equal terms comes to, and which dtype each tensor has under autocast.

**Sums**: in order, with Kahan's compensation (Kahan 1965), and pairwise; each line says where its error comes from.

**Autocast**: dtypes are noted by hooks in the running model, the handout's toy or this suite's Transformer: forward and
loss under autocast, backward outside. Autocast chooses by device type, and the CPU's choices differ from CUDA's (layer
norm and softmax stay narrow). ``pretended_cuda`` and ``cuda_autocast`` show CUDA's rules on any machine: fake tensors
carry device and dtype but no data. Backward does not run on them, as autograd's engine asks for the device; a gradient
has the dtype of its parameter, which autograd enforces.
"""

import functools
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pandas as pd
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import TorchFunctionMode

from cs336_systems.config import MODEL_SIZES, PRECISIONS
from cs336_systems.model import TransformerLM
from cs336_systems.training import cross_entropy
from cs336_systems.training.precision import autocast

DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}


@dataclass(frozen=True)
class Sum:
    """What was added up, and how far it grew."""

    total: float
    last_growth: int
    """Number of the last term that changed the total; the number of terms where they have no order."""


def in_order(n: int, term: Tensor, accumulator: torch.dtype, *, compensated: bool = False) -> Sum:
    """total = total + term, n times; torch promotes a narrower term to the accumulator's dtype.

    Compensated (Kahan 1965), what an addition rounds off is carried into the next.
    """
    total, lost, last = (torch.tensor(0.0, dtype=accumulator), torch.tensor(0.0, dtype=accumulator), 0)
    for i in range(1, n + 1):
        added = term - lost
        grown = total + added
        if compensated:
            lost = (grown - total) - added
        last = i if grown != total else last
        total = grown
    return Sum(total.item(), last)


def cast_up(n: int, term: Tensor, accumulator: torch.dtype) -> Sum:
    """Add in order, with the cast to the accumulator written out."""
    return in_order(n, term.to(accumulator), accumulator)


kahan = functools.partial(in_order, compensated=True)


def pairwise(n: int, term: Tensor, accumulator: torch.dtype) -> Sum:
    """Halves added to halves: partial sums stay of one size, and each term is rounded log2(n) times."""
    sums = term.to(accumulator).expand(n)
    while len(sums) > 1:
        if len(sums) % 2:
            sums = torch.cat([sums, sums.new_zeros(1)])
        sums = sums[0::2] + sums[1::2]
    return Sum(sums.item(), n)


Method = Callable[[int, Tensor, torch.dtype], Sum]

EXPERIMENTS: tuple[tuple[str, Method, str, str], ...] = (
    ("in order", in_order, "fp32", "fp32"),
    ("in order", in_order, "fp16", "fp16"),
    ("in order", in_order, "fp32", "fp16"),
    ("in order, terms cast up", cast_up, "fp32", "fp16"),
    ("in order", in_order, "bf16", "bf16"),
    ("in order", in_order, "fp32", "bf16"),
    ("Kahan", kahan, "fp16", "fp16"),
    ("Kahan", kahan, "bf16", "bf16"),
    ("pairwise", pairwise, "fp16", "fp16"),
    ("pairwise", pairwise, "bf16", "bf16"),
)
"""(how, method, accumulator, terms); the first four are the handout's."""


def spacing(value: float, dtype: torch.dtype) -> float:
    """Distance from ``value`` to the next larger number of ``dtype``, for normal numbers."""
    return 2.0 ** math.floor(math.log2(abs(value))) * torch.finfo(dtype).eps


def explanation(how: str, found: Sum, n: int, exact: float, term: Tensor, accumulator: str) -> str:
    """One sentence on where the error comes from, from the numbers themselves."""
    step = spacing(found.total, DTYPES[accumulator])
    error = abs(found.total / exact - 1)
    of_terms = abs(n * term.double().item() / exact - 1)
    if how.startswith("in order") and found.last_growth < n:
        return (
            f"stuck since term {found.last_growth:,}: numbers lie {step:g} apart at {found.total:g}, and what is less "
            f"than half of that is rounded away"
        )
    if error * exact <= step / 2:
        return f"the nearest that {accumulator} has: its numbers lie {step:g} apart there"
    if of_terms > 0 and abs(error / of_terms - 1) < 0.1:
        return f"the terms were rounded before they were added; {accumulator} adds almost no error of its own"
    if how == "Kahan":
        return f"the remainder that is carried along is rounded to {accumulator}, too"
    return f"each addition rounds, to numbers {step:g} apart in the end, and the roundings do not cancel"


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
        exact = n * value
        for how, method, accumulator, narrow in EXPERIMENTS:
            term = torch.tensor(value, dtype=DTYPES[narrow])
            found = method(n, term, DTYPES[accumulator])
            lines.append(
                {
                    "terms": n,
                    "how": how,
                    "accumulator": accumulator,
                    "dtype": narrow,
                    "exact": exact,
                    "result": found.total,
                    "relative_error": found.total / exact - 1,
                    "explanation": explanation(how, found, n, exact, term, accumulator),
                }
            )
    return pd.DataFrame(lines)


PRECISION_OF = {"fp16": PRECISIONS["autocast-fp16"], "bf16": PRECISIONS["autocast-bf16"]}
BATCH, N_IN, N_CLASSES = 8, 16, 5
CONFIG = MODEL_SIZES["tiny"]

BLOCK_PARTS = ("ln1", "attn.q_proj", "attn", "ln2", "ffn.w1", "ffn", "")
"""Modules of a Transformer block whose outputs are shown; the empty name is the block itself."""

WATCHED_CALLS = {
    "matmul": "products in attention",
    "softmax": "softmax",
    "silu": "silu",
    "logsumexp": "log-sum-exp of the logits",
}
"""Functions inside the Transformer whose results are not a module's output, and their names in the table."""


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


class WatchedCalls(TorchFunctionMode):
    """Notes the dtypes that the watched functions return."""

    def __init__(self, seen: dict[str, list[str]]) -> None:
        super().__init__()
        self.seen = seen

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        made = func(*args, **(kwargs or {}))
        name = getattr(func, "__name__", "").strip("_")
        if name in WATCHED_CALLS and isinstance(made, Tensor):
            note(self.seen, f"{WATCHED_CALLS[name]}, output", made)
        return made


def note(seen: dict[str, list[str]], name: str, tensor: Tensor) -> None:
    """Add a tensor's dtype to those seen under ``name``."""
    dtype = str(tensor.dtype).removeprefix("torch.")
    if dtype not in seen.setdefault(name, []):
        seen[name].append(dtype)


@contextmanager
def watched_outputs(modules: dict[str, nn.Module], seen: dict[str, list[str]]) -> Iterator[None]:
    """Note the dtype of every output of the named modules."""

    def hook_for(name: str) -> Callable[[nn.Module, Any, Tensor], None]:
        return lambda module, inputs, output: note(seen, f"{name}, output", output)

    handles = [module.register_forward_hook(hook_for(name)) for name, module in modules.items()]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def train_once(
    model: nn.Module,
    inputs: Tensor,
    targets: Tensor,
    loss_function: Callable[[Tensor, Tensor], Tensor],
    modules: dict[str, nn.Module],
    dtype: str,
) -> dict[str, str]:
    """One forward and backward pass; name of each tensor -> its dtype."""
    seen: dict[str, list[str]] = {}
    with autocast(PRECISION_OF[dtype], inputs.device), watched_outputs(modules, seen), WatchedCalls(seen):
        for parameter in model.parameters():
            note(seen, "parameters", parameter)
        logits = model(inputs)
        loss = loss_function(logits, targets)
    note(seen, "logits", logits)
    note(seen, "loss", loss)
    loss.backward()
    for parameter in model.parameters():
        assert parameter.grad is not None
        note(seen, "gradients", parameter.grad)
    return {name: ", ".join(dtypes) for name, dtypes in seen.items()}


def toy_dtypes(device: torch.device, dtype: str) -> dict[str, str]:
    """The handout's toy model."""
    model = ToyModel(N_IN, N_CLASSES).to(device)
    x = torch.randn(BATCH, N_IN, device=device)
    targets = torch.randint(N_CLASSES, (BATCH,), device=device)
    modules = {"first layer": model.fc1, "relu": model.relu, "LayerNorm": model.ln}
    return train_once(model, x, targets, F.cross_entropy, modules, dtype)


def transformer_dtypes(device: torch.device, dtype: str) -> dict[str, str]:
    """The suite's Transformer: outputs of its modules, in the first block where every block has one."""
    model = TransformerLM(CONFIG, device=device)
    ids, targets = (torch.randint(CONFIG.vocab_size, (2, 32), device=device) for _ in range(2))
    block = model.layers[0]
    modules: dict[str, nn.Module] = {"token embedding": model.token_embeddings}
    modules |= {f"block{'.' * bool(part)}{part}": block.get_submodule(part) for part in BLOCK_PARTS}
    return train_once(model, ids, targets, cross_entropy, modules | {"ln_final": model.ln_final}, dtype)


@contextmanager
def pretended_cuda() -> Iterator[None]:
    """Everything made inside is a fake tensor on ``cuda``."""
    with FakeTensorMode(), torch.device("cuda"):
        yield


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
