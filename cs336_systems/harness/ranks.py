"""Measurements on several ranks: steps as slow as the slowest rank, and cells on their own ranks.

Every such cell has fresh ranks, so one that fails, hangs or is killed on any rank costs only itself. ``launched.py``
measures cells on the ranks of a launcher.
"""

import os
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist

from cs336_systems.distributed.process_group import Rank, check_same_across_ranks, is_peer_lost, launched_world_size
from cs336_systems.distributed.spawn import RankFailed, spawn
from cs336_systems.harness.clock import WHOLE, PhaseTimes, time_phases
from cs336_systems.harness.process import Measure, Report, classify, measure_here
from cs336_systems.processes import Died


def reports() -> bool:
    """Whether this process is the one that prints and writes: rank 0, or the only process there is so far."""
    return os.environ.get("RANK", "0") == "0"


def resolve_world_sizes(requested: tuple[int, ...] | None, default: tuple[int, ...]) -> tuple[int, ...]:
    """The launcher's world size; without a launcher those of ``--world-size``, else the default ones.

    Raises:
        ValueError: the launcher has started another number of ranks than requested, or described none properly; or the
            request is empty or not positive.
    """
    present = launched_world_size()
    if requested is not None:
        if not requested:
            raise ValueError("--world-size needs at least one value, got none")
        if min(requested) < 1:
            raise ValueError(f"--world-size must be positive, got {min(requested)}")
        if present is not None and requested != (present,):
            raise ValueError(f"--world-size {' '.join(map(str, requested))}: the launcher has started {present} ranks")
    if present is not None:
        return (present,)
    return default if requested is None else requested


def one_rank_per_gpu(device: str) -> tuple[int]:
    """The usual world on this machine: all its GPUs, or two ranks on a CPU."""
    return (torch.cuda.device_count() if device == "cuda" else 2,)


def time_phases_of_ranks(
    phases: Mapping[str, Callable[[], None]], rank: Rank, *, warmup: int, steps: int
) -> PhaseTimes:
    """``time_phases`` on all ranks at once; each sample is that of the slowest rank, the same on every rank.

    Steps begin together, after a barrier that no sample holds. The maximum is taken for each phase and for the whole
    step by itself, so phases whose slowest ranks differ add up to more than the step.

    Raises:
        ValueError: the ranks disagree about phases, ``warmup`` or ``steps``, or as ``time_phases``.
    """
    check_same_across_ranks([*phases, WHOLE, warmup, steps], "phases and step counts")
    if warmup < 0 or steps < 1:
        raise ValueError(f"warmup must be at least 0 and steps at least 1, got {warmup} and {steps}")
    laps_ms: list[list[float]] = []
    for _ in range(warmup + steps):
        dist.barrier()
        step = time_phases(phases, device=rank.device, warmup=0, steps=1).samples_ms
        laps_ms.append([samples[0] for samples in step.values()])
    slowest = torch.tensor(laps_ms, dtype=torch.float64, device=rank.device)
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    columns = slowest.T.tolist()
    samples = {name: column[warmup:] for name, column in zip(step, columns, strict=True)}
    return PhaseTimes(samples, columns[-1][:warmup])


class CellFailed(Exception):
    """Carries the report of a cell from the rank on which it failed."""

    def __init__(self, report: Report) -> None:
        super().__init__(report)
        self.report = report

    def __str__(self) -> str:
        return str(self.report["message"])


def measure_as_rank(rank: Rank, measure: Measure, cell: Any, *, tell: Callable[[Report], None]) -> Report:
    """Measure one cell on this rank, having told where it runs.

    Raises:
        CellFailed: it went wrong; the exception holds the report, with ``peer_lost`` if that is all there is to say.
    """
    report, cause = measure_here(cell, rank.device, lambda: measure(cell, rank), tell)
    if cause is None:
        return report
    report["peer_lost"] = is_peer_lost(cause)
    if "traceback" in report:
        report["traceback"] = f"rank {rank.rank}: {report['traceback']}"
    raise CellFailed(report) from cause


def measure_on_ranks(measure: Measure, cell: Any, timeout_s: float, report: Report) -> None:
    """Measure a cell on ranks of its own; ``report`` takes rank 0's, or that of the first that failed.

    Where it ran is known from rank 0, or from the first rank that told: another may die before rank 0 has.

    Raises:
        TimeoutError: it took longer than ``timeout_s``.
    """

    def hear(number: int, known: Report) -> None:
        if number == 0 or "state_before" not in report:
            report.update(known)

    arguments = (measure_as_rank, cell.world_size, measure, cell)
    try:
        results = spawn(*arguments, device=cell.device, timeout_s=timeout_s, limit_s=timeout_s, hear=hear)
        report.update(results[0])
    except ValueError as error:
        report.update(status="unsupported", message=str(error))
    except RankFailed as failure:
        if isinstance(failure.__cause__, Died):
            report.update(status="oom" if failure.__cause__.out_of_memory else "error", message=str(failure))
        elif isinstance(failure.error, CellFailed):
            report.update(failure.error.report)
        else:
            report.update(classify(failure.error or failure))
