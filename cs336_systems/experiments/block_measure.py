"""Forward and backward of blocks: time, what is kept between them, the peak, and errors.

Ways are interleaved in one process, on the same weights, input and output gradient. Backward computes the gradients of
the input and of every weight into new memory. *Kept* is the growth of allocated memory during forward, per block. It
includes the output instead of the input, since one block's output is the next one's input. Results on a short sequence
are compared with fp64; for blocks in fp8, the directions of gradients are compared with fp32.

Weights of this suite's matmuls in fp8 are quantized before the clock (once a step in training), activations and
gradients inside it. Torchao's float8 replaces the linear layers of the reference block, which is then compiled, as its
documentation says; gradients are compared before that, as another shape would be compiled a second time, half a minute
each.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from cs336_systems.attention.dispatch import attention_op, unsupported_reason
from cs336_systems.blocks import block_ops, block_products, write_out
from cs336_systems.case import Unsupported
from cs336_systems.config import PRECISIONS, Recipe
from cs336_systems.costs.flops import forward_flops
from cs336_systems.costs.kept import bytes_kept
from cs336_systems.experiments.blocks import REFERENCE_BLOCKS, BlockCell
from cs336_systems.experiments.fp8 import Fp8Cell
from cs336_systems.experiments.peers import error_metric, installed, relative_error
from cs336_systems.harness.clock import WHOLE, in_gib, rate, time_phases
from cs336_systems.harness.memory import PeakMeter, allocated_bytes
from cs336_systems.harness.record import Metric
from cs336_systems.model import REFERENCE_OPS, TransformerBlock, TransformerLM
from cs336_systems.model.layers import Linear
from cs336_systems.training.precision import parameter_dtype, recipe_unsupported_reason

COMPARED_TOKENS = 512
"""The most tokens of one sequence whose results are compared with exact ones."""

Block = Callable[[Tensor, Tensor, Tensor], Tensor]
"""(x, cos, sin) -> y."""
Shape = BlockCell | Fp8Cell


@dataclass(frozen=True)
class Bench:
    """The weights and data that all ways of one subject share."""

    model: TransformerLM
    reference: Sequence[nn.Module]
    x: Tensor
    dy: Tensor
    exact: dict[str, Tensor]
    """Results of the first block on the first tokens in a wide dtype, on the host, where they add to no peak."""
    compiled: Sequence[Block]


@functools.lru_cache(maxsize=1)
def bench(subject: Shape) -> Bench:
    """Weights, data and exact results, made once for all turns of a subject: in fp64, or in fp32 for fp8's."""
    device, dtype = torch.device(subject.device), parameter_dtype(PRECISIONS[subject.dtype])
    torch.manual_seed(subject.seed)
    ops = REFERENCE_OPS
    if subject.attention != "reference":
        ops = replace(ops, attention=attention_op(subject.attention))
    n_layers, wide = (subject.layers, torch.float64) if isinstance(subject, BlockCell) else (1, torch.float32)
    config = replace(subject.config, n_layers=n_layers, vocab_size=1)  # of the model only blocks are used
    model = TransformerLM(config, ops, device=device, dtype=dtype)
    reference = list(model.layers)
    compiled = [torch.compile(block, fullgraph=True, dynamic=False) for block in reference]
    size = (subject.batch_size, subject.context_length, config.d_model)
    x, dy = (torch.randn(size, device=device, dtype=dtype) for _ in range(2))
    exact = TransformerBlock(config, REFERENCE_OPS, device=device, dtype=wide)
    exact.load_state_dict(reference[0].state_dict())
    found = {name: tensor.cpu() for name, tensor in short_results(exact, exact, model, x, dy).items()}
    return Bench(model, reference, x.requires_grad_(), dy, found, compiled)


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


def _kernels(cell: Shape) -> str:
    """Plain PyTorch's operations beside reference attention, else the fused kernels."""
    return "reference" if cell.attention == "reference" else "fused"


def _run(shared: Bench, blocks: Sequence[Block], owners: Sequence[nn.Module], cell: Shape) -> list[Metric]:
    """Times, memory on a GPU, and the model TFLOP/s of forward and backward; causal attention is half of the scores."""
    device, n_layers = shared.x.device, len(blocks)
    out: list[Tensor] = []
    cos, sin = shared.model.rotary(cell.context_length)
    leaves = [shared.x, *(parameter for block in owners for parameter in block.parameters())]

    def forward() -> None:
        y = shared.x
        for block in blocks:
            y = block(y, cos, sin)
        out.append(y)

    def backward() -> None:
        torch.autograd.grad(out.pop(), leaves, shared.dy)

    flops = forward_flops(replace(cell.config, n_layers=n_layers), cell.batch_size, cell.context_length)
    tflops = "model_tflops" if isinstance(cell, BlockCell) else "tflops"
    phases = {"forward": forward, "backward": backward}
    times = time_phases(phases, device=device, warmup=cell.warmup, steps=cell.steps).samples_ms
    metrics = [Metric(name, "ms", samples) for name, samples in times.items()]
    metrics.append(rate(tflops, "TFLOP/s", 3 * (flops.total - flops.head) / 1e12, times[WHOLE]))
    if device.type == "cuda":
        meter, before = PeakMeter(device), allocated_bytes(device)
        forward()
        kept = allocated_bytes(device) - before
        backward()
        metrics += in_gib(kept=kept / n_layers, peak=meter.peak_bytes() or 0)
    return metrics


def measure_block(cell: BlockCell) -> list[Metric]:
    """Errors, time and memory of one way.

    Raises:
        Unsupported: the device has no such attention.
    """
    config, precision = cell.config, PRECISIONS[cell.dtype]
    make = functools.partial(torch.empty, device=cell.device, dtype=parameter_dtype(precision), requires_grad=True)
    heads = (config.n_heads, config.kv_heads, config.kv_heads)
    q, k, v = (make(1, n, cell.context_length, config.d_head) for n in heads)
    if reason := unsupported_reason(cell.attention, q, k, v, causal=True):
        raise Unsupported(f"attention {cell.attention}: {reason}")
    del q, k, v
    shared = bench(cell.subject)
    blocks: Sequence[Block] = shared.compiled if cell.how == "compiled" else shared.reference
    if cell.how not in REFERENCE_BLOCKS:
        write_out(shared.model, block_ops(_kernels(cell), cell.attention), cell.how)
        blocks = list(shared.model.layers)
    metrics = errors(short_results(blocks[0], shared.reference[0], shared.model, shared.x, shared.dy), shared.exact)
    metrics += _run(shared, blocks, shared.reference, cell)
    if cell.how not in REFERENCE_BLOCKS:
        metrics += in_gib(kept_predicted=bytes_kept(config, cell.batch_size, cell.context_length, precision, cell.how))
    return metrics


def errors(got: dict[str, Tensor], exact: dict[str, Tensor]) -> list[Metric]:
    """Relative errors of the output, of its input's gradient, and of the worst gradient of a weight."""
    found = {name: relative_error(got[name], want) for name, want in exact.items()}
    said = {"out": found.pop("out"), "dx": found.pop("dx"), "dweight": max(found.values())}
    return [error_metric(name, value) for name, value in said.items()]


def measure_fp8(cell: Fp8Cell) -> list[Metric]:
    """Time, rate and memory of one block, and the cosines of its gradients.

    Raises:
        Unsupported: the device has no fp8, or torchao is not there.
    """
    recipe = cell.recipe or Recipe("same" if cell.how == "compiled" else "e4m3")
    if reason := recipe_unsupported_reason(recipe, PRECISIONS[cell.dtype], torch.device(cell.device)):
        raise Unsupported(reason)
    shared = bench(cell.subject)
    if cell.recipe is not None:
        ops = block_ops(_kernels(cell), cell.attention)
        write_out(shared.model, ops, cell.keep, block_products(_kernels(cell), cell.recipe, remember=True))
        block = owner = shared.model.layers[0]
    else:
        block, owner = _compiled(_with_torch_linears(shared.reference[0]), cell.how)
    cosines = {}
    for name, got in short_results(owner, owner, shared.model, shared.x, shared.dy).items():
        if name != "out":
            exact = shared.exact[name].to(got.device)
            cosine = nn.functional.cosine_similarity(got.double().flatten(), exact.double().flatten(), 0)
            cosines["x" if name == "dx" else name] = cosine.item()
    said = {f"cosine {name}": value for name, value in cosines.items()}
    said |= {"least_cosine": min(cosines.values()), "mean_cosine": sum(cosines.values()) / len(cosines)}
    metrics = [Metric(name, "cosine", [value]) for name, value in said.items()]
    return metrics + _run(shared, [block], [owner], cell)


def _compiled(module: nn.Module, how: str) -> tuple[Any, nn.Module]:
    """The module compiled, with torchao's linear layers if the way is one of its, and as it was before compiling."""
    if how != "compiled":
        module = with_float8(module, how.removeprefix("torchao-"))
    torch.compiler.reset()
    return torch.compile(module, fullgraph=True, dynamic=False), module


def _with_torch_linears(block: nn.Module) -> nn.Module:
    """A copy whose linear layers are torch's, with the same values in the same order of parameters."""
    block = copy.deepcopy(block)
    for module in list(block.modules()):
        for name, child in list(module.named_children()):
            if isinstance(child, Linear):
                linear = nn.Linear(child.weight.shape[1], child.weight.shape[0], child.bias is not None, device="meta")
                linear.weight, linear.bias = child.weight, child.bias  # type: ignore[assignment]
                setattr(module, name, linear)
    return block


def with_float8(module: nn.Module, recipe: str) -> nn.Module:
    """The module with torchao's float8 layers, which hold the same parameters; those inside it are replaced in place.

    Its layers quantize activations, gradients and, in every pass, weights; they are meant to be compiled, which fuses
    that with what stands around. On a CPU they emulate matmuls, as ours do.

    Args:
        module: its dtype is bf16 on a GPU.
        recipe: tensorwise: one scale for a tensor, gradients in e5m2; rowwise: a scale for a row, all in e4m3.

    Raises:
        Unsupported: torchao is not installed.
    """
    float8 = installed("torchao.float8", "torchao")
    emulate = next(module.parameters()).device.type == "cpu"
    config = replace(float8.Float8LinearConfig.from_recipe_name(recipe), emulate=emulate)
    converted: nn.Module = float8.convert_to_float8_training(module, config=config)
    return converted
