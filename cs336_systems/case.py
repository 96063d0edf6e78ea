"""One training step, declared once: every command that runs or measures a step describes it by a ``TrainingCase``.

    TrainingCase(size="xl", dtype="bf16", attention="flash")               # a named size
    TrainingCase.of(my_config, checkpoint="full")                          # any ModelConfig, at its own context

A field made by ``option`` is a column of rows and an option of every command that runs a step (``declared.py``); rows
that were measured before the field existed are read with its default. A new option is a field here and the line of
``training/assemble.py`` that applies it; ``refusals.py`` lists the combinations that no step can have. This module
imports no torch, so that a command line is parsed before torch is loaded.
"""

from dataclasses import dataclass
from typing import Any, Literal, Self

from cs336_systems.config import (
    ATTENTIONS,
    GRADIENT_DTYPES,
    KERNELS,
    MATMUL_DTYPES,
    MODEL_SIZES,
    OPTIMIZERS,
    PRECISIONS,
    SCALINGS,
    Lora,
    ModelConfig,
    Precision,
    Recipe,
    check_known,
    did_you_mean,
    resolve_size,
)
from cs336_systems.declared import option, options_in
from cs336_systems.ranks import Parallel

COMPILED = {"on": "compiled", "whole-model": "whole model compiled", "loss": "loss compiled"}
"""The ways to compile a step, in words. All compile the loss."""

UNCAPTURED_STEPS = 3
"""The number of steps before a CUDA graph is captured; they compile kernels and allocate memory."""


class Unsupported(ValueError):
    """The device, the build or a library cannot run the step; the message says why."""


_POLICIES = {"input": "full", "recursive": "recursive", "matmuls": "keep-matmuls", "attention": "keep-attention"}
_COUNTED_POLICIES = {"every": "every", "after": "first", "matmuls": "keep-matmuls"}


def kept_as(keep: str) -> dict[str, str]:
    """Return the values of the columns ``keep`` and ``checkpoint`` for a value of ``--keep``.

    ``autograd-every-3`` means keep autograd and checkpoint every-3. Without ``autograd-`` there is no ``checkpoint``.

    Raises:
        ValueError: no policy of activation checkpointing has this name.
    """
    if not keep.startswith("autograd-"):
        return {"keep": keep}
    kind, _, count = keep.removeprefix("autograd-").partition("-")
    if kind in _COUNTED_POLICIES and count.isdecimal() and int(count) > 0:
        return {"keep": "autograd", "checkpoint": f"{_COUNTED_POLICIES[kind]}-{int(count)}"}
    if kind not in _POLICIES or count:
        known = [f"autograd-{name}" for name in (*_POLICIES, "every-K", "after-M", "matmuls-K")]
        raise ValueError(f"unknown --keep {keep!r}: {did_you_mean(keep, known)}known are {', '.join(known)}")
    return {"keep": "autograd", "checkpoint": _POLICIES[kind]}


KEEP_HELP = (
    "What blocks keep from forward for backward. With autograd's backward: autograd (everything); autograd-input (each "
    "block's input; the block is recomputed); autograd-every-K (the input of every K-th block); autograd-after-M (the "
    "inputs of the first M blocks, everything of those after them); autograd-recursive (nested: halves of halves); "
    "autograd-matmuls, autograd-attention (inputs, and the results of matmuls or of attention), autograd-matmuls-K "
    "(of matmuls in the last K blocks, of attention in the others). With a hand-written backward there are four "
    "levels, each also keeping what the one before keeps: input; attention (its output); products (results of "
    "matmuls); all. Suffixes leave out parts (norm, qkv, attention, residual, ffn, swiglu), as in all-norm-swiglu. "
    "8xall+products keeps all in the first 8 blocks and products in the rest. The default is products for fused "
    "kernels and fp8, else autograd."
)


@dataclass(frozen=True)
class TrainingCase:
    """All that decides how a training step runs, except its data."""

    device: str = "cpu"
    size: str | ModelConfig = option(
        "small",
        f"Named model sizes: {', '.join(MODEL_SIZES)} (2.7b is the xl of the 2026 handout, xl-2026).",
        typed=str,
        shown=True,
    )
    batch_size: int = option(4, "Sequences per micro-batch and data rank.", sign="positive", shown=True)
    context_length: int = option(512, "Tokens per sequence.", sign="positive", shown=True)
    dtype: str = option(
        "fp32",
        "Precision: fp32, tf32 or bf16 for everything; or autocast-bf16, PyTorch's mixed precision.",
        values=tuple(PRECISIONS),
        shown=True,
    )
    attention: str = option(
        "reference",
        "Attention: reference holds all scores in memory (reference-compiled: under torch.compile); tiled, flash and "
        "hopper are this suite's FlashAttention-2 in PyTorch, in Triton, and for H100 and H200; sdpa-... and flex are "
        "torch's.",
        values=ATTENTIONS,
        words="{}",
        shown=True,
    )
    compile: str = option(
        "off",
        "on compiles each block and the loss by torch.compile; --compile alone means on. whole-model compiles all "
        "blocks as one graph, loss no block.",
        values=("off", *COMPILED),
        words=COMPILED,
        shown=True,
    )
    checkpoint: str = option(
        "none",
        "Other names for --keep autograd-...: none (autograd); full (autograd-input); every-K; first-M "
        "(autograd-after-M); recursive; keep-matmuls, keep-attention, keep-matmuls-K.",
        words="checkpoint {}",
    )
    optimizer: str = option(
        "reference",
        "AdamW: reference is plain PyTorch; torch-fused is torch's fused kernel; fused is this suite's kernel, which "
        "rounds bf16 stochastically and needs a CUDA device. muon is Muon for matrices of blocks, and AdamW for the "
        "rest.",
        values=OPTIMIZERS,
        words="{}",
        shown=True,
    )
    accumulate: int = option(
        1,
        "Micro-batches per optimizer step; their gradients are added up.",
        aliases=("--micro-batches",),
        sign="positive",
        words="{} micro-batches",
    )
    cuda_graph: str = option(
        "off",
        "on captures the step (with --optimizer torch-fused all but the optimizer) as a CUDA graph and replays it, "
        "which is faster where the GPU waits for launches. It needs --device cuda, one rank or tensor ranks by "
        "collectives, a whole step (--mode, where there is that option), --optimizer torch-fused or fused, and "
        "--warmup of at least 4.",
        values=("off", "on"),
        words="CUDA graph",
    )
    kernels: str = option(
        "reference",
        "Operations between matmuls: reference runs them in plain PyTorch, fused each in one Triton kernel. fused "
        "needs a GPU and --attention flash or hopper; its blocks have a hand-written backward, and its loss is "
        "computed in chunks, without all logits at once.",
        values=KERNELS,
        words="{} kernels",
    )
    matmul_kernels: str = option(
        "library",
        "Kernels of matmuls with --kernels fused: the library's own choice; or measured, which tries cuBLASLt's "
        "candidates for each shape before the first step, for 30 to 50 s, and takes the fastest with the same bits.",
        values=("library", "measured"),
        words="matmul kernels {}",
    )
    keep: str = option("autograd", KEEP_HELP, asked=None, words="keep {}")
    master: str = option(
        "none",
        "With fp32 the optimizer also keeps FP32 master weights; needs --dtype bf16 and --optimizer fused.",
        values=("none", "fp32"),
        flag="master-weights",  # torchrun takes --master for options of its own
        words="masters in {}",
    )
    offload: str = option(
        "none",
        "What is kept in host memory: m and v (AdamW's moments), master (FP32 master weights) and gradients, which "
        "need --optimizer fused; residual (inputs of blocks with a hand-written backward). Join several by hyphens, as "
        "in m-v.",
        words="offload {}",
    )
    matmul_dtype: str = option(
        "same",
        "Dtype of matmuls in blocks: same as the stored tensors; or e4m3, which quantizes to fp8 and needs a "
        "hand-written backward.",
        values=MATMUL_DTYPES,
    )
    gradient_dtype: str = option(
        "e4m3",
        "Dtype of activation gradients in fp8 matmuls: e4m3, or e5m2 with more range and less precision.",
        values=GRADIENT_DTYPES,
    )
    scaling: str = option(
        "tensor",
        "Which numbers share a scale in fp8 matmuls: a whole tensor; a row along the summed dimension; or a block of "
        "128 numbers of such a row.",
        values=SCALINGS,
    )
    fp8_skip_first: int = option(0, "Blocks at the input that stay out of fp8.", several=False, sign="not negative")
    fp8_skip_last: int = option(0, "Blocks at the output that stay out of fp8.", several=False, sign="not negative")
    seed: int = 0
    """The seed of parameters and tokens."""

    @classmethod
    def of(cls, config: ModelConfig, **fields: Any) -> Self:
        """Return the case of a model shape at its own context length."""
        return cls(size=config, context_length=config.context_length, **fields)

    @property
    def config(self) -> ModelConfig:
        """The model's shape at this context length."""
        size = resolve_size(self.size) if isinstance(self.size, str) else self.size
        return size.at_context(self.context_length)

    @property
    def precision(self) -> Precision:
        """How the step stores and multiplies numbers; ValueError for an unknown dtype."""
        check_known("dtype", self.dtype, PRECISIONS)
        return PRECISIONS[self.dtype]

    @property
    def compiled(self) -> bool:
        """Whether torch.compile compiles blocks or the whole model."""
        return self.compile in ("on", "whole-model")

    @property
    def written_out(self) -> bool:
        """Whether blocks have a hand-written backward, and the output head and loss run in chunks."""
        return self.keep != "autograd"

    @property
    def recipe(self) -> Recipe:
        """The recipe by which matmuls of blocks are quantized, if they are."""
        return Recipe(self.matmul_dtype, self.gradient_dtype, self.scaling, self.fp8_skip_first, self.fp8_skip_last)

    @property
    def parallel(self) -> Parallel:
        """How ranks share the step; the default is one rank, and cases of several ranks override this."""
        return Parallel()

    @property
    def deterministic(self) -> bool:
        """Whether gradients of a hand-written backward have the same bits in every run; the trainer overrides this."""
        return False

    @property
    def attention_alone(self) -> bool:
        """Whether one block's attention runs instead of a step; a benchmark overrides this."""
        return False

    @property
    def z_loss(self) -> float:
        """The coefficient of the squared log-sum-exp that is added to the loss; the trainer overrides this."""
        return 0.0

    @property
    def lora(self) -> Lora | None:
        """The adapters that are trained instead of the weights, if any; the trainer overrides this."""
        return None

    @property
    def n_trained(self) -> int:
        """The number of trained parameters of the whole model."""
        return self.config.n_parameters if self.lora is None else self.lora.n_parameters(self.config)

    @property
    def moment_bytes(self) -> int:
        """Bytes of one element of one of AdamW's moments; the trainer overrides this."""
        return self.precision.parameter_bytes

    @property
    def attention_kind(self) -> Literal["materialised", "flash"]:
        """How FLOPs and memory of this attention are counted."""
        return "materialised" if self.attention.startswith("reference") else "flash"

    @property
    def work(self) -> tuple[ModelConfig, int, int]:
        """The model, sequences per micro-batch and tokens per sequence, as the functions in ``costs`` take them."""
        return self.config, self.batch_size, self.context_length

    @property
    def tokens_per_step(self) -> int:
        """The tokens of a step on one data rank."""
        return self.accumulate * self.batch_size * self.context_length

    def __str__(self) -> str:
        """Return the shape and the differences from plain eager training, in a few words."""
        return " ".join([self.shape_words, *self.extras])

    @property
    def shape_words(self) -> str:
        """The model, batch, context and dtype in a few words."""
        return f"{self.config.name} batch {self.batch_size} context {self.context_length} {self.dtype}"

    @property
    def extras(self) -> list[str]:
        """The differences from plain eager training, each in a word or two."""
        found = []
        for each, of in options_in(TrainingCase):
            value = getattr(self, each.name)
            if of.words and value != each.default:
                words = of.words if isinstance(of.words, str) else of.words.get(value, "")
                found.append(words.format(value))
        return [*filter(None, found), *([str(self.recipe)] if self.recipe.quantized else [])]


RECIPE = ("matmul_dtype", "gradient_dtype", "scaling", "fp8_skip_first", "fp8_skip_last")
"""The fields of ``TrainingCase`` that make up ``recipe``."""
