"""Does a training case fit the memory that is free? Asked once, before anything is built.

The prediction is exact for eager reference blocks and attention, one micro-batch, and everything whole on every rank;
for any other case the states alone are a lower bound: parameters, gradients and optimizer state, as they are sharded.
Capturing a step as a CUDA graph changes nothing: it allocates what the step does, in the same order.
"""

import torch
import torch.distributed as dist

from cs336_systems.case import TrainingCase
from cs336_systems.costs.fsdp import model_units, state_bytes
from cs336_systems.costs.memory import adamw_state_bytes, parameter_bytes, peak_memory
from cs336_systems.distributed.process_group import Rank
from cs336_systems.harness.memory import cublas_workspace_bytes, free_bytes
from cs336_systems.harness.process import PredictedOutOfMemory

GIB = 1024**3


def is_predictable(case: TrainingCase) -> bool:
    """Whether ``costs.memory.peak_memory`` is the prediction of this case, and not only a lower bound."""
    whole = case.parallel.wrapper not in ("fsdp", "fsdp2") and case.parallel.optimizer_state == "replicated"
    eager = not case.compiled and not case.written_out and case.attention == "reference"
    return whole and eager and case.accumulate == 1


def predicted_bytes(case: TrainingCase, mode: str = "step", *, world_size: int = 1) -> int:
    """Predicted peak of one rank in a mode of ``config.MODES``; a lower bound unless ``is_predictable``."""
    if is_predictable(case):
        device = torch.device(case.device)
        return peak_memory(
            *case.work,
            case.precision,
            mode,
            optimizer=case.optimizer,
            checkpoint=case.checkpoint,
            device_type=device.type,
            workspace_bytes=cublas_workspace_bytes(device),
        ).n_bytes
    if case.parallel.wrapper in ("fsdp", "fsdp2"):
        return predicted_states(case, world_size)
    weights, moments = parameter_bytes(case.config, case.precision), adamw_state_bytes(case.config, case.precision)
    if case.parallel.optimizer_state != "replicated":
        moments //= world_size
    return {"forward": weights, "backward": 2 * weights, "step": 2 * weights + moments}[mode]


def predicted_states(case: TrainingCase, world_size: int) -> int:
    """Bytes of parameters, gradients and optimizer state on the fullest rank of our FSDP; of DDP in a world of one."""
    return state_bytes(model_units(case.config), world_size).total


def check_fit(case: TrainingCase, mode: str = "step", rank: Rank | None = None, *, force: bool = False) -> int:
    """Predicted peak in bytes (see ``predicted_bytes``), if it fits beside those of this machine's other ranks.

    A collective if there is a ``rank``: nobody builds a model before all have looked.

    Raises:
        PredictedOutOfMemory: it exceeds what is free, and ``force`` is not set; the message holds both figures.
    """
    predicted = predicted_bytes(case, mode, world_size=rank.world_size if rank else 1)
    ranks_here = rank.world_size if rank and rank.device.type == "cpu" else 1
    needed, free = predicted * ranks_here, free_bytes(rank.device if rank else torch.device(case.device))
    if rank is not None:
        dist.barrier()
    if needed > free and not force:
        least = "" if is_predictable(case) else "at least "
        raise PredictedOutOfMemory(f"needs {least}{needed / GIB:.1f} GiB, {free / GIB:.1f} GiB are free")
    return predicted
