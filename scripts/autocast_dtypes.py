"""Which dtype does each tensor of a model have under autocast? Read by hooks from the running model.

    uv run scripts/autocast_dtypes.py                     # this machine's device
    uv run scripts/autocast_dtypes.py --device cpu        # differs: there norms and softmax stay in low precision

Two models: the handout's toy (fc1, relu, LayerNorm, fc2) and this suite's Transformer, tiny. For each, one forward and
backward pass as training runs them: forward and loss under autocast, backward outside.
"""

import json
from dataclasses import dataclass
from typing import Literal, Self

from cs336_systems.experiments.driver import check_device
from cs336_systems.report.command_line import Format, complain, exit_with, parse

NAME = "autocast_dtypes"


@dataclass(frozen=True)
class Options:
    """Which dtype has each tensor of a model under autocast?"""

    device: Literal["cpu", "cuda"] = "cuda"
    """Where to run."""
    format: Format = "auto"
    """Format of the tables: auto draws them on a terminal and writes Markdown elsewhere."""

    @classmethod
    def default(cls, device: str) -> Self:
        return cls(device="cuda" if device == "cuda" else "cpu")


def main(arguments: list[str] | None = None) -> int:
    """Parse, run both models under both dtypes and print; returns the exit code."""
    options = parse(Options, arguments, __doc__)
    try:
        check_device(options.device)
    except ValueError as error:
        return complain(NAME, error)
    import pandas as pd
    import torch

    from cs336_systems.experiments.precision import PRECISION_OF, toy_dtypes, transformer_dtypes
    from cs336_systems.report.show import show
    from cs336_systems.report.tables import Table

    device, results = torch.device(options.device), {}
    for name, run in (("The toy model", toy_dtypes), ("The Transformer", transformer_dtypes)):
        results[name] = found = {dtype: run(device, dtype) for dtype in PRECISION_OF}
        lines = [{"tensor": tensor} | {dtype: found[dtype][tensor] for dtype in found} for tensor in found["fp16"]]
        caption = f"{name} under autocast on {device.type}, torch {torch.__version__}."
        show(Table(caption, pd.DataFrame(lines)), options.format)
    print(json.dumps({"script": NAME, "device": options.device, "dtypes": results}))
    return 0


if __name__ == "__main__":
    exit_with(NAME, main)
