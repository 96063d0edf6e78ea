"""Training steps that others published, beside what ``costs/parallelism/seconds.py`` predicts of their layouts.

The question ``published`` of ``scripts/parallelism.py``. Figures and sources are in ``outside.csv``; the layouts are
here, as the sources describe them. What a source does not say is said here: Megatron hides rows of tensor ranks under
products (``by="copies"``) and divides the optimizer's states over data and context ranks (ZeRO 1); torchtitan's full
checkpointing is keep ``input``, its checkpointing by operator is nearest to ``attention``; Meta's chunks have one block
each (section 3.3.2: a chunk has the embedding alone). torchtitan's and Meta's H100s are not quite those whose peaks
are published: torchtitan's draw 500 W and have slower memory.
"""

from dataclasses import dataclass, field
from typing import Any

from cs336_systems.answers.predicted import Cards
from cs336_systems.config import resolve_size
from cs336_systems.costs.flops import model_flops
from cs336_systems.costs.parallelism.layout import Layout
from cs336_systems.costs.parallelism.seconds import step_seconds
from cs336_systems.costs.streaming import MASTER_MOMENTS
from cs336_systems.experiments.parallel_search import Search
from cs336_systems.experiments.parallelism import QUESTIONS, Answer, table
from cs336_systems.hardware import TERA, hardware_named

WITHIN = 0.2
"""The error in seconds that a prediction should stay below."""

_LENGTH = 8192


@dataclass(frozen=True)
class PublishedStep:
    """A step on H100s, by its name in ``outside.csv``."""

    name: str
    size: str
    n_gpus: int
    n_sequences: int
    how: dict[str, Any] = field(hash=False)
    """Fields of ``Layout``, but for shards and the number of micro-batches, which follow."""

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

    @property
    def predicted_s(self) -> float:
        moments, gpu = tuple(MASTER_MOMENTS.items()), hardware_named("h100")
        how: dict[str, Any] = {"moments": moments, "launches": False, "copied_from": 0}
        return step_seconds(resolve_size(self.size), _LENGTH, self.layout, gpu, **how).total


def _megatron(name: str, size: str, gpus: dict[int, int], **how: Any) -> list[PublishedStep]:
    """Steps of NVIDIA's recipes, by numbers of GPUs and of sequences."""
    chunked = {"schedule": "interleaved"} if how.get("chunks") else {}
    how |= chunked | {"zero": 1, "tensor_by": "copies"}
    return [PublishedStep(f"{name} {n}", size, n, batch, how) for n, batch in gpus.items()]


def _fsdp(name: str, size: str, n_gpus: int, **how: Any) -> PublishedStep:
    """A step of torchtitan's FSDP with one micro-batch a step."""
    ranks = n_gpus // how.get("tensor", 1)
    return PublishedStep(f"torchtitan {name} {n_gpus}", size, n_gpus, ranks * how["micro_batch"], {"zero": 3} | how)


_META: dict[str, Any] = {"tensor": 8, "pipeline": 16, "schedule": "interleaved", "chunks": 8, "zero": 2}
_BY_OPERATOR: dict[str, Any] = {"micro_batch": 2, "keep": "attention"}
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
    *(_fsdp("8b", "llama3.1-8b", n, **_BY_OPERATOR) for n in (8, 128)),
    *(_fsdp("70b", "llama3-70b", n, **_FULL) for n in (128, 256)),
    *(_fsdp("70b copies", "llama3-70b", n, tensor_by="copies", **_FULL) for n in (128, 256)),
)
"""In bf16, on sequences of 8,192 tokens."""


@dataclass(frozen=True)
class Published:
    """Steps that others published on H100s, beside the predictions that search ranks layouts by."""

    def answer(self) -> Answer:
        lines, errors = [], []
        for step in STEPS:
            published, predicted = step.seconds, step.predicted_s
            errors.append(predicted / published - 1)
            seconds = f"{published:.2f}", f"{predicted:.2f}", f"{100 * errors[-1]:+.1f}"
            lines.append((step.name.rsplit(" ", 1)[0], step.n_gpus, step.n_sequences, *seconds, str(step.layout)))
        columns = ("subject", "GPUs", "sequences", "published s", "predicted s", "error %", "layout")
        near = sum(abs(error) <= WITHIN for error in errors)
        caption = f"Steps in bf16 on H100s, sequences of {_LENGTH:,} tokens: {near} of {len(errors)} within 20 %"
        return [table(caption, columns, lines)], {
            "steps": len(errors),
            "within 20 %": near,
            "largest": max(errors, key=abs),
        }


ALL_QUESTIONS = (Search, Published, Cards, *QUESTIONS)
"""The questions of ``scripts/parallelism.py``."""
