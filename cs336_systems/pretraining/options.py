"""The options of ``train.py``. Imports no torch.

``TrainerCase`` (``step_options.py``) declares the options of a step, ``RunFields`` all others; ``TrainOptions`` has
both. Its methods derive the step, and the numbers of steps and micro-batches, which depend on the number of ranks.
``run_refusals.py`` lists what a run cannot be.
"""

import math
import sys
from collections.abc import Collection
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self

from cs336_systems.case import kept_as
from cs336_systems.config import ADAPTED, FASTEST, Adapted, Lora, ModelConfig, resolve_size
from cs336_systems.costs.kept import default_keep
from cs336_systems.declared import option, option_name, options_of
from cs336_systems.pretraining.replica_options import ReplicaFields
from cs336_systems.pretraining.run_refusals import run_refusal
from cs336_systems.pretraining.schedules import LearningRate, ScheduleKind
from cs336_systems.pretraining.sources import sources_of
from cs336_systems.pretraining.step_options import TrainerCase
from cs336_systems.ranks import mesh_shape
from cs336_systems.refusals import refusal

CHOSEN = ("batch_size", "keep", "offload")
"""The options that ``--choose-fastest`` chooses."""


@dataclass(frozen=True)
class RunFields(ReplicaFields):
    """The options of a training run that do not describe its step."""

    CPU_DEFAULTS: ClassVar[dict[str, Any]] = {
        **{"size": "tiny", "context_length": 128, "batch_size": 8, "steps": 800},
        **{"learning_rate": 3e-3, "dtype": "fp32", "optimizer": "torch-fused"},
        **{"attention": "reference", "kernels": "reference"},
        **{"evaluate_every": 200, "evaluation_sequences": 512, "save_every": 200, "log_every": 50},
    }
    """Smaller defaults without a GPU."""
    CPU_WALLTIME: ClassVar[float] = 70.0
    """Seconds of walltime of the command without any option on a CPU, so that a first try ends soon."""

    lora_rank: int | None = option(
        None,
        "Train low-rank adapters (LoRA) of this rank beside the weights of --init, which are frozen; not with --keep "
        "autograd. None trains all weights.",
        sign="positive",
    )
    lora_alpha: float | None = option(
        None, "Adapters' products are multiplied by this over the rank; by default twice the rank.", sign="positive"
    )
    lora_on: tuple[Adapted, ...] = ADAPTED
    """Matrices with adapters: qkv (queries, keys and values), output (of attention), gate_up and down (of the
    feed-forward)."""
    init: Path | None = None
    """Hugging Face folder whose weights are trained further, instead of --size."""
    data: Path | tuple[Path, ...] | None = None
    """Folder written by tokenize_data.py, or several with their shares, as in --data web=0.7 code=0.3; by default
    Python's standard library, tokenized if necessary."""
    packing: bool = False
    """Pack whole conversations into rows, masked from each other in attention; otherwise each has a padded row. For
    data of tokenize_data.py --chat."""
    long_conversations: Literal["cut", "drop"] = "cut"
    """Whether conversations that are longer than the context are cut or dropped."""
    out: Path = Path("runs/first")
    """Folder of the run, for log, checkpoints and export. A run with checkpoints resumes from the newest."""
    resume_from: Path | None = None
    """Checkpoint of another run, such as runs/first/step-00000400, or that run for its newest: go on from there into a
    new --out, with this command's options. The other run stays as it is. Not with --agree."""
    device: Literal["cpu", "cuda"] = "cuda"
    """Device on which to run; under torchrun each rank has its own GPU."""
    total_batch_tokens: int | None = option(
        None, "Tokens per step over all ranks, from which --accumulate follows.", sign="positive"
    )
    steps: int | None = option(
        None, "Steps of the whole run, including those of earlier commands; by default one epoch.", sign="positive"
    )
    epochs: float | None = option(None, "Length of the run in epochs, instead of --steps.", sign="positive")
    learning_rate: float = option(6e-4, "Highest learning rate.", sign="not negative", aliases=("--lr",))
    schedule: ScheduleKind = "cosine"
    """Course of the learning rate after the warm-up; wsd is constant and then decays over --cooldown-steps."""
    warmup_steps: int | None = option(
        None, "Steps over which the learning rate rises; by default a tenth of all, at most 100.", sign="not negative"
    )
    final_fraction: float = option(
        0.1, "Learning rate after the last step, as a fraction of the highest.", sign="not negative"
    )
    cooldown_steps: int | None = None
    """Steps of the decay of wsd; by default the last fifth."""
    betas: tuple[float, float] = (0.9, 0.95)
    """Betas of AdamW."""
    eps: float = option(1e-8, "Epsilon of AdamW.", sign="positive")
    weight_decay: float = option(0.1, "Weight decay of matrices; norms and biases have none.", sign="not negative")
    clip: float | None = option(1.0, "Global norm to which gradients are clipped; None clips nothing.", sign="positive")
    offload: tuple[Literal["m", "v", "master", "gradients", "residual"], ...] = ()
    """The tensors that are kept in host memory, as in --offload m v: m and v (AdamW's moments), master (FP32 master
    weights) and gradients, which need --optimizer fused; residual (inputs of blocks), which does not go with --keep
    autograd."""
    choose_fastest: bool = False
    """Choose --batch-size, --keep and --offload: the fastest that are predicted to fit this GPU; the tokens of a step
    stay the same. This is the default on a GPU if none of the three is given; a run that resumes keeps its choice if it
    fits."""
    device_gib: float | None = option(
        None,
        "Limit in GiB on all device memory of the process; needs --host-gib. Layers are streamed, and a plan decides "
        "what is kept where and what is recomputed. On a CPU only the step's own buffers count.",
        sign="positive",
    )
    host_gib: float | None = option(
        None, "Limit in GiB on the process's host memory; needs --device-gib, but for --print-plan.", sign="positive"
    )
    chunk: int | None = option(
        None,
        "Tokens that a layer processes at a time under memory limits: whole sequences, or an equal part of one. By "
        "default the number that is predicted to be fastest, or a micro-batch if a step is too short for that.",
        sign="positive",
    )
    evaluate_every: int | None = option(
        250,
        "Steps between evaluations on held-out tokens; the run also ends with one. None evaluates never.",
        sign="positive",
    )
    evaluation_sequences: int | None = option(
        512, "Number of held-out sequences per evaluation; None takes all.", sign="positive"
    )
    save_every: int | None = option(
        1000,
        "Steps between checkpoints; the run also ends with one, whatever ends it. A checkpoint waits until "
        "the one before is written. None saves no checkpoints.",
        sign="positive",
    )
    keep_last: int = option(2, "How many of the newest checkpoints are kept.", sign="positive")
    keep_every: int | None = option(
        None, "Also keep every checkpoint whose step is a multiple of this.", sign="positive"
    )
    keep_best: bool = False
    """Save whenever the held-out loss is the lowest so far, keep that checkpoint besides, and export it."""
    stop_after_no_gain: int | None = option(
        None,
        "End the run after so many evaluations in a row without a new lowest held-out loss (the one before training "
        "does not count); None never does.",
        sign="positive",
    )
    log_every: int = option(1, "The console shows every Nth step (N is this number); the log has all.", sign="positive")
    tensorboard: bool = False
    """Also write TensorBoard events into --out; needs the extra tensorboard."""
    wandb: str | None = None
    """Weights & Biases project to which the run is also logged; needs the extra wandb."""
    export: bool = True
    """Export a Hugging Face folder into --out at the end."""
    walltime: float | None = option(
        None,
        "Seconds after which the command saves and ends; run it again to resume. None sets no limit. On a CPU the "
        "command without any option ends after 70 s.",
        sign="positive",
    )
    seed: int = option(0, "Seed of parameters, data order and stochastic rounding.", sign="not negative")

    @property
    def lora(self) -> Lora | None:
        """The adapters, if there are to be some."""
        if self.lora_rank is None:
            return None
        alpha = 2.0 * self.lora_rank if self.lora_alpha is None else self.lora_alpha
        return Lora(self.lora_rank, alpha, tuple(name for name in ADAPTED if name in self.lora_on))


if TYPE_CHECKING:

    @dataclass(frozen=True)
    class _Options(RunFields, TrainerCase):  # for type checkers; tyro sees the other
        size: str = ""

else:
    _Options = options_of(
        TrainerCase, RunFields, several=False, size="qwen2.5-0.5b", context_length=1024, batch_size=16
    )


@dataclass(frozen=True)
class TrainOptions(_Options):
    """A training run: its step and what surrounds it."""

    @classmethod
    def default(cls, device: str) -> Self:
        return cls() if device == "cuda" else cls(device="cpu", **cls.CPU_DEFAULTS)

    def settled(self, given: Collection[str]) -> Self:
        """Return the options without --steps if --epochs and not --steps is among the flags that were given."""
        return replace(self, steps=None) if self.epochs is not None and "--steps" not in given else self

    def check(self) -> None:
        """Raise ValueError for faults that show without data, device or ranks."""
        sources_of(self.data)
        if reason := run_refusal(self):
            raise ValueError(reason)
        self.rate_of(sys.maxsize if self.steps is None else self.steps)
        sharing = self.pipeline, self.context, self.tensor
        config = ModelConfig("any", 64, 192, 10_000, 4) if self.init else resolve_size(self.size)
        if reason := refusal(self.training_case(config, math.prod((self.copies_in_world, *sharing)))):
            raise ValueError(reason)
        if self.agree and self.lighthouse is None:
            self.data_ranks(self.ranks_per_replica)

    @property
    def capped(self) -> bool:
        """Whether the step runs under memory limits."""
        return self.device_gib is not None

    @property
    def copies_in_world(self) -> int:
        """Copies of FSDP's shards in one world of ranks. With --agree each replica is a world of its own."""
        return 1 if self.agree else self.replicas

    @property
    def worlds(self) -> int:
        """The number of worlds of ranks that train together if none has failed."""
        return self.replicas if self.agree else 1

    @property
    def kept(self) -> dict[str, str]:
        """The values of the columns ``keep`` and ``checkpoint``, which follow from --keep."""
        if self.capped:
            return {"keep": "products"}  # the most that a plan keeps
        by_default = "products" if self.lora else default_keep(self.kernels, self.matmul_dtype)
        return kept_as(self.keep or by_default)

    def data_ranks(self, world_size: int) -> int:
        """Return the number of ranks with batches of their own.

        Raises:
            ValueError: the mesh does not divide ``world_size`` ranks.
        """
        if self.capped:
            return 1  # all ranks are a ring that shares a batch
        copies = {"replicas": self.copies_in_world, "pipeline": self.pipeline}
        try:
            _, replicas, shards, *_ = mesh_shape(world_size, self.context, self.tensor, **copies)
        except ValueError as error:
            starts = "--ranks-per-replica" if self.agree and self.lighthouse is None else "torchrun --nproc-per-node"
            raise ValueError(f"{error}; {starts} N starts N") from None
        return replicas * shards

    def micro_batches(self, world_size: int) -> int:
        """Return the number of micro-batches per step.

        Raises:
            ValueError: --total-batch-tokens is no multiple of the tokens of one micro-batch on all ranks.
        """
        if self.total_batch_tokens is None:
            return self.accumulate
        n_data = self.data_ranks(world_size) * self.worlds
        tokens = self.batch_size * self.context_length * n_data
        if self.total_batch_tokens % tokens:
            asked = f"--total-batch-tokens {self.total_batch_tokens:,} is no multiple of {tokens:,}"
            size = (
                f"--batch-size {self.batch_size} of {self.context_length} tokens on {n_data} rank{'s' * (n_data > 1)}"
            )
            raise ValueError(f"{asked}, the tokens of a micro-batch: {size}")
        return self.total_batch_tokens // tokens

    def tokens_per_step(self, world_size: int) -> int:  # type: ignore[override]
        """Return the tokens per step, over all ranks and replicas."""
        n_data = self.data_ranks(world_size) * self.worlds
        return self.micro_batches(world_size) * self.batch_size * self.context_length * n_data

    def n_steps(self, n_sequences: int, world_size: int) -> int:
        """Return the number of steps of the whole run if the data have ``n_sequences`` sequences."""
        if self.steps is not None:
            return self.steps
        per_step = self.tokens_per_step(world_size) // self.context_length
        return max(1, math.ceil((self.epochs or 1.0) * n_sequences / per_step))

    def rate_of(self, n_steps: int) -> LearningRate:
        """Return the learning rate as a function of the step; raises ValueError as ``LearningRate`` does."""
        warmup = min(100, n_steps // 10) if self.warmup_steps is None else self.warmup_steps
        ends = self.final_fraction, self.cooldown_steps
        try:
            return LearningRate(self.learning_rate, n_steps, self.schedule, warmup, *ends)
        except ValueError as error:
            raise ValueError(f"{error}; see --warmup-steps, --cooldown-steps and --final-fraction") from None

    @property
    def max_norm(self) -> float:
        """The global norm to which gradients are clipped; infinity clips nothing."""
        return self.clip or math.inf

    @property
    def adamw(self) -> dict[str, Any]:
        """AdamW's hyperparameters, by torch's names."""
        return {"lr": self.learning_rate, "betas": self.betas, "eps": self.eps, "weight_decay": self.weight_decay}

    def attention_on(self, device: str, *, hopper: bool) -> str:
        """Return the name of the attention that a run has on ``cuda`` or ``cpu``.

        What ``--attention fastest`` stands for is ``hopper`` where that runs, but ``flash`` under ``--deterministic``:
        in one order of sums ``hopper``'s backward takes 1.6 to 2.1 times as long, and ``flash``'s at most 1.5 times
        (profiles/log/2026-11-22.md, profiles/attention.md).

        Args:
            hopper: whether the Hopper kernels run on the GPU, for these heads and this dtype.
        """
        if self.attention != FASTEST:
            return self.attention
        if device == "cpu":
            return "reference"
        return "hopper" if hopper and not self.deterministic else "flash"

    def training_case(self, config: ModelConfig, world_size: int) -> TrainerCase:
        """Return the step that each of ``world_size`` ranks runs."""
        own: dict[str, Any] = {
            "size": replace(config, context_length=self.context_length),
            "attention": self.attention_on(self.device, hopper=False),
            "accumulate": self.micro_batches(world_size),
            "checkpoint": "none",
            "replicas": self.copies_in_world,
            "offload": "-".join(self.offload) or "none",
            "lora": self.lora,
            "pipeline_chunks": self.pipeline_chunks or TrainerCase.pipeline_chunks,
            "world_size": world_size,
            **self.kept,
        }
        given = [each for each in fields(TrainerCase) if each.name not in own]
        return TrainerCase(**own, **{each.name: getattr(self, option_name(each)) for each in given})
