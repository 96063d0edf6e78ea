"""The rows of ``benchmark_ddp.py`` as a table: a line per rung, the step beside the one without communication."""

from cs336_systems.report.results import MAIN, Column, Line, ResultTable


def _scaling(line: Line) -> float | None:
    """Tokens/s over as many times those of the same rung on one rank, in percent."""
    ratio = line.over("tokens_per_s", line.peer(world_size=1))
    return None if ratio is None else 100 * ratio / line.settings["world_size"]


DATA_PARALLEL = ResultTable(
    settings=(
        *("gpu", "device", "size", "dtype", "attention", "compile", "checkpoint", "optimizer", "batch_size"),
        *("context_length", "warmup", "steps", "communication_dtype", "ddp", "bucket_size_mb", "world_size"),
    ),
    always=("size", "ddp", "bucket_size_mb", "world_size"),
    labels={
        "batch_size": "batch per rank",
        "communication_dtype": "sent as",
        "world_size": "ranks",
        "bucket_size_mb": "bucket MiB",
    },
    columns=(
        Column("step ms", "step", spread=True, rank=MAIN),
        Column("forward ms", "forward", rank=3),
        Column("backward ms", "backward", spread=True, rank=3),
        Column("optimizer ms", "optimizer", rank=3),
        Column("without communication ms", "local_step", spread=True, rank=2),
        Column(
            "exposed ms",
            "exposed",
            ".2f",
            note="the step less the step without communication, the median over rounds that measure both",
        ),
        Column("exposed %", "exposed_share", ".1f", rank=2),
        Column("hidden %", "hidden_share", ".1f", rank=2, note="communication beside other kernels, by a trace"),
        Column("slowed ms", "slowed", ".2f", rank=2, note="what communication beside them adds to other kernels"),
        Column("tokens/s", "tokens_per_s", ",.0f"),
        Column("collectives", "collectives", ".0f", rank=3),
        Column("sent MiB", "sent", rank=3),
        Column("peak GiB", "peak_memory"),
        Column(
            "scaling %",
            _scaling,
            ".1f",
            optional=True,
            note="tokens/s of as many times those of the same rung on one rank",
        ),
    ),
)
"""One line per cell: times, exposed communication, throughput, and scaling from one rank."""
