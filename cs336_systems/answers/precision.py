"""Tables and numbers about rounding: the handout's sums of hundredths, and its toy model's dtypes under autocast."""

import pandas as pd
import torch

from cs336_systems.experiments.precision import accumulation
from cs336_systems.experiments.precision import autocast as autocast_dtypes
from cs336_systems.experiments.precision.options import SumOptions
from cs336_systems.experiments.precision.pretended_cuda import cuda_autocast, pretended_cuda
from cs336_systems.report.tables import Table

HANDOUT_SUMS = 4
"""Of the experiments of mixed_precision_accumulation.py the first ones are the handout's."""


def sums_table() -> Table:
    """The handout's four sums of a thousand hundredths."""
    frame = accumulation.run(SumOptions(terms=(1000,))).head(HANDOUT_SUMS)
    frame = frame.assign(
        result=[f"{value:.7g}" for value in frame["result"]],
        relative_error=[f"{value:+.1e}" for value in frame["relative_error"]],
    )
    names = {"relative_error": "relative error", "dtype": "dtype of terms"}
    return Table("1,000 times 0.01; exact: 10.", frame.drop(columns=["terms", "exact"]).rename(columns=names))


def accumulated(accumulator: str, dtype: str, terms: int) -> str:
    """A sum of hundredths in order, to seven digits."""
    term = torch.tensor(0.01, dtype=accumulation.DTYPES[dtype])
    return f"{accumulation.in_order(terms, term, accumulation.DTYPES[accumulator]).total:.7g}"


def toy_table() -> Table:
    """Dtypes of the handout's toy model under CUDA's autocast, with its layer norm and the loss."""
    lines: dict[str, dict[str, str]] = {}
    for name, dtype in (("fp16", torch.float16), ("bf16", torch.bfloat16)):
        seen: dict[str, list[str]] = {}
        with pretended_cuda(), cuda_autocast(dtype):
            model = autocast_dtypes.ToyModel(autocast_dtypes.N_IN, autocast_dtypes.N_CLASSES)
            watched = {"first layer": model.fc1, "relu": model.relu, "LayerNorm": model.ln}
            with autocast_dtypes.watched_outputs(watched, seen):
                logits = model(torch.randn(autocast_dtypes.BATCH, autocast_dtypes.N_IN))
            targets = torch.zeros(autocast_dtypes.BATCH, dtype=torch.int64)
            loss = torch.nn.functional.cross_entropy(logits, targets)
        for tensor, what in ((next(model.parameters()), "parameters"), (logits, "logits"), (loss, "loss")):
            autocast_dtypes.note(seen, what, tensor)
        seen["gradients"] = seen["parameters"]
        lines = {tensor: lines.get(tensor, {"tensor": tensor}) | {name: found[0]} for tensor, found in seen.items()}
    order = ["parameters", "first layer, output", "relu, output", "LayerNorm, output", "logits", "loss", "gradients"]
    return Table("The toy model under CUDA's autocast.", pd.DataFrame([lines[tensor] for tensor in order]))
