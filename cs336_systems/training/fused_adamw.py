"""AdamW in one pass over memory, as an optimizer: ``kernels/adamw.py`` with groups, state and checkpoints.

The formula is that of ``optimizer.AdamW``; with fp32 states the two agree within rounding. Besides:

* moments in the parameter's dtype or in ``state_dtype``, bf16 or fp32; bf16 is rounded stochastically, which makes
  training with 8 bytes per parameter (p, g, m, v) possible;
* ``step(grad_scale=...)`` clips without writing gradients back, and skips a step whose gradients are not finite,
  without waiting for the device; a skipped step is not counted;
* ``master`` keeps fp32 weights of bf16 parameters, which then are the rounded masters;
* ``offload`` keeps states in host memory (``host_states.py``); results are bit-identical.

There are two launches per combination of dtypes and step; groups may differ in every hyperparameter and still share
launches. Values that change by step are read from device memory: a CUDA graph of a step is valid for later steps after
``upload_hyperparameters``, which does not wait.

Random bits depend on the seed, the step, the parameter's number among all parameters of the optimizer, and the
element's position in it. So replicas stay equal, and shards get the same bits as the whole: FSDP's shards have the
position of their first element as an attribute (``first_element``), and ``ShardedOptimizer`` calls ``locate``.
"""

import inspect
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Sequence
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from cs336_systems.kernels.adamw import Update, UpdateTable, adamw_, update_kernel
from cs336_systems.kernels.host_memory import HostLink
from cs336_systems.kernels.launching import needs_other_device
from cs336_systems.training.host_states import HostGradients, place, staged_adamw_
from cs336_systems.training.optimizer import check_hyperparameters, loss_of

MAX_DESCRIPTIONS = 64
"""The most times, on average, that tables may describe a parameter: any number of buckets describes each once."""

_DTYPES = (torch.bfloat16, torch.float32)
_STATES = ("exp_avg", "exp_avg_sq", "master")


def _hyperparameters(group: dict[str, Any]) -> tuple[float, ...]:
    """A row of ``UpdateTable.set_hyperparameters``."""
    return (group["lr"], *group["betas"], group["eps"], group["weight_decay"])


def device_reason(device: torch.device) -> str | None:
    """Why ``FusedAdamW`` cannot run on the device, in one sentence, or None if it can."""
    if needs_other_device(update_kernel, device):
        return f"optimizer fused is a Triton kernel and needs a CUDA device, got {device}"
    return None


class FusedAdamW(torch.optim.Optimizer):
    """AdamW with decoupled weight decay and bias correction, for dense bf16 and fp32 parameters on CUDA devices.

    ``state`` is per parameter ``step`` (int64, on the device), ``exp_avg``, ``exp_avg_sq``, and ``master`` where it has
    one. A state that was saved without masters resumes from the parameters; one with masters loads without.

    Args:
        params, lr, betas, eps, weight_decay: as for ``optimizer.AdamW``.
        state_dtype: of both moments; the parameter's if None.
        seed: of stochastic rounding; may differ between groups, and is saved with them.
        master: keep fp32 weights of the parameters that are bf16.
        offload: of ``exp_avg``, ``exp_avg_sq`` and ``master`` those that are kept in host memory. The device may still
            write there when ``step`` returns: synchronize before reading them.

    Raises:
        ValueError: a hyperparameter is out of range, or a parameter is of another dtype or on another device; the
            message holds the value.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.01,
        *,
        state_dtype: torch.dtype | None = None,
        seed: int = 0,
        master: bool = False,
        offload: Collection[str] = (),
    ) -> None:
        check_hyperparameters(lr, betas, eps, weight_decay)
        if state_dtype not in (None, *_DTYPES):
            raise ValueError(f"state_dtype must be torch.bfloat16, torch.float32 or None, got {state_dtype}")
        if not 0 <= seed < 2**63:
            raise ValueError(f"seed must lie in 0..2^63-1, got {seed}")
        if unknown := set(offload) - set(_STATES):
            raise ValueError(f"offload must be of {', '.join(_STATES)}, got {', '.join(sorted(unknown))}")
        self.state_dtype, self.master, self.offload = state_dtype, master, tuple(offload)
        self.host_gradients: HostGradients | None = None
        """The gradients in host memory, if they are not at the parameters."""
        self._links: dict[torch.device, HostLink] = {}
        self._places: dict[Tensor, tuple[int, int]] = {}
        self._tables: dict[tuple[int, ...], UpdateTable] = {}
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, "seed": seed})

    def upload_hyperparameters(self) -> None:
        """Make replayed launches use the groups' present lr, betas, eps and weight_decay."""
        of = {id(parameter): _hyperparameters(group) for group in self.param_groups for parameter in group["params"]}
        for parameters, table in self._tables.items():
            table.set_hyperparameters([of[parameter] for parameter in parameters])

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear all gradients, those in host memory too."""
        # torch's version imports torch._dynamo, three seconds, to exclude itself from torch.compile
        inspect.unwrap(torch.optim.Optimizer.zero_grad)(self, set_to_none)
        if self.host_gradients is not None:
            self.host_gradients.forget()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters, numbered after the existing ones; raises ValueError as the constructor does."""
        inspect.unwrap(torch.optim.Optimizer.add_param_group)(self, param_group)
        added = self.param_groups[-1]["params"]
        for parameter in added:
            reason = device_reason(parameter.device)
            if parameter.dtype not in _DTYPES:
                reason = f"optimizer fused takes bf16 and fp32 parameters, got {parameter.dtype}"
            if reason is not None:
                del self.param_groups[-1]
                raise ValueError(reason)
        for parameter in added:
            self._places[parameter] = (len(self._places), getattr(parameter, "first_element", 0))

    def locate(self, parameter: Tensor, number: int, offset: int = 0) -> None:
        """Declare ``parameter`` a shard of the tensor of this number, beginning at this element in memory order.

        Raises:
            ValueError: it is none of the optimizer's parameters.
        """
        if parameter not in self._places:
            raise ValueError(f"a parameter of shape {tuple(parameter.shape)} is none of this optimizer's")
        self._places[parameter] = (number, offset)

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None, *, grad_scale: Tensor | None = None) -> Any:
        """Update every parameter that has a gradient; returns the closure's loss if one is given.

        Args:
            grad_scale: one element on the device, by which gradients are multiplied as they are read; where it is NaN
                or inf, nothing is updated and the step is not counted.

        Raises:
            ValueError: a gradient is sparse or has another memory layout than its parameter, or the scale is invalid.
        """
        loss = loss_of(closure)
        if self.host_gradients is not None:
            self.host_gradients.settle()
        together: defaultdict[Any, list[Update]] = defaultdict(list)
        self._make_states([p for group in self.param_groups for p in group["params"] if self._gradient(p) is not None])
        for group in self.param_groups:
            for parameter in group["params"]:
                if (gradient := self._gradient(parameter)) is not None:
                    update = self._update(parameter, gradient, group)
                    staged = tuple(name for name in self.offload if name in update.tensors)
                    staged += () if parameter.grad is not None else ("gradient",)
                    together[parameter.device, update.dtypes, staged].append(update)
        for (device, _, staged), updates in together.items():
            if staged:
                if device not in self._links:
                    self._links[device] = HostLink(device)
                staged_adamw_(updates, staged, self._links[device], grad_scale)
            else:
                adamw_(updates, grad_scale, table=self._table(updates))
            # Operations of torch raise versions, which autograd and caches made from the weights compare.
            torch.autograd.graph.increment_version([update.parameter for update in updates])
        return loss

    def state_dict(self) -> dict[str, Any]:
        """Return torch's state dict, after waiting for the device's writes to host memory."""
        for device in self._links:
            if device.type == "cuda":
                torch.cuda.synchronize(device)
        return super().state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load as torch does, but into states in this optimizer's dtypes and on its devices, not the parameter's."""
        super().load_state_dict({**state_dict, "state": {}})
        saved = chain.from_iterable(group["params"] for group in state_dict["param_groups"])
        parameters = chain.from_iterable(group["params"] for group in self.param_groups)
        given = {p: state_dict["state"][i] for i, p in zip(saved, parameters, strict=True) if i in state_dict["state"]}
        self._make_states(list(given))
        for parameter, state in given.items():
            for name, ours in self.state[parameter].items():
                if name in state:
                    ours.copy_(torch.as_tensor(state[name]))

    def __getstate__(self) -> dict[str, Any]:
        raise TypeError("optimizer fused holds addresses, and is not copied: its state_dict is")

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # as torch loads a state dict
        self._tables = {}

    def _gradient(self, parameter: Tensor) -> Tensor | None:
        if parameter.grad is not None or self.host_gradients is None:
            return parameter.grad
        return self.host_gradients.of(parameter)

    def _state_dtypes(self, parameter: Tensor) -> dict[str, torch.dtype]:
        moments = dict.fromkeys(("exp_avg", "exp_avg_sq"), self.state_dtype or parameter.dtype)
        has_master = self.master and parameter.dtype == torch.bfloat16
        return moments | ({"master": torch.float32} if has_master else {})

    def _make_states(self, parameters: Sequence[Tensor]) -> None:
        """Allocate missing states; those in host memory share one slab."""
        new = {parameter: self._state_dtypes(parameter) for parameter in parameters if not self.state[parameter]}
        away = {p: {name: dtypes[name] for name in self.offload if name in dtypes} for p, dtypes in new.items()}
        for device in {parameter.device for parameter in new}:
            hosts = place({p: named for p, named in away.items() if p.device == device}, device)
            for parameter, states in hosts.items():
                state = {"step": torch.zeros((), dtype=torch.int64, device=device)}
                for name, dtype in new[parameter].items():
                    state[name] = states[name] if name in states else torch.zeros_like(parameter, dtype=dtype)
                if "master" in state:
                    state["master"].copy_(parameter)
                self.state[parameter] = state

    def _update(self, parameter: Tensor, gradient: Tensor, group: dict[str, Any]) -> Update:
        state = self.state[parameter]
        number, offset = self._places[parameter]
        if gradient.layout != torch.strided:
            raise ValueError(f"gradients must be dense, parameter {number} has one of layout {gradient.layout}")
        return Update(
            parameter,
            gradient,
            state["exp_avg"],
            state["exp_avg_sq"],
            state["step"],
            group["lr"],
            tuple(group["betas"]),
            group["eps"],
            group["weight_decay"],
            number,
            offset,
            group["seed"],
            state.get("master"),
        )

    def _table(self, updates: list[Update]) -> UpdateTable:
        key = tuple(id(update.parameter) for update in updates)
        if key not in self._tables:
            if sum(map(len, self._tables)) + len(key) > MAX_DESCRIPTIONS * len(self._places):
                self._tables.clear()
            self._tables[key] = UpdateTable()
        return self._tables[key]
