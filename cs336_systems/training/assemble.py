"""From a description to a runnable training step: the one place where optimisations are applied, in one order.

1. the operations are chosen, attention by name and the stack of blocks by checkpointing policy, and handed to the model
   as a value;
2. the model is built in the precision's parameter dtype, on its device;
3. blocks and loss are compiled, if asked: each block by itself, as torchtitan does, because equal blocks then share one
   compilation and the time to compile does not grow with depth; checkpointed segments run compiled blocks, but a
   selective policy is compiled with its block, because it must see the block's operators;
4. the optimizer is made over the parameters as they now are.
"""

from dataclasses import dataclass, replace

import torch

from cs336_systems.attention.dispatch import attention_op
from cs336_systems.attention.dispatch import unsupported_reason as attention_reason
from cs336_systems.config import PRECISIONS, ModelConfig, Precision
from cs336_systems.costs.checkpointing import SELECTIVE
from cs336_systems.model import REFERENCE_OPS, ModelOps, TransformerLM
from cs336_systems.training.activation_checkpointing import checkpointed_stack
from cs336_systems.training.activation_checkpointing import unsupported_reason as checkpointing_reason
from cs336_systems.training.loss import cross_entropy
from cs336_systems.training.optimizer import make_optimizer
from cs336_systems.training.precision import matmul_dtype, parameter_dtype, unsupported_reason
from cs336_systems.training.step import TrainStep


@dataclass(frozen=True)
class TrainingSetup:
    """Everything that decides how a training step runs, except its data."""

    config: ModelConfig
    precision: Precision = PRECISIONS["fp32"]
    device: str = "cpu"
    optimizer: str = "reference"
    compile: bool = False
    attention: str = "reference"
    """One of ``config.ATTENTIONS``; the reference is the operation that ``ops`` brings."""
    checkpoint: str = "none"
    """Which activations are computed a second time, a policy of ``costs.checkpointing``."""
    ops: ModelOps = REFERENCE_OPS
    seed: int = 0


def unsupported_attention(setup: TrainingSetup) -> str | None:
    """Why the setup's attention cannot serve its model, device and checkpointing, in one sentence, or None if it can.

    Raises:
        ValueError: there is no such attention or checkpointing policy.
    """
    if reason := checkpointing_reason(setup.checkpoint, setup.attention):
        return reason
    config = setup.config
    dtype = matmul_dtype(setup.precision)
    q, k, v = (
        torch.empty(
            1, heads, config.context_length, config.d_head, device=setup.device, dtype=dtype, requires_grad=True
        )
        for heads in (config.n_heads, config.kv_heads, config.kv_heads)
    )
    return attention_reason(setup.attention, q, k, v, causal=True)


def assemble(setup: TrainingSetup) -> TrainStep:
    """Build the model, apply what the setup asks for, and return its training step.

    Raises:
        ValueError: the device cannot run the precision or the attention, or the optimizer or the checkpointing policy
            is unknown.
    """
    device = torch.device(setup.device)
    if reason := unsupported_reason(setup.precision, device):
        raise ValueError(reason)
    if reason := unsupported_attention(setup):
        raise ValueError(f"attention {setup.attention!r} cannot serve this model: {reason}")
    ops = setup.ops
    if setup.attention != "reference":
        ops = replace(ops, attention=attention_op(setup.attention))
    compiled_inside = setup.compile and setup.checkpoint in SELECTIVE
    ops = replace(ops, stack=checkpointed_stack(setup.checkpoint, ops.stack, compiled=compiled_inside))
    torch.manual_seed(setup.seed)
    model = TransformerLM(setup.config, ops, device=device, dtype=parameter_dtype(setup.precision))
    loss_function = cross_entropy
    if setup.compile:
        if not compiled_inside:
            for block in model.layers:
                block.compile(fullgraph=True, dynamic=False)
        loss_function = torch.compile(cross_entropy, fullgraph=True, dynamic=False)
    optimizer = make_optimizer(setup.optimizer, model.parameters())
    return TrainStep(model, optimizer, setup.precision, loss_function)
