"""The faults of a training run's options that show without data, device or ranks. Imports no torch.

Checks come in this order: signs of numbers, two options for one thing, options without what they are for, the
conditions of ``REFUSALS``, and memory limits. ``TrainOptions.check`` then checks the step by
``cs336_systems/refusals.py``.
"""

from collections.abc import Callable
from dataclasses import fields
from typing import TYPE_CHECKING, Any

from cs336_systems.case import RECIPE
from cs336_systems.config import ADAPTED, PACKING
from cs336_systems.declared import flag, option_name, options_in, sign_refusal
from cs336_systems.pretraining.replica_options import faults_of
from cs336_systems.ranks import PIPELINE

if TYPE_CHECKING:
    from cs336_systems.pretraining.options import TrainOptions

_ALTERNATIVES = (("steps", "epochs"), ("init", "resume_from"), ("total_batch_tokens", "accumulate"))
"""Pairs of options of which only one may be given."""
_UNDER_CAPS: dict[str, tuple[Any, ...]] = {
    "zero": (0,),
    "tensor": (1,),
    "context": (1,),
    "pipeline": (1,),
    "offload": ((),),
    "keep": (None,),
    "compile": ("off",),
    "cuda_graph": ("off",),
    "dtype": ("bf16", "fp32"),
    "kernels": ("fused", "reference"),
    "matmul_dtype": ("same",),
    "z_loss": (0.0,),
}
"""The values that some options may have under memory limits."""


_DILOCO = ("agree_every", "agree_fragments", "agree_delay", "agree_dtype", "outer_learning_rate", "outer_momentum")
_AGREEING = (*_DILOCO, "agree_timeout", "ranks_per_replica", "lighthouse", "replica", "fail")
_ONLY_FOR: tuple[tuple[tuple[str, ...], Callable[["TrainOptions"], bool], str], ...] = (
    (RECIPE[1:], lambda o: o.matmul_dtype != "same", "quantized matmuls, and --matmul-dtype is same"),
    (("gather_by",), lambda o: o.zero == 3, "--zero 3, got --zero {o.zero}"),
    (("tensor_by",), lambda o: o.tensor > 1, "--tensor of 2 or more, got 1"),
    (("context_order",), lambda o: o.context > 1, "--context of 2 or more, got 1"),
    (PIPELINE[1:], lambda o: o.pipeline > 1, "--pipeline of 2 or more, got 1"),
    (
        ("pipeline_chunks",),
        lambda o: o.pipeline_schedule == "interleaved",
        "--pipeline-schedule interleaved, got {o.pipeline_schedule}",
    ),
    (("chunk",), lambda o: o.capped, "a run under --device-gib and --host-gib"),
    (_AGREEING, lambda o: o.agree is not None, "replicas that agree: --agree every-step or --agree diloco"),
    (_DILOCO, lambda o: o.agree == "diloco", "--agree diloco, got --agree {o.agree}"),
)
"""Options that may only be given if a condition holds, and what they are for."""


def run_refusal(options: "TrainOptions") -> str | None:
    """Return why no run can have these options, in one sentence, or None if one can.

    Raises:
        ValueError: ``--fail`` names a fault that is not known.
    """
    for each, of in options_in(options):
        name = option_name(each)
        if refusal := sign_refusal(name, getattr(options, name), of.sign):
            return refusal
    values = ((each.name, getattr(options, each.name), each.default) for each in fields(options))
    given = {name: f"{flag(name)} {value}" for name, value, default in values if value != default}
    for one, other in _ALTERNATIVES:
        if one in given and other in given:
            return f"{given[one]} and {given[other]}: give one of them"
    for names, served, what in _ONLY_FOR:
        for name in names:
            if name in given and not served(options):
                return f"{given[name]} is for {what.format(o=options)}"
    for refused, sentence in REFUSALS:
        if refused(options):
            return sentence.format(o=options)
    return _over_caps(options) if options.capped else None


def _over_caps(options: "TrainOptions") -> str | None:
    """Return why the options do not go together with memory limits, or None if they do."""
    optimizer = "fused" if options.device == "cuda" else "torch-fused"
    for name, allowed in (_UNDER_CAPS | {"optimizer": (optimizer,)}).items():
        value = getattr(options, name)
        if value not in allowed:
            shown = " ".join(value) if isinstance(value, tuple) else value
            return f"{flag(name)} {shown} does not go together with --device-gib and --host-gib"
    if options.moments == "bf16" and options.dtype != "bf16":
        return f"--moments bf16 does not go together with --dtype {options.dtype} under --device-gib"
    if options.chunk is None:
        return None
    short, long = sorted((options.chunk, options.context_length))
    tokens = options.tokens_per_step(1)
    if long % short or tokens % long:
        whole = f"sequences of {options.context_length} tokens and a step of {tokens:,}"
        return f"--chunk {options.chunk} does not divide {whole} evenly"
    return None


REFUSALS: tuple[tuple[Callable[["TrainOptions"], bool], str], ...] = (
    (lambda o: o.seed >= 2**32, "--seed must be less than 2^32, as many as NumPy's generator has, got {o.seed}"),
    (lambda o: not all(0 <= beta < 1 for beta in o.betas), "--betas must lie in [0, 1), got {o.betas[0]} {o.betas[1]}"),
    (
        lambda o: o.moments != "same" and o.optimizer != "fused",
        "--moments {o.moments} needs --optimizer fused, got {o.optimizer}",
    ),
    (
        lambda o: o.z_loss > 0 and o.kept["keep"] == "autograd",
        "--z-loss {o.z_loss} needs a head with a hand-written backward, not --keep autograd",
    ),
    (
        lambda o: o.deterministic and o.attention == "hopper" and o.kept["keep"] == "autograd",
        "--deterministic and --attention hopper need blocks with a hand-written backward, not --keep autograd",
    ),
    (
        lambda o: o.optimizer == "muon" and o.agree is not None,
        "--agree {o.agree} does not go together with --optimizer muon",
    ),
    (
        lambda o: o.resume_from is not None and o.agree is not None,
        "--agree {o.agree} does not go together with --resume-from {o.resume_from}",
    ),
    (lambda o: o.choose_fastest and o.device != "cuda", "--choose-fastest is for --device cuda, got {o.device}"),
    (
        lambda o: o.copies_in_world > 1 and o.zero != 3,
        "--replicas {o.replicas} is for --zero 3, got --zero {o.zero}, or for --agree",
    ),
    (
        lambda o: (o.device_gib is None) != (o.host_gib is None),
        "--device-gib and --host-gib are one thing: give both or none, got {o.device_gib} and {o.host_gib}",
    ),
    (
        lambda o: o.packing and o.attention not in PACKING,
        "--packing needs --attention "
        + f"{', '.join(PACKING[:-1])} or {PACKING[-1]}"
        + ", which mask documents from each other, got {o.attention}",
    ),
    (
        lambda o: o.packing and o.context > 1 and o.context_order != "gathered",
        "--packing with --context {o.context} needs --context-order gathered, which masks documents from each other, "
        "got {o.context_order}",
    ),
    (
        lambda o: o.packing and o.chunk is not None and o.chunk < o.context_length,
        "--packing needs --chunk of whole sequences of {o.context_length} tokens, got {o.chunk}",
    ),
    (
        lambda o: o.evaluate_every is None and (o.keep_best or o.stop_after_no_gain is not None),
        "--keep-best and --stop-after-no-gain need evaluations, and --evaluate-every is None",
    ),
    (lambda o: o.save_every is None and o.keep_best, "--keep-best needs checkpoints, and --save-every is None"),
    (
        lambda o: o.save_every is None and o.export,
        "--save-every None leaves no checkpoint to be exported: --no-export does without",
    ),
    (
        lambda o: o.lora_rank is None and (o.lora_alpha is not None or o.lora_on != ADAPTED),
        "--lora-alpha and --lora-on are for adapters: give --lora-rank, too",
    ),
    (
        lambda o: o.lora_rank is not None and o.init is None and o.save_every is not None,
        "--lora-rank {o.lora_rank} needs --init or --save-every None: saved adapters need the weights they are for",
    ),
    (lambda o: not o.lora_on, "--lora-on needs at least one of " + ", ".join(ADAPTED)),
    (
        lambda o: o.lora_rank is not None and o.agree is not None,
        "--lora-rank {o.lora_rank} does not go together with --agree {o.agree}",
    ),
    (
        lambda o: (o.lighthouse is None) != (o.replica is None),
        "--lighthouse and --replica are one thing: give both or none, got {o.lighthouse} and {o.replica}",
    ),
    (
        lambda o: o.lighthouse is not None and o.fail is not None,
        "--fail {o.fail!r} is for replicas that this command starts, not with --lighthouse {o.lighthouse}",
    ),
    (
        lambda o: any(fault.replica >= o.replicas for fault in faults_of(o.fail)),
        "--fail {o.fail!r} names a replica that is not there: --replicas {o.replicas} are counted from 0",
    ),
    (
        lambda o: o.agree is not None and o.capped,
        "--agree {o.agree} does not go together with --device-gib and --host-gib",
    ),
    (
        lambda o: o.agree is not None and (o.keep_best or o.stop_after_no_gain is not None),
        "--agree {o.agree} evaluates on one replica alone: not with --keep-best or --stop-after-no-gain",
    ),
    (
        lambda o: o.agree is not None and (o.cuda_graph == "on" or bool(o.offload)),
        "--agree {o.agree} needs gradients and states on the device and the host's word in each step: not with "
        "--cuda-graph on or --offload",
    ),
    (
        lambda o: o.agree == "diloco" and o.zero in (1, 2),
        "--agree diloco averages all weights that an optimizer updates: --zero must be 0 or 3, got {o.zero}",
    ),
    (
        lambda o: o.agree == "diloco" and o.agree_every % o.agree_fragments != 0,
        "--agree-every {o.agree_every} is no multiple of --agree-fragments {o.agree_fragments}",
    ),
    (
        lambda o: o.agree == "diloco" and o.agree_delay >= o.agree_every // o.agree_fragments,
        "--agree-delay {o.agree_delay} must be less than the steps between two averages, --agree-every {o.agree_every} "
        "over --agree-fragments {o.agree_fragments}",
    ),
    (
        lambda o: o.agree == "diloco" and o.steps is not None and o.steps % o.agree_every != 0,
        "--steps {o.steps} is no multiple of --agree-every {o.agree_every}: replicas end on an average",
    ),
)
"""Conditions under which no run is possible, each with the sentence that says why; ``o`` are the options."""
