"""Quoted numbers that no machine measured: rings, forms of parallelism, the 4D accounting, pipelines, failures.

Each term takes its question from the words of the quote and its answer from ``costs/``; none of them holds a formula
of its own. Words name a layer (``handout``: the scaling book's shape of a 70B model's feed-forward; ``xxl``), a device
preset of ``costs/parallelism/forms.py``, and numbers.
"""

import math
from collections.abc import Callable
from pathlib import Path

from cs336_systems.answers.quotes import Term
from cs336_systems.costs.parallelism import ring as rings
from cs336_systems.costs.parallelism.accounting import XXL, smaller_batches, thresholds, torus_network
from cs336_systems.costs.parallelism.failures import Job, mean_time_between_failures
from cs336_systems.costs.parallelism.forms import (
    FeedForward,
    Form,
    Pass,
    find_device,
    largest_world,
    least_tokens_per_device,
)
from cs336_systems.costs.parallelism.mesh import Network, best_whole_split, largest_mesh, optimal_split
from cs336_systems.costs.parallelism.pipeline import SCHEDULES, Timeline, simulate
from cs336_systems.costs.parallelism.scaling import LLAMA3_70B, Workload, communication_limit, fsdp_step
from cs336_systems.experiments.parallelism.figures import draw_goodput, draw_scaling
from cs336_systems.experiments.parallelism.pipeline_figure import draw_pipelines

LAYER = FeedForward(8192, 28_672, 3)
BATCH_TOKENS = 2**22
SAVE_S, RESTART_S = 60.0, 300.0
NODES = (8, 64, 512, 2048)
WORKLOAD = Workload(LLAMA3_70B.n_parameters, BATCH_TOKENS, 8192)


def terms() -> dict[str, Term]:
    """Numbers that prose quotes, by the first word of the quote."""
    return {
        "ring-ratio": Term(ring_ratio, ".1f"),
        "ring-ms": Term(ring_ms),
        "largest-world": Term(form_limit, ".1f"),
        "tokens-to-hide": Term(lambda device: least_tokens_per_device(LAYER, *_rates(device)), ",.0f"),
        "mesh": Term(mesh, ",.0f"),
        "xxl": Term(xxl),
        "xxl-devices": Term(xxl_devices, ",.0f"),
        "xxl-threshold": Term(xxl_threshold, ",.0f"),
        "xxl-remedy": Term(xxl_remedy, ",.0f"),
        "bubble": Term(
            lambda name, stages, microbatches: _schedule(name, stages, microbatches).bubble_fraction, "%.1f"
        ),
        "scaling": Term(scaling, ",.0f"),
        "failures": Term(failures),
    }


def figures(folder: Path) -> dict[Path, Callable[[Path], object]]:
    """What to call with a figure's path."""
    jobs = [(n, Job(mean_time_between_failures(n), SAVE_S, RESTART_S)) for n in NODES]
    labelled = [(f"{n:,} nodes, M = {job.mtbf_s / 3600:.3g} h", job) for n, job in jobs]
    timelines = [_schedule(name, "4", "8") for name in SCHEDULES]
    return {
        folder / "pipeline_schedules.png": lambda path: draw_pipelines(timelines, path),
        folder / "fsdp_scaling.png": lambda path: draw_scaling(WORKLOAD, find_device("h100"), path, 8192),
        folder / "goodput.png": lambda path: draw_goodput(labelled, path),
    }


def ring_ratio(ranks: str) -> float:
    """Bytes that a rank sends in the alternate all-reduce, over those of the ring; both played."""
    total = 1024 * int(ranks)
    runs = (rings.alternate_all_reduce(int(ranks), total), rings.all_reduce(int(ranks), total))
    return max(runs[0].bytes_per_link) / max(runs[1].bytes_per_link)


def ring_ms(name: str, ranks: str, mib: str, device: str = "h100") -> float:
    """A collective played on a ring of a device's links."""
    play = {"all-reduce": rings.all_reduce, "alternate": rings.alternate_all_reduce}[name]
    return 1e3 * play(int(ranks), int(mib) * 2**20).seconds(find_device(device).egress(int(ranks)))


def _rates(device: str) -> tuple[float, float]:
    preset = find_device(device)
    return preset.flops_per_s, preset.egress(8)


def form_limit(form: Form, which: Pass, tokens: str, device: str = "h100") -> float:
    """Devices up to which a form hides its communication, at so many tokens in the batch."""
    return largest_world(form, LAYER, float(tokens), which, *_rates(device))


def mesh(what: str, axes: str, n_devices: str = "256", tokens: str = str(2**20), device: str = "h100") -> float:
    """FSDP and tensor parallelism together: the best split of so many devices, or the most devices."""
    preset = find_device(device)
    egress = preset.egress(int(n_devices))
    network = Network(preset.flops_per_s, egress, egress, {"overlapping": True, "sharing": False}[axes])
    best = optimal_split(LAYER, float(tokens), int(n_devices), network)
    whole = best_whole_split(LAYER, float(tokens), int(n_devices), network)
    x, y = largest_mesh(LAYER, float(tokens), network)
    found = {"best-fsdp": best.fsdp, "best-tp": best.tp, "whole-fsdp": whole.fsdp, "whole-tp": whole.tp}
    return (found | {"largest": x * y, "largest-fsdp": x, "largest-tp": y})[what]


def xxl(what: str) -> float:
    """Sizes of the accounting question's stack; bytes as GB of 1e9, activations as MB per token."""
    return {
        "billions": XXL.n_parameters / 1e9,
        "states-gb": XXL.state_bytes / 1e9,
        "states-gib": XXL.state_bytes / 2**30,
        "activations-mb": XXL.activation_bytes_per_token / 1e6,
        "activations-gb-32k": XXL.activation_bytes_per_token * 32_768 / 1e9,
        "h100": math.ceil(XXL.state_bytes / 80e9),
        "h100-gib": math.ceil(XXL.state_bytes / (80 * 2**30)),
    }[what]


def xxl_devices(tokens: str) -> float:
    """TPU v5p needed for the states and half of the activations of so many tokens, the other half on each."""
    return XXL.least_devices(find_device("tpu-v5p").memory_bytes, float(tokens))


def xxl_threshold(what: str, convention: str, rings_of: str = "n") -> float:
    """Tokens per device, or in all, from which forward on 16 x 4 devices is bound by compute."""
    network = torus_network(
        find_device("tpu-v5p"), 2, 1, overlapping={"sum": False, "max": True}[convention], large_rings=rings_of == "n"
    )
    found = next(t for t in thresholds(XXL.layer, 64, network) if (t.fsdp, t.tp) == (16, 4))
    return math.ceil({"each": found.tokens_per_device, "all": found.tokens}[what])


def xxl_remedy(number: str) -> float:
    """Tokens per device after one of the remedies, in the order of ``smaller_batches``."""
    network = torus_network(find_device("tpu-v5p"), 2, 1, overlapping=False, large_rings=True)
    return math.ceil(smaller_batches(XXL.layer, 16, 4, network)[int(number)][1])


def _schedule(name: str, stages: str, microbatches: str) -> Timeline:
    return simulate(name, int(stages), int(microbatches), chunks=2 if name == "interleaved" else 1)


def scaling(what: str, devices: str = "512") -> float:
    """FSDP of a 70B model on H100s: the two limits, and a step on so many devices."""
    h100 = find_device("h100")
    step = fsdp_step(WORKLOAD, int(devices), h100)
    limit = communication_limit(WORKLOAD, h100)
    return {
        "communication-limit": limit,
        "batch-limit": WORKLOAD.n_sequences,
        "tokens-at-limit": WORKLOAD.batch_tokens / limit,
        "compute-s": step.compute_s,
        "communication-s": step.communication_s,
    }[what]


def failures(what: str, nodes: str) -> float:
    """Hours between failures, best interval in minutes, or share of time that becomes work."""
    job = Job(mean_time_between_failures(int(nodes)), SAVE_S, RESTART_S)
    return {
        "hours-between": job.mtbf_s / 3600,
        "young-min": job.young_s / 60,
        "best-min": job.optimal_s / 60,
        "goodput": job.goodput(job.optimal_s),
        "goodput-hourly": job.goodput(3600.0),
    }[what]
