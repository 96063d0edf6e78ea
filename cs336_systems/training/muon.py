"""Muon for the matrices of blocks, and AdamW for the embedding, the head, norms and biases.

Each matrix W of r rows and c columns, with gradient G, has one moment M (Jordan et al. 2024,
https://kellerjordan.github.io/posts/muon; decay and scale are those of Liu et al. 2025, "Muon is Scalable for LLM
Training", arXiv 2502.16982):

    M = 0.95 M + G
    O = orthogonalised(G + 0.95 M)                                       Nesterov's momentum
    W = (1 - lr weight_decay) W - lr 0.2 sqrt(max(r, c)) O

O has singular values near 1, so the root mean square of its elements is about 1 / sqrt(max(r, c)), and that of the
update 0.2 lr: about that of AdamW's, so that a learning rate and weight decay that serve AdamW serve Muon as well.

q, k and v are orthogonalised separately, and so are gate and up, although blocks multiply each group as one matrix:
they are separate maps, and if their rows were orthogonalised together, the update of one would depend on the others'
gradients. They are separate parameters already (``blocks/weights.py``), so nothing has to be split.

All other parameters use torch's fused AdamW on a CPU and this suite's on a GPU (``fused_muon.py``). The matmuls of the
iteration are in bf16; everything else is computed in fp32.

Measured on a CPU (train.py's size tiny on the standard library, fp32, one seed; learning rates 0.003, 0.01, 0.02):
after 800 steps the held-out loss is 5.00, 4.66, 4.56 with Muon, and 4.99, 4.73, 4.76 with AdamW; Muon passes AdamW's
best in a run of 600 steps (4.72). So the best learning rate is not quite the same, and a larger one is worth a try.
A model of 100M parameters on an H100: profiles/h200.md.

Ranks divide the work. Under ZeRO 1 and 2 each matrix has a rank that updates it. Under FSDP each rank has some rows of
every matrix and of its moment: for as many matrices at a time as there are ranks, G + 0.95 M is sent in fp32 so that
each rank has one matrix whole, and O is sent back in bf16 (``RowsOfRanks``; like "Distributed Muon" of Liu et al.,
section 2.3, except that there every rank gathers all matrices).

Limits: no tensor parallelism, no adapters, no states in host memory, no FP32 master weights, no CUDA graph
(``refusals.py``).
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from cs336_systems.training.optimizer import loss_of

MUON = "muon"
"""The key of a parameter group that is true if Muon updates the group."""
MOMENTUM = 0.95
COEFFICIENTS = (3.4445, -4.7750, 2.0315)
"""Factors of X, X^3 and X^5 in an iteration: the steepest slope at 0 that ends within about 0.3 of 1 (Jordan)."""
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


class WholeMatrices:
    """Matrices of which this rank has all rows."""

    def shape(self, matrix: Tensor) -> torch.Size:
        return matrix.shape

    def together(self, matrices: Sequence[Tensor]) -> Iterator[Sequence[Tensor]]:
        """The matrices in turns, of which those of one turn are orthogonalised together."""
        return ([matrix] for matrix in matrices)

    def orthogonalised(self, matrices: Sequence[Tensor], values: Sequence[Tensor]) -> list[Tensor]:
        """``orthogonalised`` of the values of a turn's matrices."""
        return [orthogonalised(value) for value in values]


class RowsOfRanks(WholeMatrices):
    """Matrices of which each rank of a group has the rows that ``torch.chunk`` would give it, as under FSDP.

    Args:
        shapes: of the whole matrices, by the tensors of this rank's rows.
    """

    def __init__(self, shapes: Mapping[Tensor, torch.Size], group: dist.ProcessGroup) -> None:
        self._shapes, self._group = shapes, group
        self._rank, self._n_ranks = dist.get_rank(group), dist.get_world_size(group)

    def shape(self, matrix: Tensor) -> torch.Size:
        return self._shapes[matrix]

    def together(self, matrices: Sequence[Tensor]) -> Iterator[Sequence[Tensor]]:
        """Groups of as many matrices as there are ranks, of similar size."""
        ordered, n = sorted(matrices, key=lambda matrix: self.shape(matrix).numel()), self._n_ranks
        return (ordered[i : i + n] for i in range(0, len(ordered), n))

    def orthogonalised(self, matrices: Sequence[Tensor], values: Sequence[Tensor]) -> list[Tensor]:
        """Rows of ``orthogonalised`` of whole matrices, the r-th of which rank r computes; a collective."""
        parts, own = [value.numel() for value in values], [0] * self._n_ranks
        parts += [0] * (self._n_ranks - len(parts))
        if mine := self._rank < len(matrices):
            n_rows, n_columns = self.shape(matrices[self._rank])
            most = -(-n_rows // self._n_ranks)
            own = [n_columns * min(most, max(0, n_rows - most * rank)) for rank in range(self._n_ranks)]
        sent = torch.cat([value.flatten() for value in values])
        whole = sent.new_empty(sum(own))
        dist.all_to_all_single(whole, sent, own, parts, group=self._group)
        found = torch.empty(0, dtype=torch.bfloat16, device=sent.device)
        if mine:
            found = orthogonalised(whole.view(n_rows, n_columns)).flatten()
        rows = found.new_empty(len(sent))
        dist.all_to_all_single(rows, found, parts, own, group=self._group)
        pieces = rows.split(parts[: len(values)])
        return [piece.view(value.shape) for piece, value in zip(pieces, values, strict=True)]


class Muon(torch.optim.Optimizer):
    """Updates groups with ``muon`` by Muon, and the others by the AdamW class with which it is combined.

    ``state`` of a matrix is ``step``, as AdamW counts it, and ``momentum_buffer``.
    """

    WHOLE: ClassVar[str] = MUON
    """The key of groups whose parameters ``ShardedOptimizer`` does not cut."""

    matrices = WholeMatrices()
    """The layout of matrices of which this rank's tensors are parts."""

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
        loss = loss_of(closure)
        every, taken = self.param_groups, None if grad_scale is None else grad_scale.isfinite()
        matrices = [group for group in every if group.get(MUON)]
        self._make_states([p for group in matrices for p in group["params"] if p.grad is not None])
        for group in matrices:
            for some in self.matrices.together([p for p in group["params"] if p.grad is not None]):
                self._update_matrices(some, group, grad_scale, taken)
        self.param_groups = [group for group in every if not group.get(MUON)]
        try:
            self._step_others(grad_scale)
        finally:
            self.param_groups = every
        return loss

    def _update_matrices(
        self, some: Sequence[Tensor], group: dict[str, Any], scale: Tensor | None, taken: Tensor | None
    ) -> None:
        means, mixed = [], []
        for parameter in some:
            assert parameter.grad is not None
            wide = torch.promote_types(parameter.dtype, torch.float32)
            gradient = parameter.grad.detach().to(wide) if scale is None else parameter.grad.detach().to(wide) * scale
            means.append(torch.add(gradient, self.state[parameter]["momentum_buffer"].to(wide), alpha=MOMENTUM))
            mixed.append(torch.add(gradient, means[-1], alpha=MOMENTUM))
        for parameter, mean, update in zip(some, means, self.matrices.orthogonalised(some, mixed), strict=True):
            state, before = self.state[parameter], parameter.to(mean.dtype)
            momentum = state["momentum_buffer"]
            rate = group["lr"] * 0.2 * max(self.matrices.shape(parameter)) ** 0.5
            after = torch.add(before * (1 - group["lr"] * group["weight_decay"]), update.to(mean.dtype), alpha=-rate)
            if taken is not None:
                after, mean = torch.where(taken, after, before), torch.where(taken, mean, momentum.to(mean.dtype))
            self._store(parameter, group, [(parameter, after), (momentum, mean)])
            state["step"] += 1 if taken is None else taken

    def _make_states(self, parameters: Sequence[Tensor]) -> None:
        """Allocate missing states."""
        raise NotImplementedError

    def _step_others(self, scale: Tensor | None) -> None:
        """Step AdamW over the present groups."""
        raise NotImplementedError

    def _store(self, parameter: Tensor, group: dict[str, Any], values: Sequence[tuple[Tensor, Tensor]]) -> None:
        """Copy values into the matrix and its moment, rounded to their dtypes."""
        for place, value in values:
            place.copy_(value)


class TorchMuon(Muon, torch.optim.AdamW):
    """Muon for matrices, and torch's AdamW with ``fused=True`` for all other parameters."""

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
