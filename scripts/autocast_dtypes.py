"""Which dtype does each tensor of a model have under autocast? Read by hooks from the running model.

    uv run scripts/autocast_dtypes.py                     # this machine's device
    uv run scripts/autocast_dtypes.py --device cpu        # differs: there norms and softmax stay in low precision

Two models: the handout's toy (fc1, relu, LayerNorm, fc2) and this suite's Transformer, tiny. For each, one forward and
backward pass as training runs them: forward and loss under autocast, backward outside.
"""

from cs336_systems.experiments.precision.options import AutocastOptions
from cs336_systems.report.command_line import exit_with, parse


def main(arguments: list[str] | None = None) -> int:
    """Parse, then run both models."""
    options = parse(AutocastOptions, arguments, __doc__)
    from cs336_systems.experiments.precision.autocast import answer  # torch and pandas come with it

    return answer(options)


if __name__ == "__main__":
    exit_with("autocast_dtypes", main)
