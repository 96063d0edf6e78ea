"""How ``mesh.py`` measures a cell: one step on every rank, its messages and their prediction, and memory.

After the measurement every parameter must be bit-identical on the ranks that hold a copy of it, or the cell fails.
"""

from cs336_systems.distributed.process_group import Rank
from cs336_systems.experiments.mesh import MeshCell
from cs336_systems.experiments.mesh_attention import measure_attention
from cs336_systems.experiments.mesh_messages import predicted_messages
from cs336_systems.experiments.mesh_timeline import measure_timeline
from cs336_systems.experiments.ranked import EFFORT, Effort, PreparedStep, check_replicas, peak_metrics, time_metrics
from cs336_systems.hardware import MIB
from cs336_systems.harness.clock import in_gib, time_phases_of_ranks
from cs336_systems.harness.memory import PeakMeter, check_fit
from cs336_systems.harness.record import Metric
from cs336_systems.profiling.communication import communication_metrics, record_phases_of_ranks
from cs336_systems.profiling.traces import kineto


def measure(cell: MeshCell, rank: Rank, *, effort: Effort = EFFORT) -> list[Metric]:
    """Measure one cell; only rank 0 is recorded.

    Raises:
        PredictedOutOfMemory: the steps of this machine's ranks would not fit together.
        RuntimeError: ranks that hold the same weights ended with different ones.
        FloatingPointError: the loss is not finite.
    """
    if cell.attention_alone:
        return measure_attention(cell, rank, effort)
    predicted = None if cell.parallel.by_torch else check_fit(cell, rank=rank)
    meter, prepared = PeakMeter(rank.device), PreparedStep(cell, rank)
    phases = prepared.phases()
    times = time_phases_of_ranks(phases, rank, steps=cell.steps, warmup=effort.warmup(cell))
    metrics = time_metrics(times, cell) + peak_metrics(meter, rank)
    metrics += in_gib(predicted_peak=predicted) if predicted is not None else []
    if cell.repeat == 0 and not cell.parallel.by_torch and cell.cuda_graph == "off":  # else collectives are unseen
        sent = prepared.sent()
        metrics += [
            Metric("collectives", "per step", [len(sent)]),
            Metric("messages", "MiB per step", [sum(each.n_bytes for each in sent if each.kind != "recv") / MIB]),
        ]
        if (predicted_bytes := predicted_messages(cell, rank.rank)) is not None:
            metrics.append(Metric("predicted_messages", "MiB per step", [predicted_bytes / MIB]))
    check_replicas(prepared)
    if cell.pipeline > 1 and not cell.parallel.by_torch:
        return metrics + measure_timeline(prepared, effort.recording(cell))
    if (path := effort.recording(cell)) is not None:
        record_phases_of_ranks(phases, prepared.step.model, rank, path if rank.rank == 0 else None)
        if rank.rank == 0:
            metrics += communication_metrics(kineto.read(path))
    return metrics
