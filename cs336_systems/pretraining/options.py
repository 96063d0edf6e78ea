"""What ``train.py`` is asked, and what is checked before anything runs: every fault is one sentence. Imports no torch.

``training_case`` is the step that the options describe, ``Schedule`` its learning rate by step; how many steps and
micro-batches there are follows from the options and the number of ranks.
"""

import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, Literal, Self

from cs336_systems.case import Parallel, TrainingCase
from cs336_systems.config import ModelConfig, resolve_size
from cs336_systems.costs.checkpointing import canonical_policy
from cs336_systems.costs.kept import default_keep, unserved_reason
from cs336_systems.costs.offload import offload_reason
from cs336_systems.pretraining.schedules import Schedule, ScheduleKind

_POSITIVE = (
    *("context_length", "batch_size", "accumulate", "total_batch_tokens", "steps", "epochs", "clip", "walltime"),
    *("evaluate_every", "evaluation_sequences", "save_every", "keep_last", "keep_every", "log_every"),
    *("lmhead_chunks", "quantization_every", "device_gib", "host_gib", "chunk"),
)
_NOT_NEGATIVE = (
    "learning_rate",
    "z_loss",
    "weight_decay",
    "eps",
    "seed",
    "warmup_steps",
    "fp8_skip_first",
    "fp8_skip_last",
)
_UNDER_CAPS: dict[str, list[Any]] = {
    **{"zero": [0], "offload": [()], "keep": [None], "recompute": ["none"], "compile": ["off"], "cuda_graph": ["off"]},
    **{"dtype": ["bf16", "fp32"], "kernels": ["fused", "reference"], "matmul_dtype": ["same"]},
    **{"z_loss": [0.0], "lmhead_chunks": [None]},
}
"""Options with the only values that they may have under caps on memory."""
_MOST_WARMUP = 100
"""Steps, unless it is said."""


@dataclass(frozen=True)
class TrainOptions:
    """A training run."""

    CPU_DEFAULTS: ClassVar[dict[str, Any]] = {
        **{"size": "tiny", "context_length": 128, "batch_size": 8, "steps": 800},
        **{"learning_rate": 3e-3, "dtype": "fp32", "optimizer": "torch-fused"},
        **{"attention": "reference", "kernels": "reference"},
        **{"evaluate_every": 200, "evaluation_sequences": 512, "save_every": 200, "log_every": 50, "walltime": 70.0},
    }
    """Where there is no GPU defaults shrink, so that a bare command ends in a minute and a half."""

    size: str = "qwen2.5-0.5b"
    """Named model size, from scratch: tiny, small, medium, ..., llama3-1b, qwen2.5-0.5b, ...; with the vocabulary of
    the data."""
    init: Path | None = None
    """Hugging Face folder whose weights are trained further, in place of --size."""
    data: Path | None = None
    """Folder of tokenize_data.py; by default that of Python's standard library, made if it is not there."""
    out: Path = Path("runs/first")
    """Folder of the run: log, checkpoints, export; if there are checkpoints, the run goes on from the newest."""
    device: Literal["cpu", "cuda"] = "cuda"
    """Where to run; under torchrun every rank has one."""

    context_length: int = 1024
    """Tokens per sequence."""
    batch_size: int = 16
    """Sequences per micro-batch and rank."""
    accumulate: int = 1
    """Micro-batches per step."""
    total_batch_tokens: int | None = None
    """Tokens per step of all ranks, from which --accumulate follows."""
    steps: int | None = None
    """Of the whole run, what an earlier command has made included; by default one epoch."""
    epochs: float | None = None
    """In place of --steps."""

    learning_rate: float = 6e-4
    """The highest."""
    schedule: ScheduleKind = "cosine"
    """What comes after the warm-up."""
    warmup_steps: int | None = None
    """Over which the learning rate rises; by default a tenth of all steps, at most 100."""
    final_fraction: float = 0.1
    """Of the highest learning rate, at the end."""
    cooldown_steps: int | None = None
    """Of wsd; by default the last fifth."""
    betas: tuple[float, float] = (0.9, 0.95)
    """Of AdamW."""
    eps: float = 1e-8
    """Of AdamW."""
    weight_decay: float = 0.1
    """Of matrices; norms and biases have none."""
    clip: float | None = 1.0
    """Largest norm of the whole gradient; None for no clipping."""
    z_loss: float = 0.0
    """How much of the squared log-sum-exp of the logits training's loss has besides; not with --keep autograd."""
    skip_nonfinite: bool = False
    """Pass over steps whose loss or gradient is not finite, instead of stopping at the first."""

    dtype: Literal["fp32", "tf32", "bf16", "autocast-bf16"] = "bf16"
    """Of parameters, gradients and products; autocast-bf16: fp32 parameters, products in bf16."""
    moments: Literal["same", "fp32", "bf16"] = "same"
    """Dtype of AdamW's moments; other than the parameters' with --optimizer fused."""
    master: Literal["none", "fp32"] = "none"
    """fp32: with --dtype bf16 and --optimizer fused, weights in fp32 that the optimizer keeps besides."""
    offload: tuple[Literal["m", "v", "master", "gradients", "residual"], ...] = ()
    """What is kept in host memory: moments, masters, gradients (with --optimizer fused), inputs of blocks (not with
    --keep autograd)."""
    optimizer: Literal["torch-fused", "fused"] = "fused"
    """torch's fused AdamW; or ours, with stochastic rounding of bf16, on CUDA devices."""
    kernels: Literal["reference", "fused", "fused-products"] = "fused"
    """Between matrix products: plain PyTorch; or fused, a Triton kernel each, on CUDA devices. fused-products: those,
    and on Hopper a kernel of our own for the products of forward."""
    attention: str = "flash"
    """reference, flash, hopper, sdpa-flash, ..."""
    keep: str | None = None
    """What blocks with a written-out backward keep: input, attention, products, all, less switches as in all-norm;
    autograd: backward is autograd's. By default products for fused kernels and quantized products, else autograd."""
    lmhead_chunks: int | None = None
    """In which a micro-batch's tokens go through head and loss, one after the other; None leaves it to the kernel. Not
    with --keep autograd."""
    matmul_dtype: Literal["same", "e4m3"] = "same"
    """Of the products of blocks: same, as tensors are stored; or e4m3, quantized to fp8, which a CPU emulates; not with
    --keep autograd."""
    gradient_dtype: Literal["e4m3", "e5m2"] = "e4m3"
    """Of gradients of activations in quantized products; e5m2 has more range and less precision."""
    scaling: Literal["tensor", "row", "block"] = "tensor"
    """What shares a scale where products are quantized: a tensor; a row of what is summed; or a block of 128 of it."""
    fp8_skip_first: int = 0
    """Blocks at the input whose products are not quantized."""
    fp8_skip_last: int = 0
    """Blocks at the output whose products are not quantized."""
    recompute: str = "none"
    """With --keep autograd, which activations are computed a second time: none, full, every-K, ..."""
    compile: Literal["off", "on"] = "off"
    """With --keep autograd, torch.compile of each block."""
    cuda_graph: Literal["off", "on"] = "off"
    """Replay the step as a CUDA graph, with --optimizer torch-fused without the optimizer; one rank."""
    zero: Literal[0, 1, 2, 3] = 0
    """What ranks divide: 0 nothing (DDP), 1 the optimizer's state, 2 gradients too, 3 parameters too (FSDP)."""

    device_gib: float | None = None
    """With --host-gib: stream layers, so that all that the process has on the device stays below this cap; on a CPU the
    step's slabs alone are counted. The plan says what is kept where, and what is computed again."""
    host_gib: float | None = None
    """With --device-gib: the cap on host memory."""
    chunk: int | None = None
    """Under these caps, tokens that a layer sees at a time: whole sequences or an even piece of one. By default what is
    fastest, or a micro-batch where a step is too short for that."""

    evaluate_every: int | None = 250
    """Steps between evaluations on held-out tokens, and one at the end; None for no evaluation."""
    evaluation_sequences: int | None = 512
    """Held-out sequences, the first so many; None for all."""
    save_every: int | None = 1000
    """Steps between checkpoints, and one at the end, whatever ends the run; one that is due while the one before is
    written waits for it. None for no checkpoint at all."""
    keep_last: int = 2
    """Checkpoints that stay."""
    keep_every: int | None = None
    """Checkpoints of steps that are multiples of it stay for ever."""
    log_every: int = 1
    """Of so many steps the console shows one; the log has all."""
    quantization_every: int | None = None
    """Of so many steps the log tells of one what quantization did to each tensor: absmax, underflow, saturation; with
    --matmul-dtype e4m3, and not with --cuda-graph on. None for none."""
    tensorboard: bool = False
    """Write event files into --out, too: needs the extra tensorboard."""
    wandb: str | None = None
    """Project of Weights & Biases to which the run is told, too: needs the extra wandb."""
    export: bool = True
    """At the end, to a Hugging Face folder in --out."""
    walltime: float | None = None
    """Seconds from the command's start, after which the run saves and ends, to be taken up again; None for no end."""
    seed: int = 0
    """Of parameters, of the order of the data, of stochastic rounding."""

    @classmethod
    def default(cls, device: str) -> Self:
        """The defaults on a device."""
        return cls() if device == "cuda" else cls(device="cpu", **cls.CPU_DEFAULTS)

    def check(self) -> None:
        """Raise ValueError for what can be said without looking at data, device or ranks."""
        for name in _POSITIVE:
            value = getattr(self, name)
            if value is not None and not (value > 0 and math.isfinite(value)):
                raise ValueError(f"{_flag(name)} must be positive, got {value}")
        for name in _NOT_NEGATIVE:
            value = getattr(self, name)
            if value is not None and not (value >= 0 and math.isfinite(value)):
                raise ValueError(f"{_flag(name)} must not be negative, got {value}")
        if not all(0 <= beta < 1 for beta in self.betas):
            raise ValueError(f"--betas must lie in [0, 1), got {self.betas[0]} {self.betas[1]}")
        if self.steps is not None and self.epochs is not None:
            raise ValueError(f"--steps {self.steps} and --epochs {self.epochs:g}: give one of them")
        if self.total_batch_tokens is not None and self.accumulate != 1:
            raise ValueError("--total-batch-tokens and --accumulate: give one of them")
        if self.moments != "same" and self.optimizer != "fused":
            raise ValueError(f"--moments {self.moments} needs --optimizer fused, got {self.optimizer}")
        if self.z_loss and self.kept == "autograd":
            raise ValueError(f"--z-loss {self.z_loss:g} needs a head that is written out, not --keep autograd")
        if self.lmhead_chunks is not None and self.kept == "autograd":
            asked = f"--lmhead-chunks {self.lmhead_chunks}"
            raise ValueError(f"{asked} needs a head that is written out, not --keep autograd")
        for name in ("gradient_dtype", "scaling", "fp8_skip_first", "fp8_skip_last", "quantization_every"):
            if self.matmul_dtype == "same" and getattr(self, name) != getattr(TrainOptions, name):
                asked = f"{_flag(name)} {getattr(self, name)}"
                raise ValueError(f"{asked} is for quantized products, and --matmul-dtype is same")
        if self.quantization_every is not None and self.cuda_graph == "on":
            raise ValueError(
                f"--quantization-every {self.quantization_every} needs --cuda-graph off: replays show nothing"
            )
        self._check_caps()
        if self.save_every is None and self.export:
            raise ValueError("--save-every None leaves no checkpoint to be exported: --no-export does without")
        if self.init is None:
            resolve_size(self.size)
        canonical_policy(self.recompute)
        any_depth = 1 + max(self.fp8_skip_first, 0) + max(self.fp8_skip_last, 0)
        case = self.training_case(ModelConfig("any", 64, 192, any_depth, 4), 1)
        if reason := unserved_reason(case) or offload_reason(case):
            raise ValueError(reason)

    @property
    def capped(self) -> bool:
        """Whether the step runs under caps on memory."""
        return self.device_gib is not None

    def _check_caps(self) -> None:
        """Raise ValueError for what does not go together with caps on memory."""
        if (self.device_gib is None) != (self.host_gib is None):
            raise ValueError("--device-gib and --host-gib are one thing: give both or none")
        if not self.capped:
            if self.chunk is not None:
                raise ValueError(f"--chunk {self.chunk} is for a run under --device-gib and --host-gib")
            return
        optimizer = "fused" if self.device == "cuda" else "torch-fused"
        for name, served in (_UNDER_CAPS | {"optimizer": [optimizer]}).items():
            value = getattr(self, name)
            if value not in served:
                shown = " ".join(value) if isinstance(value, tuple) else value
                raise ValueError(f"{_flag(name)} {shown} does not go together with --device-gib and --host-gib")
        if self.moments == "bf16" and self.dtype != "bf16":
            raise ValueError(f"--moments bf16 does not go together with --dtype {self.dtype} under --device-gib")
        if self.chunk is None:
            return
        short, long = sorted((self.chunk, self.context_length))
        if long % short or self.tokens_per_step(1) % long:
            raise ValueError(
                f"--chunk {self.chunk} does not divide sequences of {self.context_length} tokens and a step of "
                f"{self.tokens_per_step(1):,} evenly"
            )

    @property
    def kept(self) -> str:
        """What blocks keep, said or not; under caps at most."""
        if self.capped:
            return "products"
        return self.keep or default_keep(self.kernels, self.matmul_dtype)

    def micro_batches(self, world_size: int) -> int:
        """Per step.

        Raises:
            ValueError: the tokens of a step are no whole number of micro-batches of all ranks.
        """
        if self.total_batch_tokens is None:
            return self.accumulate
        tokens = self.batch_size * self.context_length * world_size
        if self.total_batch_tokens % tokens:
            raise ValueError(
                f"--total-batch-tokens {self.total_batch_tokens:,} is no multiple of {tokens:,}, the tokens of a "
                f"micro-batch: --batch-size {self.batch_size} of {self.context_length} tokens on {world_size} ranks"
            )
        return self.total_batch_tokens // tokens

    def tokens_per_step(self, world_size: int) -> int:
        """Of all ranks."""
        return self.micro_batches(world_size) * self.batch_size * self.context_length * world_size

    def n_steps(self, n_sequences: int, world_size: int) -> int:
        """Of the whole run, on data of so many sequences."""
        if self.steps is not None:
            return self.steps
        per_step = self.tokens_per_step(world_size) // self.context_length
        return max(1, math.ceil((self.epochs or 1.0) * n_sequences / per_step))

    def schedule_of(self, n_steps: int) -> Schedule:
        """The learning rate by step; raises ValueError as ``Schedule`` does."""
        warmup_steps = min(_MOST_WARMUP, n_steps // 10) if self.warmup_steps is None else self.warmup_steps
        return Schedule(
            self.learning_rate, n_steps, self.schedule, warmup_steps, self.final_fraction, self.cooldown_steps
        )

    def training_case(self, config: ModelConfig, world_size: int) -> "TrainerCase":
        """The step on each of so many ranks."""
        return TrainerCase(
            device=self.device,
            size=replace(config, context_length=self.context_length),
            batch_size=self.batch_size,
            context_length=self.context_length,
            dtype=self.dtype,
            attention=self.attention,
            compile=self.compile,
            checkpoint=canonical_policy(self.recompute),
            optimizer=self.optimizer,
            accumulate=self.micro_batches(world_size),
            cuda_graph=self.cuda_graph,
            kernels=self.kernels,
            keep=self.kept,
            matmul_dtype=self.matmul_dtype,
            gradient_dtype=self.gradient_dtype,
            scaling=self.scaling,
            fp8_skip_first=self.fp8_skip_first,
            fp8_skip_last=self.fp8_skip_last,
            master=self.master,
            offload="-".join(self.offload) or "none",
            seed=self.seed,
            z_loss=self.z_loss,
            lmhead_chunks=self.lmhead_chunks,
            moments=self.moments,
            zero=self.zero,
            world_size=world_size,
        )


@dataclass(frozen=True)
class TrainerCase(TrainingCase):
    """A training step as a run divides it over ranks."""

    z_loss: float = 0.0
    lmhead_chunks: int | None = None
    moments: str = "same"
    zero: int = 0
    world_size: int = 1

    @property
    def moment_bytes(self) -> int:
        """Of an element of each of AdamW's moments."""
        return {"same": self.precision.parameter_bytes, "fp32": 4, "bf16": 2}[self.moments]

    @property
    def head_chunk(self) -> int | None:
        tokens = self.batch_size * self.context_length
        return None if self.lmhead_chunks is None else -(-tokens // self.lmhead_chunks)

    @property
    def parallel(self) -> Parallel:
        if self.zero == 3:
            return Parallel("fsdp")
        if self.world_size == 1:
            return Parallel()
        if self.zero == 0:
            return Parallel("bucketed")
        return Parallel(optimizer_state="scattered" if self.zero == 1 else "scattered-gradients")


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"
