"""A block's weights as its matrix products read them: q, k, v in one matrix, gate and up in another.

The reference block's parameters keep their names and shapes in state dicts, optimizers and checkpoints. ``merge_`` puts
those that are multiplied together one after the other in one storage; ``BlockWeights.of`` then views the whole matrix
without a copy. FSDP and sharded optimizers, which move parameters, keep such neighbours together
(``distributed/buckets.py``). Parameters that are no longer adjacent are copied together while a block runs, which is
correct, but reads and writes them once more.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from cs336_systems.config import ADAPTED

PARTS: dict[str, tuple[str, ...]] = {
    "ln1": ("ln1.weight",),
    "qkv": ("attn.q_proj.weight", "attn.k_proj.weight", "attn.v_proj.weight"),
    "qkv_bias": ("attn.q_proj.bias", "attn.k_proj.bias", "attn.v_proj.bias"),
    "q_norm": ("attn.q_norm.weight",),
    "k_norm": ("attn.k_norm.weight",),
    "output": ("attn.output_proj.weight",),
    "ln2": ("ln2.weight",),
    "gate_up": ("ffn.w1.weight", "ffn.w3.weight"),
    "down": ("ffn.w2.weight",),
}
PARTS |= {
    f"{name}_{letter.lower()}": tuple(part.replace(".weight", f".lora_{letter}.weight") for part in PARTS[name])
    for name in ADAPTED
    for letter in "AB"
}
"""The parameters of a block whose rows, in order, are each weight's: those of the reference block and of adapters."""


@dataclass(frozen=True, kw_only=True)
class _Optional:
    """The weights that only some blocks have, or their gradients. P = (H + 2 K) E is the width of q | k | v."""

    qkv_bias: Tensor | None = None
    """(P,)"""
    q_norm: Tensor | None = None
    """(E,), the gain of the norm that each head of q passes."""
    k_norm: Tensor | None = None
    """(E,)"""
    qkv_a: Tensor | None = None
    """(3 r, D): the adapters of q, k and v, of rank r."""
    qkv_b: Tensor | None = None
    """(P, r)"""
    output_a: Tensor | None = None
    """(r, H E)"""
    output_b: Tensor | None = None
    """(D, r)"""
    gate_up_a: Tensor | None = None
    """(2 r, D)"""
    gate_up_b: Tensor | None = None
    """(2F, r)"""
    down_a: Tensor | None = None
    """(r, F)"""
    down_b: Tensor | None = None
    """(D, r)"""


@dataclass(frozen=True, kw_only=True)
class BlockWeights(_Optional):
    """One block's weights, outputs first as in ``nn.Linear``. No gradients are recorded for them."""

    ln1: Tensor
    """(D,)"""
    qkv: Tensor
    """(P, D)"""
    output: Tensor
    """(D, H E)"""
    ln2: Tensor
    """(D,)"""
    gate_up: Tensor
    """(2F, D)"""
    down: Tensor
    """(D, F)"""
    adapter_scale: float = 0.0
    """Alpha over the rank."""

    @classmethod
    def of(cls, parameters: Mapping[str, Tensor], adapter_scale: float = 0.0) -> "BlockWeights":
        """Make weights from a block's parameters: views if these are adjacent in memory, else copies."""
        held = {name: merged([parameters[part].detach() for part in parts]) for name, parts in _held(parameters)}
        return cls(**held, adapter_scale=adapter_scale)


@dataclass(frozen=True, kw_only=True)
class BlockGradients(_Optional):
    """Memory into which backward writes the gradients of ``BlockWeights``; None for gradients that are not needed."""

    ln1: Tensor | None = None
    qkv: Tensor | None = None
    output: Tensor | None = None
    ln2: Tensor | None = None
    gate_up: Tensor | None = None
    down: Tensor | None = None

    @classmethod
    def empty(
        cls, parameters: Mapping[str, Tensor], wanted: Iterable[str], *, vectors_only: bool = False
    ) -> "BlockGradients":
        """Memory for the gradients of weights with a wanted parameter, which the first backward overwrites.

        Args:
            vectors_only: allocate memory only for gains and biases; matrices are on ``meta``.
        """
        wanted = frozenset(wanted)
        found: dict[str, Tensor] = {}
        for name, parts in _held(parameters):
            first = parameters[parts[0]]
            if not wanted.isdisjoint(parts):
                shape = sum(_rows(parameters, parts)), *first.shape[1:]
                if vectors_only and first.dim() > 1:
                    found[name] = first.new_empty((), device="meta").expand(shape)  # a dry run counts tensors on meta
                else:
                    found[name] = first.new_empty(shape)
        return cls(**found)

    @classmethod
    def there(cls, gradients: Mapping[str, Tensor]) -> "BlockGradients | None":
        """The gradients of some parameters, to be accumulated in place; None if backward cannot write there.

        It cannot if the gradients of parameters that are multiplied together are not adjacent in memory.
        """
        found: dict[str, Tensor] = {}
        for name, parts in PARTS.items():
            own = [gradients[part] for part in parts if part in gradients]
            if not own:
                continue
            whole = adjacent(own) if len(own) == len(parts) else None
            if whole is None:
                return None
            found[name] = whole
        return cls(**found)

    def by_parameter(self, parameters: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Views of the gradients, by the names of the reference block's parameters, whose shapes ``parameters`` has."""
        views: dict[str, Tensor] = {}
        for name, parts in PARTS.items():
            if (gradient := getattr(self, name)) is not None:
                views |= zip(parts, gradient.split_with_sizes(_rows(parameters, parts)), strict=True)
        return views


def _held(parameters: Mapping[str, Tensor]) -> list[tuple[str, tuple[str, ...]]]:
    return [(name, parts) for name, parts in PARTS.items() if parts[0] in parameters]


def _rows(parameters: Mapping[str, Tensor], parts: Iterable[str]) -> list[int]:
    return [parameters[part].shape[0] for part in parts]  # len() of a tensor runs Python


def merged(parts: Sequence[Tensor]) -> Tensor:
    """The rows of all parts in one tensor: a view if they are adjacent in one storage, else a copy.

    If the parts have no memory, the result is on ``meta``.
    """
    whole = adjacent(parts)
    return torch.cat(list(parts)) if whole is None else whole


def adjacent(parts: Sequence[Tensor]) -> Tensor | None:
    """``merged`` of parts that are adjacent in memory, else None."""
    first = parts[0]
    if len(parts) == 1 and first.is_contiguous():
        return first
    storage, end = first.untyped_storage()._cdata, first.storage_offset()
    for part in parts:
        if not (part.is_contiguous() and part.untyped_storage()._cdata == storage and part.storage_offset() == end):
            return None
        end += part.numel()
    shape = sum(part.shape[0] for part in parts), *first.shape[1:]
    if not first.untyped_storage().nbytes():  # a placeholder for weights that are elsewhere
        return first.new_empty(shape, device="meta")
    return first.as_strided(shape, first.stride(), first.storage_offset())


@torch.no_grad()
def merge_(block: nn.Module) -> None:
    """Move parameters that are multiplied together into one storage; values, names and objects stay the same.

    Those on ``meta`` share a storage without memory, which shows that they belong together; merge after ``to_empty``.
    """
    parameters = dict(block.named_parameters())
    for _, parts in _held(parameters):
        whole = merged([parameters[part].detach() for part in parts])
        for part, rows in zip(parts, whole.split(_rows(parameters, parts)), strict=True):
            parameters[part].data = rows
