"""The table of ``benchmark_kernels``."""

from cs336_systems.report.results import MAIN, Column, Line, ResultTable


def _worst(line: Line, prefix: str) -> str | None:
    """The largest of the metrics whose names begin so."""
    found = [row["median"] for name, row in line.metrics.items() if name.startswith(prefix)]
    return f"{max(found):.1e}" if found else None


KERNEL_TABLE = ResultTable(
    settings=("gpu", "device", "kernel", "dtype", "rows", "width", "how", "n_samples"),
    always=("kernel", "how"),
    labels={"n_samples": "samples"},
    columns=(
        Column("forward ms", "forward", spread=True, rank=MAIN),
        Column("forward GB/s", "forward_bandwidth", ",.0f", rank=2, note="bytes that must move, over the time"),
        Column("forward % of copy", "forward_copy_share", ".0f", note="GB/s over those of a large copy, same process"),
        Column(
            *("forward extra GiB", "forward_extra", ".2f"),
            rank=2,
            note="at the peak of a call, beyond its inputs and what it leaves",
            optional=True,
        ),
        Column("backward ms", "backward", spread=True, rank=MAIN),
        Column("backward GB/s", "backward_bandwidth", ",.0f", rank=2),
        Column("backward % of copy", "backward_copy_share", ".0f"),
        Column("error", lambda line: _worst(line, "error_out"), note="relative Frobenius norm against fp64"),
        Column("gradients' error", lambda line: _worst(line, "error_grad"), note="of the worst gradient"),
    ),
)
