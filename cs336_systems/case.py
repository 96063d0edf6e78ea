"""One training step, described once: a ``TrainingCase``, used by every cell that measures a step and every command.

    TrainingCase(size="xl", dtype="bf16", attention="flash")               # a named size
    TrainingCase.of(my_config, checkpoint="full")                          # any ModelConfig, at its own context

The fields are the columns of a row and the options of a command line. A new option is a field here, its set of values
in ``experiments/options.py`` (a test holds the two together) and the line of ``training/assemble.py`` that obeys it;
rows that were measured before it existed are read with its default. Imports no torch, so that a command line can be
parsed before torch is loaded.
"""

from dataclasses import dataclass
from typing import Any, Literal, Self

from cs336_systems.config import (
    GRADIENT_DTYPES,
    MATMUL_DTYPES,
    PRECISIONS,
    SCALINGS,
    ModelConfig,
    Precision,
    Recipe,
    resolve_size,
)

COMPILED = {"on": "compiled", "whole-model": "whole model compiled"}
"""Ways to compile a step, each in words: every block by itself, or the model as one graph; the loss in both."""

UPDATES = ("after-backward", "under-backward")
"""When the optimizer steps."""

UNCAPTURED_STEPS = 3
"""What a step that becomes a CUDA graph runs as it is before: kernels are compiled, states and workspaces allocated."""


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
    bucket_size_mb: float = 25.0
    """MiB of the buckets in which gradients (and owned parameters) travel."""
    communication_dtype: str = "same"
    """In which DDP sends and adds up gradients: same, or bf16."""
    max_ctas: int = 0
    """Most thread blocks of NCCL's kernels that send DDP's gradients; 0 for as many as NCCL chooses."""
    compute_dtype: str = "same"
    """In which FSDP gathers weights and computes: same as the masters, or bf16."""
    prefetch: int = 1
    """Units whose weights our FSDP gathers ahead."""
    gather_by: GatherBy = "collectives"
    """How weights come together under our FSDP: in collectives, or by copies from the other ranks' memory."""
    update: str = "after-backward"
    """after-backward; or under-backward: our FSDP's shards are updated as soon as their gradients are averages."""
    on_host: bool = False
    """Of torch's FSDP2: shards, their gradients and the optimizer's state are in host memory."""


@dataclass(frozen=True)
class TrainingCase:
    """Everything that decides how a training step runs, except its data."""

    device: str = "cpu"
    size: str | ModelConfig = "small"
    """A named size, or a shape of one's own."""
    batch_size: int = 4
    """Sequences per micro-batch and rank; a step has one micro-batch unless ``accumulate`` says otherwise."""
    context_length: int = 512
    """Tokens per sequence."""
    dtype: str = "fp32"
    """One of ``config.PRECISIONS``."""
    attention: str = "reference"
    """One of ``config.ATTENTIONS``; the reference is the operation that the model's ``ops`` bring."""
    compile: str = "off"
    """on: torch.compile of each block and of the loss; whole-model: of the model as one graph, and of the loss."""
    checkpoint: str = "none"
    """Which activations are computed a second time, a policy of ``costs.checkpointing``."""
    optimizer: str = "reference"
    """One of ``config.OPTIMIZERS``."""
    accumulate: int = 1
    """Micro-batches per step, whose gradients add up to that of the mean over all of their tokens."""
    cuda_graph: str = "off"
    """on: the whole step is captured and replayed, so that the device does not wait for launches."""
    kernels: str = "reference"
    """One of ``config.KERNELS``: norms, rotations, SwiGLU, head and loss; fused needs a written-out backward."""
    keep: str = "autograd"
    """autograd: the blocks' backward is autograd's; else it is written out, and keeps what ``costs/kept.py`` says."""
    master: str = "none"
    """fp32: weights that the optimizer keeps besides those in bf16; ``--master-weights`` of command lines."""
    offload: str = "none"
    """What is kept in host memory, names of ``costs/offload.py`` by hyphens."""
    matmul_dtype: str = "same"
    """Of the products of written-out blocks, as of ``config.Recipe``, whose fields these five are."""
    gradient_dtype: str = "e4m3"
    scaling: str = "tensor"
    fp8_skip_first: int = 0
    fp8_skip_last: int = 0
    seed: int = 0
    """Of parameters and tokens."""

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
        """How the products of blocks are quantized, if they are."""
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
        """How much of the squared log-sum-exp a written-out model's loss has besides; a trainer says so."""
        return 0.0

    @property
    def moment_bytes(self) -> int:
        """Of an element of each of AdamW's moments; a trainer may say so."""
        return self.precision.parameter_bytes

    @property
    def head_chunk(self) -> int | None:
        """Tokens whose logits a written-out model has at a time; None where its operation chooses."""
        return None

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
        """Of this rank, all micro-batches together."""
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
        """What differs from plain eager training, each in a word or two."""
        return [
            *([self.attention] if self.attention != "reference" else []),
            *([COMPILED[self.compile]] if self.compiled else []),
            *([f"checkpoint {self.checkpoint}"] if self.checkpoint != "none" else []),
            *([self.optimizer] if self.optimizer != "reference" else []),
            *([f"{self.accumulate} micro-batches"] if self.accumulate != 1 else []),
            *(["CUDA graph"] if self.cuda_graph == "on" else []),
            *([f"{self.kernels} kernels"] if self.kernels != "reference" else []),
            *([f"keep {self.keep}"] if self.written_out else []),
            *([str(self.recipe)] if self.recipe.quantized else []),
            *([f"masters in {self.master}"] if self.master != "none" else []),
            *([f"offload {self.offload}"] if self.offload != "none" else []),
        ]


def update_reason(case: TrainingCase) -> str | None:
    """Why the case's optimizer cannot update when it is asked to, in one sentence, or None if it can.

    Raises:
        ValueError: ``update`` is neither after-backward nor under-backward.
    """
    update = case.parallel.update
    if update not in UPDATES:
        raise ValueError(f"update must be {' or '.join(UPDATES)}, got {update!r}")
    if update == "after-backward":
        return None
    if case.parallel.wrapper != "fsdp":
        return f"update {update} works on the shards of wrapper fsdp, got {case.parallel.wrapper}"
    if case.precision.name == "autocast-fp16":
        return f"update {update} cannot wait for loss scaling of autocast-fp16, which decides whether a step counts"
    return None


def recipe_reason(case: TrainingCase) -> str | None:
    """Why the case's products cannot be quantized as it says, in one sentence, or None if they can, or need not.

    That is what can be said without looking at the device.
    """
    recipe, config = case.recipe, case.config
    for name, value, known in (
        ("matmul_dtype", recipe.matmul, MATMUL_DTYPES),
        ("gradient_dtype", recipe.gradient, GRADIENT_DTYPES),
        ("scaling", recipe.scaling, SCALINGS),
    ):
        if value not in known:
            return f"unknown {name} {value!r}: known are {', '.join(known)}"
    if not recipe.quantized:
        return None
    asked = f"matmul_dtype {recipe.matmul}"
    if not case.written_out:
        return f"{asked} with keep autograd: quantized products are those of blocks whose backward is written out"
    if recipe.skip_first < 0 or recipe.skip_last < 0:
        return f"{asked} skips blocks, of which there cannot be {min(recipe.skip_first, recipe.skip_last)}"
    if recipe.skip_first + recipe.skip_last >= config.n_layers:
        skipped = f"the first {recipe.skip_first} and the last {recipe.skip_last} are skipped"
        return f"{asked} quantizes none of {config.n_layers} blocks: {skipped}"
    sizes = {"d_model": config.d_model, "d_kv": config.d_kv, "d_ff": config.d_ff, "context": case.context_length}
    odd = [f"{name} {size}" for name, size in sizes.items() if size % 16]
    return f"{asked}: products in fp8 take sizes that 16 divides, not {', '.join(odd)}" if odd else None


def cuda_graph_reason(case: TrainingCase) -> str | None:
    """Why the case's step cannot be captured as a CUDA graph, in one sentence, or None if it may be, or need not.

    Raises:
        ValueError: ``cuda_graph`` is neither off nor on.
    """
    if case.cuda_graph not in ("off", "on"):
        raise ValueError(f"cuda_graph must be off or on, got {case.cuda_graph!r}")
    if case.cuda_graph == "off":
        return None
    if case.device != "cuda":
        return f"a CUDA graph needs device cuda, got {case.device}"
    if case.parallel.wrapper != "none" or case.parallel.optimizer_state != "replicated":
        return "ranks agree through the host on what they send, which a CUDA graph cannot hold"
    if case.precision.name == "autocast-fp16":
        return "loss scaling of autocast-fp16 decides on the host whether a step counts, which a CUDA graph cannot hold"
    if case.optimizer == "reference":
        return "optimizer reference counts steps on the host, which a CUDA graph cannot hold: use torch-fused or fused"
    return None
