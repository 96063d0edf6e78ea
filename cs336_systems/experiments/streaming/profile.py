"""A cell's steps under nsys, which runs them in a process of their own: ranges and streams by their lanes' names.

    python -m cs336_systems.experiments.streaming.profile '{"device": "cuda", "size": "llama3-8b", ...}'

runs the cell's warm-up and steps with ranges (``profiling/streamed.py``) and prints their times. The recording opens in
Nsight Systems; ``profile_model.py --read FILE.sqlite`` shows its ranges and kernels.
"""

import json
import sys
from dataclasses import asdict
from pathlib import Path

import torch

from cs336_systems.experiments.streaming.cells import StreamingCell
from cs336_systems.experiments.streaming.measure import planned, prepared
from cs336_systems.harness.clock import WHOLE, time_phases
from cs336_systems.harness.record import Metric
from cs336_systems.profiling.ranges import STEP, ranged_phases
from cs336_systems.profiling.recording import record_times
from cs336_systems.profiling.streamed import RangedStreams
from cs336_systems.profiling.traces import nsys
from cs336_systems.profiling.traces.queries import times
from cs336_systems.profiling.traces.tables import Trace, require_kernels
from cs336_systems.streaming.schedule import Kind


def profile(cell: StreamingCell, raw: Path) -> list[Metric]:
    """Record a cell's steps in a folder: their times, and what each kind of operation kept the device for, per step.

    Raises:
        TraceError: the recording failed, which it does where the caps hold no plan, or holds no kernels.
    """
    path = recording(cell, raw)
    found = record_times([sys.executable, "-m", f"{__package__}.profile", json.dumps(asdict(cell))], path)
    trace = nsys.read(path)
    require_kernels(trace)
    metrics = [Metric("recorded_step", "ms", found[WHOLE])]
    return metrics + [Metric(kind, "ms", [ms], derived=True) for kind, ms in kinds(trace).items()]


def recording(cell: StreamingCell, raw: Path) -> Path:
    """Where a cell's lies."""
    name = f"streaming-{cell.size}-c{cell.context_length}-{cell.device_gib:g}-{cell.host_gib:g}-{cell.order}"
    return raw / name / "step.sqlite"


def kinds(trace: Trace) -> dict[str, float]:
    """Milliseconds per step in which operations of each kind, with what they copy, kept the device."""
    inside = trace.during(trace.ranges, trace.instances(STEP))["name"]
    names = [name for name in inside.unique() if name.startswith(tuple(Kind))]
    return {name: times(trace, trace.instances(name, inside=STEP)).unioned_ms for name in names}


def main() -> None:
    """Run the cell that the first argument describes."""
    cell = StreamingCell(**json.loads(sys.argv[1]))
    device = torch.device(cell.device)
    choice, _, _ = planned(cell)
    step, ids, targets = prepared(cell, choice, RangedStreams(device) if device.type == "cuda" else None)
    step.rehearse(ids, targets)

    def whole() -> None:
        step(ids, targets)

    phases = ranged_phases({"schedule": whole}, warmup=cell.warmup)
    print(json.dumps(time_phases(phases, device=device, warmup=cell.warmup, steps=cell.steps).samples_ms))


if __name__ == "__main__":
    main()
