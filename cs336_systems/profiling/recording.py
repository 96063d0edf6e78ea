"""Profile one workload: plain and annotated steps interleaved, then recorded ones, and what the trace says in numbers.

    metrics = profile_workload(workload, recorded, "kineto", folder / "step.json.gz")
    trace = read_trace(folder / "step.json.gz")

The metrics hold the clock's samples three times, ``unprofiled_<phase>``, ``annotated_<phase>`` and
``recorded_<phase>``, so that what ranges and recording cost stands beside every conclusion drawn from them: as the
quotient of two medians, ``annotation_ratio`` and ``recording_ratio``.

The workload is also a program, which nsys starts as a child:

    python -m cs336_systems.profiling.recording '{"device": "cuda", "size": "small", ...}'

runs the annotated warm-up and steps and prints their times as one JSON object (milliseconds by phase).
"""

import gc
import json
import math
import sys
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median

import torch

from cs336_systems.case import TrainingCase
from cs336_systems.config import check_known
from cs336_systems.harness.clock import WHOLE, PhaseTimes, time_phases
from cs336_systems.harness.record import Metric
from cs336_systems.profiling.ranges import STEP, annotate, ranged_phases
from cs336_systems.profiling.traces import kineto, nsys
from cs336_systems.profiling.traces.kernels import MATMUL
from cs336_systems.profiling.traces.queries import class_times, limits, times
from cs336_systems.profiling.traces.tables import Trace, TraceError, require_kernels
from cs336_systems.training import assemble, random_batch

PROFILERS = {"nsys": nsys.EXPORT, "kineto": ".json.gz"}
"""The profilers, each with the ending of its files."""

HOWS = ("unprofiled", "annotated", "recorded")
"""Prefixes of the clock's metrics."""

ROUNDS = 2
"""Times that plain and annotated steps alternate; the order is reversed each time."""


@dataclass(frozen=True)
class Workload(TrainingCase):
    """One training case, one mode of its step, and how many steps of it to run."""

    mode: str = "step"
    warmup: int = 5
    steps: int = 10

    def command(self) -> list[str]:
        """The command line that runs the annotated steps in a process of their own."""
        return [sys.executable, "-m", "cs336_systems.profiling.recording", json.dumps(asdict(self))]


class RunnableWorkload:
    """A workload's model and batch on its device, ready to run any number of times."""

    def __init__(self, workload: Workload) -> None:
        self.workload = workload
        self.device = torch.device(workload.device)
        self.step = assemble(workload)
        self.batch = random_batch(workload)

    def run(self, warmup: int, steps: int, *, annotated: bool) -> PhaseTimes:
        """Time warm-up and steps, with ranges on everything or as they are.

        Raises:
            FloatingPointError: the loss is not finite.
        """
        phases = self.step.phases(self.workload.mode, *self.batch)
        if annotated:
            phases = ranged_phases(phases, warmup=warmup)
        with annotate(self.step.model) if annotated else nullcontext():
            taken = time_phases(phases, device=self.device, warmup=warmup, steps=steps)
        assert self.step.loss is not None
        if not math.isfinite(loss := self.step.loss.item()):
            raise FloatingPointError(f"loss is {loss}")
        return taken


def read_trace(path: Path) -> Trace:
    """A trace of either profiler, told by the name of its file.

    Raises:
        TraceError: it cannot be read, or it is a report of nsys that was not exported.
    """
    return nsys.read(path) if path.suffix in (nsys.EXPORT, nsys.REPORT) else kineto.read(path)


def profile_workload(workload: Workload, recorded: Workload, profiler: str, path: Path) -> list[Metric]:
    """Time ``workload`` plain and annotated, record ``recorded``, the same with other counts of steps, to ``path``.

    Raises:
        ValueError: no such profiler.
        TraceError: the recording failed, or it holds no kernels though it ran on a GPU.
    """
    check_known("profiler", profiler, PROFILERS)
    runnable = RunnableWorkload(workload)
    samples_ms: dict[str, dict[str, list[float]]] = {how: {} for how in HOWS}
    for i in range(ROUNDS):
        for how in HOWS[:2] if i % 2 == 0 else HOWS[1::-1]:
            found = runnable.run(workload.warmup, workload.steps, annotated=how == "annotated").samples_ms
            for phase, samples in found.items():
                samples_ms[how].setdefault(phase, []).extend(samples)

    if profiler == "nsys":
        del runnable  # the child needs the memory
        gc.collect()
        torch.cuda.empty_cache()
        printed = nsys.record(recorded.command(), path)
        lines = [line for line in printed.splitlines() if line.startswith("{")]
        if not lines:
            raise TraceError(f"the program under nsys printed no times: {printed[-200:]!r}")
        samples_ms["recorded"] = json.loads(lines[-1])
    else:
        with kineto.recording(path, runnable.device):
            samples_ms["recorded"] = runnable.run(recorded.warmup, recorded.steps, annotated=True).samples_ms
    trace = read_trace(path)
    if workload.device == "cuda":
        require_kernels(trace)

    metrics = [Metric(f"{how}_{phase}", "ms", samples) for how in HOWS for phase, samples in samples_ms[how].items()]
    unprofiled_ms, annotated_ms, recorded_ms = (median(samples_ms[how][WHOLE]) for how in HOWS)
    metrics.append(Metric("annotation_ratio", "annotated / unprofiled", [annotated_ms / unprofiled_ms]))
    metrics.append(Metric("recording_ratio", "recorded / unprofiled", [recorded_ms / unprofiled_ms]))
    return metrics + _trace_metrics(trace, unprofiled_ms)


def _trace_metrics(trace: Trace, unprofiled_ms: float) -> list[Metric]:
    """Per step: busy time, operations, share of matmuls, and the idle share of a GPU."""
    steps = trace.instances(STEP)
    whole, sums = times(trace, steps), class_times(trace, steps)
    metrics = [
        Metric("busy", "ms", [whole.unioned_ms], derived=True),
        Metric("operations", "count", [whole.operations], derived=True),
        Metric("matmul_share", "% of summed time", [100 * sums.get(MATMUL, 0.0) / whole.summed_ms], derived=True),
    ]
    if trace.has_gpu:
        idle = limits(trace, unprofiled_ms).idle_percent
        metrics.append(Metric("idle", "% of unprofiled step", [idle], derived=True))
    return metrics


def main() -> None:
    """Run the annotated steps of the workload that the first argument describes."""
    workload = Workload(**json.loads(sys.argv[1]))
    taken = RunnableWorkload(workload).run(workload.warmup, workload.steps, annotated=True)
    print(json.dumps(taken.samples_ms))


if __name__ == "__main__":
    main()
