"""The rows of ``benchmark_ddp.py`` as a table: a line per rung, the step against the one without communication."""

from cs336_systems.case import RECIPE
from cs336_systems.experiments.ranked import SCALING, SENT, scaling, sent_mib
from cs336_systems.report.results import MAIN, Column, Line, ResultTable, Spread

_PEER, _PEER_BUCKET_MIB = "torch", "25"


def _over_torch(line: Line) -> Spread | None:
    """The step's ratio to that of torch's DDP; of rungs without buckets, to its usual ones."""
    if line.settings["ddp"] == _PEER:
        return None
    bucket = line.settings["bucket_size_mb"] or _PEER_BUCKET_MIB
    return line.repeats_over("step", line.peer(ddp=_PEER, bucket_size_mb=bucket))


DATA_PARALLEL = ResultTable(
    settings=(
        *("gpu", "device", "size", "dtype", "attention", "compile", "checkpoint", "optimizer", "batch_size"),
        *("accumulate", "kernels", "keep", *RECIPE, "context_length", "warmup", "steps", "communication_dtype"),
        *("max_ctas", "ddp", "bucket_size_mb", "world_size"),
    ),
    always=("size", "ddp", "bucket_size_mb", "world_size"),
    labels={
        "batch_size": "batch per rank",
        "communication_dtype": "sent as",
        "max_ctas": "thread blocks",
        "world_size": "ranks",
        "bucket_size_mb": "bucket MiB",
    },
    columns=(
        Column("step ms", "step", spread=True, rank=MAIN),
        Column(
            "/ torch",
            _over_torch,
            ".3f",
            rank=0,
            optional=True,
            note="median step over torch's, by repeat",
        ),
        Column("forward ms", "forward", rank=3),
        Column("backward ms", "backward", spread=True, rank=3),
        Column("optimizer ms", "optimizer", rank=3),
        Column("without communication ms", "local_step", spread=True, rank=2),
        Column(
            "exposed ms",
            "exposed",
            ".2f",
            spread=True,
            note="mean of the step before and after steps without communication, less theirs",
        ),
        Column("exposed %", "exposed_share", ".1f", rank=2),
        Column("hidden %", "hidden_share", ".1f", rank=2, optional=True, note="communication beside other kernels"),
        Column(
            "waited ms",
            "waited",
            ".2f",
            rank=2,
            optional=True,
            note="only communication runs",
        ),
        Column(
            "slowed ms",
            "slowed",
            ".2f",
            rank=2,
            optional=True,
            note="what communication adds to kernels beside it",
        ),
        Column("tokens/s", "tokens_per_s", ",.0f"),
        Column("collectives", "collectives", ".0f", rank=3),
        Column("sent MiB", lambda line: sent_mib(line.metrics, line.settings["world_size"]), rank=3, note=SENT),
        Column("peak GiB", "peak_memory"),
        Column("scaling %", lambda line: scaling(line, max_ctas=0), ".1f", optional=True, note=SCALING),
    ),
)
"""One line per cell: times, exposed communication, throughput, and scaling from one rank."""
