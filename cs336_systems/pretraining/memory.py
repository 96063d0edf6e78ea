"""One device's memory in segments: predicted before the first step, and measured after the second.

Segments are the memory in use at the step's peak: weights (masters too, if they are the parameters), gradients, m, v
and masters of AdamW, activations, and head and loss, mostly a chunk of logits; ``in all`` is their sum. The allocator
tells the sum and the states apart, and no more: measured gradients and head and loss are their sizes as predicted, so
that any error shows in the activations. ``other`` are the allocator's reserves, the CUDA context and other processes.
Memory of the host comes last. Sizes are in bytes.
"""

import torch

from cs336_systems.costs.fsdp import model_units, state_bytes
from cs336_systems.costs.memory import parameter_bytes
from cs336_systems.costs.offload import STATES, host_bytes, offloaded, state_bytes_per_parameter
from cs336_systems.distributed.peer_memory import mapped_bytes
from cs336_systems.harness.fit import gradient_shards, is_predictable, predicted_peak
from cs336_systems.pretraining.options import TrainerCase
from cs336_systems.streaming.choose import ChosenPlan
from cs336_systems.training.step import TrainStep


def predicted_segments(case: TrainerCase, total: int | None) -> dict[str, int]:
    """Segments of one rank; states alone where the peak is not predicted (``harness.fit.is_predictable``).

    Args:
        total: memory of the device; None if it has none of its own, and no segment is free.
    """
    width, away = case.precision.parameter_bytes, offloaded(case)
    states = {name: n_bytes for name, n_bytes in state_bytes_per_parameter(case).items() if name not in away}
    on_host = {f"{name} on the host": n_bytes for name, n_bytes in host_bytes(case, case.world_size).items()}
    if not is_predictable(case):
        held = parameter_bytes(case.config, case.precision)
        if case.parallel.wrapper == "fsdp":
            held = state_bytes(model_units(case.config), case.world_size, width).parameters
        gradients = 0 if "gradients" in away else held // gradient_shards(case, case.world_size)
        divided = case.parallel.optimizer_state in ("scattered", "scattered-gradients")
        of_state = held // case.world_size if divided else held
        shares = {name: of_state * n_bytes // width for name, n_bytes in states.items()}
        return {"weights": held, "gradients": gradients, **shares, **on_host}
    parts = dict(predicted_peak(case, world_size=case.world_size).parts)
    of_states, loss = parts.pop("optimizer state", 0), parts.pop("loss", 0)
    shares = {name: of_states * n_bytes // sum(states.values()) for name, n_bytes in states.items()}
    segments = {"weights": parts.pop("parameters"), "gradients": parts.pop("gradients", 0), **shares}
    segments |= {"activations": sum(parts.values()), "head and loss": loss}
    segments["in all"] = sum(segments.values())
    free = {} if total is None else {"free": max(0, total - segments["in all"])}
    return segments | free | on_host


def actual_segments(step: TrainStep, predicted: dict[str, int], total: int) -> dict[str, int]:
    """Segments of a CUDA device, whose peak since it was reset is a step's."""
    segments = {"weights": sum(p.nbytes for p in step.model.parameters()), "gradients": predicted["gradients"]}
    on_host: dict[str, int] = {}
    for name, key in STATES.items():
        for state in step.optimizer.state.values():
            if key in state:
                here = segments if state[key].device == step.device else on_host
                segment = name if here is segments else f"{name} on the host"
                here[segment] = here.get(segment, 0) + state[key].nbytes
    peak = torch.cuda.max_memory_allocated(step.device) + mapped_bytes(step.device)
    free = torch.cuda.mem_get_info(step.device)[0]
    loss = predicted.get("head and loss", 0)
    segments |= {"activations": peak - sum(segments.values()) - loss, "head and loss": loss, "in all": peak}
    return segments | {"other": max(0, total - free - peak), "free": free} | on_host


def planned_segments(choice: ChosenPlan, *, copies: bool) -> dict[str, int]:
    """Segments of a plan under memory caps, on the device and on the host.

    Args:
        copies: whether checkpoints are copied before they are written.
    """
    found: dict[str, int] = {}
    beside = {"checkpoint's copy": copy_bytes(choice) if copies else 0}
    for parts, cap, where in (
        (choice.device_parts, choice.caps.device, ""),
        (choice.host_parts | beside, choice.caps.host, " on the host"),
    ):
        found |= {f"{name}{where}": n_bytes for name, n_bytes in parts.items() if n_bytes}
        used = sum(parts.values())
        found |= {f"in all{where}": used, f"free{where}": cap - used}
    return found


def copy_bytes(choice: ChosenPlan) -> int:
    """Bytes of a checkpoint's copy; 0 where the host's cap has no room for it, and no copy is made."""
    work = choice.plan.work
    n_bytes = work.config.n_parameters * (work.precision.parameter_bytes + sum(n for _, n in work.moments))
    return n_bytes if n_bytes <= choice.spare_host_bytes else 0
