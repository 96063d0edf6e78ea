"""The tensors that a block keeps for its backward pass: every tensor, who keeps it, and how large it is.

``torch.autograd.graph.saved_tensors_hooks`` sees each tensor that an operation saves; the graph then tells which node
saved it under which name, and the Python stack which line of the model asked for it.

    residuals = block_residuals(MODEL_SIZES["small"], 4, 512, PRECISIONS["fp32"], torch.device("cpu"))
    residuals.activation_mib, residuals.gradient_mib
    residuals.tensors                      # one line per storage

One line stands for one storage, however many views of it are saved. Its ``kind`` says whose it is:

    activation       made by forward (or its input), kept for backward: what ``costs/memory.py`` predicts
    parameter copy   a parameter in another dtype, made by autocast; recognised by its values
    parameter        alive anyway
    table            alive anyway: rotary tables, token ids, targets

Works on CPU and CUDA, for eager blocks. Tensors that are alive only during forward or backward are not seen here.
"""

import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType
from typing import Any

import pandas as pd
import torch
from torch import Tensor, nn

from cs336_systems.config import ModelConfig, Precision
from cs336_systems.model import REFERENCE_OPS, ModelOps
from cs336_systems.model.layers import RotaryEmbedding
from cs336_systems.model.transformer import TransformerBlock
from cs336_systems.profiling.memory_history import own_place
from cs336_systems.training.precision import autocast, matmul_precision, parameter_dtype

MIB = 1024**2

KINDS = ACTIVATION, PARAMETER_COPY, PARAMETER, TABLE = "activation", "parameter copy", "parameter", "table"


@dataclass(frozen=True)
class Residuals:
    """The tensors that one forward pass kept and the gradients that its backward pass left behind."""

    tensors: pd.DataFrame
    """One row per storage with the columns ``kind, module, kept_by, source, shape, dtype, mib``, the largest first
    within a kind."""
    gradients: pd.DataFrame
    """One row per gradient after backward, with the columns ``parameter, shape, dtype, mib``."""

    def mib(self, kind: str) -> float:
        """MiB of one of ``KINDS``."""
        return float(self.tensors.loc[self.tensors["kind"] == kind, "mib"].sum())

    @property
    def activation_mib(self) -> float:
        """MiB that exist for the sake of backward only, copies of parameters left out."""
        return self.mib(ACTIVATION)

    @property
    def gradient_mib(self) -> float:
        """MiB of the parameters' gradients."""
        return float(self.gradients["mib"].sum())


def graph_nodes(output: Tensor) -> Iterator[Any]:
    """Every node (``torch.autograd.graph.Node``) of the graph that made ``output``, each once."""
    seen: set[Any] = set()
    frontier = [output.grad_fn]
    while frontier:
        node = frontier.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        frontier += [function for function, _ in node.next_functions]
        yield node


def storage_address(tensor: Tensor) -> int:
    """The address at which the storage of ``tensor`` begins, which its views share."""
    return tensor.untyped_storage().data_ptr()


@dataclass
class _Save:
    """One tensor as an operation saved it."""

    tensor: Tensor
    module: str
    source: str
    kept_by: str = ""


def block_residuals(
    config: ModelConfig,
    batch_size: int,
    seq_len: int,
    precision: Precision,
    device: torch.device,
    *,
    ops: ModelOps = REFERENCE_OPS,
    make: Callable[..., TransformerBlock] = TransformerBlock,
) -> Residuals:
    """Residuals of one ``TransformerBlock`` of the model, on random input that requires a gradient.

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
    saves: list[_Save] = []
    unpacked: list[_Save] = []
    path: list[str] = []

    def pack(tensor: Tensor) -> _Save:
        saves.append(_Save(tensor, path[-1] if path else "", _source()))
        return saves[-1]

    def unpack(save: _Save) -> Tensor:
        unpacked.append(save)
        return save.tensor

    with matmul_precision(precision), _tracked_modules(block, path):
        hooks = torch.autograd.graph.saved_tensors_hooks(pack, unpack)
        with hooks, autocast(precision, device):
            output = block(x, cos, sin)
        _name_savers(output, unpacked)
        table = _table(saves, block, {"cos": cos, "sin": sin})
        output.backward(torch.randn_like(output))
    gradients = [
        (name, tuple(grad.shape), _short(grad.dtype), grad.nbytes / MIB)
        for name, parameter in block.named_parameters()
        if (grad := parameter.grad) is not None
    ]
    return Residuals(table, pd.DataFrame(gradients, columns=["parameter", "shape", "dtype", "mib"]))


def _source() -> str:
    """The innermost line of the model or the training code that is running, as ``model/ops.py:40 rms_norm``."""
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        code = frame.f_code
        if code.co_filename != __file__ and (own := own_place(f"{code.co_filename}:{frame.f_lineno} {code.co_name}")):
            return own
        frame = frame.f_back
    return ""


@contextmanager
def _tracked_modules(module: nn.Module, path: list[str]) -> Iterator[None]:
    """Keep the names of the modules that are running in ``path``, the innermost last."""
    handles = []
    for name, part in module.named_modules():
        handles.append(part.register_forward_pre_hook(lambda part, args, name=name: path.append(name)))
        handles.append(part.register_forward_hook(lambda part, args, output: (path.pop(), None)[1]))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _name_savers(output: Tensor, unpacked: list[_Save]) -> None:
    """Ask each node of the graph for what it saved: unpacking tells which saves these were."""
    for node in graph_nodes(output):
        operation = re.sub(r"Backward\d*$", "", node.name())
        for attribute in (name for name in dir(node) if name.startswith("_saved_") or name == "saved_tensors"):
            unpacked.clear()
            getattr(node, attribute)
            for save in unpacked:
                save.kept_by = f"{operation}.{attribute.removeprefix('_saved_')}"


def _table(saves: Sequence[_Save], module: nn.Module, tables: Mapping[str, Tensor]) -> pd.DataFrame:
    """The table ``Residuals.tensors``."""
    parameters = {storage_address(parameter): name for name, parameter in module.named_parameters()}
    known = {storage_address(tensor): name for name, tensor in [*module.named_buffers(), *tables.items()]}
    groups: dict[int, list[_Save]] = {}
    for save in saves:
        groups.setdefault(storage_address(save.tensor), []).append(save)
    lines: list[dict[str, Any]] = []
    for address, group in groups.items():
        whole = max((save.tensor for save in group), key=lambda tensor: (tensor.nbytes, tensor.ndim))
        name = parameters.get(address) or known.get(address)
        kind = PARAMETER if address in parameters else TABLE if address in known else ACTIVATION
        if kind == ACTIVATION and (original := _copied_parameter(whole, module)):
            kind, name = PARAMETER_COPY, original
        lines.append(
            {
                "kind": kind,
                "module": name or group[0].module,
                "kept_by": ", ".join(dict.fromkeys(save.kept_by for save in group)),
                "source": "; ".join(dict.fromkeys(save.source for save in group)),
                "shape": tuple(whole.shape),
                "dtype": _short(whole.dtype),
                "mib": whole.untyped_storage().nbytes() / MIB,
            }
        )
    lines.sort(key=lambda line: (KINDS.index(line["kind"]), -line["mib"]))
    return pd.DataFrame(lines)


def _copied_parameter(tensor: Tensor, module: nn.Module) -> str | None:
    """Name of the parameter whose values ``tensor`` holds in another dtype, as it lies in memory or transposed."""
    flat = torch.empty(0, dtype=tensor.dtype, device=tensor.device).set_(tensor.untyped_storage())
    for name, parameter in module.named_parameters():
        if parameter.dtype != tensor.dtype and parameter.numel() == flat.numel():
            cast = parameter.detach().to(tensor.dtype)
            if torch.equal(flat, cast.flatten()) or torch.equal(flat, cast.mT.flatten() if cast.ndim > 1 else cast):
                return name
    return None


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
