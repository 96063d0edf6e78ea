"""Options of ``train.py``, and checks before anything runs: every fault is one sentence. Imports no torch.

``training_case`` is the step that the options describe, ``Schedule`` its learning rate by step; how many steps and
micro-batches there are follows from the options and the number of ranks.
"""

import math
from dataclasses import dataclass, replace
from operator import ge, gt
from pathlib import Path
from typing import Any, ClassVar, Literal, Self

from cs336_systems.case import GatherBy, Parallel, TrainingCase
from cs336_systems.config import ModelConfig, resolve_size
from cs336_systems.costs.checkpointing import canonical_policy
from cs336_systems.costs.kept import default_keep
from cs336_systems.pretraining.schedules import Schedule, ScheduleKind
from cs336_systems.refusals import refusal

_POSITIVE = (
    *("context_length", "batch_size", "accumulate", "total_batch_tokens", "steps", "epochs", "clip", "walltime"),
    *("evaluate_every", "evaluation_sequences", "save_every", "keep_last", "keep_every", "log_every"),
    *("lmhead_chunks", "quantization_every", "device_gib", "host_gib", "chunk", "eps"),
)
_NOT_NEGATIVE = (
    "learning_rate",
    "z_loss",
    "weight_decay",
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
_RECOMPUTED = {name: name for name in ("swiglu", "norm", "ffn", "qkv")} | {"att": "qkv-attention"}
"""What a block computes again, as switches of ``--keep``."""
_SEEDS = 2**32
"""As many as NumPy's RandomState has."""
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
    """Named model size, trained from scratch: tiny, small, medium, ..., llama3-1b, qwen2.5-0.5b, ...; with the data's
    vocabulary."""
    init: Path | None = None
    """Hugging Face folder whose weights are trained further, instead of --size."""
    data: Path | None = None
    """Folder written by tokenize_data.py; by default Python's standard library, tokenised if necessary."""
    out: Path = Path("runs/first")
    """Folder of the run: log, checkpoints, export. A folder with checkpoints is resumed from the newest."""
    device: Literal["cpu", "cuda"] = "cuda"
    """Where to run; under torchrun each rank has its own GPU."""

    context_length: int = 1024
    """Tokens per sequence."""
    batch_size: int = 16
    """Sequences per micro-batch and rank."""
    accumulate: int = 1
    """Micro-batches per step."""
    total_batch_tokens: int | None = None
    """Tokens per step over all ranks; sets --accumulate."""
    steps: int | None = None
    """Steps of the whole run, including those of earlier commands; by default one epoch."""
    epochs: float | None = None
    """Length of the run, instead of --steps or its default."""

    learning_rate: float = 6e-4
    """Highest learning rate."""
    schedule: ScheduleKind = "cosine"
    """Shape of the learning rate after the warm-up."""
    warmup_steps: int | None = None
    """Steps over which the learning rate rises; by default a tenth of all, at most 100."""
    final_fraction: float = 0.1
    """Final learning rate, as a fraction of the highest."""
    cooldown_steps: int | None = None
    """Steps of the decay of wsd; by default the last fifth."""
    betas: tuple[float, float] = (0.9, 0.95)
    """Betas of AdamW."""
    eps: float = 1e-8
    """Epsilon of AdamW."""
    weight_decay: float = 0.1
    """Weight decay of matrices; norms and biases have none."""
    clip: float | None = 1.0
    """Largest norm of the whole gradient; None: no clipping."""
    z_loss: float = 0.0
    """Coefficient of the squared log-sum-exp of the logits, added to the training loss; not with --keep autograd."""
    skip_nonfinite: bool = False
    """Skip steps whose loss or gradient is not finite, instead of stopping at the first."""

    dtype: Literal["fp32", "tf32", "bf16", "autocast-bf16"] = "bf16"
    """Dtype of parameters, gradients and matrix products; autocast-bf16: fp32 parameters, products in bf16."""
    moments: Literal["same", "fp32", "bf16"] = "same"
    """Dtype of AdamW's moments; one that is not the parameters' needs --optimizer fused."""
    master_weights: Literal["none", "fp32"] = "none"
    """fp32: the optimizer also keeps fp32 master weights; with --dtype bf16 and --optimizer fused."""
    offload: tuple[Literal["m", "v", "master", "gradients", "residual"], ...] = ()
    """Kept in host memory: moments, master weights, gradients (with --optimizer fused), inputs of blocks (not with
    --keep autograd)."""
    optimizer: Literal["torch-fused", "fused"] = "fused"
    """torch's fused AdamW; or fused, this suite's, with stochastic rounding of bf16, on CUDA devices."""
    kernels: Literal["reference", "fused"] = "fused"
    """Operations between matrix products: reference, plain PyTorch; fused, one Triton kernel each, on CUDA devices."""
    attention: str = "flash"
    """Implementation: reference, flash, hopper, sdpa-flash, ..."""
    deterministic: bool = False
    """The same bits every run, and under all memory caps that give the same chunks in a round: with --attention hopper,
    whose backward then takes longer."""
    keep: str | None = None
    """What blocks with a written-out backward keep: input, attention, products, all, or a level without some parts, as
    all-norm; autograd: backward is left to autograd. By default products for fused kernels and fp8, else autograd."""
    lmhead_chunks: int | None = None
    """Number of chunks in which a micro-batch's tokens pass through head and loss; None: the kernel decides. Not with
    --keep autograd."""
    matmul_dtype: Literal["same", "e4m3"] = "same"
    """Dtype of the blocks' matrix products: same, as tensors are stored; e4m3, quantized to fp8, which a CPU emulates.
    Not with --keep autograd."""
    gradient_dtype: Literal["e4m3", "e5m2"] = "e4m3"
    """Dtype of activation gradients in fp8 matrix products; e5m2 has more range and less precision."""
    scaling: Literal["tensor", "row", "block"] = "tensor"
    """Numbers that share a scale in fp8 matrix products: a tensor; a row along the summed dimension; or a block of 128
    of it."""
    fp8_skip_first: int = 0
    """First blocks that stay out of fp8."""
    fp8_skip_last: int = 0
    """Last blocks that stay out of fp8."""
    recompute: str = "none"
    """What blocks compute again, instead of --keep: swiglu, norm, ffn, qkv, att, several as norm-swiglu, or block; with
    --keep autograd, activation checkpointing: full, every-K, ..."""
    compile: Literal["off", "on"] = "off"
    """With --keep autograd, torch.compile of each block."""
    cuda_graph: Literal["off", "on"] = "off"
    """Replay the step as a CUDA graph (with --optimizer torch-fused without the optimizer); one rank."""
    zero: Literal[0, 1, 2, 3] = 0
    """State sharded among ranks: 0 none (DDP), 1 the optimizer's, 2 also gradients, 3 also parameters (FSDP). One rank
    has nobody to share with: there all are 0."""
    gather_by: GatherBy = "collectives"
    """How weights come together at --zero 3: in collectives; or by copies from the other ranks' memory, on one host."""

    device_gib: float | None = None
    """With --host-gib: stream layers, so that all memory of the process on the device stays below this cap. A plan
    decides what is kept where and what is computed again. On a CPU only the step's slabs count."""
    host_gib: float | None = None
    """With --device-gib: the cap on host memory."""
    chunk: int | None = None
    """Under these caps, tokens that a layer processes at a time: whole sequences or an even piece of one. By default
    the fastest, or a micro-batch if a step is too short for that."""

    evaluate_every: int | None = 250
    """Steps between evaluations on held-out tokens; there is one at the end. None: no evaluation."""
    evaluation_sequences: int | None = 512
    """Number of held-out sequences per evaluation; None: all."""
    save_every: int | None = 1000
    """Steps between checkpoints; there is one at the end, whatever ends the run. A checkpoint waits while the one
    before is still written. None: no checkpoints."""
    keep_last: int = 2
    """Number of newest checkpoints that are kept."""
    keep_every: int | None = None
    """Checkpoints of steps that are multiples of this are never removed."""
    log_every: int = 1
    """The console shows one step in this many; the log has all."""
    quantization_every: int | None = None
    """Log once in this many steps what quantization did to each tensor: absmax, underflow, saturation. With
    --matmul-dtype e4m3 and --cuda-graph off. None: never."""
    tensorboard: bool = False
    """Also write TensorBoard events into --out; needs the extra tensorboard."""
    wandb: str | None = None
    """Weights & Biases project to which the run is also logged; needs the extra wandb."""
    export: bool = True
    """Export a Hugging Face folder into --out at the end."""
    walltime: float | None = None
    """Seconds from the start of the command after which the run saves and ends, to be resumed; None: no limit."""
    seed: int = 0
    """Seed of parameters, data order and stochastic rounding."""

    @classmethod
    def default(cls, device: str) -> Self:
        """The defaults on a device."""
        return cls() if device == "cuda" else cls(device="cpu", **cls.CPU_DEFAULTS)

    def settled(self) -> Self:
        """Where epochs are asked for, the default of steps does not count."""
        by_default = self.epochs is not None and self.steps == self.default(self.device).steps
        return replace(self, steps=None) if by_default else self

    def check(self) -> None:
        """Raise ValueError for what can be said without looking at data, device or ranks."""
        for names, serves, must in ((_POSITIVE, gt, "be positive"), (_NOT_NEGATIVE, ge, "not be negative")):
            for name in names:
                value = getattr(self, name)
                if value is not None and not (serves(value, 0) and math.isfinite(value)):
                    raise ValueError(f"{_flag(name)} must {must if math.isfinite(value) else 'be finite'}, got {value}")
        if self.seed >= _SEEDS:
            raise ValueError(f"--seed must be less than 2^32, got {self.seed}")
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
        if self.deterministic and self.attention == "hopper" and self.kept == "autograd":
            raise ValueError(
                "--deterministic and --attention hopper need blocks that are written out, not --keep autograd"
            )
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
        if self.keep is not None and self._kept_beside is not None:
            raise ValueError(f"--recompute {self.recompute} is --keep {self._kept_beside}: give one of them")
        if canonical_policy(self._policy) != "none" and self.keep is None and self.kept != "autograd":
            how = (
                f"--kernels {self.kernels} with --matmul-dtype {self.matmul_dtype} does not have: use --recompute block"
            )
            raise ValueError(f"--recompute {self.recompute} needs blocks under autograd, which {how}")
        if self.gather_by == "copies" and self.zero != 3:
            raise ValueError(f"--gather-by copies is for --zero 3, got --zero {self.zero}")
        any_depth = 1 + max(self.fp8_skip_first, 0) + max(self.fp8_skip_last, 0)
        case = self.training_case(ModelConfig("any", 64, 192, any_depth, 4), 1)
        if reason := refusal(case):
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
        return self.keep or self._kept_beside or default_keep(self.kernels, self.matmul_dtype)

    @property
    def _kept_beside(self) -> str | None:
        """What blocks keep beside the parts that ``recompute`` names; None if it names none."""
        parts = self.recompute.split("-")
        if not all(part in _RECOMPUTED for part in parts):
            return "input" if self.recompute == "block" else None
        return "-".join(["all", *(_RECOMPUTED[part] for part in parts)])

    @property
    def _policy(self) -> str:
        """Of activation checkpointing."""
        return self.recompute if self._kept_beside is None else "none"

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
            checkpoint=canonical_policy(self._policy),
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
            master=self.master_weights,
            offload="-".join(self.offload) or "none",
            seed=self.seed,
            z_loss=self.z_loss,
            deterministic=self.deterministic,
            lmhead_chunks=self.lmhead_chunks,
            moments=self.moments,
            zero=self.zero,
            gather_by=self.gather_by,
            world_size=world_size,
        )


@dataclass(frozen=True)
class TrainerCase(TrainingCase):
    """A training step as a run divides it over ranks."""

    z_loss: float = 0.0
    deterministic: bool = False
    lmhead_chunks: int | None = None
    moments: str = "same"
    zero: int = 0
    gather_by: GatherBy = "collectives"
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
        if self.world_size == 1:
            return Parallel()  # FSDP would copy each weight to gather it from itself
        if self.zero == 3:
            return Parallel("fsdp", gather_by=self.gather_by)
        if self.zero == 0:
            return Parallel("bucketed")
        return Parallel(optimizer_state="scattered" if self.zero == 1 else "scattered-gradients")


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"
