"""Dtypes under autocast, read by hooks from the running model: the handout's toy, and this suite's Transformer."""

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pandas as pd
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from cs336_systems.config import MODEL_SIZES, PRECISIONS
from cs336_systems.experiments.driver import check_device
from cs336_systems.experiments.precision.options import AutocastOptions
from cs336_systems.model import TransformerLM
from cs336_systems.report.command_line import complain
from cs336_systems.report.show import show
from cs336_systems.report.tables import Table
from cs336_systems.training import cross_entropy
from cs336_systems.training.precision import autocast

NAME = "autocast_dtypes"
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
"""Functions inside the Transformer whose results are no module's output."""


class ToyModel(nn.Module):
    """The handout's: (batch, n_in) -> logits (batch, n_classes)."""

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


def dtype_table(name: str, found: dict[str, dict[str, str]], device: torch.device) -> Table:
    """One line per tensor, one column per autocast dtype."""
    tensors = next(iter(found.values()))
    frame = pd.DataFrame([{"tensor": tensor} | {dtype: found[dtype][tensor] for dtype in found} for tensor in tensors])
    return Table(f"{name} under autocast on {device.type}, torch {torch.__version__}.", frame)


def answer(options: AutocastOptions) -> int:
    """Run both models under both dtypes and print; returns the exit code."""
    try:
        check_device(options.device)
    except ValueError as error:
        return complain(NAME, error)
    device = torch.device(options.device)
    results = {}
    for name, run in (("The toy model", toy_dtypes), ("The Transformer", transformer_dtypes)):
        results[name] = {dtype: run(device, dtype) for dtype in PRECISION_OF}
        show(dtype_table(name, results[name], device), options.format)
    print(json.dumps({"script": NAME, "device": options.device, "dtypes": results}))
    return 0
