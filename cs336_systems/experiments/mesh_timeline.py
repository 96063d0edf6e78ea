"""When do the stages of a pipeline wait? Start and end of each operation, compared with a simulation of the schedule.

A stage is idle while none of its operations runs, until the last stage is done. The prediction simulates the schedule
with the measured mean time of each operation of each part, so it shows the idle time due to the order alone.
"""

import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from cs336_systems.costs.parallelism.pipeline import TimedOperation, Timeline, timed
from cs336_systems.costs.parallelism.schedules import Operation
from cs336_systems.experiments.ranked import PreparedStep
from cs336_systems.harness.clock import synchronize
from cs336_systems.harness.record import Metric
from cs336_systems.report.figures import save
from cs336_systems.report.pipelines import pipelines_figure


def measure_timeline(prepared: PreparedStep, path: Path | None) -> list[Metric]:
    """Return each stage's idle share of a step's forward and backward, measured and predicted; a collective.

    Args:
        path: path of the recording; a figure of both timelines, predicted above measured, is saved beside it.
    """
    measured = record_timeline(prepared)
    predicted = timed(measured.plan, mean_times(measured))
    rank, how = prepared.rank, prepared.cell.parallel
    if path is not None and rank.rank == 0:
        _draw(
            str(prepared.cell), predicted, measured, path.with_name(path.name.removesuffix(".json.gz") + "-stages.png")
        )
    unit = f"% of passes, by stage of {how.pipeline}"
    return [
        Metric("idle", unit, [100 * share for share in measured.idle_fractions]),
        Metric("predicted_idle", unit, [100 * share for share in predicted.idle_fractions]),
    ]


def record_timeline(prepared: PreparedStep) -> Timeline:
    """Run a step and record when each operation of each stage of this rank's pipeline ran, in ms; a collective."""
    step: Any = prepared.step
    pipeline, device = step.pipeline, prepared.rank.device
    notes: list[tuple[Operation, Any, Any]] = []

    def now() -> Any:
        if device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    run = pipeline.run

    def observed(work: Callable[..., Any], *given: Any) -> None:
        def noted(operation: Operation, x: Any) -> Any:
            start = now()  # after the message has arrived
            result = work(operation, x)
            notes.append((operation, start, now()))
            return result

        run(noted, *given)

    pipeline.run = observed
    try:
        passes, token = prepared.phases()["passes"], torch.zeros((), device=device)
        for _ in range(2):  # the first time, ranks may be far apart
            dist.all_reduce(token)
        begin = now()
        passes()
        prepared.step.optimizer.zero_grad(set_to_none=True)
    finally:
        del pipeline.run
    synchronize(device)
    if device.type == "cuda":
        own = [(op, begin.elapsed_time(start), begin.elapsed_time(end)) for op, start, end in notes]
    else:
        own = [(op, 1e3 * (start - begin), 1e3 * (end - begin)) for op, start, end in notes]
    of_stages: list[Any] = [None] * pipeline.plan.stages
    dist.all_gather_object(of_stages, own, group=step.stages)
    operations = tuple(tuple(TimedOperation(stage, *each) for each in found) for stage, found in enumerate(of_stages))
    return Timeline(pipeline.plan, operations)


def mean_times(measured: Timeline) -> list[Mapping[str, float]]:
    """Return mean times of F, B and W of each part of the model; if only BW was timed, half of it counts as W."""
    plan = measured.plan
    samples: list[dict[str, list[float]]] = [{} for _ in plan.places]
    for stage, operations in enumerate(measured.operations):
        for each in operations:
            part = samples[plan.part(stage, each.operation.chunk)]
            part.setdefault(each.operation.kind, []).append(each.end - each.start)
    means = [{kind: sum(times) / len(times) for kind, times in part.items()} for part in samples]
    return [{"F": part["F"], **{kind: part.get(kind, part.get("BW", 0.0) / 2) for kind in "BW"}} for part in means]


def _draw(title: str, predicted: Timeline, measured: Timeline, path: Path) -> None:
    """Draw both timelines, and print the path to stderr."""
    shown = {
        f"{name}: {100 * each.bubble_fraction:.1f} % idle in {each.span:,.0f} ms": each
        for name, each in (("predicted from mean times", predicted), ("measured", measured))
    }
    save(pipelines_figure(shown, "ms"), path)
    print(f"{title}: {path}", file=sys.stderr)
