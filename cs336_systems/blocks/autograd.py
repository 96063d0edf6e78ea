"""The written-out block as a module: one autograd Function over the reference block's own parameters.

    model = TransformerLM(config, device="cuda", dtype=torch.bfloat16)
    write_out(model, REFERENCE, "products")          # same parameters, names and state dict
    write_out(model, REFERENCE, "input", inputs_on_host=True)

Tensors kept for backward go through ``save_for_backward``, so hooks on saved tensors see them, a second backward
behaves as in any module, and in-place changes are detected. For autograd the block is one node whose inputs include its
parameters: gradient hooks, DDP, sharded optimizers and FSDP work as on the reference block. Under FSDP the block must
be one unit (``units=lambda module: isinstance(module, TransformerBlock)``), since it reads its children's weights
itself. A block's input may be in host memory from forward to backward (``host_inputs.py``); hooks on saved tensors then
do not see it, and in-place changes of it are not detected. ``torch.compile`` does not compile the block. Hooks on
modules inside it are not run.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any, Unpack

import torch
from torch import Tensor
from torch._compile import _disable_dynamo
from torch.autograd.function import once_differentiable

from cs336_systems.blocks.block import backward, forward
from cs336_systems.blocks.host_inputs import HostInputs
from cs336_systems.blocks.ops import BlockOps
from cs336_systems.blocks.products import STORED, Products, stored
from cs336_systems.blocks.quantized import QuantizedProducts
from cs336_systems.blocks.saved import Saved
from cs336_systems.blocks.weight_gradients import Later
from cs336_systems.blocks.weights import BlockGradients, BlockWeights, merge_
from cs336_systems.config import ModelConfig
from cs336_systems.costs.kept import keep_of_blocks, kept_names
from cs336_systems.kernels.linear_cross_entropy import linear_cross_entropy
from cs336_systems.kernels.own_gradient import adds_to, own_gradient
from cs336_systems.model import ModelOps, TransformerBlock, TransformerLM
from cs336_systems.model.layers import Placement
from cs336_systems.model.tensor_ranks import ALONE, TensorRanks

Works = list[Callable[[], None]]

_put_off: list[Works] = []
"""The lists of open ``put_off`` contexts, the innermost last; autograd's own threads read this, too."""


@contextmanager
def put_off(works: Works) -> Iterator[None]:
    """Defer the gradients of weights in backwards of written-out blocks while the context is open.

    For each block, backward adds a function to ``works`` that computes the gradients and passes them to autograd, which
    accumulates them and runs hooks on parameters; until it is called, the block's activations are kept. Torch also runs
    these hooks during backward itself, as for every parameter whose gradient is None, so wrappers must not send
    gradients then (``no_sync``).
    """
    _put_off.append(works)
    try:
        yield
    finally:
        _put_off.pop()


class _BlockFunction(torch.autograd.Function):
    """``apply(block, kept, names, x, cos, sin, starts, *parameters)``, parameters in the order of ``names``."""

    @staticmethod
    def forward(
        ctx: Any,
        block: "WrittenOutBlock",
        kept: tuple[str, ...],
        names: tuple[str, ...],
        x: Tensor,
        cos: Tensor,
        sin: Tensor,
        starts: Tensor | None,
        *parameters: Tensor,
    ) -> Tensor:
        weights = block.weights(dict(zip(names, parameters, strict=True)))
        saved, x = Saved(kept), x.contiguous()
        ctx.away = None
        if block.host_inputs is not None and kept:
            saved, ctx.away = Saved(name for name in kept if name != "x"), block.host_inputs.send(x)
        how = block.block_ops, block.config, cos, sin
        y = forward(x, weights, saved, *how, products=block.products, starts=starts)
        ctx.block, ctx.kept, ctx.names, ctx.saved_names, ctx.starts = block, kept, names, tuple(saved.tensors), starts
        ctx.save_for_backward(cos, sin, *parameters, *saved.tensors.values())
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        block: WrittenOutBlock = ctx.block
        cos, sin, *tensors = ctx.saved_tensors
        n_parameters = len(ctx.names)
        parameters = dict(zip(ctx.names, tensors[:n_parameters], strict=True))
        saved = Saved(ctx.kept)
        saved.keep(**dict(zip(ctx.saved_names, tensors[n_parameters:], strict=True)))
        if ctx.away is not None:
            saved.keep(x=ctx.away.fetch())
        del tensors
        once = not torch._C._autograd._get_current_graph_task_keep_graph()
        if once:  # autograd would keep all of it alive until this returns
            ctx.maybe_clear_saved_tensors()
            ctx.away = None
        wants_dx, _, _, _, *wanted = ctx.needs_input_grad[3:]
        trained = {name: parameters[name] for name, want in zip(parameters, wanted, strict=True) if want}
        later: Later | None = [] if _put_off else None
        there = None if later is not None else _gradients_there(trained, in_backward=True)
        grads = there or BlockGradients.empty(parameters, trained, vectors_only=later is not None)
        weights = block.weights(parameters)
        how = block.block_ops, block.config, cos, sin
        options: dict[str, Any] = {"products": block.products, "accumulate": there is not None, "later": later}
        options["starts"] = ctx.starts
        dx = backward(dy.contiguous(), weights, saved, grads, *how, consume=once, **options)
        by_parameter: Mapping[str, Tensor | None] = grads.by_parameter(parameters)
        if later is not None:
            _put_off[-1].append(partial(_finish, later, grads, trained))
        if later is not None or there is not None:
            by_parameter = dict.fromkeys(parameters)
        gradients = (by_parameter[name] if want else None for name, want in zip(parameters, wanted, strict=True))
        return None, None, None, dx if wants_dx else None, None, None, None, *gradients


def _gradients_there(parameters: Mapping[str, Tensor], *, in_backward: bool) -> BlockGradients | None:
    """The parameters' own gradients, if backward may accumulate into them in place.

    A matmul that accumulates reads and writes a gradient once. If autograd is given a separate gradient, it also reads
    two gradients and writes one.
    """
    gradients: dict[str, Tensor] = {}
    for name, parameter in parameters.items():
        if (gradient := own_gradient(parameter)) is None:
            return None
        gradients[name] = gradient
    if not gradients:
        return None
    if in_backward and not adds_to(next(iter(parameters.values()))):
        return None
    return BlockGradients.there(gradients)


def _finish(later: Later, vectors: BlockGradients, parameters: Mapping[str, Tensor]) -> None:
    """Compute the deferred gradients of matrices, and accumulate those of all parameters."""
    there = _gradients_there(parameters, in_backward=False)
    target = there or BlockGradients.empty(parameters, parameters)
    for product in later:
        product(target, there is not None)
    for name, value in vars(vectors).items():
        if value is not None and not value.is_meta:
            own: Tensor = getattr(target, name)
            own.copy_(value if there is None else own + value)
    gradients = target.by_parameter(parameters)
    if there is None and any(p.grad is not None or not p.is_leaf or p._backward_hooks for p in parameters.values()):
        torch.autograd.backward(list(parameters.values()), [gradients[name] for name in parameters])
        return
    for name, parameter in parameters.items():
        if there is None:
            parameter.grad = gradients[name]  # autograd would copy it, away from its neighbours in memory
        for hook in (parameter._post_accumulate_grad_hooks or {}).values():
            hook(parameter)


class WrittenOutBlock(TransformerBlock):
    """A reference block whose forward and backward are ``block.py``'s: x (B, S, d_model) -> same.

    Args:
        block_ops: the operations between products; they must support the device and the dtype.
        keep: which activations are kept for backward: a level and switches of ``costs/kept.py``.
        host_inputs: where the input is kept; None means on the device.
        products: unquantized or quantized products; those that remember weights must not be shared with other blocks.

    Raises:
        ValueError: no such level or switch; in forward, x and the parameters differ in dtype, or autocast is on.
    """

    def __init__(
        self,
        config: ModelConfig,
        block_ops: BlockOps,
        keep: str,
        host_inputs: HostInputs | None = None,
        products: Products = STORED,
        **placement: Unpack[Placement],
    ) -> None:
        super().__init__(config, **placement)
        self.config, self.block_ops, self.products = config, block_ops, products
        self.adapter_scale = 0.0
        """The factor of the adapters' products, if the matrices have adapters (``adapters.py``)."""
        self.kept, self.host_inputs = kept_names(keep, quantized=products.quantized), host_inputs
        merge_(self)

    def _apply(self, fn: Any, recurse: bool = True) -> "WrittenOutBlock":
        """``nn.Module._apply``, which ``to`` and ``to_empty`` call; it moves every parameter separately.

        Raises:
            RuntimeError: weights exist only in quantized form (``QuantizedProducts.frozen``).
        """
        for name, p in self.named_parameters():
            if p.numel() and not (p.is_meta or p.untyped_storage().nbytes()):
                raise RuntimeError(f"{name} is there in fp8 alone, and cannot be moved or cast")
        super()._apply(fn, recurse)
        merge_(self)
        self.products.at(())
        return self

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Merge the weights of a copy or an unpickled block, whose parameters are separate in memory."""
        super().__setstate__(state)
        merge_(self)

    @_disable_dynamo  # torch.compiler.disable imports the compiler when it decorates, this when first called
    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, starts: Tensor | None = None) -> Tensor:
        parameters = dict(self.named_parameters())
        if torch.amp.is_autocast_available(x.device.type) and torch.is_autocast_enabled(x.device.type):
            raise ValueError("a written-out block runs in the dtype of its weights: leave autocast off")
        for name, parameter in parameters.items():
            if parameter.dtype != x.dtype:
                raise ValueError(f"x is {x.dtype} and {name} {parameter.dtype}: a written-out block has one dtype")
        recorded = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in (x, *parameters.values()))
        kept = self.kept if recorded else ()
        return _BlockFunction.apply(self, kept, tuple(parameters), x, cos, sin, starts, *parameters.values())

    def weights(self, parameters: Mapping[str, Tensor]) -> BlockWeights:
        """The weights for a pass; also tells products which parameters hold them."""
        self.products.at([parameter for name, parameter in parameters.items() if ".lora_" not in name])
        return BlockWeights.of(parameters, self.adapter_scale)


def head_ops(kernels: str, ops: ModelOps, z_loss: float = 0.0) -> ModelOps:
    """Give ``ops`` the loss in chunks, by a name of ``config.KERNELS``; ``fused`` brings the final norm, too.

    Norm and head stay modules, so that wrappers and profiler ranges see the calls of both.

    Args:
        z_loss: as for ``linear_cross_entropy``; only used while gradients are enabled, not in evaluation.
    """
    fused = kernels == "fused"

    def loss(x: Tensor, weight: Tensor, targets: Tensor, ranks: TensorRanks = ALONE) -> Tensor:
        z = z_loss if torch.is_grad_enabled() else 0.0
        return linear_cross_entropy(x, weight, targets, z_loss=z, fused=fused, ranks=ranks)

    if not fused:
        return replace(ops, linear_cross_entropy=loss)
    from cs336_systems.kernels.rms_norm import rms_norm  # imports Triton, which not every machine has

    return replace(ops, rms_norm=rms_norm, linear_cross_entropy=loss)


def write_out(
    model: TransformerLM, block_ops: BlockOps, keep: str, products: Products = STORED, *, inputs_on_host: bool = False
) -> None:
    """Replace the model's blocks by written-out ones with the same parameters; call this before wrapping the model.

    Args:
        inputs_on_host: keep the blocks' inputs in host memory.
        keep: for all blocks, or for each as ``costs.kept.keep_of_blocks`` parses it.
        products: quantized ones are used only in those blocks that their recipe quantizes.

    Raises:
        ValueError: no such level or switch.
    """
    host_inputs = HostInputs(len(model.layers)) if inputs_on_host else None
    keeps = keep_of_blocks(keep, len(model.layers))
    for i, (block, keep) in enumerate(zip(model.layers, keeps, strict=True)):
        own = products
        if isinstance(products, QuantizedProducts):
            quantizes = products.recipe.quantizes(i, len(model.layers))
            own = products.for_another_block() if quantizes else stored(products.ranks)
        written_out = WrittenOutBlock(model.config, block_ops, keep, host_inputs, own, device="meta")
        for name, child in block.named_children():
            setattr(written_out, name, child)
        merge_(written_out)
        model.layers[i] = written_out
