"""AdamW of one layer at a time, on tensors that are only there while it runs.

    optimizer = LayerAdamW(lr=3e-4)
    optimizer.lr = schedule(step)                # a value per step
    optimizer(7, {"weights": ..., "gradients": ..., "exp_avg": ..., "exp_avg_sq": ...}, steps, scale)

On a GPU this is ``kernels/adamw.py``: one pass, bf16 rounded stochastically, bits that depend on a parameter's number
among all and not on where it lies; or, with masters in fp32, nothing. Elsewhere it is torch's fused AdamW.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor

from cs336_systems.streaming.layout import MASTER
from cs336_systems.training.optimizer import check_hyperparameters


@dataclass
class LayerAdamW:
    """AdamW with decoupled weight decay and bias correction.

    Raises:
        ValueError: a hyperparameter is out of range.
    """

    lr: float = 1e-3
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.01
    decay: Literal["all", "matrices"] = "all"
    """What decays: all parameters, or matrices alone."""
    seed: int = 0
    """Of stochastic rounding."""
    _tables: dict[int, Any] = field(default_factory=dict, repr=False)

    def __post_init__(self) -> None:
        check_hyperparameters(self.lr, self.betas, self.eps, self.weight_decay)

    def __call__(
        self, first_number: int, state: Mapping[str, Sequence[Tensor]], steps: Sequence[Tensor], scale: Tensor | None
    ) -> None:
        """One step, in place.

        Args:
            first_number: of the first of these parameters, among all of the model.
            state: their ``weights``, ``gradients``, ``exp_avg``, ``exp_avg_sq`` and, if it is kept, ``master``.
            steps: taken by each so far; () on the device, int64 on a GPU and fp32 elsewhere.
            scale: by which gradients are multiplied, () in fp32; where it is not finite, nothing is updated; 1 if None.
        """
        if steps[0].device.type == "cuda":
            self._in_one_pass(first_number, state, steps, scale)
            return
        skipped = None if scale is None else scale.isfinite().logical_not().float()
        for step, gradient in zip(steps, state["gradients"], strict=True):
            step.add_(1 if skipped is None else 1 - skipped)
            if scale is not None:
                gradient.mul_(scale)
        updated = state.get(MASTER, state["weights"])
        named = (state[name] for name in ("gradients", "exp_avg", "exp_avg_sq"))
        for weight, gradient, exp_avg, exp_avg_sq, step in zip(updated, *named, steps, strict=True):
            torch._fused_adamw_(
                [weight],
                [gradient.to(weight.dtype)],
                [exp_avg],
                [exp_avg_sq],
                [],
                [step],
                lr=self.lr,
                beta1=self.betas[0],
                beta2=self.betas[1],
                weight_decay=self._decay_of(weight),
                eps=self.eps,
                amsgrad=False,
                maximize=False,
                grad_scale=None,
                found_inf=skipped,
            )
        if MASTER in state and (skipped is None or not skipped):
            for weight, master in zip(state["weights"], state[MASTER], strict=True):
                weight.copy_(master)

    def _decay_of(self, weight: Tensor) -> float:
        return self.weight_decay if self.decay == "all" or weight.dim() > 1 else 0.0

    def _in_one_pass(
        self, first_number: int, state: Mapping[str, Sequence[Tensor]], steps: Sequence[Tensor], scale: Tensor | None
    ) -> None:
        from cs336_systems.kernels.adamw import Update, UpdateTable, adamw_  # brings Triton along

        how = self.lr, self.betas, self.eps
        named = (state[name] for name in ("weights", "gradients", "exp_avg", "exp_avg_sq"))
        masters = state.get(MASTER, [None] * len(steps))
        updates = [
            Update(w, g, m, v, step, *how, self._decay_of(w), number=first_number + i, seed=self.seed, master=master)
            for i, (w, g, m, v, step, master) in enumerate(zip(*named, steps, masters, strict=True))
        ]
        table = self._tables.setdefault(first_number, UpdateTable())
        adamw_(updates, scale, stochastic_rounding=True, table=table)
