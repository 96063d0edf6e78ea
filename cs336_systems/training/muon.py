"""Muon for the matrices of blocks, and AdamW for the embedding, the head, norms and biases.

Each matrix W of r rows and c columns, with gradient G, has one moment M (Jordan et al. 2024,
https://kellerjordan.github.io/posts/muon; decay and scale are those of Liu et al. 2025, "Muon is Scalable for LLM
Training", arXiv 2502.16982):

    M = 0.95 M + G
    O = orthogonalised(G + 0.95 M)                                       Nesterov's momentum
    W = (1 - lr weight_decay) W - lr 0.2 sqrt(max(r, c)) O

O has singular values near 1, so the root mean square of its elements is about 1 / sqrt(max(r, c)), and that of the
update 0.2 lr: about that of AdamW's, so that a learning rate and weight decay that serve AdamW serve Muon as well.

q, k and v are orthogonalised apart, and so are gate and up, although blocks multiply each group as one matrix: they are
maps of their own, and in the polar factor of all rows together the update of one would depend on the others' gradients.
The parameters are apart already (``blocks/weights.py``), so nothing has to be cut.

The AdamW of all else is torch's fused one on a CPU and this suite's on a GPU (``fused_muon.py``). The products of the
iteration are in bf16, and all else is computed in fp32.

Measured on a CPU (train.py's size tiny on the standard library, fp32, one seed; learning rates 0.003, 0.01, 0.02):
after 800 steps the held-out loss is 5.00, 4.66, 4.56 with Muon, and 4.99, 4.73, 4.76 with AdamW; Muon passes AdamW's
best in a run of 600 steps (4.72). So the best learning rate is not quite the same, and a larger one is worth a try.

Limits: whole matrices, so neither ZeRO 2 or 3 nor tensor parallelism; no adapters, no states in host memory, no FP32
master weights, no CUDA graph (``refusals.py``).
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

MUON = "muon"
"""The key of a parameter group that is true where Muon updates it."""
MOMENTUM = 0.95
COEFFICIENTS = (3.4445, -4.7750, 2.0315)
"""Of X, X^3 and X^5 in a step of the iteration: the steepest slope at 0 that ends within about 0.3 of 1 (Jordan)."""
ITERATIONS = 5


def orthogonalised(matrix: Tensor, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """Return U f(S) V^T of a matrix (r, c) = U S V^T, in ``dtype``; f(S) is about 1.

    Newton-Schulz iteration: 5 steps X = a X + b (X X^T) X + c (X X^T)^2 X from the matrix over its Frobenius norm.
    Singular values above 1/500 of that norm come out between 0.68 and 1.21.
    """
    a, b, c = COEFFICIENTS
    x = (matrix / torch.linalg.matrix_norm(matrix).clamp(min=1e-30)).to(dtype)
    if wide := x.shape[0] > x.shape[1]:  # so that X X^T is the smaller of the two products
        x = x.mT
    for _ in range(ITERATIONS):
        squares = x @ x.mT
        x = torch.addmm(x, torch.addmm(squares, squares, squares, beta=b, alpha=c), x, beta=a)
    return x.mT if wide else x


def muon_groups(model: nn.Module, *, decay_vectors: bool) -> list[dict[str, Any]]:
    """Return three groups: the matrices of blocks for Muon; other matrices; norms and biases."""
    groups: tuple[list[Tensor], ...] = ([], [], [])
    for name, parameter in model.named_parameters():
        groups[2 if parameter.dim() < 2 else 0 if "layers" in name.split(".") else 1].append(parameter)
    blocks, others, vectors = groups
    undecayed: dict[str, Any] = {} if decay_vectors else {"weight_decay": 0.0}
    return [{"params": blocks, MUON: True}, {"params": others}, {"params": vectors} | undecayed]


class Muon(torch.optim.Optimizer):
    """Updates groups with ``muon`` by Muon, and leaves the others to the AdamW with which it is mixed.

    ``state`` of a matrix is ``step``, as AdamW counts it, and ``momentum_buffer``.
    """

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters; ValueError if Muon is to update one that is no matrix, or as AdamW raises it."""
        super().add_param_group(param_group)
        added = self.param_groups[-1]
        for parameter in added["params"] if added.get(MUON) else ():
            if parameter.dim() != 2:
                del self.param_groups[-1]
                raise ValueError(f"Muon updates matrices, got a parameter of shape {tuple(parameter.shape)}")

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None, *, grad_scale: Tensor | None = None) -> Any:
        """Update every parameter that has a gradient; returns the closure's loss if one is given.

        Args:
            grad_scale: as ``FusedAdamW.step``; where it is not finite, nothing is updated and no step is counted.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        every, taken = self.param_groups, None if grad_scale is None else grad_scale.isfinite()
        matrices = [group for group in every if group.get(MUON)]
        self._make_states([p for group in matrices for p in group["params"] if p.grad is not None])
        for group in matrices:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update_matrix(parameter, parameter.grad, group, grad_scale, taken)
        self.param_groups = [group for group in every if not group.get(MUON)]
        try:
            self._step_others(grad_scale)
        finally:
            self.param_groups = every
        return loss

    def _update_matrix(
        self, parameter: Tensor, gradient: Tensor, group: dict[str, Any], scale: Tensor | None, taken: Tensor | None
    ) -> None:
        state, wide = self.state[parameter], torch.promote_types(parameter.dtype, torch.float32)
        before, momentum = parameter.to(wide), state["momentum_buffer"].to(wide)
        gradient = gradient.to(wide) if scale is None else gradient.to(wide) * scale
        mean = torch.add(gradient, momentum, alpha=MOMENTUM)
        update = orthogonalised(torch.add(gradient, mean, alpha=MOMENTUM)).to(wide)
        rate = group["lr"] * 0.2 * max(parameter.shape) ** 0.5
        after = torch.add(before * (1 - group["lr"] * group["weight_decay"]), update, alpha=-rate)
        if taken is not None:
            after, mean = torch.where(taken, after, before), torch.where(taken, mean, momentum)
        self._store(parameter, group, [(parameter, after), (state["momentum_buffer"], mean)])
        state["step"] += 1 if taken is None else taken

    def _make_states(self, parameters: Sequence[Tensor]) -> None:
        """Make the states that are not there yet."""
        raise NotImplementedError

    def _step_others(self, scale: Tensor | None) -> None:
        """Step AdamW over the groups that are there now."""
        raise NotImplementedError

    def _store(self, parameter: Tensor, group: dict[str, Any], values: Sequence[tuple[Tensor, Tensor]]) -> None:
        """Copy values to where they are kept, the matrix and its moment, rounded to the dtype there."""
        for place, value in values:
            place.copy_(value)


class TorchMuon(Muon, torch.optim.AdamW):
    """Muon for matrices, and for the rest torch's AdamW, which is given ``fused=True``."""

    def step(self, closure: Callable[[], float] | None = None, *, grad_scale: Tensor | None = None) -> Any:
        """As ``Muon.step``; by default with the scale that ``GradientGuard`` leaves for torch's AdamW."""
        inverse: Tensor | None = getattr(self, "grad_scale", None)
        return super().step(closure, grad_scale=grad_scale if inverse is None else inverse.reciprocal())

    def _make_states(self, parameters: Sequence[Tensor]) -> None:
        for parameter in parameters:
            if not self.state[parameter]:
                step = torch.zeros((), dtype=torch.float32, device=parameter.device)
                self.state[parameter] = {"step": step, "momentum_buffer": torch.zeros_like(parameter)}

    def _step_others(self, scale: Tensor | None) -> None:
        torch.optim.AdamW.step(self)  # which reads the scale where the guard left it
