"""Forward and backward of blocks: time, what is kept between them, the peak, and errors against fp64 at a short length.

Ways take turns in one process, on the same weights, input and arriving gradient. Backward computes the gradients of the
input and of every weight into new memory. *Kept* is the growth of allocated memory over forward, by block: the output
is there then, in place of which the input counts, as the output of one block is the input of the next.
"""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from cs336_systems.attention.dispatch import attention_op, unsupported_reason
from cs336_systems.blocks import block_ops, write_out
from cs336_systems.case import Unsupported
from cs336_systems.config import PRECISIONS
from cs336_systems.costs.flops import forward_flops
from cs336_systems.costs.kept import bytes_kept
from cs336_systems.experiments.blocks.cells import REFERENCE_BLOCKS, BlockCell
from cs336_systems.hardware import GIB
from cs336_systems.harness.clock import WHOLE, time_phases
from cs336_systems.harness.memory import PeakMeter, allocated_bytes
from cs336_systems.harness.record import Metric
from cs336_systems.model import REFERENCE_OPS, TransformerBlock, TransformerLM
from cs336_systems.training.precision import parameter_dtype

COMPARED_TOKENS = 512
"""Of one sequence, at most, whose results are compared with those in fp64."""

Block = Callable[[Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Bench:
    """What all ways at one shape share."""

    model: TransformerLM
    reference: Sequence[nn.Module]
    compiled: Sequence[Block]
    x: Tensor
    dy: Tensor
    exact: dict[str, Tensor]
    """In fp64, of the first block on the first tokens: output and gradients, on the host, out of a peak's way."""

    def blocks(self, cell: BlockCell) -> Sequence[Block]:
        """The way's blocks, all with the same weights."""
        if cell.how in REFERENCE_BLOCKS:
            return self.compiled if cell.how == "compiled" else self.reference
        # Plain PyTorch's operations beside reference attention, else the fused kernels.
        kernels = "reference" if cell.attention == "reference" else "fused"
        write_out(self.model, block_ops(kernels, cell.attention), cell.how)
        return list(self.model.layers)


@functools.lru_cache(maxsize=1)
def bench(shape: BlockCell) -> Bench:
    """Weights, data and compiled blocks, made once for all turns at a shape."""
    device, dtype = torch.device(shape.device), parameter_dtype(PRECISIONS[shape.dtype])
    torch.manual_seed(shape.seed)
    ops = REFERENCE_OPS
    if shape.attention != "reference":
        ops = replace(ops, attention=attention_op(shape.attention))
    # Of a model all but its blocks is of no use here, and kept small.
    config = replace(shape.config, n_layers=shape.layers, vocab_size=1)
    model = TransformerLM(config, ops, device=device, dtype=dtype)
    reference = list(model.layers)
    compiled = [torch.compile(block, fullgraph=True, dynamic=False) for block in reference]
    size = (shape.batch_size, shape.context_length, config.d_model)
    x, dy = (torch.randn(size, device=device, dtype=dtype) for _ in range(2))
    exact = TransformerBlock(config, REFERENCE_OPS, device=device, dtype=torch.float64)
    exact.load_state_dict(reference[0].state_dict())
    found = {name: tensor.cpu() for name, tensor in short_results(exact, exact, model, x, dy).items()}
    return Bench(model, reference, compiled, x.requires_grad_(), dy, found)


def measure(cell: BlockCell) -> list[Metric]:
    """Errors, time and memory of one way.

    Raises:
        Unsupported: the device has no such attention.
    """
    device = torch.device(cell.device)
    _check_attention(cell, device)
    shared = bench(cell.shape)
    model, x, dy = shared.model, shared.x, shared.dy
    blocks = shared.blocks(cell)
    metrics = errors(short_results(blocks[0], shared.reference[0], model, x, dy), shared.exact)
    cos, sin = model.rotary(cell.context_length)
    leaves = [x, *(parameter for block in shared.reference for parameter in block.parameters())]
    out: list[Tensor] = []

    def forward() -> None:
        y = x
        for block in blocks:
            y = block(y, cos, sin)
        out.append(y)

    def backward() -> None:
        torch.autograd.grad(out.pop(), leaves, dy)

    times = time_phases({"forward": forward, "backward": backward}, device=device, warmup=cell.warmup, steps=cell.steps)
    metrics += [Metric(name, "ms", samples) for name, samples in times.samples_ms.items()]
    rates = [step_flops(cell) / ms / 1e9 for ms in times.samples_ms[WHOLE]]
    metrics.append(Metric("model_tflops", "TFLOP/s", rates, derived=True))
    if device.type == "cuda":
        meter, before = PeakMeter(device), allocated_bytes(device)
        forward()
        kept = allocated_bytes(device) - before
        backward()
        metrics.append(Metric("kept", "GiB", [kept / cell.layers / GIB]))
        metrics.append(Metric("peak", "GiB", [(meter.peak_bytes() or 0) / GIB]))
    if cell.how not in REFERENCE_BLOCKS:
        shape = (cell.config, cell.batch_size, cell.context_length, PRECISIONS[cell.dtype])
        metrics.append(Metric("kept_predicted", "GiB", [bytes_kept(*shape, cell.how) / GIB]))
    return metrics


def step_flops(cell: BlockCell) -> int:
    """Model FLOPs of forward and backward of the blocks; causal attention is half of the score matrix."""
    config = replace(cell.config, n_layers=cell.layers)
    forward = forward_flops(config, cell.batch_size, cell.context_length)
    return 3 * (forward.total - forward.head)


def short_results(block: Block, owner: nn.Module, model: TransformerLM, x: Tensor, dy: Tensor) -> dict[str, Tensor]:
    """Output, and gradients by name, of one block on the first tokens of the first sequence.

    Args:
        owner: the module whose parameters the block multiplies with, in their dtype.
    """
    parameters = dict(owner.named_parameters())
    dtype = next(iter(parameters.values())).dtype
    x, dy = (tensor.detach()[:1, :COMPARED_TOKENS].to(dtype).contiguous() for tensor in (x, dy))
    y = block(x.requires_grad_(), *model.rotary(x.shape[1]))
    gradients = torch.autograd.grad(y, [x, *parameters.values()], dy)
    return {"out": y.detach(), **dict(zip(("dx", *parameters), gradients, strict=True))}


def errors(got: dict[str, Tensor], exact: dict[str, Tensor]) -> list[Metric]:
    """Relative Frobenius errors of the output, of its input's gradient, and of the worst gradient of a weight."""
    found = {}
    for name, want in exact.items():
        want = want.to(got[name].device)
        found[name] = ((got[name].double() - want).norm() / want.norm()).item()
    out, dx = found.pop("out"), found.pop("dx")
    said = {"error_out": out, "error_dx": dx, "error_dweight": max(found.values())}
    return [Metric(name, "relative", [value]) for name, value in said.items()]


def _check_attention(cell: BlockCell, device: torch.device) -> None:
    config, dtype = cell.config, parameter_dtype(PRECISIONS[cell.dtype])
    q, k, v = (
        torch.empty(1, heads, cell.context_length, config.d_head, device=device, dtype=dtype, requires_grad=True)
        for heads in (config.n_heads, config.kv_heads, config.kv_heads)
    )
    if reason := unsupported_reason(cell.attention, q, k, v, causal=True):
        raise Unsupported(f"attention {cell.attention}: {reason}")
