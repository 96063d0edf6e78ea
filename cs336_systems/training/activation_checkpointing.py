"""Run blocks so that backward needs less memory: the activations that a policy drops are computed a second time.

A plan says which segments are recomputed (``costs/checkpointing.py`` defines the policies and cites them). This file
executes a plan: an ``int`` runs a block, a tuple runs through ``torch.utils.checkpoint``, which keeps the segment's
input and runs the segment again in backward; segments may be nested. The gradients have the same bits as without
checkpointing, if the operations are deterministic and draw no random numbers, which would be drawn anew. Segments whose
parameters are partly or all frozen, and inputs without gradients, are supported.

Selective policies also keep the results of some operations (``create_selective_checkpoint_contexts``): all matmuls, or
only attention; or all matmuls in the last blocks and only attention in earlier ones. They observe operators: under
``torch.compile`` the whole checkpointed block is therefore one compiled function, since a block compiled by itself
would hide its operators. The block's hooks, which gather its weights under FSDP, run outside of the compiled function.
Other policies are not compiled.

    stack = checkpointed_stack("every-4", REFERENCE_OPS.stack)
    model = TransformerLM(config, replace(REFERENCE_OPS, stack=stack))       # the same parameters by the same names
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from cs336_systems.costs.checkpointing import (
    KEEP_ATTENTION,
    KEEP_MATMULS,
    Segments,
    canonical_policy,
    is_selective,
    make_plan,
    selective_policies,
)

Block = Callable[..., Tensor]
Stack = Callable[..., Tensor]
"""(blocks, x, cos, sin) -> x, as ``ModelOps.stack``."""

FUSED_ATTENTION = (
    "cs336_systems::flash_attention_forward",
    "cs336_systems::hopper_attention_forward",
    "aten::_scaled_dot_product_flash_attention",
    "aten::_scaled_dot_product_flash_attention_for_cpu",
    "aten::_scaled_dot_product_cudnn_attention",
    "aten::_scaled_dot_product_efficient_attention",
)
"""Attentions that are one operator."""

_PRODUCTS = ("aten::mm", "aten::addmm", "aten::bmm")
_WITH_VISIBLE_PRODUCTS = ("reference", "flash", "hopper", "sdpa-flash", "sdpa-cudnn", "sdpa-efficient")


def checkpointed_stack(policy: str, stack: Stack, *, compiled: bool = False) -> Stack:
    """``stack`` under a policy.

    Args:
        stack: runs the given blocks, one after the other.
        compiled: compile each block with its checkpoint inside; for selective policies only, as the others leave that
            to the blocks.

    Raises:
        ValueError: there is no such policy, or ``compiled`` with one that is not selective.
    """
    policy = canonical_policy(policy)
    if is_selective(policy):
        return _selective_stack(policy, stack, compiled)
    if compiled:
        raise ValueError(f"checkpoint policy {policy!r} runs compiled blocks and is not compiled itself")
    if policy == "none":
        return stack
    return lambda blocks, *how: _run_plan(make_plan(policy, len(blocks)), stack, blocks, *how)


def unsupported_reason(policy: str, attention: str) -> str | None:
    """Why a policy does not work with the named attention, in one sentence, or None if it does.

    Raises:
        ValueError: there is no such policy.
    """
    if not is_selective(policy) or attention in _WITH_VISIBLE_PRODUCTS:
        return None
    return (
        f"{policy} keeps results of operators, and those of attention {attention!r} are hidden or many; it can be had "
        f"with {', '.join(_WITH_VISIBLE_PRODUCTS)}"
    )


def _run_plan(plan: Segments, stack: Stack, blocks: Sequence[Block], x: Tensor, *where: Tensor) -> Tensor:
    for part in plan:
        if isinstance(part, int):
            x = stack([blocks[part]], x, *where)
        else:
            segment = functools.partial(_run_plan, part, stack, blocks)
            x = checkpoint(segment, x, *where, use_reentrant=False, preserve_rng_state=False)
    return x


def _selective_stack(policy: str, stack: Stack, compiled: bool) -> Stack:
    """Every block as a separate segment under its own policy."""
    runners = {kept: _selective_block(contexts, compiled) for kept, contexts in _CONTEXTS.items()}

    def run_blocks(blocks: Sequence[Block], x: Tensor, *where: Tensor) -> Tensor:
        policies = selective_policies(policy, len(blocks))
        run = [functools.partial(runners[kept], block) for kept, block in zip(policies, blocks, strict=True)]
        return stack(run, x, *where)

    return run_blocks


def _selective_block(contexts: Callable[[], tuple[Any, Any]], compiled: bool) -> Callable[..., Tensor]:
    """A function that runs a block on its inputs, with a fresh pair of contexts each time."""

    def run_block(block: Block, x: Tensor, *where: Tensor) -> Tensor:
        return checkpoint(block, x, *where, use_reentrant=False, preserve_rng_state=False, context_fn=contexts)

    @functools.partial(torch.compile, fullgraph=True, dynamic=False)
    def run_forward(block: nn.Module, x: Tensor, *where: Tensor) -> Tensor:
        return run_block(functools.partial(type(block).forward, block), x, *where)

    def run_compiled(block: nn.Module, x: Tensor, *where: Tensor) -> Tensor:
        block.forward = functools.partial(run_forward, block)  # hooks run outside of it
        try:
            return block(x, *where)
        finally:
            del block.forward

    return run_compiled if compiled else run_block


class _Keep:
    """Decides for one block, operator by operator, whose results are kept.

    ``keep-attention`` must distinguish the reference's two batched products: the one after the softmax is with the
    values. Recomputation calls the operators in forward's order, so decisions are the same.
    """

    def __init__(self, policy: str) -> None:
        self.matmuls = policy == KEEP_MATMULS
        self.after_softmax = False

    def __call__(self, _context: Any, op: Any, *_args: Any, **_kwargs: Any) -> CheckpointPolicy:
        name = op.name()
        with_values = self.after_softmax and name == "aten::bmm"
        self.after_softmax = name == "aten::_softmax" or (self.after_softmax and not with_values)
        keep = name in FUSED_ATTENTION or with_values or (self.matmuls and name in _PRODUCTS)
        return CheckpointPolicy.MUST_SAVE if keep else CheckpointPolicy.PREFER_RECOMPUTE


def _keep_matmuls_contexts() -> tuple[Any, Any]:
    return create_selective_checkpoint_contexts(_Keep(KEEP_MATMULS))


def _keep_attention_contexts() -> tuple[Any, Any]:
    return create_selective_checkpoint_contexts(_Keep(KEEP_ATTENTION))


_CONTEXTS = {KEEP_MATMULS: _keep_matmuls_contexts, KEEP_ATTENTION: _keep_attention_contexts}
"""A function for each policy: torch.compile distinguishes functions by their code, not by their closures, and would run
one policy's graph for the other."""
