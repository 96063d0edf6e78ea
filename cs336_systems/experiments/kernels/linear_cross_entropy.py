"""Loss and gradients of a head over a vocabulary, against PyTorch's products, softmax and its gradient.

Eager has the logits of all tokens at once, as a head and a loss apart from each other have; compiled goes in chunks of
4,096 tokens, the faster of what PyTorch offers, and so does the reference in fp64.
"""

import functools
from collections.abc import Callable

import torch
from torch import Tensor

from cs336_systems.config import PRECISIONS
from cs336_systems.experiments.kernels import peers
from cs336_systems.experiments.kernels.cells import KernelCell
from cs336_systems.experiments.kernels.measure import Function, Subject
from cs336_systems.kernels.linear_cross_entropy import linear_cross_entropy_forward_backward
from cs336_systems.training.precision import parameter_dtype

VOCABULARY = {"cuda": 151_936, "cpu": 1000}
"""Of Qwen2.5, and small enough for a CPU."""
COMPILED_CHUNK = 4096
SMALL_CHUNK = 1024
"""As many tokens as Liger takes by default at 32,768 x 4096."""


def subject(cell: KernelCell, device: torch.device) -> Subject:
    """x (rows, width), normal, weight (vocabulary, width) for logits of unit variance, every eighth target ignored.

    Forward does everything: it reads x and weight and writes the gradients of both and lse (rows,). Its bound is not
    these bytes but 6 rows x width x vocabulary FLOPs. lse stands for the loss, as a scalar's error says little; others
    do not return it.
    """
    dtype = parameter_dtype(PRECISIONS[cell.dtype])
    n_words = VOCABULARY[device.type]
    x = torch.randn(cell.rows, cell.width, device=device, dtype=dtype)
    weight = torch.randn(n_words, cell.width, device=device, dtype=dtype).mul_(cell.width**-0.5)
    targets = torch.randint(n_words, (cell.rows,), device=device)
    targets[::8] = -100

    def ours(x: Tensor, weight: Tensor, chunk: int | None = None) -> tuple[Tensor, ...]:
        _, dx, dweight, lse = linear_cross_entropy_forward_backward(x, weight, targets, chunk=chunk)
        return dx, dweight, lse

    def reference(x: Tensor, weight: Tensor) -> tuple[Tensor, ...]:
        wide = torch.promote_types(x.dtype, torch.float32)
        chunk = cell.rows if cell.how == "eager" and x.dtype == dtype else COMPILED_CHUNK
        counts = (targets != -100).to(wide)
        scale = counts / counts.sum()
        all_lse, all_dx, dweight = [], [], torch.zeros_like(weight)
        for x_C, targets_C, scale_C in zip(x.split(chunk), targets.split(chunk), scale.split(chunk), strict=True):
            logits = (x_C @ weight.T).to(wide)
            lse = logits.logsumexp(-1, keepdim=True)
            one_hot = torch.arange(n_words, device=device) == targets_C[:, None]
            dlogits = (((logits - lse).exp() - one_hot.to(wide)) * scale_C[:, None]).to(x.dtype)
            all_lse.append(lse.squeeze(-1))
            all_dx.append(dlogits @ weight)
            dweight = torch.addmm(dweight, dlogits.T, x_C)
        return torch.cat(all_dx), dweight, torch.cat(all_lse)

    lse_bytes = cell.rows * torch.float32.itemsize
    others: dict[str, Callable[[], Function]] = {
        "ours-small-chunks": lambda: functools.partial(ours, chunk=SMALL_CHUNK),
        "liger": functools.partial(peers.liger_linear_cross_entropy, targets, 1),
        "liger-large-chunks": functools.partial(peers.liger_linear_cross_entropy, targets, 4),
        "cut-cross-entropy": functools.partial(peers.cut_cross_entropy, targets, filtered=False),
        "cut-cross-entropy-filtered": functools.partial(peers.cut_cross_entropy, targets, filtered=True),
    }
    n_bytes = 2 * (x.nbytes + weight.nbytes) + lse_bytes
    return Subject({"x": x, "weight": weight}, ours, reference, n_bytes, peers=others)
