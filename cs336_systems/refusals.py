"""Training steps that are invalid on every device: a table of conditions, each with its error message.

    if reason := refusal(case): ...

Every grid of a benchmark, every run of ``train.py`` and ``training.assemble`` call it. ``assemble.check_supported``
checks what depends on the device, a library or torch's version. Imports no torch.
"""

from collections.abc import Callable

from cs336_systems.case import TrainingCase
from cs336_systems.config import FP8_QUANTUM, WRITTEN_OUT_ATTENTIONS, check_known
from cs336_systems.costs.checkpointing import canonical_policy
from cs336_systems.costs.kept import LEVELS, keep_of_blocks
from cs336_systems.costs.offload import offloaded
from cs336_systems.costs.parallelism.stages import divide, plan_of
from cs336_systems.declared import options_in, sign_refusal
from cs336_systems.ranks import PIPELINE, SPLIT_BY_TORCH, TORCH_CONTEXT_ATTENTIONS, Parallel, context_parts


def refusal(case: TrainingCase) -> str | None:
    """Why no step can be as the case says, in one sentence, or None if one can.

    Raises:
        ValueError: a value is unknown; the message has the nearest.
    """
    _check_names(case)
    for each, of in options_in(TrainingCase):  # cells of benchmarks have others, 0 where they do not apply
        if wrong := sign_refusal(each.name, getattr(case, each.name), of.sign):
            return wrong
    for refused, sentence in REFUSALS:
        if refused(case):
            return sentence.format(case=case, parallel=case.parallel, attentions=", ".join(_attentions(case)))
    return _mesh_sizes(case) or _fp8_sizes(case)


def command_refusal(case: TrainingCase) -> str | None:
    """``refusal``, and why a command refuses what Triton's interpreter, which tests use, can run without a GPU."""
    if case.optimizer == "fused" and not case.device.startswith("cuda"):
        return f"optimizer fused needs device cuda, got {case.device}: Triton kernels run on GPUs"
    return refusal(case)


def _check_names(case: TrainingCase) -> None:
    for owner in (case, case.parallel):
        for each, of in options_in(owner):
            if of.values:
                check_known(each.name, getattr(owner, each.name), of.values)
    canonical_policy(case.checkpoint)
    offloaded(case)
    if case.written_out:
        if "+" not in case.keep:
            check_known("level", case.keep.split("-")[0], (*LEVELS, "autograd"), f" in what to keep, {case.keep!r}")
        keep_of_blocks(case.keep, case.config.n_layers)


def _attentions(case: TrainingCase) -> list[str]:
    """Those whose backward is a function of its own, which blocks with a hand-written backward can call."""
    return [name for name in WRITTEN_OUT_ATTENTIONS if case.kernels == "reference" or name != "reference"]


def _shared(case: TrainingCase) -> bool:
    """Whether ranks share the step."""
    parallel = case.parallel
    return (parallel.wrapper, parallel.optimizer_state, parallel.ranks_per_batch) != ("none", "replicated", 1)


def _tensor_ranks_alone(parallel: Parallel) -> bool:
    """Whether ranks share matrices by collectives and nothing else, so that each sends the same in every step."""
    return parallel == Parallel("none", tensor=parallel.tensor, pipeline_by=parallel.pipeline_by)


def _quantized(case: TrainingCase) -> bool:
    return case.recipe.quantized


def _whole_gradients(parallel: Parallel) -> bool:
    """Whether ranks hold whole gradients until all micro-batches are done, and this suite averages them."""
    return parallel.wrapper not in ("fsdp", "fsdp2", "torch-ddp")


def _beside_stages(parallel: Parallel) -> bool:
    """Whether FSDP is asked for what it does not do under a pipeline."""
    asked = parallel.gather_by, parallel.compute_dtype, parallel.update
    return asked != ("collectives", "same", "after-backward")


def _updates_early(case: TrainingCase) -> bool:
    return case.parallel.update != "after-backward"


def _offloads_states(case: TrainingCase) -> bool:
    """Whether states or gradients of the optimizer are in host memory."""
    return bool(offloaded(case) - {"residual"})


REFUSALS: tuple[tuple[Callable[[TrainingCase], bool], str], ...] = (
    (
        lambda case: _quantized(case) and not case.written_out,
        "matmul_dtype {case.matmul_dtype} with keep autograd: quantized matmuls are in blocks with a hand-written "
        "backward",
    ),
    (
        lambda case: _quantized(case) and case.fp8_skip_first + case.fp8_skip_last >= case.config.n_layers,
        "matmul_dtype {case.matmul_dtype} quantizes none of {case.config.n_layers} blocks: the first "
        "{case.fp8_skip_first} and the last {case.fp8_skip_last} are skipped",
    ),
    (
        lambda case: case.kernels != "reference" and not case.written_out,
        "kernels {case.kernels} with keep autograd: they need a hand-written backward, " + ", ".join(LEVELS),
    ),
    (
        lambda case: case.kernels != "reference" and not case.device.startswith("cuda"),
        "kernels {case.kernels} need device cuda, got {case.device}: Triton kernels run on GPUs",
    ),
    (
        lambda case: case.written_out and case.attention not in _attentions(case),
        "kernels {case.kernels}, keep {case.keep} with attention {case.attention}: its backward must be a function of "
        "its own, which {attentions} have",
    ),
    (
        lambda case: case.lora is not None and not case.written_out,
        "LoRA of rank {case.lora.rank} with keep autograd: adapters are in blocks with a hand-written backward, "
        + ", ".join(LEVELS),
    ),
    (
        lambda case: case.lora is not None and max(case.parallel.tensor, case.parallel.pipeline) > 1,
        "LoRA of rank {case.lora.rank} with tensor {parallel.tensor}, pipeline {parallel.pipeline}: ranks that share "
        "matrices or divide blocks have no adapters",
    ),
    (
        lambda case: case.written_out and case.precision.autocast,
        "keep {case.keep} with dtype {case.precision.name}: blocks with a hand-written backward run in one dtype, "
        "fp32, tf32 or bf16",
    ),
    (
        lambda case: case.written_out and case.compile != "off",
        "keep {case.keep} with compile {case.compile}: blocks with a hand-written backward are not compiled, only keep "
        "autograd is",
    ),
    (
        lambda case: case.written_out and case.checkpoint != "none",
        "keep {case.keep} with checkpoint {case.checkpoint}: both say what is kept for backward, give one of them",
    ),
    (
        lambda case: case.master != "none" and (case.optimizer != "fused" or case.dtype != "bf16"),
        "master weights in {case.master} are for dtype bf16 and optimizer fused, got {case.dtype} and {case.optimizer}",
    ),
    (
        lambda case: "master" in offloaded(case) and case.master == "none",
        "offload {case.offload} needs master weights in fp32, got {case.master}",
    ),
    (
        lambda case: "residual" in offloaded(case) and not case.written_out,
        "offload {case.offload} needs blocks with a hand-written backward, got keep autograd",
    ),
    (
        lambda case: _offloads_states(case) and case.optimizer != "fused",
        "offload {case.offload} needs optimizer fused, got {case.optimizer}",
    ),
    (
        lambda case: "gradients" in offloaded(case) and _shared(case),
        "offload {case.offload} is for one rank: several reduce gradients on the device",
    ),
    (
        lambda case: _offloads_states(case) and _updates_early(case),
        "offload {case.offload} with update {parallel.update}: states on the host change after backward",
    ),
    (
        lambda case: case.offload != "none" and case.cuda_graph == "on",
        "offload {case.offload} copies beside the step, which a CUDA graph does not hold",
    ),
    (
        lambda case: case.matmul_kernels == "measured" and not (case.kernels == "fused" and case.device == "cuda"),
        "matmul_kernels measured needs device cuda and kernels fused, got {case.device} and {case.kernels}",
    ),
    (
        lambda case: (
            case.matmul_kernels == "measured"
            and _quantized(case)
            and (case.scaling, case.gradient_dtype) != ("tensor", "e4m3")
        ),
        "matmul_kernels measured with matmul_dtype {case.matmul_dtype} needs scaling tensor and gradient_dtype e4m3, "
        "got {case.scaling} and {case.gradient_dtype}",
    ),
    (
        lambda case: case.matmul_kernels == "measured" and case.parallel.ranks_per_batch > 1,
        "matmul_kernels measured is for ranks with batches of their own, got tensor {parallel.tensor}, context "
        "{parallel.context}, pipeline {parallel.pipeline}",
    ),
    (
        lambda case: case.cuda_graph == "on" and case.device != "cuda",
        "cuda_graph on needs device cuda, got {case.device}",
    ),
    (
        lambda case: case.cuda_graph == "on" and _shared(case) and not _tensor_ranks_alone(case.parallel),
        "cuda_graph on is for one rank, or tensor ranks by collectives alone: other ranks agree through the host on "
        "what they send, which a graph cannot hold",
    ),
    (
        lambda case: case.cuda_graph == "on" and case.optimizer == "reference",
        "cuda_graph on with optimizer reference: it counts steps on the host, which a graph cannot hold; use "
        "torch-fused or fused",
    ),
    (
        lambda case: case.cuda_graph == "on" and case.optimizer == "muon",
        "cuda_graph on with optimizer muon: it draws random numbers by the host's count of steps, which a graph cannot "
        "hold",
    ),
    (
        lambda case: case.optimizer == "muon" and case.lora is not None,
        "optimizer muon with LoRA of rank {case.lora.rank}: it is for the matrices of blocks, which are frozen",
    ),
    (
        lambda case: case.optimizer == "muon" and case.parallel.tensor > 1,
        "optimizer muon needs whole matrices, which tensor {parallel.tensor} cuts",
    ),
    (
        lambda case: (
            case.optimizer == "muon"
            and (case.parallel.wrapper == "fsdp2" or case.parallel.optimizer_state == "torch-zero")
        ),
        "optimizer muon needs whole matrices, which wrapper {parallel.wrapper} with optimizer's state "
        "{parallel.optimizer_state} cuts",
    ),
    (
        lambda case: case.optimizer == "muon" and _updates_early(case),
        "optimizer muon needs whole matrices, which update {parallel.update} cuts",
    ),
    (
        lambda case: case.compile == "whole-model" and (case.checkpoint != "none" or case.parallel.wrapper != "none"),
        "compile whole-model leaves no boundaries between blocks for checkpoint {case.checkpoint} and wrapper "
        "{parallel.wrapper} to work at; compile on does",
    ),
    (
        lambda case: (
            case.parallel.tensor_by_torch
            and (case.written_out or case.optimizer == "fused" or case.parallel != _torch_alone(case.parallel))
        ),
        "tensor_by {parallel.tensor_by} divides a plain model over all ranks: not with keep {case.keep}, "
        "optimizer {case.optimizer}, context {parallel.context}, wrapper {parallel.wrapper}, optimizer's state "
        "{parallel.optimizer_state}",
    ),
    (
        lambda case: case.parallel.tensor_by_torch and (case.config.tie_embeddings or case.config.qk_norm),
        "tensor_by {parallel.tensor_by} is set up for models without tied embeddings and norms of queries, not for "
        "{case.size}",
    ),
    (
        lambda case: (
            case.parallel.pipeline_by_torch
            and (
                case.written_out
                or case.precision.autocast
                or case.compile == "whole-model"
                or case.parallel != _torch_alone(case.parallel)
            )
        ),
        "pipeline_by {parallel.pipeline_by} runs stages of plain blocks on all ranks: not with keep {case.keep}, dtype "
        "{case.dtype}, compile {case.compile}, tensor {parallel.tensor}, context {parallel.context}, wrapper "
        "{parallel.wrapper}, optimizer's state {parallel.optimizer_state}",
    ),
    (
        lambda case: case.parallel.pipeline_by_torch and case.config.tie_embeddings,
        "pipeline_by {parallel.pipeline_by} is set up for models without tied embeddings, not for {case.size}",
    ),
    (
        lambda case: (
            case.parallel.pipeline_by_torch and case.compiled and case.parallel.pipeline_schedule in SPLIT_BY_TORCH
        ),
        "pipeline_by {parallel.pipeline_by} divides backward under {parallel.pipeline_schedule}, which torch cannot do "
        "to compiled blocks: compile must be loss or off, got {case.compile}",
    ),
    (
        lambda case: (
            case.parallel.pipeline_by_torch
            and case.parallel.pipeline_schedule == "1f1b"
            and case.accumulate < case.parallel.pipeline
        ),
        "pipeline_by {parallel.pipeline_by} needs a micro-batch for each of {parallel.pipeline} stages under 1f1b, got "
        "{case.accumulate}",
    ),
    (
        lambda case: case.parallel.context_by_torch and not case.attention_alone,
        "context_order {parallel.context_order} shares the attention of one block among ranks, not a whole step",
    ),
    (
        lambda case: (
            case.parallel.context_by_torch
            and (
                case.written_out or case.attention not in TORCH_CONTEXT_ATTENTIONS or not case.device.startswith("cuda")
            )
        ),
        "context_order {parallel.context_order} needs keep autograd, attention "
        + " or ".join(TORCH_CONTEXT_ATTENTIONS)
        + " and device cuda, got {case.keep}, {case.attention} and {case.device}",
    ),
    (
        lambda case: case.parallel.ranks_per_batch > 1 and not (case.written_out or case.parallel.by_torch),
        "ranks that share a batch (tensor {parallel.tensor}, context {parallel.context}, pipeline {parallel.pipeline}) "
        "need keep " + ", ".join(LEVELS[:-1]) + f" or {LEVELS[-1]}, got autograd",
    ),
    (
        lambda case: case.parallel.pipeline > 1 and case.parallel.optimizer_state == "scattered-gradients",
        "pipeline {parallel.pipeline} with ZeRO stage 2: gradients stay whole until all micro-batches are done, so it "
        "needs as much memory as ZeRO stage 1; use stage 1, or 3",
    ),
    (
        lambda case: (
            case.parallel.pipeline > 1
            and (
                not (_whole_gradients(case.parallel) or case.parallel.wrapper == "fsdp")
                or case.parallel.optimizer_state == "torch-zero"
            )
        ),
        "pipeline {parallel.pipeline} with wrapper {parallel.wrapper}, optimizer's state {parallel.optimizer_state}: "
        "stages run under this suite's data parallelism, ZeRO stage 1 or FSDP",
    ),
    (
        lambda case: case.parallel.pipeline > 1 and case.parallel.wrapper == "fsdp" and _beside_stages(case.parallel),
        "pipeline {parallel.pipeline} with FSDP gathers weights by collectives, in their own dtype, and updates them "
        "after backward: not with gather_by {parallel.gather_by}, compute_dtype {parallel.compute_dtype} or update "
        "{parallel.update}",
    ),
    (
        lambda case: case.parallel.pipeline > 1 and bool({"gradients", "residual"} & offloaded(case)),
        "pipeline {parallel.pipeline} with offload {case.offload}: gradients and inputs of blocks stay on the device",
    ),
    (
        lambda case: (
            case.parallel.context > 1
            and (case.parallel.wrapper, case.parallel.optimizer_state) == ("none", "replicated")
        ),
        "context {parallel.context} with wrapper none: nothing averages the gradients of ranks that share sequences",
    ),
    (
        lambda case: case.parallel.replicas > 1 and case.parallel.wrapper != "fsdp",
        "replicas {parallel.replicas} are copies of shards of this suite's FSDP, got wrapper {parallel.wrapper}",
    ),
    (
        lambda case: case.parallel.ranks_per_batch > 1 and case.parallel.max_ctas > 0,
        "max_ctas {parallel.max_ctas} is for a group of all ranks, not with tensor {parallel.tensor}, context "
        "{parallel.context}",
    ),
    (
        lambda case: case.parallel.tensor > 1 and _quantized(case) and case.scaling != "tensor",
        "scaling {case.scaling} with tensor {parallel.tensor}: rows that ranks gather have one scale, scaling tensor",
    ),
    (
        lambda case: _updates_early(case) and case.parallel.wrapper != "fsdp",
        "update {parallel.update} works on the shards of wrapper fsdp, got {parallel.wrapper}",
    ),
)
"""In the order in which they are asked: what a step lacks altogether before what two of its options cannot share."""


def _fp8_sizes(case: TrainingCase) -> str | None:
    """Why fp8 matmuls cannot take the case's sizes, if they cannot."""
    parallel, config = case.parallel, case.config.part(case.parallel.tensor)
    sizes = {"d_model": config.d_model, "d_query": config.d_query, "d_kv": config.d_kv, "d_ff": config.d_ff}
    if parallel.ranks_per_batch == 1:
        sizes |= {"context": case.context_length}
    else:
        sizes |= {"tokens": case.batch_size * case.context_length // parallel.ranks_per_batch}
    odd = [f"{name} {size}" for name, size in sizes.items() if size % FP8_QUANTUM]
    if not (_quantized(case) and odd):
        return None
    of = f" of each of tensor {parallel.tensor} x context {parallel.context}" * (parallel.ranks_per_batch > 1)
    taken = f"matmuls in fp8 take sizes{of} that {FP8_QUANTUM} divides"
    return f"matmul_dtype {case.matmul_dtype}: {taken}, not {', '.join(odd)}"


def _torch_alone(parallel: Parallel) -> Parallel:
    """A step that torch alone divides, as ``parallel`` asks for that."""
    names = ("tensor", "tensor_by") if parallel.tensor_by_torch else PIPELINE
    return Parallel(**{name: getattr(parallel, name) for name in names})


def _mesh_sizes(case: TrainingCase) -> str | None:
    """Why ranks cannot share the case's model and batch in equal parts, if they cannot."""
    parallel, length = case.parallel, case.context_length
    try:
        if (plan := plan_of(case)) is not None:
            divide(plan, case.config)
        context_parts(length, parallel.context, parallel.context_order)
        case.config.part(parallel.tensor)
    except ValueError as error:
        return str(error)
    if (own := length // parallel.context) % parallel.tensor:
        return f"tensor {parallel.tensor} does not divide the {own} tokens of a sequence that a rank holds"
    return None
