"""One training step, declared once: a ``TrainingCase``, used by every cell that measures a step and by every command.

    TrainingCase(size="xl", dtype="bf16", attention="flash")               # a named size
    TrainingCase.of(my_config, checkpoint="full")                          # any ModelConfig, at its own context

A field made by ``option`` is a column of a row and an option of every command that runs a step (``declared.py``); rows
that were measured before it existed are read with its plain value. A new one is a field here and the line of
``training/assemble.py`` that obeys it; what it cannot do together with others stands in ``refusals.py``. Imports no
torch, so that a command line can be parsed before torch is loaded.
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
    ModelConfig,
    Precision,
    Recipe,
    did_you_mean,
    resolve_size,
)
from cs336_systems.declared import option, options_in

COMPILED = {"on": "compiled", "whole-model": "whole model compiled"}
"""Ways to compile a step, each in words: every block by itself, or the model as one graph; the loss in both."""

UNCAPTURED_STEPS = 3
"""Steps that run before a CUDA graph is captured: they compile kernels and allocate states and workspaces."""


class Unsupported(ValueError):
    """The device, the build or the library cannot run what was asked for; the message says why."""


GatherBy = Literal["collectives", "copies"]


@dataclass(frozen=True)
class Parallel:
    """How ranks share a step: what wraps the model, and where the optimizer's state lies."""

    wrapper: str = "none"
    """none, or a name of ``training.parallel.WRAPPERS``: naive, flat, overlapped, bucketed, torch-ddp, fsdp, fsdp2."""
    optimizer_state: str = "replicated"
    """replicated, owned, scattered, scattered-gradients, torch-zero: ``training.parallel.make_parallel_optimizer``."""
    bucket_size_mb: float = option(
        25.0, "MiB of the buckets in which gradients (and owned parameters) are sent.", sign="positive", shown=True
    )
    communication_dtype: str = option(
        "same",
        "Dtype in which DDP sends and reduces gradients: their own, or bf16.",
        values=("same", "bf16"),
        shown=True,
    )
    max_ctas: int = option(
        0,
        "Most thread blocks of each NCCL kernel that sends DDP's gradients; each block takes a multiprocessor from "
        "backward. 0: NCCL chooses.",
        sign="not negative",
    )
    compute_dtype: str = "same"
    """Dtype in which FSDP gathers weights and computes: same as the masters, or bf16."""
    prefetch: int = option(1, "How many units ahead our FSDP gathers weights.", sign="not negative", shown=True)
    gather_by: GatherBy = option(
        "collectives",
        "How our FSDP gathers weights: in collectives, or by copying from the other ranks' memory on the same host.",
        shown=True,
    )
    update: str = option(
        "after-backward",
        "When the optimizer updates our FSDP's shards: after backward, or each unit as soon as its gradients are "
        "reduced.",
        values=("after-backward", "under-backward"),
    )
    on_host: bool = False
    """Whether torch's FSDP2 has shards, their gradients and the optimizer's state in host memory."""


_POLICIES = {"input": "full", "recursive": "recursive", "matmuls": "keep-matmuls", "attention": "keep-attention"}
_COUNTED_POLICIES = {"every": "every", "after": "first"}


def kept_as(keep: str) -> dict[str, str]:
    """The columns ``keep`` and ``checkpoint`` that a value of ``--keep`` means.

    autograd-every-3 is keep autograd with checkpoint every-3; a value that names no policy says nothing of the latter.

    Raises:
        ValueError: there is no such policy of activation checkpointing.
    """
    if not keep.startswith("autograd-"):
        return {"keep": keep}
    kind, _, count = keep.removeprefix("autograd-").partition("-")
    if kind in _COUNTED_POLICIES and count.isdecimal() and int(count) > 0:
        return {"keep": "autograd", "checkpoint": f"{_COUNTED_POLICIES[kind]}-{int(count)}"}
    if kind not in _POLICIES or count:
        known = [f"autograd-{name}" for name in (*_POLICIES, "every-K", "after-M")]
        raise ValueError(f"unknown --keep {keep!r}: {did_you_mean(keep, known)}known are {', '.join(known)}")
    return {"keep": "autograd", "checkpoint": _POLICIES[kind]}


KEEP_HELP = (
    "What blocks keep from forward for backward. With autograd's backward: autograd (everything); autograd-input (each "
    "block's input; the block is recomputed); autograd-every-K (the input of every K-th block); autograd-after-M (the "
    "inputs of the first M blocks, everything of those after them); autograd-recursive (nested: halves of halves); "
    "autograd-matmuls, autograd-attention (inputs, and the results of matmuls or of attention). With a hand-written "
    "backward, each with all before it: input; attention (its output); products (results of matmuls); all. Suffixes "
    "leave out parts: all-norm-swiglu (of norm, qkv, attention, residual, ffn, swiglu). 8xall+products keeps all in "
    "the first 8 blocks. By default products for fused kernels and fp8, else autograd."
)


@dataclass(frozen=True)
class TrainingCase:
    """Everything that decides how a training step runs, except its data."""

    device: str = "cpu"
    size: str | ModelConfig = option(
        "small",
        f"Named model sizes: {', '.join(MODEL_SIZES)} (2.7b is the xl of the 2026 handout, xl-2026).",
        typed=str,
        shown=True,
    )
    batch_size: int = option(4, "Sequences per micro-batch and rank.", sign="positive", shown=True)
    context_length: int = option(512, "Tokens per sequence.", sign="positive", shown=True)
    dtype: str = option(
        "fp32",
        "Precision: all in fp32, tf32 or bf16; autocast-*, PyTorch's mixed precision.",
        values=tuple(PRECISIONS),
        shown=True,
    )
    attention: str = option(
        "reference",
        "Attention: reference, all scores in memory; this suite's FlashAttention in PyTorch (tiled), in Triton (flash) "
        "or for H100 and H200 (hopper); torch's (sdpa-..., flex).",
        values=ATTENTIONS,
        words="{}",
        shown=True,
    )
    compile: str = option(
        "off",
        "torch.compile of each block and of the loss; --compile alone means on. whole-model compiles the blocks as one "
        "graph.",
        values=("off", *COMPILED),
        words=COMPILED,
        shown=True,
    )
    checkpoint: str = option(
        "none",
        "Other names for --keep autograd-...: none (autograd); full (autograd-input); every-K; first-M "
        "(autograd-after-M); recursive; keep-matmuls, keep-attention.",
        words="checkpoint {}",
    )
    optimizer: str = option(
        "reference",
        "AdamW: reference, in plain PyTorch; torch-fused, torch's fused kernel; fused, this suite's kernel, with "
        "stochastic rounding of bf16, on CUDA devices.",
        values=OPTIMIZERS,
        words="{}",
        shown=True,
    )
    accumulate: int = option(
        1,
        "Micro-batches per optimizer step; their gradients are added up.",
        sign="positive",
        words="{} micro-batches",
    )
    cuda_graph: str = option(
        "off",
        "on: capture the step (with --optimizer torch-fused all but the optimizer) and replay it; faster where the GPU "
        "waits for launches. Needs --device cuda, one rank, --mode step, --optimizer torch-fused or fused, and "
        "--warmup of at least 4.",
        values=("off", "on"),
        words="CUDA graph",
    )
    kernels: str = option(
        "reference",
        "Operations between matmuls: reference, plain PyTorch; fused, one Triton kernel each. fused needs a GPU and "
        "--attention flash or hopper; blocks have a hand-written backward, and the loss never holds all logits.",
        values=KERNELS,
        words="{} kernels",
    )
    keep: str = option("autograd", KEEP_HELP, asked=None, words="keep {}")
    master: str = option(
        "none",
        "fp32: the optimizer also keeps FP32 master weights; with --dtype bf16 and --optimizer fused.",
        values=("none", "fp32"),
        flag="master-weights",  # torchrun takes --master for options of its own
        words="masters in {}",
    )
    offload: str = option(
        "none",
        "What is kept in host memory: AdamW's m and v, master (weights), gradients (all with --optimizer fused), "
        "residual (inputs of blocks with a hand-written backward); several joined by hyphens, as m-v.",
        words="offload {}",
    )
    matmul_dtype: str = option(
        "same",
        "Dtype of matmuls in blocks: same, that of the stored tensors; or e4m3, quantized to fp8, in blocks with a "
        "hand-written backward.",
        values=MATMUL_DTYPES,
    )
    gradient_dtype: str = option(
        "e4m3",
        "Dtype of activation gradients in fp8 matmuls: e4m3; or e5m2, with more range and less precision.",
        values=GRADIENT_DTYPES,
    )
    scaling: str = option(
        "tensor",
        "What shares a scale in fp8 matmuls: the whole tensor; a row along the summed dimension; or a block of 128 "
        "numbers of such a row.",
        values=SCALINGS,
    )
    fp8_skip_first: int = option(0, "Blocks at the input that stay out of fp8.", several=False, sign="not negative")
    fp8_skip_last: int = option(0, "Blocks at the output that stay out of fp8.", several=False, sign="not negative")
    seed: int = 0
    """Seed of parameters and tokens."""

    @classmethod
    def of(cls, config: ModelConfig, **fields: Any) -> Self:
        """The case of a shape at its own context length."""
        return cls(size=config, context_length=config.context_length, **fields)

    @property
    def config(self) -> ModelConfig:
        """The model's shape at this context length."""
        size = resolve_size(self.size) if isinstance(self.size, str) else self.size
        return size.at_context(self.context_length)

    @property
    def precision(self) -> Precision:
        """How the step stores and multiplies numbers."""
        return PRECISIONS[self.dtype]

    @property
    def compiled(self) -> bool:
        return self.compile in COMPILED

    @property
    def written_out(self) -> bool:
        """Whether the blocks' backward is written out, and head and loss run in chunks."""
        return self.keep != "autograd"

    @property
    def recipe(self) -> Recipe:
        """How the matmuls of blocks are quantized, if they are."""
        return Recipe(self.matmul_dtype, self.gradient_dtype, self.scaling, self.fp8_skip_first, self.fp8_skip_last)

    @property
    def parallel(self) -> Parallel:
        """How ranks share the step; cells of several ranks say so from their own columns."""
        return Parallel()

    @property
    def deterministic(self) -> bool:
        """Whether a written-out model's gradients are the same bits every run; a trainer says so."""
        return False

    @property
    def z_loss(self) -> float:
        """Coefficient of the squared log-sum-exp in a written-out model's loss; a trainer says so."""
        return 0.0

    @property
    def moment_bytes(self) -> int:
        """Bytes of an element of each of AdamW's moments; a trainer may say so."""
        return self.precision.parameter_bytes

    @property
    def attention_kind(self) -> Literal["materialised", "flash"]:
        """How its attention's work is counted."""
        return "materialised" if self.attention.startswith("reference") else "flash"

    @property
    def work(self) -> tuple[ModelConfig, int, int]:
        """Model, sequences and tokens per sequence of a micro-batch, as the functions in ``costs`` take them."""
        return self.config, self.batch_size, self.context_length

    @property
    def tokens_per_step(self) -> int:
        """Tokens of this rank in a step, all micro-batches together."""
        return self.accumulate * self.batch_size * self.context_length

    def __str__(self) -> str:
        """In a few words, for people: what differs from the plain case is named."""
        return " ".join([self.shape_words, *self.extras])

    @property
    def shape_words(self) -> str:
        """Model, batch, context and dtype."""
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
"""Fields that are a recipe of quantized matmuls."""
