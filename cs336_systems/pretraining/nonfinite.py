"""Where a step became non-finite: its batch run again, with every tensor checked."""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from cs336_systems.distributed.arrivals import wait_for_parameters
from cs336_systems.distributed.fsdp import FSDP
from cs336_systems.distributed.process_group import on_every_rank
from cs336_systems.pretraining.capped import CappedStep
from cs336_systems.training.step import TrainStep


class NonFiniteStep(RuntimeError):
    """A loss or a gradient is NaN or inf; the model is as it was before the step."""


def find_nonfinite(step: TrainStep | CappedStep, token_ids: Tensor, targets: Tensor) -> str:
    """The first tensor that is not finite, in words: a parameter, a module's output, or a gradient; a collective.

    Runs forward and backward of the batch again, and drops the gradients. First is what is computed first, so of
    gradients the one of the last parameter.
    """
    found = (
        step.find_nonfinite(token_ids, targets) if isinstance(step, CappedStep) else _found(step, token_ids, targets)
    )
    if dist.is_initialized():
        of_ranks: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(of_ranks, found)
        found = next(filter(None, of_ranks), None)
    return found or "nothing, when it ran again"


def losses_of_ranks(loss: Tensor) -> str:
    """What each rank's own loss, (), was, in words to follow others; nothing where there is one rank; a collective."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return ""
    return f", of ranks {' and '.join(f'{one:g}' for one in on_every_rank(loss.item))}"


def _found(step: TrainStep, token_ids: Tensor, targets: Tensor) -> str | None:
    wait_for_parameters(step.model)
    parameters = [(name.removeprefix("module."), p) for name, p in step.model.named_parameters()]
    found = [f"parameter {name}" for name, parameter in parameters if not _finite(parameter.detach())]

    def watch(name: str) -> Any:
        def look(module: nn.Module, inputs: Any, output: Any) -> None:
            if isinstance(output, Tensor) and not _finite(output.detach()):
                found.append(f"the output of {name or 'the model'}")

        return look

    def look_at(name: str) -> Any:
        def look(gradient: Tensor) -> None:
            if not _finite(gradient):
                found.append(f"the gradient of {name}")

        return look

    hooks: list[Any] = [
        module.register_forward_hook(watch(name.removeprefix("module").removeprefix(".")))
        for name, module in step.model.named_modules()
    ]
    fully_sharded = isinstance(step.model, FSDP)  # whose parameters are in no graph
    if not fully_sharded:  # as backward makes them, for some do not stay
        hooks += [parameter.register_hook(look_at(name)) for name, parameter in parameters if parameter.requires_grad]
    try:
        passes = TrainStep.phases(step, "step", token_ids, targets)  # not as a CUDA graph
        del passes["optimizer"]
        for run in passes.values():
            run()
        for name, parameter in reversed(parameters if fully_sharded else []):
            if parameter.grad is not None and not _finite(parameter.grad.detach()):
                found.append(f"the gradient of {name}")
    finally:
        for hook in hooks:
            hook.remove()
        step.optimizer.zero_grad(set_to_none=True)
    return found[0] if found else None


def _finite(tensor: Tensor) -> bool:
    return bool(torch.isfinite(tensor).all()) if tensor.is_floating_point() else True
