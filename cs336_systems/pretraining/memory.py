"""One device's memory in segments: predicted before the first step, measured after the second, and advice.

    predicted = predicted_segments(case, total)          # total: of the device
    actual = actual_segments(step, predicted, total)     # after the second step, of which the peak is
    hint(case, total)                                    # one line, or nothing to say

Segments are what is alive at the step's peak: weights (masters too, if they are the parameters), gradients, m, v and
masters of AdamW, activations, and what head and loss have, which is a chunk of logits most of all; ``in all`` is their
sum. The allocator tells the sum and the states apart, and no more: what is measured of gradients and of head and loss
is their size as predicted, so that whatever is off shows in the activations. ``other`` are the allocator's reserves,
the CUDA context and other processes. What is kept in host memory comes last. Sizes are in bytes.
"""

from dataclasses import replace

import torch

from cs336_systems.costs.fsdp import model_units, state_bytes
from cs336_systems.costs.kept import LEVELS, keep_of_blocks
from cs336_systems.costs.memory import parameter_bytes
from cs336_systems.costs.offload import STATES, host_bytes, offloaded, state_bytes_per_parameter
from cs336_systems.distributed.peer_memory import mapped_bytes
from cs336_systems.hardware import GIB
from cs336_systems.harness.fit import gradient_shards, is_predictable, predicted_peak
from cs336_systems.pretraining.options import TrainerCase
from cs336_systems.streaming.choose import ChosenPlan
from cs336_systems.training.step import TrainStep

_MUCH = 0.25
"""Of a device, which is worth a hint when it is free."""
_SPARED = 0.05
"""Of a device, which hints leave to reserves and the CUDA context."""


def predicted_segments(case: TrainerCase, total: int | None) -> dict[str, int]:
    """Of one rank; states alone where the peak is not predicted (``harness.fit.is_predictable``).

    Args:
        total: of the device; None if it has no memory of its own, and none is free.
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
    peak = predicted_peak(case, world_size=case.world_size)
    parts = dict(peak.parts)
    of_states = parts.pop("optimizer state", 0)
    shares = {name: of_states * n_bytes // sum(states.values()) for name, n_bytes in states.items()}
    segments = {"weights": parts.pop("parameters"), "gradients": parts.pop("gradients", 0), **shares}
    loss = parts.pop("loss", 0)
    segments |= {"activations": sum(parts.values()), "head and loss": loss}
    segments["in all"] = sum(segments.values())
    free = {} if total is None else {"free": max(0, total - segments["in all"])}
    return segments | free | on_host


def actual_segments(step: TrainStep, predicted: dict[str, int], total: int) -> dict[str, int]:
    """Of a CUDA device, whose peak since it was reset is a step's."""
    segments = {
        "weights": sum(parameter.nbytes for parameter in step.model.parameters()),
        "gradients": predicted["gradients"],
    }
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


def hint(case: TrainerCase, total: int | None) -> str:
    """What would use memory that is free, or save what is short, with its predicted sum; empty if nothing would."""
    if total is None or not (case.written_out and is_predictable(case)) or offloaded(case):
        return ""

    def needs(**changes: object) -> int:
        return predicted_segments(replace(case, **changes), None)["in all"]  # type: ignore[arg-type]

    def fits(n_bytes: int) -> bool:
        return n_bytes <= (1 - _SPARED) * total

    levels = [LEVELS.index(keep.split("-")[0]) for keep in keep_of_blocks(case.keep, case.config.n_layers)]
    now = needs()
    if not fits(now):
        for keep in reversed(LEVELS[: max(levels)]):
            if fits(needed := needs(keep=keep)):
                return f"It is more than fits: --keep {keep} would take {needed / GIB:.1f} GiB in all"
        return "It is more than fits: take a smaller --batch-size, and more --accumulate"
    if total - now < _MUCH * total:
        return ""
    found = [(f"--keep {keep}", needs(keep=keep)) for keep in LEVELS[min(levels) + 1 :]][::-1]
    larger = 2 * case.batch_size
    found.append((f"--batch-size {larger}", needs(batch_size=larger, accumulate=max(1, case.accumulate // 2))))
    fitting = [f"{option} would take {needed / GIB:.1f} GiB in all" for option, needed in found if fits(needed)]
    return f"{(total - now) / GIB:.1f} GiB are free: {', or '.join(fitting)}" if fitting else ""


def planned_segments(choice: ChosenPlan, *, copies: bool) -> dict[str, int]:
    """What a plan under memory caps takes on the device and on the host.

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
