"""Products and blocks in each way: time with and without quantization, and how far gradients turn from those of fp32.

Ways take turns in one process on the same weights and data. Of our quantized products the weights are quantized before
(once a step in training), activations and gradients inside the clock, each in a phase of its own. A block's operations
find the largest magnitudes of what they write, as in training; a product by itself reads its tensors for that.

Torchao's float8 replaces the linear layers of the reference block, which is then compiled, as its documentation says;
gradients are compared before that, as another shape would be compiled a second time, half a minute each.
"""

import copy
import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from cs336_systems.attention.dispatch import attention_op
from cs336_systems.blocks import block_ops, block_products, write_out
from cs336_systems.case import Unsupported
from cs336_systems.config import PRECISIONS, Recipe
from cs336_systems.costs.flops import forward_flops
from cs336_systems.experiments.fp8.cells import Fp8Cell, product_shape
from cs336_systems.experiments.fp8.torchao_layers import with_float8
from cs336_systems.hardware import GIB
from cs336_systems.harness.clock import WHOLE, time_phases
from cs336_systems.harness.memory import PeakMeter, allocated_bytes
from cs336_systems.harness.record import Metric
from cs336_systems.model import REFERENCE_OPS, TransformerBlock, TransformerLM
from cs336_systems.model.layers import Linear
from cs336_systems.training.precision import parameter_dtype, recipe_unsupported_reason

COMPARED_TOKENS = 512
"""Of one sequence, at most, on which gradients are compared with those of fp32."""

Phases = dict[str, Callable[[], None]]


def measure(cell: Fp8Cell) -> list[Metric]:
    """Time and rate of one cell, and of a block its gradients' cosines.

    Raises:
        Unsupported: the device has no fp8, or torchao is not there.
    """
    device = torch.device(cell.device)
    recipe = cell.recipe or Recipe("same" if cell.how == "compiled" else "e4m3")
    if reason := recipe_unsupported_reason(recipe, PRECISIONS[cell.dtype], device):
        raise Unsupported(reason)
    torch.manual_seed(cell.seed)
    return _measure_product(cell, device) if cell.part == "product" else _measure_block(cell, device)


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


def _rate(name: str, flops: float, samples_ms: Sequence[float]) -> Metric:
    return Metric(name, "TFLOP/s", [flops / ms / 1e9 for ms in samples_ms], derived=True)


def _our_product(cell: Fp8Cell, x: Tensor, dy: Tensor, weight: Tensor) -> tuple[Phases, Phases]:
    """Forward and backward, and what comes after them, each alone: the weight's gradient, also added to one."""
    recipe = cell.recipe
    assert recipe is not None
    kernels = "reference" if cell.attention == "reference" else "fused"
    ops, products = block_ops(kernels, cell.attention), block_products(kernels, recipe)
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
    """With torchao's linear layers, if the way is one of its."""
    return module if how == "compiled" else with_float8(module, how.removeprefix("torchao-"))


# ---- blocks


@dataclass(frozen=True)
class _Bench:
    """What all ways at one shape share."""

    model: TransformerLM
    reference: TransformerBlock
    x: Tensor
    dy: Tensor
    exact: dict[str, Tensor]
    """Gradients of fp32 on the first tokens, by name, on the host."""


@functools.lru_cache(maxsize=1)
def _bench(shape: Fp8Cell) -> _Bench:
    device, dtype = torch.device(shape.device), parameter_dtype(PRECISIONS[shape.dtype])
    ops = REFERENCE_OPS
    if shape.attention != "reference":
        ops = replace(ops, attention=attention_op(shape.attention))
    config = replace(shape.config, n_layers=1, vocab_size=1)  # of a model all but its blocks is of no use here
    model = TransformerLM(config, ops, device=device, dtype=dtype)
    reference = model.layers[0]
    assert isinstance(reference, TransformerBlock)
    size = (shape.batch_size, shape.context_length, config.d_model)
    x, dy = (torch.randn(size, device=device, dtype=dtype) for _ in range(2))
    exact = TransformerBlock(config, REFERENCE_OPS, device=device, dtype=torch.float32)
    exact.load_state_dict(reference.state_dict())
    gradients = {name: each.cpu() for name, each in _short_gradients(exact, model, x, dy).items()}
    return _Bench(model, reference, x.requires_grad_(), dy, gradients)


def _short_gradients(block: nn.Module, model: TransformerLM, x: Tensor, dy: Tensor) -> dict[str, Tensor]:
    """Of the input and of every parameter of the block, on the first tokens of the first sequence."""
    parameters = dict(block.named_parameters())
    dtype = next(iter(parameters.values())).dtype
    x, dy = (tensor.detach()[:1, :COMPARED_TOKENS].to(dtype).contiguous() for tensor in (x, dy))
    y = block(x.requires_grad_(), *model.rotary(x.shape[1]))
    return dict(zip(("x", *parameters), torch.autograd.grad(y, (x, *parameters.values()), dy), strict=True))


def _measure_block(cell: Fp8Cell, device: torch.device) -> list[Metric]:
    shared = _bench(cell.shape)
    block, owner = _block(cell, shared)
    gradients = _short_gradients(owner, shared.model, shared.x, shared.dy)
    cosines = {
        name: nn.functional.cosine_similarity(
            got.double().flatten(), shared.exact[name].to(device).double().flatten(), 0
        )
        for name, got in gradients.items()
    }
    metrics = [Metric(f"cosine {name}", "cosine", [value.item()]) for name, value in cosines.items()]
    metrics.append(Metric("least_cosine", "cosine", [min(cosines.values()).item()]))
    metrics.append(Metric("mean_cosine", "cosine", [float(sum(cosines.values()) / len(cosines))]))

    cos, sin = shared.model.rotary(cell.context_length)
    leaves, out = [shared.x, *owner.parameters()], []

    def forward() -> None:
        out.append(block(shared.x, cos, sin))

    def backward() -> None:
        torch.autograd.grad(out.pop(), leaves, shared.dy)

    times = time_phases({"forward": forward, "backward": backward}, device=device, warmup=cell.warmup, steps=cell.steps)
    metrics += [Metric(name, "ms", samples) for name, samples in times.samples_ms.items()]
    flops = forward_flops(replace(cell.config, n_layers=1), cell.batch_size, cell.context_length)
    metrics.append(_rate("tflops", 3 * (flops.total - flops.head), times.samples_ms[WHOLE]))
    if device.type == "cuda":
        meter, before = PeakMeter(device), allocated_bytes(device)
        forward()
        metrics.append(Metric("kept", "GiB", [(allocated_bytes(device) - before) / GIB]))
        backward()
        metrics.append(Metric("peak", "GiB", [(meter.peak_bytes() or 0) / GIB]))
    return metrics


def _block(cell: Fp8Cell, shared: _Bench) -> tuple[Callable[..., Tensor], nn.Module]:
    """The way's block, and the module that it is, or was before it was compiled."""
    if cell.recipe is not None:
        kernels = "reference" if cell.attention == "reference" else "fused"
        products = block_products(kernels, cell.recipe, remember=True)
        write_out(shared.model, block_ops(kernels, cell.attention), cell.keep, products)
        return shared.model.layers[0], shared.model.layers[0]
    with_layers = _float8(_with_torch_linears(shared.reference), cell.how)
    torch.compiler.reset()
    return torch.compile(with_layers, fullgraph=True, dynamic=False), with_layers


def _with_torch_linears(block: TransformerBlock) -> nn.Module:
    """A copy whose linear layers are torch's, with the same values in the same order of parameters."""
    block = copy.deepcopy(block)
    for module in list(block.modules()):
        for name, child in list(module.named_children()):
            if isinstance(child, Linear):
                linear = nn.Linear(child.weight.shape[1], child.weight.shape[0], child.bias is not None, device="meta")
                linear.weight, linear.bias = child.weight, child.bias  # type: ignore[assignment]
                setattr(module, name, linear)
    return block
