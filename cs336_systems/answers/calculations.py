"""Predictions of communication compared with measurements, and the shapes that documents compute with.

The shapes are those of the scaling book (a 70B model's feed-forward, a batch of 4M tokens, H100s) and of the accounting
question (TPUs). A collective's time is predicted twice: from the link's datasheet, without latency and so as a lower
bound, and by a ring fitted to rows.
"""

import math

import pandas as pd
import torch

from cs336_systems.answers.committed import NotMeasured
from cs336_systems.config import resolve_size
from cs336_systems.costs.communication import Link, RingCost, cost, fit
from cs336_systems.costs.fsdp import model_units
from cs336_systems.costs.parallelism.forms import FeedForward, find_device
from cs336_systems.costs.parallelism.scaling import LLAMA3_70B, ModelAndBatch
from cs336_systems.distributed.buckets import partition
from cs336_systems.hardware import MIB
from cs336_systems.report.tables import Table, digits

LAYER = FeedForward(8192, 28_672, 3)
WORKLOAD = ModelAndBatch(LLAMA3_70B.n_parameters, 2**22, 8192)
H100, TPU = find_device("h100"), find_device("tpu-v5p")
DATASHEET = Link(0.0, 1 / H100.egress_bytes_per_s)
"""The link that joins H100s and H200s of one host; without latency, as no datasheet states one."""


def link_of(collectives: pd.DataFrame, world_size: int) -> Link:
    """Fit a link to all collectives that were timed between ``world_size`` GPUs.

    Raises:
        NotMeasured: there are too few times.
    """
    times = gpu_times(collectives)
    points = [(_cost(row), row["median"] / 1e3) for _, row in times[times["world_size"] == world_size].iterrows()]
    try:
        return fit(points)
    except ValueError as error:
        raise NotMeasured(f"no link of {world_size} ranks can be fitted: {error}") from error


def gpu_times(collectives: pd.DataFrame) -> pd.DataFrame:
    """Return the newest times of each cell of collectives between GPUs."""
    rows = collectives[(collectives["metric"] == "time") & (collectives["device"] == "cuda")]
    return rows.drop_duplicates(["world_size", "dtype", "collective", "size_mb"], keep="last")


def _cost(row: pd.Series) -> RingCost:
    return cost(row["collective"], int(row["world_size"]), int(row["total_bytes"]))


def best_bucket_mib(collectives: pd.DataFrame, size: str, world_size: int) -> float:
    """sqrt(s w o): all gradients' bytes, and with the fitted link bandwidth and latency of an all-reduce."""
    n_bytes, bandwidth, overhead = _bucket_terms(collectives, size, world_size)
    return (n_bytes * bandwidth * overhead) ** 0.5 / MIB


def bucket_overhead_ms(collectives: pd.DataFrame, size: str, world_size: int, n_buckets: int) -> float:
    """s / (n w) + n o: the last of n buckets, and a latency for each."""
    n_bytes, bandwidth, overhead = _bucket_terms(collectives, size, world_size)
    return 1e3 * (n_bytes / (n_buckets * bandwidth) + n_buckets * overhead)


def _bucket_terms(collectives: pd.DataFrame, size: str, world_size: int) -> tuple[int, float, float]:
    """Bytes of all gradients; bytes/s and seconds per call of an all-reduce over the fitted link."""
    link, call = link_of(collectives, world_size), cost("all_reduce", world_size, 1.0)
    return sum(gradient_sizes(size)), 1 / (call.wire_bytes * link.beta_s_per_byte), call.steps * link.alpha_s


def gradient_sizes(size: str) -> list[int]:
    """Bytes of every fp32 gradient of the reference model, in the order of forward."""
    return [4 * math.prod(shape) for unit in model_units(resolve_size(size)) for shape in unit]


def rung_messages(rung: str, sizes: list[int], bucket_mib: float | None) -> list[int]:
    """Bytes of each all-reduce that a rung of the ladder sends, in the order in which backward sends them."""
    backwards = sizes[::-1]
    if rung == "flat":
        return [sum(sizes)]
    if rung in ("naive", "overlapped"):
        return backwards
    gradients = (torch.empty(size, dtype=torch.uint8, device="meta") for size in backwards)
    return [sum(each.nbytes for each in bucket) for bucket in partition(gradients, (bucket_mib or 0) * MIB)]


def exposed_ms(rung: str, messages: list[int], world_size: int, link: Link, backward_ms: float) -> float:
    """Communication that a step waits for: all of it after backward, or what backward cannot hide.

    Overlapped rungs send while backward runs; the last message cannot begin before backward ends, and what does not
    fit beside backward remains.
    """
    each = [1e3 * link.seconds(cost("all_reduce", world_size, n_bytes)) for n_bytes in messages]
    if rung in ("naive", "flat"):
        return sum(each)
    return max(each[-1], sum(each) - backward_ms)


def collectives_predictions(collectives: pd.DataFrame) -> Table:
    """All-reduces in fp32 of every world and size: measured, by the datasheet, and by the ring fitted to two ranks."""
    link, times = link_of(collectives, 2), gpu_times(collectives)
    times = times[(times["collective"] == "all_reduce") & (times["dtype"] == "fp32")]
    lines = []
    for _, row in times.sort_values(["world_size", "size_mb"]).iterrows():
        lower, ring = (1e3 * each.seconds(_cost(row)) for each in (DATASHEET, link))
        lines.append(
            {"ranks": row["world_size"], "MB": f"{row['size_mb']:g}", "measured ms": digits(row["median"])}
            | {"datasheet ms": digits(lower), "its error %": _error(lower, row["median"])}
            | {"ring of 2 ms": digits(ring), "ring's error %": _error(ring, row["median"])}
        )
    return Table("All-reduce in fp32, medians; MB of 1e6 bytes.", pd.DataFrame(lines))


def _error(predicted: float, measured: float) -> str:
    return f"{round(100 * (predicted / measured - 1)) + 0:+d}"


def ddp_predictions(rows: pd.DataFrame, collectives: pd.DataFrame) -> Table:
    """Exposed communication of every rung in fp32: predicted from the gradients and a link, and measured."""
    lines = []
    ran = rows[(rows["status"] == "ok") & (rows["world_size"] > 1)]
    for _, cell in ran.groupby(["size", "world_size", "ddp", "bucket_size_mb"], sort=False, dropna=False):
        size, rung, world_size = str(cell["size"].iloc[0]), str(cell["ddp"].iloc[0]), int(cell["world_size"].iloc[0])
        bucket = pd.to_numeric(cell["bucket_size_mb"], errors="coerce").iloc[0]
        medians = cell.drop_duplicates("metric", keep="last").set_index("metric")["median"]
        messages = rung_messages(rung, gradient_sizes(size), None if pd.isna(bucket) else float(bucket))
        line = {"size": size, "ddp": rung, "ranks": world_size, "measured exposed ms": f"{medians['exposed']:.2f}"}
        links, backward_ms = (DATASHEET, link_of(collectives, world_size)), medians["local_backward"]
        lower, ring = (exposed_ms(rung, messages, world_size, link, backward_ms) for link in links)
        line |= {"datasheet ms": f"{lower:.2f}", "fitted ring ms": f"{ring:.2f}"}
        lines.append(line | {"ring less measured ms": f"{ring - medians['exposed']:+.2f}"})
    return Table("Exposed communication.", pd.DataFrame(lines))
