"""The tables of ``benchmark_fp8``: products, and blocks with their gradients."""

from cs336_systems.report.results import MAIN, Column, Line, ResultTable, Spread

_SETTINGS = ("gpu", "device", "size", "batch_size", "context_length", "dtype")


def _speedup(line: Line) -> Spread | None:
    """Time of what is not quantized over this one's, turn by turn."""
    stored = line.peer(how="stored")
    return None if stored is None else stored.repeats_over("step", line)


_SPEEDUP = Column("x", _speedup, ".3f", rank=MAIN, note="times as fast as stored, of several turns median and range")

PRODUCT_TABLE = ResultTable(
    settings=(*_SETTINGS, "product", "how", "warmup", "steps"),
    always=("product", "how"),
    columns=(
        Column("quantize x ms", "quantize_x", optional=True, note="absmax, and both quantized copies"),
        Column("forward ms", "forward"),
        Column("quantize dy ms", "quantize_dy", optional=True),
        Column("backward ms", "backward", note="both products"),
        Column("all ms", "step", spread=True, rank=MAIN),
        _SPEEDUP,
        Column("dW ms", "weight_gradient", optional=True, note="the weight's gradient alone"),
        Column("add dW ms", "accumulate", optional=True, note="the same, added to an earlier one, as training does"),
        Column("TFLOP/s", "tflops", ".0f", little=True),
        Column("alone TFLOP/s", "product_tflops", ".0f", optional=True, little=True, note="without quantization"),
    ),
)

BLOCK_TABLE = ResultTable(
    settings=(*_SETTINGS, "attention", "keep", "how", "warmup", "steps"),
    always=("how",),
    columns=(
        Column("forward ms", "forward"),
        Column("backward ms", "backward"),
        Column("both ms", "step", spread=True, rank=MAIN),
        _SPEEDUP,
        Column("TFLOP/s", "tflops", ".0f", little=True),
        Column("least cosine", "least_cosine", ".4f", note="of a gradient with that of fp32, on a short sequence"),
        Column("mean cosine", "mean_cosine", ".4f"),
        Column("kept GiB", "kept", ".2f", rank=2, optional=True, note="for backward"),
        Column("peak GiB", "peak", ".1f", rank=3, optional=True),
    ),
)
