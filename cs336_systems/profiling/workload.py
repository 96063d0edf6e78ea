"""The step that is profiled, as a program: it can run in this process, or as a child that a profiler starts.

    python -m cs336_systems.profiling.workload '{"device": "cuda", "size": "small", ...}'

runs the annotated warm-up and steps and prints their times as one JSON object (milliseconds by phase), which is all
that nsys needs to be given. In-process, ``PreparedStep`` alternates plain and annotated steps of one model, so that the
cost of annotation is a ratio of neighbours.
"""

import json
import math
import sys
from contextlib import nullcontext
from dataclasses import asdict, dataclass

import torch

from cs336_systems.case import TrainingCase
from cs336_systems.harness.clock import PhaseTimes, time_phases
from cs336_systems.profiling.ranges import annotate, ranged_phases
from cs336_systems.training import assemble, random_batch


@dataclass(frozen=True)
class Workload(TrainingCase):
    """One training case, one mode of its step, and how many steps of it to run."""

    mode: str = "step"
    warmup: int = 5
    steps: int = 10

    def command(self) -> list[str]:
        """The command line that runs the annotated steps in a process of their own."""
        return [sys.executable, "-m", "cs336_systems.profiling.workload", json.dumps(asdict(self))]


class PreparedStep:
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
            times = time_phases(phases, device=self.device, warmup=warmup, steps=steps)
        assert self.step.loss is not None
        if not math.isfinite(loss := self.step.loss.item()):
            raise FloatingPointError(f"loss is {loss}")
        return times


def main() -> None:
    """Run the annotated steps of the workload that the first argument describes."""
    workload = Workload(**json.loads(sys.argv[1]))
    times = PreparedStep(workload).run(workload.warmup, workload.steps, annotated=True)
    print(json.dumps(times.samples_ms))


if __name__ == "__main__":
    main()
