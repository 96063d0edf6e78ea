"""The tensors that a block keeps for its backward pass: every tensor, the operation that keeps it, and its size.

    kept = block_residuals(MODEL_SIZES["small"], 4, 512, PRECISIONS["fp32"], torch.device("cpu"))
    kept.groupby("kind")["mib"].sum()

One line stands for one storage, however many views of it the nodes of autograd's graph save. Its ``kind`` says whose it
is:

    activation       made by forward (or its input), kept for backward: what ``costs/memory.py`` predicts
    parameter copy   a parameter in another dtype, made by autocast; recognised by its values
    parameter        alive anyway
    table            alive anyway: rotary tables, buffers
    gradient         of a parameter, left behind by backward

Works on CPU and CUDA, for eager blocks. Tensors that are alive only during forward or backward are not seen here.
"""

import re
from collections.abc import Callable, Iterator

import pandas as pd
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from cs336_systems.config import ModelConfig, Precision
from cs336_systems.hardware import MIB
from cs336_systems.model import REFERENCE_OPS, ModelOps
from cs336_systems.model.layers import RotaryEmbedding
from cs336_systems.model.transformer import TransformerBlock
from cs336_systems.training.precision import autocast, matmul_precision, parameter_dtype

KINDS = "activation", "parameter copy", "parameter", "table", "gradient"
ACTIVATION, PARAMETER_COPY, PARAMETER, TABLE, GRADIENT = KINDS


def storage_address(tensor: Tensor) -> int:
    """The address at which the storage of ``tensor`` begins, which its views share."""
    return tensor.untyped_storage().data_ptr()


def saved_tensors(output: Tensor) -> Iterator[tuple[Tensor, str]]:
    """Every tensor that a node of the graph of ``output`` saves, with node and attribute: ``Softmax.result``.

    Scalars are left out: a Python number that a tensor was multiplied by is saved as one.
    """
    seen, frontier = set(), [output.grad_fn]
    while frontier:
        node = frontier.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        frontier += [function for function, _ in node.next_functions]
        operation = re.sub(r"Backward\d*$", "", node.name())
        for attribute in dir(node):
            if attribute.startswith("_saved_") or attribute == "saved_tensors":
                for leaf in tree_leaves(getattr(node, attribute)):
                    if isinstance(leaf, Tensor) and leaf.ndim:
                        yield leaf, f"{operation}.{attribute.removeprefix('_saved_')}"


def block_residuals(
    config: ModelConfig,
    batch_size: int,
    seq_len: int,
    precision: Precision,
    device: torch.device,
    *,
    ops: ModelOps = REFERENCE_OPS,
    make: Callable[..., TransformerBlock] = TransformerBlock,
) -> pd.DataFrame:
    """Lists the tensors that a block keeps for backward on random input, and its gradients after backward.

    One row per storage, and per gradient, with the columns ``kind, name, kept_by, shape, dtype, mib``, the largest
    first within a kind.

    Args:
        make: makes the block, given (config, ops, device=, dtype=).

    Raises:
        ValueError: ``seq_len`` is beyond the config's context length.
    """
    dtype = parameter_dtype(precision)
    block = make(config, ops, device=device, dtype=dtype)
    rotary = RotaryEmbedding(config, device=device, dtype=dtype)
    with torch.no_grad():
        for module in (*block.modules(), rotary):
            if callable(reset := getattr(module, "reset_parameters", None)):
                reset()
    x = torch.randn(batch_size, seq_len, config.d_model, device=device, dtype=dtype, requires_grad=True)
    cos, sin = rotary(seq_len)
    with matmul_precision(precision):
        with autocast(precision, device):
            output = block(x, cos, sin)
        groups: dict[int, list[tuple[Tensor, str]]] = {}
        for tensor, kept_by in saved_tensors(output):
            groups.setdefault(storage_address(tensor), []).append((tensor, kept_by))
        owners = {storage_address(tensor): (TABLE, name) for name, tensor in [*block.named_buffers()]}
        owners |= {storage_address(cos): (TABLE, "cos"), storage_address(sin): (TABLE, "sin")}
        sharing: dict[int, list[str]] = {}  # hand-written blocks keep q | k | v, and gate | up, in one storage each
        for name, parameter in block.named_parameters():
            sharing.setdefault(storage_address(parameter), []).append(name)
        owners |= {address: (PARAMETER, " | ".join(names)) for address, names in sharing.items()}
        lines = []
        for address, group in groups.items():
            whole = max((tensor for tensor, _ in group), key=lambda tensor: (tensor.nbytes, tensor.ndim))
            kind, name = owners.get(address) or _copied_parameter(whole, block) or (ACTIVATION, "")
            lines.append((kind, name, ", ".join(dict.fromkeys(kept_by for _, kept_by in group)), *_form(whole)))
        output.backward(torch.randn_like(output))
    for name, parameter in block.named_parameters():
        if parameter.grad is not None:
            lines.append((GRADIENT, name, "", *_form(parameter.grad)[:2], parameter.grad.nbytes / MIB))
    lines.sort(key=lambda line: (KINDS.index(line[0]), -line[-1]))
    return pd.DataFrame(lines, columns=["kind", "name", "kept_by", "shape", "dtype", "mib"])


def _form(tensor: Tensor) -> tuple[tuple[int, ...], str, float]:
    """Shape, dtype, and MiB of the storage."""
    dtype = str(tensor.dtype).removeprefix("torch.")
    return tuple(tensor.shape), dtype, tensor.untyped_storage().nbytes() / MIB


def _copied_parameter(tensor: Tensor, module: nn.Module) -> tuple[str, str] | None:
    """The parameter whose values ``tensor`` holds in another dtype, as it lies in memory or transposed."""
    flat = torch.empty(0, dtype=tensor.dtype, device=tensor.device).set_(tensor.untyped_storage())
    for name, parameter in module.named_parameters():
        if parameter.dtype != tensor.dtype and parameter.numel() == flat.numel():
            cast = parameter.detach().to(tensor.dtype)
            if torch.equal(flat, cast.flatten()) or torch.equal(flat, cast.mT.flatten() if cast.ndim > 1 else cast):
                return PARAMETER_COPY, name
    return None
