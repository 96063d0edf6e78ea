"""What a block holds while it runs: what is not kept lives from where it is made to where it is last read."""

import functools
from dataclasses import replace

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._pytree import tree_leaves

from cs336_systems.blocks import REFERENCE, BlockGradients, BlockWeights, Saved, backward, forward
from cs336_systems.blocks.ops import OPERATIONS, PRODUCTS
from cs336_systems.costs.kept import kept_names
from tests.modes import Mode

from .cases import LLAMA, block_of, inputs, tables

ROWS = 2 * 17
D, P, F = LLAMA.d_model, LLAMA.d_model + 2 * LLAMA.d_kv, LLAMA.d_ff


class Watched(Mode):
    """Notes, at each call of an operation, the elements per row that are alive of what was made since the mode began.

    Statistics, narrower than the model, are left out.
    """

    def __init__(self) -> None:
        super().__init__()
        self.made: dict[int, tuple[StorageWeakRef, int]] = {}
        self.alive: list[tuple[str, int]] = []
        calls = {name: functools.partial(self.call, name, getattr(REFERENCE, name)) for name in OPERATIONS - PRODUCTS}
        self.ops = replace(REFERENCE, **calls)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        before = {
            leaf.untyped_storage()._cdata for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)
        }
        results = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(results):
            if isinstance(tensor, torch.Tensor) and tensor.untyped_storage()._cdata not in before:
                storage = tensor.untyped_storage()
                self.made[storage._cdata] = StorageWeakRef(storage), storage.nbytes() // (4 * ROWS)
        return results

    def call(self, name, operation, *arguments, **options):
        sizes = [size for storage, size in self.made.values() if size >= D and not storage.expired()]
        self.alive.append((name, sum(sizes)))
        return operation(*arguments, **options)


def test_activations_live_no_longer_than_they_are_read():
    parameters = {name: value.detach() for name, value in block_of(LLAMA, torch.float32).named_parameters()}
    weights, grads = BlockWeights.of(parameters), BlockGradients.empty(parameters, parameters)
    x, dy = inputs(LLAMA, 17, torch.float32)
    how = LLAMA, *tables(LLAMA, 17, torch.float32)
    with Watched() as watched:
        forward(x, weights, Saved(()), watched.ops, *how)
    assert watched.alive == [
        ("rms_norm_forward", 0),
        ("rotate_", D + P),  # normed1, qkv
        ("attention_forward", P),
        ("add_rms_norm_forward", D + D),  # attended and its product
        ("swiglu_product_", D + D + 3 * F),  # residual, normed2, gate_up and its product
    ]
    with Watched() as watched:
        saved = Saved(kept_names("products"))
        forward(x, weights, saved, REFERENCE, *how)
        watched.alive.clear()
        backward(dy, weights, saved, grads, watched.ops, *how, consume=True)
    assert saved.tensors == {}
    kept = D + P  # attended, qkv
    assert watched.alive == [
        ("swiglu_backward_", kept + D + 2 * F + F),  # residual, gate_up, gradient of the product
        ("rms_norm_forward", kept + D + 2 * F),
        ("rms_norm_backward", kept + D + D),  # residual, gradient of normed2
        ("attention_backward", kept + D + D + P),  # gradients of residual, attended and qkv
        ("rotate_", D + P),
        ("rms_norm_forward", D + P),
        ("rms_norm_backward", D + D),
    ]
