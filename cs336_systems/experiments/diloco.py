"""What does it cost to average weights every H steps (DiLoCo) instead of gradients in every step?

Replicas of one model train on this machine, each a world of one rank, as ``train.py --agree`` has them. Whatever their
number and H, step s of all together learns the same sequences, those of one process with the whole batch: a point of
held-out loss against tokens compares only how replicas agree. Data parallelism is ``every-step``.

Bytes are those that a replica's collectives send on a ring; a run fails if they differ from the prediction of
``costs/parallelism/local_steps.py``. Between averages there are no common weights, so DiLoCo's loss is measured only at
averages. ``diloco_measure.py`` runs a cell.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from cs336_systems.config import resolve_size
from cs336_systems.costs.parallelism.local_steps import sent_bytes_per_step
from cs336_systems.declared import option, options_of
from cs336_systems.experiments.driver import PRELOADED, Experiment, measured_by, one_stage, presented
from cs336_systems.experiments.options import RunOptions, every
from cs336_systems.pretraining.options import TrainOptions
from cs336_systems.pretraining.run_refusals import DILOCO
from cs336_systems.pretraining.schedules import ScheduleKind
from cs336_systems.report.results import MAIN, Column, Line, ResultTable, Spread

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure

STDLIB = "stdlib"
DATA_PARALLEL = "every-step"
_ONLY_DILOCO = (*DILOCO, "first_steps")
_SHARED = ("device", "size", "context_length", "steps", "dtype", "seed", "learning_rate", "evaluate_every", "schedule")
"""Columns that are options of train.py for all runs."""


@dataclass(frozen=True)
class DilocoCell:
    """A run of replicas; the fields are columns."""

    device: str = "cuda"
    size: str = option("qwen-100m", "Named model sizes.")
    world_size: int = option(
        2,
        "Numbers of replicas, each on a GPU of its own or a share of the CPU.",
        asked=(1, 2),
        flag="replicas",
        sign="positive",
    )
    agree: str = DATA_PARALLEL
    agree_every: int | None = option(
        1, "Steps between averages of DiLoCo.", typed=int, asked=(1, 10, 30, 100, 500), sign="positive"
    )
    agree_fragments: int | None = option(
        1, "Parts of the weights that DiLoCo averages one after the other.", typed=int, sign="positive"
    )
    agree_delay: int | None = option(
        0, "Steps for which DiLoCo trains on beside an average.", typed=int, sign="not negative"
    )
    agree_dtype: str | None = option("same", "Dtype in which DiLoCo sends changes of weights.", values=("same", "fp8"))
    outer_learning_rate: float | None = option(
        0.7, "Learning rate of DiLoCo's outer optimizer.", typed=float, sign="not negative"
    )
    outer_momentum: float | None = option(
        0.9, "Nesterov momentum of the outer optimizer.", typed=float, sign="not negative"
    )
    first_steps: int | None = option(
        0,
        "Steps by data parallelism before DiLoCo, which begins from their weights and moments.",
        typed=int,
        sign="not negative",
    )
    learning_rate: float = option(6e-4, "Highest learning rate of AdamW, in data parallelism and inside DiLoCo.")
    schedule: ScheduleKind = option("cosine", "As for train.py; wsd or constant under --first-steps.", several=False)
    steps: int = option(1500, "Steps of each run.", several=False, sign="positive")
    total_batch_tokens: int = option(65_536, "Tokens per step of all replicas together.", several=False)
    batch_size: int = option(32, "The most sequences of a micro-batch.", several=False, sign="positive")
    context_length: int = option(1024, "Tokens per sequence.", several=False, sign="positive")
    dtype: str = option("autocast-bf16", "As for train.py.", values=("fp32", "bf16", "autocast-bf16"), several=False)
    evaluate_every: int = option(
        100, "Steps between evaluations; one between averages waits.", several=False, sign="positive"
    )
    evaluation_sequences: int = option(512, "Held-out sequences.", several=False, sign="positive")
    repeat: int = 0
    seed: int = 0
    data: str = STDLIB
    """The tokens: Python's standard library, or folders."""

    @property
    def variant(self) -> str:
        return self.agree

    @property
    def train_options(self) -> TrainOptions:
        """The run as train.py would be asked for it, without its folders."""
        own = self.total_batch_tokens // self.world_size // self.context_length
        asked = {name: TrainOptions.CPU_DEFAULTS[name] for name in ("optimizer", "kernels", "attention")}
        if self.device != "cpu":  # autocast needs blocks whose backward autograd derives
            asked = {"attention": "flash"}  # which all rows have
            asked |= {"keep": "autograd", "kernels": "reference"} if self.dtype.startswith("autocast") else {}
        asked |= {name: getattr(self, name) for name in _SHARED}
        asked |= {"agree": self.agree, "replicas": self.world_size, "total_batch_tokens": self.total_batch_tokens}
        if self.agree == "diloco":
            asked |= {name: getattr(self, name) for name in DILOCO}
        asked |= {"evaluation_sequences": self.evaluation_sequences, "save_every": None, "export": False}
        return TrainOptions(batch_size=max(1, min(self.batch_size, own)), agree_timeout=600.0, **asked)

    @property
    def runs(self) -> list[TrainOptions]:
        """Return the run, preceded by the data-parallel run whose checkpoint it resumes, if there is one."""
        asked = self.train_options
        if not self.first_steps:
            return [asked]
        begins = replace(self, agree=DATA_PARALLEL, **dict[str, Any](dict.fromkeys(_ONLY_DILOCO))).train_options
        warmup = asked.rate_of(self.steps).warmup_steps
        first: dict[str, Any] = {"schedule": "constant", "steps": self.first_steps, "save_every": self.first_steps}
        return [replace(begins, warmup_steps=warmup, **first), replace(asked, warmup_steps=warmup)]

    def predicted_bytes(self, n_parameters: int) -> float:
        """Return the predicted bytes that a replica sends in the whole run."""
        element_bytes = 2 if self.dtype == "bf16" else 4
        how: dict[str, Any] = {"element_bytes": element_bytes, "in_8_bits": self.agree_dtype == "fp8"}
        apart = sent_bytes_per_step(n_parameters, self.world_size, self.agree_every or 1, **how)
        first_steps = self.first_steps or 0
        first = sent_bytes_per_step(n_parameters, self.world_size, element_bytes=element_bytes)
        return (self.steps - first_steps) * apart + first_steps * first

    def __str__(self) -> str:
        shared = f"{self.size}, {self.world_size} replicas, learning rate {self.learning_rate:g}, seed {self.seed}"
        if self.agree == DATA_PARALLEL:
            return f"data parallelism of {shared}"
        outer = f"outer {self.outer_learning_rate:g} and {self.outer_momentum:g}"
        parts = f"{self.agree_fragments} fragments, delay {self.agree_delay}, {self.agree_dtype}"
        return f"DiLoCo every {self.agree_every} of {shared}, {outer}, {parts}"


@dataclass(frozen=True)
class Asked(RunOptions):
    """What does it cost to average weights every H steps (DiLoCo) instead of gradients in every step?"""

    CPU_DEFAULTS: ClassVar = {
        **{"size": ("tiny",), "replicas": (2,), "agree_every": (1, 10, 30), "learning_rate": (3e-3,), "steps": 60},
        **{"total_batch_tokens": 1024, "batch_size": 8, "context_length": 128, "dtype": "fp32"},
        **{"evaluate_every": 30, "evaluation_sequences": 128},
    }
    data: str = STDLIB
    """Tokens to learn: stdlib is Python's standard library; else a folder of tokenize_data.py."""
    seeds: int = 1
    """Runs of each cell, with --seed and those that follow it."""


Options: Any = options_of(DilocoCell, Asked)


def make_cells(options: Any) -> list[DilocoCell]:
    """For each seed, number of replicas and learning rate data parallelism, then DiLoCo in each way."""
    for size in options.size:
        resolve_size(size).at_context(options.context_length)
    if options.data != STDLIB:
        from cs336_systems.pretraining.dataset import Dataset

        Dataset.open(Path(options.data))
    cells: list[DilocoCell] = []
    no_diloco: dict[str, Any] = dict.fromkeys(_ONLY_DILOCO)
    for repeat in range(options.seeds):
        turn = {"repeat": (repeat,), "seed": (options.seed + repeat,)}
        for cell in every(DilocoCell, options, **turn):
            cells += [replace(cell, agree="diloco"), replace(cell, **no_diloco)]
    for first in filter(None, options.first_steps):
        if first >= options.steps or options.schedule in ("cosine", "linear"):
            said = f"--first-steps {first} of --steps {options.steps} under --schedule {options.schedule}"
            raise ValueError(f"{said}: they must be fewer, and the schedule wsd or constant")
    for cell in cells:
        if (cell.first_steps or 0) % (cell.agree_every or 1):
            raise ValueError(f"--first-steps {cell.first_steps} is no multiple of --agree-every {cell.agree_every}")
        for run in cell.runs:
            run.check()
        if cell.first_steps:
            first, then = cell.runs
            before, after = first.rate_of(cell.first_steps), then.rate_of(cell.steps)
            same = sum(before(step) == after(step) for step in range(cell.first_steps))
            if same < cell.first_steps:
                said = f"--first-steps {cell.first_steps} reach into the decay of --schedule {cell.schedule}"
                raise ValueError(f"{said}: of --steps {cell.steps} at most {same} come before it")
        cell.train_options.micro_batches(1)
    return sorted(dict.fromkeys(cells), key=lambda cell: (cell.repeat, cell.agree != DATA_PARALLEL))


def _data_parallel(line: Line) -> Line | None:
    """The line of data parallelism on as many replicas and the same tokens; None for itself."""
    if line.settings["agree"] == DATA_PARALLEL:
        return None
    return line.peer(agree=DATA_PARALLEL, **{name: "" for name in _ONLY_DILOCO if name in line.settings})


def _percent_above(line: Line) -> Spread | None:
    ratio = line.repeats_over("held_out_loss", _data_parallel(line), ("commit", "host"))
    return ratio and Spread(*(100 * (each - 1) for each in (ratio.median, ratio.least, ratio.largest)))


def _times_less(line: Line) -> float | None:
    peer = _data_parallel(line)
    return peer.over("sent", line) if peer else None


TABLE = ResultTable(
    settings=(
        *("gpu", "device", "data", "size", "dtype", "steps", "total_batch_tokens", "context_length", "learning_rate"),
        *("schedule", "agree", "world_size", *_ONLY_DILOCO),
    ),
    always=("agree", "world_size", "agree_every"),
    labels={"world_size": "replicas", "agree_every": "H", "total_batch_tokens": "tokens per step"},
    columns=(
        Column("held-out loss", "held_out_loss", ".4f", spread=True, rank=MAIN),
        Column(
            "% above",
            _percent_above,
            "+.2f",
            rank=MAIN,
            note="held-out loss above data parallelism's, per seed; median and range",
        ),
        Column("sent MiB", "sent", rank=2, note="by each replica in the whole run, over a ring"),
        Column("bytes/token", "sent_per_token", note="bytes sent by all replicas / tokens trained on"),
        Column("times less", _times_less, ",.0f", note="data parallelism's bytes / DiLoCo's"),
        Column("step ms", "step", rank=3),
    ),
)


def loss_figure(rows: pd.DataFrame) -> Figure | None:
    """Held-out loss against tokens, and against what a replica sends; a colour for each way to agree, a dash for each
    number of replicas; of several seeds the first, of several sizes the last; None without rows."""
    import pandas as pd

    from cs336_systems.report.figures import lines

    found = [line for line in TABLE.lines(rows[rows["repeat"].fillna(0) == 0]) if "loss_at" in line.metrics]
    if not found:
        return None
    found = [line for line in found if line.settings["size"] == found[-1].settings["size"]]
    differ = [name for name in _WORDS if len({line.settings.get(name) for line in found} - {""}) > 1]
    points = []
    for line in found:
        samples = dict(zip(line.run["metric"], line.run["samples"], strict=True))
        loss, tokens, sent = samples["loss_at"], samples["tokens_at"], samples["sent_at"]
        way = "data parallelism" if line.settings["agree"] == DATA_PARALLEL else f"H = {line.settings['agree_every']}"
        way += "".join(f", {_WORDS[name]} {line.settings[name]}" for name in differ if line.settings[name])
        own = {"way": way, "replicas": f"{line.settings['world_size']} replicas"}
        for at_tokens, at_sent, level in zip(tokens, sent, loss, strict=True):
            places = {"tokens": at_tokens / 1e6, "sent": at_sent / 1024} if at_sent else {"tokens": at_tokens / 1e6}
            points += [own | {"panel": panel, "at": at, "loss": level} for panel, at in places.items() if at_tokens]
    table = pd.DataFrame(points)
    figure, axes = lines(table, x="at", y="loss", colour="way", style="replicas", panel="panel", sharey=True)
    axes["tokens"].set(xlabel="million tokens, of all replicas", ylabel="held-out loss, nats")
    if "sent" in axes:
        sent_at = table["at"][table["panel"] == "sent"]
        scale = "log" if sent_at.max() > 10 * sent_at.min() else "linear"  # of less than a decade, numbers overlap
        axes["sent"].set(xlabel="GiB sent by each replica", xscale=scale)
    first = found[-1].last
    figure.suptitle(f"DiLoCo of {first['size']} on {first['gpu'] or first['device']}", fontsize=11)
    return figure


_WORDS = {
    "learning_rate": "learning rate",
    "agree_fragments": "fragments",
    "agree_delay": "delay",
    "agree_dtype": "in",
    "outer_learning_rate": "outer",
    "outer_momentum": "momentum",
    "first_steps": "after steps",
}
"""Settings that a legend names where they differ, and how."""

EXPERIMENT = Experiment(
    "benchmark_diloco",
    DilocoCell,
    make_cells,
    one_stage(measured_by("diloco_measure"), lambda cell: cell.device),
    presented(TABLE.of, {"": loss_figure}),
    ("held_out_loss", "sent", "sent_per_token", "step"),
    options=Options,
    preloaded=lambda options: (*PRELOADED, "cs336_systems.pretraining.every_step", "cs336_systems.pretraining.diloco"),
)
