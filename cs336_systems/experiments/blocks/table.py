"""The table of ``benchmark_blocks``."""

from cs336_systems.report.results import MAIN, Column, Line, ResultTable, Spread


def _over_compiled(line: Line) -> Spread | None:
    """Forward and backward over the compiled block's, turn by turn."""
    return line.repeats_over("step", line.peer(how="compiled"))


BLOCK_TABLE = ResultTable(
    settings=(
        *("gpu", "device", "size", "batch_size", "context_length", "dtype", "attention", "layers", "how"),
        *("warmup", "steps"),
    ),
    always=("size", "how"),
    labels={"how": "block"},
    columns=(
        Column("forward ms", "forward"),
        Column("backward ms", "backward"),
        Column("both ms", "step", spread=True, rank=MAIN, note="of all layers"),
        Column("/ compiled", _over_compiled, ".3f", rank=MAIN, note="of several turns median and range"),
        Column("TFLOP/s", "model_tflops", rank=2, note="model FLOPs, causal"),
        Column("kept GiB", "kept", ".2f", note="for backward, per block, its input included", optional=True),
        Column("predicted GiB", "kept_predicted", ".2f", rank=2, little=True),
        Column("peak GiB", "peak", ".1f", rank=2, note="weights and their gradients included", optional=True),
        Column("error", "error_out", ".1e", rank=3, note="relative Frobenius norm against fp64, on a short sequence"),
        Column("dx's error", "error_dx", ".1e", rank=3),
        Column("weights' error", "error_dweight", ".1e", rank=3, note="of the worst weight's gradient"),
    ),
)
