"""The rows of ``benchmark_fsdp.py`` as a table: a line per implementation, memory by kind, waits, ratio to FSDP2."""

from cs336_systems.experiments.ranked import SENT, sent_mib
from cs336_systems.report.results import MAIN, Column, Line, ResultTable, Spread

_PEER = "torch"


def _over_fsdp2(line: Line) -> Spread | None:
    """The step's ratio to that of torch's implementation under the same settings."""
    return None if line.settings["fsdp"] == _PEER else line.repeats_over("step", line.peer(fsdp=_PEER, prefetch=""))


FULLY_SHARDED = ResultTable(
    settings=(
        *("gpu", "device", "size", "dtype", "attention", "checkpoint", "compile", "optimizer", "batch_size"),
        *("accumulate", "kernels", "keep", "context_length", "warmup", "steps", "world_size", "fsdp", "prefetch"),
    ),
    always=("size", "world_size", "fsdp", "prefetch"),
    labels={"batch_size": "batch per rank", "world_size": "ranks", "fsdp": "implementation"},
    columns=(
        Column("step ms", "step", spread=True, rank=MAIN),
        Column(
            "/ FSDP2",
            _over_fsdp2,
            ".3f",
            rank=0,
            note="the step over FSDP2's, round by round",
        ),
        Column("forward ms", "forward", rank=2),
        Column("backward ms", "backward", rank=2),
        Column("optimizer ms", "optimizer", rank=2),
        Column("tokens/s", "tokens_per_s", ",.0f"),
        Column("parameters GiB", "parameters", rank=3),
        Column("gradients GiB", "gradients", rank=3),
        Column("optimizer GiB", "optimizer_state", rank=3),
        Column(
            "states to predicted %",
            "state_error",
            "+.2f",
            rank=2,
            note="of the fullest rank",
        ),
        Column("peak GiB", "peak_memory"),
        Column("collectives", "collectives", ".0f", rank=3),
        Column("sent MiB", lambda line: sent_mib(line.metrics, line.settings["world_size"]), rank=2, note=SENT),
        Column("predicted MiB", "predicted_sent", rank=3),
        Column("gathers", "gathers", ".0f", rank=3),
        Column("late", "late_gathers", ".0f", rank=2, note="gathers waited for"),
        Column(
            "waited ms",
            "gather_wait",
            ".3f",
            spread=True,
            rank=2,
            note="for all gathers of a step",
        ),
        Column("hidden %", "hidden_share", ".1f", rank=2, optional=True, note="communication beside other kernels"),
        Column(
            "communication alone ms",
            "waited",
            ".2f",
            rank=2,
            optional=True,
            note="only communication runs",
        ),
    ),
)
"""One line per cell: step times, states and peak, communication and waits for weights."""
