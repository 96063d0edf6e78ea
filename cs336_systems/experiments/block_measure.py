"""Forward and backward of blocks and of their matmuls: time, what is kept between them, the peak, and errors.

Ways are interleaved in one process, on the same weights, input and arriving gradient. Backward computes the gradients
of the input and of every weight into new memory. *Kept* is the growth of allocated memory over forward, by block: the
output is there then, in place of which the input counts, as the output of one block is the input of the next. Results
on a short sequence are compared with those in fp64; of blocks in fp8, the directions of gradients with those in fp32.

Weights of this suite's matmuls in fp8 are quantized before (once a step in training), activations and gradients inside
the clock, each in a phase of its own. A block's operations find the largest magnitudes of what they write, as in
training; a matmul by itself reads its tensors for that. Torchao's float8 replaces the linear layers of the reference
block, which is then compiled, as its documentation says; gradients are compared before that, as another shape would be
compiled a second time, half a minute each.
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
from cs336_systems.blocks.products import Products
from cs336_systems.case import Unsupported
from cs336_systems.config import PRECISIONS, Recipe
from cs336_systems.costs.flops import forward_flops
from cs336_systems.costs.kept import bytes_kept
from cs336_systems.experiments.blocks import REFERENCE_BLOCKS, BlockCell
from cs336_systems.experiments.fp8 import Fp8Cell, product_shape
from cs336_systems.experiments.kernel_measure import installed
from cs336_systems.hardware import GIB
from cs336_systems.harness.clock import WHOLE, time_phases
from cs336_systems.harness.memory import PeakMeter, allocated_bytes
from cs336_systems.harness.record import Metric
from cs336_systems.model import REFERENCE_OPS, TransformerBlock, TransformerLM
from cs336_systems.model.layers import Linear
from cs336_systems.training.precision import parameter_dtype, recipe_unsupported_reason

COMPARED_TOKENS = 512
"""The most tokens of one sequence whose results are compared with exact ones."""

Block = Callable[[Tensor, Tensor, Tensor], Tensor]
Phases = dict[str, Callable[[], None]]


@dataclass(frozen=True)
class Bench:
    """The weights and data that all ways at one shape share."""

    model: TransformerLM
    reference: Sequence[nn.Module]
    x: Tensor
    dy: Tensor
    exact: dict[str, Tensor]
    """Results of the first block on the first tokens in a wide dtype, on the host, where they add to no peak."""
    compiled: Sequence[Block] = ()


@functools.lru_cache(maxsize=1)
def bench(shape: BlockCell | Fp8Cell) -> Bench:
    """Weights, data and exact results, made once for all turns at a shape: in fp64, or in fp32 for the shape of fp8."""
    device, dtype = torch.device(shape.device), parameter_dtype(PRECISIONS[shape.dtype])
    torch.manual_seed(shape.seed)
    ops = REFERENCE_OPS
    if shape.attention != "reference":
        ops = replace(ops, attention=attention_op(shape.attention))
    # Of a model all but its blocks is of no use here, and kept small.
    blocks = isinstance(shape, BlockCell)
    config = replace(shape.config, n_layers=shape.layers if isinstance(shape, BlockCell) else 1, vocab_size=1)
    model = TransformerLM(config, ops, device=device, dtype=dtype)
    reference = list(model.layers)
    compiled = [torch.compile(block, fullgraph=True, dynamic=False) for block in reference] if blocks else []
    size = (shape.batch_size, shape.context_length, config.d_model)
    x, dy = (torch.randn(size, device=device, dtype=dtype) for _ in range(2))
    exact = TransformerBlock(config, REFERENCE_OPS, device=device, dtype=torch.float64 if blocks else torch.float32)
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


def kernels_beside(attention: str) -> str:
    """Plain PyTorch's operations beside reference attention, else the fused kernels."""
    return "reference" if attention == "reference" else "fused"


def _run(
    shared: Bench, blocks: Sequence[Block], owners: Sequence[nn.Module], cell: BlockCell | Fp8Cell, n_layers: int
) -> list[Metric]:
    """Times, memory on a GPU, and the model TFLOP/s of forward and backward; causal attention is half of the scores."""
    device = shared.x.device
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

    times = time_phases({"forward": forward, "backward": backward}, device=device, warmup=cell.warmup, steps=cell.steps)
    metrics = [Metric(name, "ms", samples) for name, samples in times.samples_ms.items()]
    memory = []
    if device.type == "cuda":
        meter, before = PeakMeter(device), allocated_bytes(device)
        forward()
        kept = allocated_bytes(device) - before
        backward()
        memory.append(Metric("kept", "GiB", [kept / n_layers / GIB]))
        memory.append(Metric("peak", "GiB", [(meter.peak_bytes() or 0) / GIB]))
    flops = forward_flops(replace(cell.config, n_layers=n_layers), cell.batch_size, cell.context_length)
    rate = "model_tflops" if isinstance(cell, BlockCell) else "tflops"
    return [*metrics, _rate(rate, 3 * (flops.total - flops.head), times.samples_ms[WHOLE]), *memory]


def _rate(name: str, flops: float, samples_ms: Sequence[float]) -> Metric:
    return Metric(name, "TFLOP/s", [flops / ms / 1e9 for ms in samples_ms], derived=True)


def measure_block(cell: BlockCell) -> list[Metric]:
    """Errors, time and memory of one way.

    Raises:
        Unsupported: the device has no such attention.
    """
    _check_attention(cell)
    shared = bench(cell.shape)
    if cell.how in REFERENCE_BLOCKS:
        blocks: Sequence[Block] = shared.compiled if cell.how == "compiled" else shared.reference
    else:
        write_out(shared.model, block_ops(kernels_beside(cell.attention), cell.attention), cell.how)
        blocks = list(shared.model.layers)
    metrics = errors(short_results(blocks[0], shared.reference[0], shared.model, shared.x, shared.dy), shared.exact)
    metrics += _run(shared, blocks, shared.reference, cell, cell.layers)
    if cell.how not in REFERENCE_BLOCKS:
        shape = (cell.config, cell.batch_size, cell.context_length, PRECISIONS[cell.dtype])
        metrics.append(Metric("kept_predicted", "GiB", [bytes_kept(*shape, cell.how) / GIB]))
    return metrics


def errors(got: dict[str, Tensor], exact: dict[str, Tensor]) -> list[Metric]:
    """Relative Frobenius errors of the output, of its input's gradient, and of the worst gradient of a weight."""
    found = {}
    for name, want in exact.items():
        want = want.to(got[name].device)
        found[name] = ((got[name].double() - want).norm() / want.norm()).item()
    out, dx = found.pop("out"), found.pop("dx")
    said = {"error_out": out, "error_dx": dx, "error_dweight": max(found.values())}
    return [Metric(name, "relative", [value]) for name, value in said.items()]


def _check_attention(cell: BlockCell) -> None:
    config, dtype, device = cell.config, parameter_dtype(PRECISIONS[cell.dtype]), torch.device(cell.device)
    q, k, v = (
        torch.empty(1, heads, cell.context_length, config.d_head, device=device, dtype=dtype, requires_grad=True)
        for heads in (config.n_heads, config.kv_heads, config.kv_heads)
    )
    if reason := unsupported_reason(cell.attention, q, k, v, causal=True):
        raise Unsupported(f"attention {cell.attention}: {reason}")


def measure_fp8(cell: Fp8Cell) -> list[Metric]:
    """Time and rate of one matmul or block, and the cosines of a block's gradients.

    Raises:
        Unsupported: the device has no fp8, or torchao is not there.
    """
    device = torch.device(cell.device)
    recipe = cell.recipe or Recipe("same" if cell.how == "compiled" else "e4m3")
    if reason := recipe_unsupported_reason(recipe, PRECISIONS[cell.dtype], device):
        raise Unsupported(reason)
    torch.manual_seed(cell.seed)
    return _measure_product(cell, device) if cell.part == "product" else _measure_fp8_block(cell)


def _measure_product(cell: Fp8Cell, device: torch.device) -> list[Metric]:
    n, k = product_shape(cell.config, cell.product)
    dtype = parameter_dtype(PRECISIONS[cell.dtype])
    shapes = (cell.tokens, k), (cell.tokens, n), (n, k)
    x, dy, weight = (torch.randn(shape, device=device, dtype=dtype) for shape in shapes)
    later: Phases = {}
    if cell.recipe is None:
        phases = _torch_product(cell, x, dy, weight)
    else:
        phases, later = _our_product(cell, x, dy, weight)
    times = time_phases(phases, device=device, warmup=cell.warmup, steps=cell.steps)
    metrics = [Metric(name, "ms", samples) for name, samples in times.samples_ms.items()]
    for name, phase in later.items():
        times_alone = time_phases({name: phase}, device=device, warmup=cell.warmup, steps=cell.steps)
        metrics.append(Metric(name, "ms", times_alone.samples_ms[name]))
    flops = 3 * 2 * cell.tokens * n * k
    metrics.append(_rate("tflops", flops, times.samples_ms[WHOLE]))
    if cell.recipe is not None:
        alone = [sum(ms) for ms in zip(times.samples_ms["forward"], times.samples_ms["backward"], strict=True)]
        metrics.append(replace(_rate("product_tflops", flops, alone), derived=False))  # of a sum of times
    return metrics


def _our_product(cell: Fp8Cell, x: Tensor, dy: Tensor, weight: Tensor) -> tuple[Phases, Phases]:
    """The phases of forward and backward; and of the weight's gradient, fresh and added to one, each timed alone."""
    recipe = cell.recipe
    assert recipe is not None
    ops, products = block_ops(kernels_beside(cell.attention), cell.attention), _products(cell)
    held = products.read_weight(cell.product, weight, rows=True, columns=True)
    y, dweight = torch.empty_like(dy), torch.empty_like(weight)
    read: dict[str, Any] = {}

    def quantize_x() -> None:
        read["x"] = products.read(x, products.maxima(x).of("normed1", x))

    def forward() -> None:
        products.forward_(ops, y, read["x"].rows, held.rows)

    def quantize_dy() -> None:
        read["dy"] = products.read_gradient(dy, products.gradient_maxima(dy).of("dy", dy))

    def backward() -> None:
        products.backward(ops, read["dy"].rows, held.columns)
        products.backward_weight_(ops, dweight, read["dy"].columns, read["x"].columns, False)

    def gradient_of_weight(accumulate: bool) -> None:
        products.backward_weight_(ops, dweight, read["dy"].columns, read["x"].columns, accumulate)

    phases = {"quantize_x": quantize_x, "forward": forward, "quantize_dy": quantize_dy, "backward": backward}
    alone: Phases = {
        "weight_gradient": functools.partial(gradient_of_weight, False),
        "accumulate": functools.partial(gradient_of_weight, True),
    }
    return phases, alone


def _torch_product(cell: Fp8Cell, x: Tensor, dy: Tensor, weight: Tensor) -> Phases:
    linear = nn.Linear(weight.shape[1], weight.shape[0], bias=False, device=x.device, dtype=x.dtype)
    linear.weight.data = weight
    wrapped = _float8(nn.Sequential(linear), cell.how)
    torch.compiler.reset()
    compiled = torch.compile(wrapped, fullgraph=True, dynamic=False)
    leaves, out = (x.requires_grad_(), linear.weight), []

    def forward() -> None:
        out.append(compiled(x))

    def backward() -> None:
        torch.autograd.grad(out.pop(), leaves, dy)

    return {"forward": forward, "backward": backward}


def _float8(module: nn.Module, how: str) -> nn.Module:
    """The module with torchao's linear layers, if the way is one of its."""
    return module if how == "compiled" else with_float8(module, how.removeprefix("torchao-"))


def _products(cell: Fp8Cell, *, remember: bool = False) -> Products:
    assert cell.recipe is not None
    return block_products(kernels_beside(cell.attention), cell.recipe, remember=remember)


def _measure_fp8_block(cell: Fp8Cell) -> list[Metric]:
    shared = bench(cell.shape)
    block, owner = _fp8_block(cell, shared)
    gradients = short_results(owner, owner, shared.model, shared.x, shared.dy)
    cosines = {}
    for name, got in gradients.items():
        if name != "out":
            exact = shared.exact[name].to(got.device)
            cosine = nn.functional.cosine_similarity(got.double().flatten(), exact.double().flatten(), 0)
            cosines["x" if name == "dx" else name] = cosine.item()
    metrics = [Metric(f"cosine {name}", "cosine", [value]) for name, value in cosines.items()]
    metrics.append(Metric("least_cosine", "cosine", [min(cosines.values())]))
    metrics.append(Metric("mean_cosine", "cosine", [sum(cosines.values()) / len(cosines)]))
    return metrics + _run(shared, [block], [owner], cell, 1)


def _fp8_block(cell: Fp8Cell, shared: Bench) -> tuple[Block, nn.Module]:
    """The way's block, and the module that it is, or was before it was compiled."""
    if cell.recipe is not None:
        ops = block_ops(kernels_beside(cell.attention), cell.attention)
        write_out(shared.model, ops, cell.keep, _products(cell, remember=True))
        return shared.model.layers[0], shared.model.layers[0]
    with_layers = _float8(_with_torch_linears(shared.reference[0]), cell.how)
    torch.compiler.reset()
    return torch.compile(with_layers, fullgraph=True, dynamic=False), with_layers


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
