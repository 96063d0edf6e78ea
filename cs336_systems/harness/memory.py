"""The memory that a step will take (predicted), that it took (measured), and that is free.

The peak is predicted (``training/dry_run.py``) for one micro-batch of eager reference blocks and attention, for any
number of hand-written blocks with fused kernels, quantized by tensor or not, with everything whole on every rank, and
for the latter as our FSDP shards them; for any other case the states alone are a lower bound. Capturing a step as a
CUDA graph changes nothing: it allocates what the step does, in the same order.

On a GPU the peak is the caching allocator's high-water mark of allocated bytes. On a CPU it is the growth of the
process's resident set, which includes what libraries take, and is that of a cell only in a process that has measured
no other. What is free is asked of the driver, or of the kernel and the control group.
"""

from contextlib import suppress
from functools import lru_cache
from math import prod
from pathlib import Path

import psutil
import torch
import torch.distributed as dist

from cs336_systems.case import TrainingCase
from cs336_systems.costs.fsdp import held_elements, is_sharded
from cs336_systems.costs.memory import CUBLAS_WORKSPACE_BYTES, PeakMemory
from cs336_systems.costs.offload import OFFLOADS, offloaded, state_bytes_per_parameter
from cs336_systems.costs.parallelism.stages import stages_of_case
from cs336_systems.distributed.peer_memory import mapped_bytes
from cs336_systems.distributed.process_group import Rank
from cs336_systems.hardware import GIB
from cs336_systems.harness.isolation import PredictedOutOfMemory
from cs336_systems.kernels.host_memory import free_host_bytes, highest_resident_bytes
from cs336_systems.training.dry_run import dry_run

_OLDER_WORKSPACE_BYTES = (2 * 4096 + 8 * 16) * 1024
"""Torch's default before Hopper."""

_dry_run = lru_cache(dry_run)


def cublas_workspace_bytes(device: torch.device) -> int:
    """Bytes that torch allocates for each cuBLAS handle; 0 on a CPU, and where there is no GPU an H200's."""
    if device.type != "cuda":
        return 0
    if not torch.cuda.is_available():
        return CUBLAS_WORKSPACE_BYTES
    return CUBLAS_WORKSPACE_BYTES if torch.cuda.get_device_capability(device)[0] >= 9 else _OLDER_WORKSPACE_BYTES


def allocated_bytes(device: torch.device) -> int:
    """Bytes of tensors on a GPU; 0 on a CPU, which does not say."""
    return torch.cuda.memory_allocated(device) if device.type == "cuda" else 0


def free_bytes(device: torch.device) -> int:
    """Bytes that a new process could still allocate on ``device``."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    return free_host_bytes()


_used = False
"""Whether this process holds memory of more than the present cell: the growth of its resident set says nothing then."""


def mark_used() -> None:
    """Record that a cell has been measured in this process, or that several cells share it."""
    global _used
    _used = True


class PeakMeter:
    """High-water mark of memory from construction on: ``peak_bytes()`` of this process on one device."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
            self.retries_before = torch.cuda.memory_stats(device)["num_alloc_retries"]
        else:
            with suppress(OSError):  # resets the kernel's high-water mark, where it can
                Path("/proc/self/clear_refs").write_text("5", encoding="utf-8")
            self.baseline = psutil.Process().memory_info().rss

    def requested_bytes(self) -> int | None:
        """The most bytes requested on a GPU: the peak without the allocator's rounding; None on a CPU.

        By default the allocator does not split a cached block if less than 1 MiB would be left over, so the peaks of
        programs that need the same memory may differ; ``profiling/memory.py`` shows by how much.
        """
        if self.device.type != "cuda":
            return None
        return torch.cuda.memory_stats(self.device)["requested_bytes.all.peak"] + mapped_bytes(self.device)

    def allocation_retries(self) -> int | None:
        """How often an allocation failed, and succeeded once all cached blocks were freed; None on a CPU."""
        if self.device.type != "cuda":
            return None
        return torch.cuda.memory_stats(self.device)["num_alloc_retries"] - self.retries_before

    def peak_bytes(self) -> int | None:
        """None, not measured, on a CPU in a process that has measured a cell before or was started by a launcher."""
        if self.device.type == "cuda":
            return torch.cuda.max_memory_allocated(self.device) + mapped_bytes(self.device)
        if _used:
            return None
        return max(0, highest_resident_bytes() - self.baseline)


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
    states = predicted_states(case, world_size)
    counted = {"forward": ("weights",), "backward": ("weights", "gradients"), "step": tuple(states)}[mode]
    return sum(states[name] for name in counted)


def predicted_peak(case: TrainingCase, mode: str = "step", *, world_size: int = 1) -> PeakMemory:
    """Predicted peak of one rank, of a case that ``is_predictable``."""
    workspace = cublas_workspace_bytes(torch.device(case.device))
    return _dry_run(case, mode, world_size=world_size, workspace_bytes=workspace)


def predicted_states(case: TrainingCase, world_size: int) -> dict[str, int]:
    """Bytes of weights, gradients and each of the optimizer's states on the device of the fullest rank.

    Gradients are those that a step ends with: an optimizer that steps under backward leaves what is replicated.
    """
    away = offloaded(case)
    found = {name: n_bytes for name, n_bytes in _states(case, world_size).items() if name not in away}
    return {"weights": found.pop("weights"), "gradients": found.pop("gradients", 0), **found}


def offloaded_bytes(case: TrainingCase, world_size: int) -> dict[str, int]:
    """Bytes that the fullest rank has in host memory, by the names of ``costs.offload.OFFLOADS``."""
    how, config, names = case.parallel, case.config, offloaded(case)
    rows = case.batch_size * case.context_length // (how.tensor * how.context)
    n_layers = max(stage.n_layers for stage in stages_of_case(case))
    found = _states(case, world_size)
    found["residual"] = n_layers * rows * config.d_model * case.precision.parameter_bytes
    return {name: found[name] for name in OFFLOADS if name in names}


def _states(case: TrainingCase, world_size: int) -> dict[str, int]:
    """Bytes of ``predicted_states``, wherever they lie."""
    how, width = case.parallel, case.precision.parameter_bytes
    world_size //= how.tensor * how.pipeline
    part = case.config.part(how.tensor)
    fullest = max(stages_of_case(case), key=lambda stage: stage.n_parameters(part))
    n_weights = n_gradients = n_states = fullest.n_parameters(part)
    if how.wrapper in ("fsdp", "fsdp2"):
        n_weights = n_gradients = n_states = held_elements(fullest.units(part), world_size // how.replicas)
    if case.lora is not None:
        n_gradients = n_states = case.n_trained // (world_size // how.replicas if how.wrapper == "fsdp" else 1)
        n_weights += n_states
    if how.optimizer_state != "replicated":
        n_states //= world_size
    if how.optimizer_state == "scattered-gradients" or (how.optimizer_state == "scattered" and case.accumulate == 1):
        n_gradients //= world_size
    if how.update != "after-backward":
        n_gradients = sum(prod(shape) for unit in fullest.units(part) for shape in unit if not is_sharded(shape))
    found = {"weights": width * n_weights, "gradients": width * n_gradients}
    return found | {name: int(n_states * n_bytes) for name, n_bytes in state_bytes_per_parameter(case).items()}


def check_fit(case: TrainingCase, mode: str = "step", rank: Rank | None = None, *, force: bool = False) -> int:
    """Predicted peak in bytes (see ``predicted_bytes``), if it fits beside those of this machine's other ranks.

    A collective if there is a ``rank``: no rank builds a model before all have checked.

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
