"""Does a training case fit the memory that is free? Asked once, before anything is built.

The peak is predicted (``training/dry_run.py``) for one micro-batch of eager reference blocks and attention, for any
number of hand-written blocks with fused kernels, quantized by tensor or not, with everything whole on every rank, and
for the latter as our FSDP shards them; for any other case the states alone are a lower bound: parameters, gradients and
optimizer state, as they are sharded. Capturing a step as a CUDA graph changes nothing: it allocates what the step does,
in the same order.
"""

from functools import lru_cache
from math import prod

import torch
import torch.distributed as dist

from cs336_systems.case import TrainingCase
from cs336_systems.costs.fsdp import is_sharded, model_units, state_bytes
from cs336_systems.costs.memory import PeakMemory, parameter_bytes
from cs336_systems.costs.offload import offloaded, state_bytes_per_parameter
from cs336_systems.distributed.process_group import Rank
from cs336_systems.hardware import GIB
from cs336_systems.harness.isolation import PredictedOutOfMemory
from cs336_systems.harness.memory import cublas_workspace_bytes, free_bytes
from cs336_systems.training.dry_run import dry_run

_dry_run = lru_cache(dry_run)


def is_predictable(case: TrainingCase) -> bool:
    """Whether a dry run predicts the peak of this case, and does not only bound it from below."""
    whole = case.parallel.wrapper not in ("fsdp", "fsdp2") and case.parallel.optimizer_state == "replicated"
    plain = case.offload == case.master == "none"
    if case.written_out:
        sharded = case.parallel.wrapper == "fsdp" and case.parallel.compute_dtype == "same" and case.accumulate == 1
        by_tensor = not case.recipe.quantized or case.recipe.scaling == "tensor"
        return case.kernels != "reference" and by_tensor and (whole or sharded)
    return plain and whole and case.accumulate == 1 and not case.compiled and case.attention == "reference"


def predicted_bytes(case: TrainingCase, mode: str = "step", *, world_size: int = 1) -> int:
    """Predicted peak of one rank in a mode of ``config.MODES``; a lower bound unless ``is_predictable``."""
    if is_predictable(case):
        return predicted_peak(case, mode, world_size=world_size).n_bytes
    if case.parallel.wrapper in ("fsdp", "fsdp2"):
        return predicted_states(case, world_size)
    weights, on_host = parameter_bytes(case.config, case.precision), offloaded(case)
    per_parameter = sum(n for name, n in state_bytes_per_parameter(case).items() if name not in on_host)
    states = case.config.n_parameters * per_parameter
    if case.parallel.optimizer_state != "replicated":
        states //= world_size
    gradients = 0 if "gradients" in on_host else weights // gradient_shards(case, world_size)
    return {"forward": weights, "backward": weights + gradients, "step": weights + gradients + states}[mode]


def gradient_shards(case: TrainingCase, world_size: int) -> int:
    """In how many parts ranks divide the gradients that a step ends with, unless our FSDP does."""
    freed = {"scattered-gradients": True, "scattered": case.accumulate == 1}
    return world_size if freed.get(case.parallel.optimizer_state) else 1


def predicted_peak(case: TrainingCase, mode: str = "step", *, world_size: int = 1) -> PeakMemory:
    """Predicted peak of one rank, of a case that ``is_predictable``."""
    workspace = cublas_workspace_bytes(torch.device(case.device))
    return _dry_run(case, mode, world_size=world_size, workspace_bytes=workspace)


def predicted_states(case: TrainingCase, world_size: int) -> int:
    """Bytes of parameters, gradients and optimizer state on the fullest rank of our FSDP; of DDP in a world of one.

    Gradients are those that a step ends with: an optimizer that steps under backward leaves what is replicated.
    """
    units, width = model_units(case.config), case.precision.parameter_bytes
    states = state_bytes(units, world_size, width)
    optimizer = states.parameters // width * sum(state_bytes_per_parameter(case).values())
    if case.parallel.update == "after-backward":
        return states.parameters + states.gradients + optimizer
    replicated = sum(prod(shape) for unit in units for shape in unit if not is_sharded(shape))
    return states.parameters + width * replicated + optimizer


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
