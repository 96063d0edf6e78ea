"""The rows of ``benchmark_fsdp.py`` as a table: a line per implementation, memory by kind, waits, ratio to FSDP2."""

from cs336_systems.case import RECIPE
from cs336_systems.experiments.ranked import SCALING, SENT, scaling, sent_mib
from cs336_systems.report.results import MAIN, Column, Line, ResultTable, Spread

_PEER = "torch"


_WORK = ("gpu", "device", "size", "dtype", "batch_size", "accumulate", "context_length", "world_size")
"""What the fastest ways to do the same work agree in."""
_OURS_ALONE = ("fsdp", "prefetch", "update", "gather_by", "do_bench", "losses")


def _over_fsdp2(line: Line) -> Spread | None:
    """The step's ratio to that of torch's implementation: under the same settings, or else of its fastest."""
    if line.settings["fsdp"] == _PEER:
        return None
    twins = _twins(line, _PEER)
    return line.repeats_over("step", twins[0] if twins else _fastest(line, _PEER))


def _over_ours(line: Line) -> Spread | None:
    """How many times as long torch's implementation takes as the fastest of ours, where none has its settings."""
    if line.settings["fsdp"] != _PEER or _twins(line, "ours"):
        return None
    return line.repeats_over("step", _fastest(line, "ours"))


def _twins(line: Line, implementation: str) -> list[Line]:
    """Of an implementation, what differs in nothing else, but for what only ours can be asked."""
    shared = {name: value for name, value in line.settings.items() if name not in _OURS_ALONE}
    return [
        other for other in line.lines.values() if other.settings.items() >= (shared | {"fsdp": implementation}).items()
    ]


def _fastest(line: Line, implementation: str) -> Line | None:
    """Of an implementation at the same work."""
    work = {name: value for name, value in line.settings.items() if name in _WORK}
    found = [
        other
        for other in line.lines.values()
        if other.settings.items() >= (work | {"fsdp": implementation}).items() and "step" in other.metrics
    ]
    return min(found, key=lambda other: float(other.metrics["step"]["median"]), default=None)


FULLY_SHARDED = ResultTable(
    settings=(
        *("gpu", "device", "size", "dtype", "attention", "checkpoint", "compile", "optimizer", "batch_size"),
        *("accumulate", "kernels", "keep", *RECIPE, "context_length", "warmup", "steps", "world_size", "fsdp"),
        *("prefetch", "update", "gather_by", "do_bench", "master", "losses"),
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
            note="median step over FSDP2's, by repeat",
        ),
        Column(
            "/ ours",
            _over_ours,
            ".3f",
            optional=True,
            note="FSDP2's median step over that of the fastest of ours, by repeat",
        ),
        Column("do_bench ms", "do_bench", rank=2, optional=True, note="the step by triton.testing.do_bench"),
        Column(
            "loss off %",
            "loss_error",
            ".3f",
            optional=True,
            note="from the reference's in fp32, on one batch from the same weights, the most of any step",
        ),
        Column("forward ms", "forward", rank=2),
        Column("backward ms", "backward", rank=2),
        Column("optimizer ms", "optimizer", rank=2),
        Column("tokens/s", "tokens_per_s", ",.0f"),
        Column("scaling %", scaling, ".1f", optional=True, note=SCALING),
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
        Column("requested GiB", "peak_requested", ".3f", rank=2, optional=True, note="before the allocator rounds up"),
        Column("predicted GiB", "predicted_peak", rank=2, optional=True, note="the peak"),
        Column("MHz", "sm_mhz", ".0f", rank=2, optional=True, note="clock of rank 0's GPU in the timed steps"),
        Column("W", "power_w", ".0f", rank=2, optional=True, note="its power"),
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
            note="on rank 0",
        ),
        Column("exposed ms", "exposed", ".2f", rank=2, optional=True, note="the same on the rank where it is least"),
    ),
)
"""One line per cell: step times, states and peak, communication and waits for weights."""
