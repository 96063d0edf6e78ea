"""Training steps that others published, beside what ``costs/parallelism/seconds.py`` predicts of their layouts.

The question ``published`` of ``scripts/parallelism.py``. Figures and sources are in ``outside.csv``; the layouts are
here, as the sources describe them. What a source does not say is said here: Megatron hides rows of tensor ranks under
products (``by="copies"``) and divides the optimizer's states over data and context ranks (ZeRO 1); torchtitan's full
checkpointing is keep ``input``; Meta's chunks have one block each (section 3.3.2: a chunk has the embedding alone).

Nothing is fitted to these steps. NeMo's and Meta's are predicted with this suite's shares of an H100 of 700 W. Of
torchtitan's, three things are known to differ (``torchtitan``): the card, attention, and what async TP hides.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

from cs336_systems.answers.own_steps import RESULTS
from cs336_systems.answers.predicted import Cards
from cs336_systems.config import resolve_size
from cs336_systems.costs.flops import model_flops
from cs336_systems.costs.parallelism.layout import Layout
from cs336_systems.costs.parallelism.seconds import step_seconds
from cs336_systems.costs.rates import OURS, Sustained
from cs336_systems.costs.streaming import MASTER_MOMENTS
from cs336_systems.experiments.parallel_search import Cases, Search
from cs336_systems.experiments.parallelism import QUESTIONS, Answer
from cs336_systems.hardware import GB_PER_S, GIB, TERA, Hardware, hardware_named
from cs336_systems.report.tables import Table

WITHIN = 0.2
"""The error in seconds that a prediction should stay below."""

_LENGTH = 8192


@dataclass(frozen=True)
class Program:
    """A program on its cards."""

    gpu: Hardware
    sustained: Sustained = OURS
    hidden: float = 1.0
    """The share that the program saves of the time that ``copies`` saves tensor ranks beside collectives."""


def ours() -> Program:
    """This suite on H100s of 700 W."""
    return Program(hardware_named("h100"))


@cache
def torchtitan() -> Program:
    """torchtitan on Meta's H100s, from December 2024 to June 2025.

    The cards draw 500 W and have 96 GB at 2.4 TB/s; their peak, by its page between those of an H100 NVL (835 TFLOP/s)
    and SXM (989), is taken as the latter. Attention is FlashAttention-2: torch did not choose cuDNN's by itself then
    (pytorch/pytorch#138522; in #142132 329 TFLOP/s, not 631). Its rates are ours times what rows of one run say of
    both; so is what async TP saves, of two ranks and one sequence, here taken for eight and up to 16.

    Raises:
        NotMeasured: those rows are missing.
    """
    from cs336_systems.answers.committed import Committed

    committed = Committed(RESULTS.parent, "h200")
    attention = committed.rows("attention-training", d_head=128, heads=32, length=16_384, batch_size=1).asked("impl")
    step = committed.rows("mesh-peers", world_size=2).asked("tensor_by")

    def slower(metric: str) -> float:
        return attention(metric, "sdpa-flash") / attention(metric, "hopper")

    saved = step("step", "torch") - step("step", "torch-async")
    return Program(
        replace(hardware_named("h100"), memory_bytes=96 * GIB, memory_bytes_per_s=2400 * GB_PER_S, watts=500.0),
        replace(
            OURS,
            attention_forward=OURS.attention_forward * slower("forward_tflops"),
            attention_backward=OURS.attention_backward * slower("backward_tflops"),
        ),
        hidden=saved / (step("step", "collectives") - step("step", "copies")),
    )


@dataclass(frozen=True)
class PublishedStep:
    """A step on H100s, by its name in ``outside.csv``."""

    name: str
    size: str
    n_gpus: int
    n_sequences: int
    how: dict[str, Any] = field(hash=False)
    """Fields of ``Layout``, but for shards and the number of micro-batches, which follow."""
    program: Callable[[], Program] = ours

    @property
    def layout(self) -> Layout:
        ranks = self.n_gpus // Layout(**self.how).n_ranks
        each = self.n_sequences // ranks // Layout(**self.how).micro_batch
        return Layout(shards=ranks, n_micro_batches=each, **self.how)

    @property
    def seconds(self) -> float:
        """As published, or from tokens/s or model FLOP/s of a GPU, these with all scores counted, as PaLM does.

        Raises:
            ValueError: the figure has another unit.
        """
        from cs336_systems.answers.training import outside  # brings pandas along

        figure, unit = outside(self.name).split(" ", 1)
        value, tokens = float(figure.replace(",", "")), self.n_sequences * _LENGTH / self.n_gpus
        if unit == "s":
            return value
        if unit == "tokens/s a GPU":
            return tokens / value
        if unit == "TFLOP/s a GPU":
            flops = model_flops(resolve_size(self.size), 1, _LENGTH, "step", "palm") / _LENGTH
            return tokens * flops / (value * TERA)
        raise ValueError(f"{self.name} is in {unit!r}, which is no time, tokens/s a GPU or TFLOP/s a GPU")

    def predicted_s(self, program: Program) -> float:
        moments = tuple(MASTER_MOMENTS.items())
        how: dict[str, Any] = {"moments": moments, "launches": False, "copied_from": 0, "sustained": program.sustained}

        def seconds(layout: Layout) -> float:
            return step_seconds(resolve_size(self.size), _LENGTH, layout, program.gpu, **how).total

        if self.layout.tensor_by == "collectives" or program.hidden == 1.0:
            return seconds(self.layout)
        waited = seconds(replace(self.layout, tensor_by="collectives"))
        return waited - program.hidden * (waited - seconds(self.layout))

    def error(self, program: Program) -> float:
        """Predicted over published seconds, less 1."""
        return self.predicted_s(program) / self.seconds - 1


def _megatron(name: str, size: str, gpus: dict[int, int], **how: Any) -> list[PublishedStep]:
    """Steps of NVIDIA's recipes, by numbers of GPUs and of sequences."""
    chunked = {"schedule": "interleaved"} if how.get("chunks") else {}
    how |= chunked | {"zero": 1, "tensor_by": "copies"}
    return [PublishedStep(f"{name} {n}", size, n, batch, how) for n, batch in gpus.items()]


def _fsdp(name: str, size: str, n_gpus: int, **how: Any) -> PublishedStep:
    """A step of torchtitan's FSDP with one micro-batch a step."""
    ranks = n_gpus // how.get("tensor", 1)
    n_sequences = ranks * how["micro_batch"]
    return PublishedStep(f"torchtitan {name} {n_gpus}", size, n_gpus, n_sequences, {"zero": 3} | how, torchtitan)


_META: dict[str, Any] = {"tensor": 8, "pipeline": 16, "schedule": "interleaved", "chunks": 8, "zero": 2}
_BY_OPERATOR: dict[str, Any] = {"keep": "16xattention+products"}
"""Checkpointing by operator recomputes every second product of a block (k, the output's and w3), as many FLOPs as where
half of the blocks recompute all but w2."""
_FULL: dict[str, Any] = {"micro_batch": 16, "keep": "input", "tensor": 8}

STEPS = (
    *_megatron("NeMo 8b", "llama3.1-8b", {n: 16 * n for n in (8, 16, 32, 64, 128)}, context=2),
    *_megatron(
        "NeMo 70b",
        "llama3-70b",
        {n: 2 * n for n in (64, 128, 256, 512, 1024, 2048)},
        tensor=4,
        pipeline=4,
        context=2,
        chunks=5,
    ),
    *_megatron(
        "NeMo 405b", "llama3.1-405b", {576: 252, 1152: 504, 2304: 1008}, tensor=8, pipeline=9, context=2, chunks=7
    ),
    *(PublishedStep(f"Llama 3 405b {n}", "llama3.1-405b", n, 2048, _META) for n in (8192, 16_384)),
    *(_fsdp("8b", "llama3.1-8b", n, micro_batch=2, **_BY_OPERATOR) for n in (8, 128)),
    _fsdp("8b", "llama3.1-8b", 64, micro_batch=12, tensor=8, **_BY_OPERATOR),
    _fsdp("8b copies", "llama3.1-8b", 64, micro_batch=12, tensor=8, tensor_by="copies", **_BY_OPERATOR),
    *(_fsdp("70b", "llama3-70b", n, **_FULL) for n in (128, 256)),
    *(_fsdp("70b copies", "llama3-70b", n, tensor_by="copies", **_FULL) for n in (128, 256)),
)
"""In bf16, on sequences of 8,192 tokens."""


@dataclass(frozen=True)
class Published:
    """Steps that others published on H100s, beside the predictions that search ranks layouts by."""

    def answer(self) -> Answer:
        lines = []
        errors = {step: (step.error(step.program()), step.error(ours())) for step in STEPS}
        for step, (error, as_ours) in errors.items():
            seconds = f"{step.seconds:.2f}", f"{step.predicted_s(step.program()):.2f}"
            subject, percents = step.name.rsplit(" ", 1)[0], (_percent(error), _percent(as_ours))
            lines.append((subject, step.n_gpus, step.n_sequences, *seconds, *percents, str(step.layout)))
        columns = ("subject", "GPUs", "sequences", "published s", "predicted s", "error %", _AS_OURS, "layout")
        near = _within([error for error, _ in errors.values()])
        caption = f"Steps in bf16 on H100s, sequences of {_LENGTH:,} tokens: {near} of {len(errors)} within 20 %"
        summary = {
            "steps": len(errors),
            "within 20 %": near,
            "within 20 % as ours on 700 W": _within([as_ours for _, as_ours in errors.values()]),
            "largest": max((error for error, _ in errors.values()), key=abs),
        }
        return [Table.of(caption, columns, lines), _by_publisher(errors)], summary


_AS_OURS = "as ours on 700 W: error %"


def _by_publisher(errors: dict[PublishedStep, tuple[float, float]]) -> Table:
    lines = []
    for publisher in ("NeMo", "Llama 3", "torchtitan"):
        own = [both for step, both in errors.items() if step.name.startswith(publisher)]
        cells = [str(len(own))]
        for found in zip(*own, strict=True):
            cells += [f"{_within(found)}", f"{_percent(min(found))} to {_percent(max(found))}"]
        lines.append((publisher, *cells))
    columns = ("published by", "steps", "within 20 %", "error %", "as ours on 700 W: within 20 %", _AS_OURS)
    return Table.of("Predicted over published seconds, less 1", columns, lines)


def _within(errors: Sequence[float]) -> int:
    return sum(abs(error) <= WITHIN for error in errors)


def _percent(error: float) -> str:
    return f"{100 * error:+.1f}"


ALL_QUESTIONS = (Search, Cases, Published, Cards, *QUESTIONS)
"""The questions of ``scripts/parallelism.py``."""
