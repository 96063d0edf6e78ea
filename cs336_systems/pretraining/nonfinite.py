"""Where a step became non-finite: its batch run a second time, with every tensor checked."""

from collections.abc import Callable
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

    Runs forward and backward of the batch and drops the gradients. First is the tensor that is computed first, so of
    gradients the one of the last parameter.
    """
    find: Callable[..., str | None] = CappedStep.find_nonfinite if isinstance(step, CappedStep) else _find
    found = find(step, token_ids, targets)
    if dist.is_initialized():
        found = next(filter(None, on_every_rank(lambda: found)), None)
    return found or "nothing, when it ran again"


def losses_of_ranks(loss: Tensor) -> str:
    """Each rank's own loss, (), in words that follow others; empty where there is one rank; a collective."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return ""
    return f", of ranks {' and '.join(f'{one:g}' for one in on_every_rank(loss.item))}"


def _find(step: TrainStep, token_ids: Tensor, targets: Tensor) -> str | None:
    wait_for_parameters(step.model)
    found: list[str] = []

    def look(name: str, tensor: Any) -> None:
        if isinstance(tensor, Tensor) and tensor.is_floating_point() and not torch.isfinite(tensor.detach()).all():
            found.append(name)

    def watch_output(name: str, module: nn.Module) -> Any:
        return module.register_forward_hook(lambda module, inputs, output: look(f"the output of {name}", output))

    def watch_gradient(name: str, parameter: Tensor) -> Any:
        return parameter.register_hook(lambda gradient: look(f"the gradient of {name}", gradient))

    parameters = [(name.removeprefix("module."), p) for name, p in step.model.named_parameters()]
    for name, parameter in parameters:
        look(f"parameter {name}", parameter)
    hooks = [
        watch_output(name.removeprefix("module").removeprefix(".") or "the model", module)
        for name, module in step.model.named_modules()
    ]
    sharded = isinstance(step.model, FSDP)  # its parameters are in no graph
    if not sharded:  # as backward makes them, for some do not stay
        hooks += [watch_gradient(name, parameter) for name, parameter in parameters if parameter.requires_grad]
    try:
        passes = TrainStep.phases(step, "step", token_ids, targets)  # not as a CUDA graph
        del passes["optimizer"]
        for run in passes.values():
            run()
        for name, parameter in reversed(parameters if sharded else []):
            look(f"the gradient of {name}", parameter.grad)
    finally:
        for hook in hooks:
            hook.remove()
        step.optimizer.zero_grad(set_to_none=True)
    return found[0] if found else None
