"""Invalid options of a training run, as far as they show without data, device or ranks. Imports no torch.

Checks come in this order: signs of numbers, two options for one thing, options without what they are for, half a pair,
options of one world beside --agree, the conditions of ``REFUSALS``, and memory limits. ``TrainOptions.check`` then
checks the step by ``cs336_systems/refusals.py``.
"""

from collections.abc import Callable
from dataclasses import fields
from typing import TYPE_CHECKING, Any

from cs336_systems.case import RECIPE
from cs336_systems.config import ADAPTED, FASTEST, PACKING
from cs336_systems.declared import as_typed, flag, option_name, options_in, sign_refusal
from cs336_systems.pretraining.replica_options import faults_of
from cs336_systems.ranks import PIPELINE

if TYPE_CHECKING:
    from cs336_systems.pretraining.options import TrainOptions

ALTERNATIVES = (("steps", "epochs"), ("total_batch_tokens", "accumulate"))
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
    "scaling": ("tensor",),
    "fp8_skip_first": (0,),
    "fp8_skip_last": (0,),
    "z_loss": (0.0,),
}
"""The values that some options may have under memory limits."""


DILOCO = ("agree_every", "agree_fragments", "agree_delay", "agree_dtype", "outer_learning_rate", "outer_momentum")
"""Options of --agree diloco alone."""
_AGREEING = ("agree_timeout", "ranks_per_replica", "lighthouse", "replica", "fail")
_ONLY_FOR: tuple[tuple[tuple[str, ...], Callable[["TrainOptions"], object], str], ...] = (
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
    (DILOCO, lambda o: o.agree == "diloco", "--agree diloco, got --agree {o.agree}"),
    (_AGREEING, lambda o: o.agree is not None, "replicas that agree: --agree every-step or --agree diloco"),
    (("moments",), lambda o: o.optimizer == "fused", "--optimizer fused, got {o.optimizer}"),
    (("z_loss",), lambda o: o.kept["keep"] != "autograd", "a head with a hand-written backward, not --keep autograd"),
    (("replicas",), lambda o: o.agree or o.zero == 3, "--zero 3, got --zero {o.zero}, or for --agree"),
    (
        ("keep_best", "stop_after_no_gain"),
        lambda o: o.evaluate_every is not None,
        "runs with evaluations, and --evaluate-every is None",
    ),
    (("keep_best",), lambda o: o.save_every is not None, "runs with checkpoints, and --save-every is None"),
    (("lora_alpha", "lora_on"), lambda o: o.lora_rank is not None, "adapters: give --lora-rank, too"),
)
"""Options that may only be given if a condition holds, and what they are for."""
_TOGETHER = (("device_gib", "host_gib"), ("lighthouse", "replica"))
"""Pairs of options of which both or none are given."""
_ONE_WORLD = ("resume_from", "lora_rank", "device_gib")
"""Options that do not go together with --agree."""


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
    given = {name: as_typed(name, value) for name, value, default in values if value != default}
    for one, other in ALTERNATIVES:
        if one in given and other in given:
            return f"{given[one]} and {given[other]}: give one of them"
    for names, served, what in _ONLY_FOR:
        for name in names:
            if name in given and not served(options):
                return f"{given[name]} is for {what.format(o=options)}"
    for names in _TOGETHER:
        if len(given.keys() & names) == 1:
            found = " and ".join(str(getattr(options, name)) for name in names)
            return f"{' and '.join(map(flag, names))} go together: give both or none, got {found}"
    if options.agree is not None:
        for name in _ONE_WORLD:
            if name in given:
                return f"{given['agree']} does not go together with {given[name]}"
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
            return f"{as_typed(name, value)} does not go together with --device-gib and --host-gib"
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
    (lambda o: o.outer_momentum >= 1, "--outer-momentum must lie in [0, 1), got {o.outer_momentum:g}"),
    (
        lambda o: o.deterministic and o.attention == "hopper" and o.kept["keep"] == "autograd",
        "--deterministic and --attention hopper need blocks with a hand-written backward, not --keep autograd",
    ),
    (
        lambda o: o.optimizer == "muon" and o.agree is not None,
        "--agree {o.agree} does not go together with --optimizer muon",
    ),
    (lambda o: o.choose_fastest and o.device != "cuda", "--choose-fastest is for --device cuda, got {o.device}"),
    (
        lambda o: o.packing and o.attention not in (FASTEST, *PACKING),
        "--packing needs --attention "
        + f"{', '.join(PACKING[:-1])} or {PACKING[-1]}"
        + ", which mask documents from each other, got {o.attention}",
    ),
    (
        lambda o: o.packing and o.chunk is not None and o.chunk < o.context_length,
        "--packing needs --chunk of whole sequences of {o.context_length} tokens, got {o.chunk}",
    ),
    (
        lambda o: o.save_every is None and o.export,
        "--save-every None leaves no checkpoint to be exported: --no-export does without",
    ),
    (
        lambda o: o.init is not None and o.size != o.default(o.device).size,
        "--init {o.init} has a size of its own: leave out --size {o.size}",
    ),
    (
        lambda o: o.lora_rank is not None and o.init is None and o.save_every is not None,
        "--lora-rank {o.lora_rank} needs --init or --save-every None: saved adapters need the weights they are for",
    ),
    (lambda o: not o.lora_on, "--lora-on needs at least one of " + ", ".join(ADAPTED)),
    (
        lambda o: o.lighthouse is not None and o.fail is not None,
        "--fail {o.fail!r} is for replicas that this command starts, not with --lighthouse {o.lighthouse}",
    ),
    (
        lambda o: any(fault.replica >= o.replicas for fault in faults_of(o.fail)),
        "--fail {o.fail!r} names a replica that is not there: --replicas {o.replicas} are counted from 0",
    ),
    (
        lambda o: o.steps is not None and any(fault.step >= o.steps for fault in faults_of(o.fail)),
        "--fail {o.fail!r} names a step that is not there: --steps {o.steps} are counted from 0",
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
