"""AdamW from the paper's formula; the choice between it, torch's fused kernel and ours (``fused_adamw.py``).

Loshchilov & Hutter 2019, algorithm 2: weight decay acts on the parameter directly, decoupled from the moments; both
moments are bias-corrected. It updates one tensor at a time, with a dozen small kernels each; compare fused optimizers
with ``--optimizer reference torch-fused fused``. State is two tensors like the parameter, in the parameter's dtype.
"""

import inspect
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from cs336_systems.config import OPTIMIZERS


class AdamW(torch.optim.Optimizer):
    """AdamW with decoupled weight decay and bias correction.

    Args:
        params: tensors or parameter groups, as every ``torch.optim.Optimizer`` takes them.
        lr: step size alpha.
        betas: decay rates of the first and second moment, each in [0, 1).
        eps: added to the root of the corrected second moment.
        weight_decay: lambda; each step shrinks a parameter by ``lr * weight_decay`` of itself.

    Raises:
        ValueError: a hyperparameter is out of range; the message holds the value.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.01,
    ) -> None:
        check_hyperparameters(lr, betas, eps, weight_decay)
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})

    # torch's versions import torch._dynamo, three seconds, to exclude themselves from torch.compile
    add_param_group = inspect.unwrap(torch.optim.Optimizer.add_param_group)
    zero_grad = inspect.unwrap(torch.optim.Optimizer.zero_grad)

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> Any:
        """Update every parameter that has a gradient; returns the closure's loss if one is given."""
        loss = loss_of(closure)
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update(parameter, parameter.grad, group)
        return loss

    def _update(self, parameter: Tensor, gradient: Tensor, group: dict[str, Any]) -> None:
        state = self.state[parameter]
        if not state:
            state["step"] = 0
            state["exp_avg"] = torch.zeros_like(parameter)
            state["exp_avg_sq"] = torch.zeros_like(parameter)
        state["step"] += 1
        beta1, beta2 = group["betas"]
        first, second = state["exp_avg"], state["exp_avg_sq"]
        first.mul_(beta1).add_(gradient, alpha=1 - beta1)
        second.mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)

        correction1 = 1 - beta1 ** state["step"]
        correction2 = 1 - beta2 ** state["step"]
        denominator = second.sqrt().div_(correction2**0.5).add_(group["eps"])
        parameter.mul_(1 - group["lr"] * group["weight_decay"])
        parameter.addcdiv_(first, denominator, value=-group["lr"] / correction1)


def loss_of(closure: Callable[[], float] | None) -> float | None:
    """Call an optimizer's closure, with gradients enabled, and return its loss; None without a closure."""
    if closure is None:
        return None
    with torch.enable_grad():
        return closure()


def check_hyperparameters(lr: float, betas: tuple[float, float], eps: float, weight_decay: float) -> None:
    """Raise ValueError for one that is out of range; the message holds the value."""
    if not lr >= 0:
        raise ValueError(f"lr must not be negative, got {lr}")
    if len(betas) != 2 or not all(0 <= beta < 1 for beta in betas):
        raise ValueError(f"betas must be two numbers in [0, 1), got {betas}")
    if not eps >= 0:
        raise ValueError(f"eps must not be negative, got {eps}")
    if not weight_decay >= 0:
        raise ValueError(f"weight_decay must not be negative, got {weight_decay}")


def decay_groups(parameters: Iterable[Tensor]) -> list[dict[str, Any]]:
    """Two groups for an optimizer: matrices, and norms and biases, which get no weight decay."""
    every = list(parameters)
    matrices, others = ([p for p in every if (p.dim() > 1) == wanted] for wanted in (True, False))
    return [{"params": matrices}, {"params": others, "weight_decay": 0.0}]


def optimizer_class(name: str, device: torch.device) -> tuple[type[torch.optim.Optimizer], dict[str, Any]]:
    """Class and arguments of a name in ``config.OPTIMIZERS``, for parameters on this device.

    Raises:
        ValueError: no such optimizer.
    """
    if name == "reference":
        return AdamW, {}
    if name == "torch-fused":
        return torch.optim.AdamW, {"fused": True}
    if name == "fused":
        from cs336_systems.training.fused_adamw import FusedAdamW  # brings Triton along

        return FusedAdamW, {}
    if name == "muon" and device.type == "cpu":
        from cs336_systems.training.muon import TorchMuon

        return TorchMuon, {"fused": True}
    if name == "muon":
        from cs336_systems.training.fused_muon import FusedMuon

        return FusedMuon, {}
    raise ValueError(f"unknown optimizer {name!r}: known are {', '.join(OPTIMIZERS)}")


def unsupported_reason(name: str, device: torch.device) -> str | None:
    """Why an optimizer cannot run on the device, in one sentence, or None if it can."""
    if name != "fused":
        return None
    from cs336_systems.training.fused_adamw import device_reason

    return device_reason(device)
