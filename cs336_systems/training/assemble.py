"""Make a runnable training step from a ``TrainingCase``, for one rank and for many: the one place that does so.

Optimisations are applied from outside, in one order:

1. the operations are chosen, attention by name and the stack of blocks by checkpointing policy, and passed to the model
   as a value;
2. the model is built in the precision's parameter dtype, on its device (on ``meta`` for our FSDP, which never holds it
   whole). If requested, its blocks are replaced by ones with a hand-written backward, each with the activations that it
   keeps and the quantization of its products; the model then computes its own loss. Adapters are added, and all other
   parameters frozen;
3. blocks and loss are compiled, if requested: each block separately, as torchtitan does, because equal blocks then
   share one compilation (or the whole model, for comparison, or only the loss). Checkpointed segments run compiled
   blocks, but a selective policy is compiled with its block, because it must see the block's operators;
4. the model is wrapped for its ranks (``parallel.py``), after compiling, as compiled code cannot gather parameters;
5. the optimizer is made over the resulting parameters, with its states in host memory if requested, and the step, which
   may be replayed as a CUDA graph.

    step = assemble(TrainingCase(size="small", dtype="bf16"))
    step = assemble(case, rank)                            # inside ``distributed.process_group.joined``
    loss = step(*random_batch(case, rank))
"""

from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from cs336_systems.attention.dispatch import attention_op
from cs336_systems.attention.dispatch import unsupported_reason as attention_reason
from cs336_systems.blocks import adapt, block_ops, block_products, head_ops, write_out
from cs336_systems.case import TrainingCase, Unsupported
from cs336_systems.costs.checkpointing import is_selective
from cs336_systems.costs.offload import STATES, offloaded
from cs336_systems.costs.parallelism.schedules import Schedule
from cs336_systems.costs.parallelism.stages import divide, plan_of
from cs336_systems.costs.parallelism.step import copied_from
from cs336_systems.distributed.context import context_ops, local_tokens, rotate_local
from cs336_systems.distributed.fsdp import FSDP
from cs336_systems.distributed.mesh import Mesh
from cs336_systems.distributed.messages import Mailbox
from cs336_systems.distributed.pipeline import Pipeline, keep_stage
from cs336_systems.distributed.process_group import Rank
from cs336_systems.distributed.tensor import fill_from_whole, tensor_ops
from cs336_systems.distributed.tensor_travel import tensor_ranks
from cs336_systems.kernels.matmul import choose
from cs336_systems.model import REFERENCE_OPS, ModelOps, TransformerLM
from cs336_systems.refusals import refusal
from cs336_systems.training.activation_checkpointing import checkpointed_stack
from cs336_systems.training.activation_checkpointing import unsupported_reason as checkpointing_reason
from cs336_systems.training.backward_update import BackwardUpdate
from cs336_systems.training.clipping import GradientGuard
from cs336_systems.training.cuda_graph import CapturedStep
from cs336_systems.training.optimizer import unsupported_reason as optimizer_reason
from cs336_systems.training.parallel import make_parallel_optimizer, wrap
from cs336_systems.training.pipelined import PipelinedByTorch, PipelinedStep
from cs336_systems.training.precision import matmul_dtype, parameter_dtype, recipe_unsupported_reason
from cs336_systems.training.precision import unsupported_reason as precision_reason
from cs336_systems.training.product_choice import products_of
from cs336_systems.training.step import TrainStep, cross_entropy, masked_cross_entropy


def assemble(case: TrainingCase, rank: Rank | None = None) -> TrainStep:
    """Build the model, apply what the case asks for, and return its training step.

    Args:
        rank: this process among those that share the step; it determines the device.

    Raises:
        Unsupported: the device, the attention or the checkpointing cannot do what the case asks for (a ValueError).
        ValueError: a name in the case is unknown.
    """
    return finish(build_model(case, rank), case, rank)


def mesh_of(case: TrainingCase, rank: Rank | None) -> Mesh | None:
    """The mesh of ranks that the case describes, None if every rank has its own batch; a collective.

    Raises:
        ValueError: the number of ranks cannot be divided this way, or there are none.
    """
    parallel = case.parallel
    if parallel.ranks_per_batch * parallel.replicas == 1:
        return None
    sizes = {name: getattr(parallel, name) for name in ("pipeline", "replicas", "context", "tensor")}
    if rank is None:
        asked = " x ".join(f"{name} {n}" for name, n in sizes.items() if n > 1)
        raise ValueError(f"{asked} needs a process group, this process has joined none")
    return Mesh.over(rank, **sizes)


def build_model(case: TrainingCase, rank: Rank | None = None) -> TransformerLM:
    """Steps 1 to 3 except for the loss: this rank's model before it is wrapped; raises as ``assemble``."""
    device = rank.device if rank else torch.device(case.device)
    check_supported(case, device)
    if case.matmul_kernels == "measured":
        choose(products_of(case, device))
        torch.cuda.empty_cache()
    return build_unchecked(case, device, mesh_of(case, rank))


def build_unchecked(
    case: TrainingCase, device: torch.device, mesh: Mesh | None, ops: ModelOps = REFERENCE_OPS
) -> TransformerLM:
    """``build_model`` without a check of the device, if it is known to support the case or nothing will be computed."""
    ops, config = case_ops(case, ops), case.config
    tensor, context = (mesh.group(name) if mesh else None for name in ("tensor", "context"))
    if by_torch := case.parallel.tensor_by_torch:
        tensor = None
    ranks = tensor_ranks(tensor, device, case.parallel.tensor_by, copied_from(case.device))
    if tensor:
        ops, config = tensor_ops(ops, ranks), config.part(ranks.n_ranks)
    torch.manual_seed(case.seed)
    sharded, stages = case.parallel.wrapper == "fsdp", plan_of(case)
    in_parts = tensor is not None or stages is not None
    place = torch.device("meta") if sharded or in_parts else device
    model = TransformerLM(config, ops, device=place, dtype=parameter_dtype(case.precision))
    if context:
        rotate_local(model, context, case.parallel.context_order)
    if tensor:
        fill_from_whole(model, ranks)
    if case.written_out:
        products = block_products(case.kernels, case.recipe, remember=True, ranks=ranks)
        away = "residual" in offloaded(case)
        of_blocks = block_ops(case.kernels, case.attention, deterministic=case.deterministic)
        if context:
            of_blocks = context_ops(of_blocks, context, case.parallel.context_order)
        write_out(model, of_blocks, case.keep, products, inputs_on_host=away)
    if case.lora is not None:
        adapt(model, case.lora)
    if stages:
        assert mesh is not None
        keep_stage(model, stages, divide(stages, case.config), mesh.place("pipeline"))
    if in_parts and not sharded:
        model.to_empty(device=device).reset_parameters()
    if by_torch:
        from cs336_systems.distributed.torch_tensor import share_by_torch

        assert mesh is not None
        share_by_torch(model, mesh.devices["tensor"], in_pieces=case.parallel.tensor_by == "torch-async")
    if case.compile == "whole-model":
        model.compile(fullgraph=True, dynamic=False)
    elif case.compiled and not is_selective(case.checkpoint):
        for block in model.layers:
            block.compile(fullgraph=True, dynamic=False)
    return model


def finish(
    model: TransformerLM,
    case: TrainingCase,
    rank: Rank | None = None,
    *,
    guard: GradientGuard | None = None,
    masked: bool = False,
    **hyperparameters: Any,
) -> TrainStep:
    """Steps 4 and 5: wrap the model, make its optimizer and its step; raises as ``assemble``.

    Args:
        guard: clips by the norm of the whole model, and skips steps whose gradients are not finite.
        masked: some targets may be ignored; all others of a step then have equal weight, on whichever rank they are.
        hyperparameters: for ``make_parallel_optimizer``.
    """
    loss_function = None if case.written_out else masked_cross_entropy if masked else cross_entropy
    if case.parallel.tensor_by_torch:
        from cs336_systems.distributed.torch_tensor import enter_loss_parallel, loss_of_words

        loss_function = loss_of_words
        enter_loss_parallel()
    if case.compile != "off" and loss_function is not None:
        loss_function = torch.compile(loss_function, fullgraph=True, dynamic=False)
    mesh = mesh_of(case, rank)
    group = mesh.same_weights if mesh else None
    if guard is not None:
        guard.mesh = mesh
    wrapped = wrap(model, case.parallel, rank, mesh)
    away = offloaded(case)
    if case.optimizer == "fused":
        hyperparameters |= {
            "master": case.master != "none",
            "offload": [STATES[name] for name in STATES if name in away],
        }
    optimizer = make_parallel_optimizer(case.optimizer, wrapped, case.parallel, group=group, **hyperparameters)
    if "gradients" in away:
        from cs336_systems.training.host_states import HostGradients  # brings Triton along

        optimizer.host_gradients = HostGradients(wrapped.parameters())  # type: ignore[attr-defined]
    counted = group if group is not None and group.size() > 1 else None
    if masked and mesh is None and rank is not None and rank.world_size > 1:
        counted = dist.group.WORLD
    kind = CapturedStep if case.cuda_graph == "on" else TrainStep
    update = None
    if case.parallel.update == "under-backward":
        assert isinstance(wrapped, FSDP)
        update = BackwardUpdate(wrapped, optimizer)
    given = wrapped, optimizer, case.precision, loss_function, case.accumulate, guard, update, counted
    plan = plan_of(case)
    if plan is None:
        return kind(*given)
    assert mesh is not None and rank is not None
    stages, blocks = mesh.devices.get_group("pipeline"), divide(plan, case.config)
    if case.parallel.pipeline_by_torch:
        from cs336_systems.distributed.torch_pipeline import TorchPipeline

        assert loss_function is not None
        shape = case.batch_size, case.context_length
        return PipelinedByTorch(
            *given, pipeline=TorchPipeline(model, plan, blocks, stages, loss_function, shape), stages=stages
        )
    messages = mesh.messages(case.parallel.pipeline_by, mailbox_of(case, plan))
    pipeline = Pipeline(plan, mesh.place("pipeline"), messages)
    return PipelinedStep(*given, pipeline=pipeline, blocks=blocks, stages=stages)


def mailbox_of(case: TrainingCase, plan: Schedule) -> Mailbox:
    """A mailbox large enough for a plan's training passes, and for its evaluation (``forwards``).

    A message is the activations of one micro-batch, or their gradient.
    """
    rows = case.batch_size * case.context_length // (case.parallel.context * case.parallel.tensor)
    n_messages = max(each.messages_ahead for each in (plan, plan.forwards(plan.microbatches)))
    return Mailbox.holding(n_messages, rows * case.config.d_model * case.precision.parameter_bytes)


def case_ops(case: TrainingCase, ops: ModelOps = REFERENCE_OPS) -> ModelOps:
    """The operations of the case's model: attention, kernels of head and loss, and the checkpointing policy's stack."""
    if case.attention != "reference":
        ops = replace(ops, attention=attention_op(case.attention))
    if case.written_out:
        ops = head_ops(case.kernels, ops, case.z_loss)
    compiled = case.compiled and is_selective(case.checkpoint)
    return replace(ops, stack=checkpointed_stack(case.checkpoint, ops.stack, compiled=compiled))


def random_batch(case: TrainingCase, rank: Rank | None = None) -> tuple[Tensor, Tensor]:
    """Random token ids and targets of a step, int64 on the device, from the case's seed; they differ along data.

    Each is (accumulate * batch, context / context ranks); a context rank has its own tokens of each sequence.
    """
    mesh = mesh_of(case, rank)
    generator = torch.Generator().manual_seed(
        case.seed * 1009 + (mesh.place("data") if mesh else rank.rank if rank else 0) + 1
    )
    shape = (2, case.accumulate * case.batch_size, case.context_length)
    ids = torch.randint(case.config.vocab_size, shape, generator=generator, device="cpu")  # not the default device
    token_ids, targets = local_tokens(ids, mesh, case.parallel.context_order).to(rank.device if rank else case.device)
    return token_ids, targets


def check_supported(case: TrainingCase, device: torch.device) -> None:
    """Raise Unsupported, with one sentence, if the device or one of the options does not support the case.

    Checks that need no device are in ``refusals.py``; ValueError for an unknown name.
    """
    config, gathered = case.config, case.parallel.compute_dtype  # FSDP casts weights to the latter
    dtype = torch.bfloat16 if gathered == "bf16" else matmul_dtype(case.precision)
    reason = refusal(case) or precision_reason(case.precision, device)
    reason = reason or recipe_unsupported_reason(case.recipe, case.precision, device)
    reason = reason or checkpointing_reason(case.checkpoint, case.attention) or optimizer_reason(case.optimizer, device)
    if reason is None:
        q, k, v = (
            torch.empty(1, heads, case.context_length, config.d_head, device=device, dtype=dtype, requires_grad=True)
            for heads in (config.n_heads, config.kv_heads, config.kv_heads)
        )
        if found := attention_reason(case.attention, q, k, v, causal=True):
            reason = f"attention {case.attention}: {found}"
    if reason is not None:
        raise Unsupported(reason)
