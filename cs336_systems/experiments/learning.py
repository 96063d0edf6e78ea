"""What does a run learn, and how fast, when blocks multiply in fp8? Held-out loss, tokens/s, and gradients.

Each run is one of train.py's trainer, to its end. Runs of one seed begin with the same weights and see the same tokens
in the same order, so that losses are compared by seed. At a run's end each parameter's gradient on a few held-out
sequences is compared with that of the same weights in fp32, by plain PyTorch.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from cs336_systems.config import resolve_size
from cs336_systems.declared import option, options_of
from cs336_systems.experiments.driver import Experiment, Stage, presented
from cs336_systems.experiments.fp8 import RECIPES
from cs336_systems.experiments.options import RunOptions, cell_of
from cs336_systems.experiments.training import as_options
from cs336_systems.pretraining.options import TrainOptions
from cs336_systems.report.results import MAIN, Column, Line, ResultTable, Spread

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure
    from torch import Tensor

    from cs336_systems.distributed.process_group import Rank
    from cs336_systems.harness.record import Metric
    from cs336_systems.harness.sweep import Outcome
    from cs336_systems.pretraining.preparation import PreparedRun
    from cs336_systems.training.step import TrainStep

DEFAULT_DATA = Path("data/stdlib-bpe4096")

GOAL_PERCENT = 0.5
"""How many percent a recipe's loss may be from that of stored matmuls."""

_COMPARED_SEQUENCES = 4
"""Sequences of a micro-batch, at most, on which gradients are compared."""

_EXACT: dict[str, Any] = {
    **{"dtype": "fp32", "kernels": "reference", "attention": "reference", "keep": "autograd", "matmul_dtype": "same"},
    **{"gradient_dtype": "e4m3", "scaling": "tensor", "optimizer": "torch-fused", "cuda_graph": "off"},
}
"""The step that others are compared with."""

_SMOOTHED_SHARE = 0.1
"""Share of a run's steps over which the figure takes means."""

_RUN = (
    *("device", "size", "context_length", "batch_size", "total_batch_tokens", "steps", "learning_rate", "dtype"),
    *("kernels", "keep", "attention", "cuda_graph", "seed"),
)
"""Columns that are options of train.py."""


@dataclass(frozen=True)
class LearningCell:
    """A run; the fields are columns."""

    device: str = "cuda"
    size: str = option("qwen-100m", "Named model size.", several=False)
    recipe: str = option(
        "stored",
        "Matmuls of blocks: stored, in --dtype; e4m3 with one scale per tensor, or with scales by row, also with "
        "gradients in e5m2, or with scales by block.",
        values=tuple(RECIPES),
        asked=("stored", "e4m3", "e4m3-row", "e4m3-e5m2", "e4m3-block"),
    )
    context_length: int = option(1024, "Tokens per sequence.", several=False, sign="positive")
    batch_size: int = option(16, "Sequences per micro-batch.", several=False, sign="positive")
    total_batch_tokens: int = option(16_384, "Tokens per step.", several=False)
    steps: int = option(240, "Steps of each run, over which its learning rate decays.", several=False, sign="positive")
    learning_rate: float = option(6e-4, "Highest learning rate.", several=False)
    dtype: str = option(
        "bf16",
        "Dtype of parameters, gradients, moments, and of matmuls that are not quantized.",
        values=("fp32", "bf16"),
        several=False,
    )
    kernels: str = option("fused", "As for train.py.", values=("reference", "fused"), several=False)
    keep: str = option("products", "As for train.py.", several=False)
    attention: str = option("hopper", "As for train.py.", several=False)
    cuda_graph: str = option("on", "As for train.py.", values=("off", "on"), several=False)
    data: str = option(
        str(DEFAULT_DATA),
        "Folder written by tokenize_data.py, with held-out tokens; the default one is made if it is not there.",
        several=False,
    )
    warmup: int = option(10, "Steps before those whose speed is recorded.", several=False, sign="not negative")
    seed: int = 0
    repeat: int = 0
    """The round."""

    @property
    def variant(self) -> str:
        return self.recipe

    @property
    def train_options(self) -> TrainOptions:
        """The run as train.py would be asked for it, without its folder."""
        ours: dict[str, Any] = {name: getattr(self, name) for name in _RUN} | as_options(self.recipe)
        if self.device == "cpu":
            ours["optimizer"] = TrainOptions.CPU_DEFAULTS["optimizer"]
        ours |= {"data": Path(self.data), "evaluate_every": self.steps, "evaluation_sequences": None}
        return TrainOptions(save_every=None, export=False, **ours)

    def __str__(self) -> str:
        return f"{self.size} {self.recipe}, {self.steps} steps on {Path(self.data).name}, seed {self.seed}"


@dataclass(frozen=True)
class Asked(RunOptions):
    """What does a run learn, and how fast, with matmuls in fp8?"""

    CPU_DEFAULTS: ClassVar = {
        **{"size": "tiny", "recipe": ("stored", "e4m3"), "seeds": 1, "steps": 40},
        **{"context_length": 64, "batch_size": 8, "total_batch_tokens": 512, "learning_rate": 3e-3, "dtype": "fp32"},
        **{"kernels": "reference", "attention": "reference", "cuda_graph": "off"},
    }
    seeds: int = option(3, "Number of seeds for each recipe, from --seed on.", sign="positive")


Options: Any = options_of(LearningCell, Asked)


def make_cells(options: Any) -> list[LearningCell]:
    """In rounds, each recipe with the round's seed.

    Raises:
        ValueError: a value that no run can have.
    """
    resolve_size(options.size)
    if options.steps <= options.warmup:
        raise ValueError(f"--steps must be more than --warmup {options.warmup}, got {options.steps}")
    cells = [
        cell_of(LearningCell, options, repeat=repeat, seed=options.seed + repeat, recipe=recipe)
        for repeat, recipe in itertools.product(range(options.seeds), options.recipe)
    ]
    for cell in cells:
        cell.train_options.check()
        cell.train_options.micro_batches(1)
    return cells


def stages(options: Any, cells: Sequence[LearningCell], outcomes: list[Outcome]) -> list[Stage]:
    """All runs in one process, so that only the first compiles, once there are data: the default ones are made.

    Raises:
        ValueError: there are no such data, or nothing of them is held out.
    """
    from cs336_systems.pretraining.dataset import Dataset
    from cs336_systems.pretraining.preparation import default_data

    dataset = Dataset.open(default_data() if Path(options.data) == DEFAULT_DATA else Path(options.data))
    if dataset.evaluation is None:
        raise ValueError(f"{dataset.folder} holds out nothing to evaluate on")
    return [Stage(cells, measure, share=lambda cell: cell.size)]


def measure(cell: LearningCell) -> list[Metric]:
    """Seconds and tokens per second of each step after the first few, the loss of all, held-out loss, and cosines.

    Raises:
        Unsupported: the device cannot do it.
        ValueError: there are no such data, or nothing of them is held out.
    """
    import tempfile

    from cs336_systems.distributed.process_group import joined
    from cs336_systems.harness.record import Metric
    from cs336_systems.pretraining.preparation import prepare
    from cs336_systems.pretraining.run_records import Evaluation, LoggedStep, Record
    from cs336_systems.pretraining.trainer import run_prepared

    class Records(list[Record]):
        """A sink that keeps every record."""

        write = list.append

        def close(self) -> None:
            pass

    with tempfile.TemporaryDirectory() as name, joined(cell.device) as rank:
        prepared, said = prepare(replace(cell.train_options, out=Path(name)), rank), Records()
        run_prepared(prepared, rank, said)
        cosines = _cosines(prepared, rank)
    steps = [record for record in said if isinstance(record, LoggedStep)]
    (evaluation,) = (record for record in said if isinstance(record, Evaluation))
    steady = steps[cell.warmup :]
    return [
        Metric("step", "ms", [1000 * step.seconds for step in steady]),
        Metric("tokens_per_s", "1/s", [step.tokens / step.seconds for step in steady]),
        Metric("learned_tokens", "tokens", [sum(step.tokens for step in steps)]),
        Metric("loss", "nats", [step.loss for step in steps]),
        Metric("evaluation_loss", "nats", [evaluation.loss]),
        Metric("cosine", "cosine", cosines),
        Metric("least_cosine", "cosine", [min(cosines)]),
        Metric("mean_cosine", "cosine", [sum(cosines) / len(cosines)]),
    ]


def _cosines(prepared: PreparedRun, rank: Rank) -> list[float]:
    """Cosine of each parameter's gradient with that of fp32, at the weights that the run has come to."""
    from torch.nn.functional import cosine_similarity

    from cs336_systems.pretraining.loader import evaluation_batches
    from cs336_systems.training.assemble import assemble
    from cs336_systems.training.step import TrainStep

    step, options = prepared.step, prepared.options
    assert prepared.evaluation is not None and isinstance(step, TrainStep)
    n_sequences = step.accumulate * min(options.batch_size, _COMPARED_SEQUENCES)
    token_ids, targets, _ = next(evaluation_batches(prepared.evaluation, n_sequences))
    exact = assemble(replace(prepared.case, **_EXACT), rank)
    exact.model.load_state_dict(step.model.state_dict())
    own, reference = (_gradients(each, token_ids, targets) for each in (step, exact))
    return [cosine_similarity(own[name].flatten(), reference[name].flatten(), 0).item() for name in reference]


def _gradients(step: TrainStep, token_ids: Tensor, targets: Tensor) -> dict[str, Tensor]:
    """Gradients in fp64 by the parameter's name; the step changes nothing."""
    from cs336_systems.training.step import TrainStep

    passes = TrainStep.phases(step, "step", token_ids, targets)  # not as a CUDA graph
    for phase, run in passes.items():
        if phase != "optimizer":
            run()
    found = {name: p.grad.double() for name, p in step.model.named_parameters() if p.grad is not None}
    step.optimizer.zero_grad(set_to_none=True)
    return found


def by_seed(line: Line, metric: str) -> pd.Series:
    """The metric's median by seed; nothing if the line lacks it."""
    return line.run[line.run["metric"] == metric].drop_duplicates("seed", keep="last").set_index("seed")["median"]


def off_percent(line: Line) -> pd.Series:
    """By seed, how far the held-out loss is above that of stored matmuls with the same seed, in percent."""
    losses, stored = by_seed(line, "evaluation_loss"), line.peer(recipe="stored")
    return losses[:0] if stored is None else 100 * (losses / by_seed(stored, "evaluation_loss") - 1).dropna()


def speedup(line: Line) -> float | None:
    """Times as fast as stored matmuls."""
    return line.over("tokens_per_s", line.peer(recipe="stored"))


def _spread(values: pd.Series) -> Spread | None:
    """Mean and ends."""
    return Spread(values.mean(), values.min(), values.max()) if len(values) else None


LEARNING_TABLE = ResultTable(
    settings=(
        *("gpu", "device", "size", "batch_size", "context_length", "total_batch_tokens", "steps", "learning_rate"),
        *("dtype", "kernels", "keep", "attention", "cuda_graph", "data", "warmup", "recipe"),
    ),
    always=("recipe",),
    columns=(
        Column("seeds", lambda line: float(len(by_seed(line, "evaluation_loss"))), ".0f"),
        Column("learned tokens", "learned_tokens", ",.0f", rank=2, note="by each run"),
        Column(
            "held-out loss",
            lambda line: _spread(by_seed(line, "evaluation_loss")),
            ".4f",
            note="nats per token, mean and range over the seeds",
        ),
        Column(
            "above stored %",
            lambda line: None if line.settings["recipe"] == "stored" else _spread(off_percent(line)),
            "+.3f",
            rank=MAIN,
            note="with the same seed, mean and range over the seeds",
        ),
        Column(
            "least cosine",
            lambda line: by_seed(line, "least_cosine").min(),
            ".4f",
            note="of a parameter's gradient with that of fp32, at the end, over all seeds",
        ),
        Column("mean cosine", lambda line: by_seed(line, "mean_cosine").mean(), ".4f"),
        Column("tokens/s", "tokens_per_s", ",.0f", rank=MAIN),
        Column("x", speedup, ".3f", note="times as fast as stored"),
    ),
)


@dataclass(frozen=True)
class Deviations:
    """By how many percent held-out losses are above those of stored matmuls with the same seed.

    Attributes:
        n: pairs of runs.
        n_above: pairs in which the recipe has the higher loss.
        error: standard error of the mean; NaN for one pair.
    """

    n: int
    n_above: int
    mean: float
    error: float
    least: float
    largest: float


def loss_deviations(rows: pd.DataFrame, *recipes: str) -> Deviations:
    """Deviations of the named recipes, or of all that are quantized.

    Raises:
        ValueError: no run of theirs stands beside one of stored matmuls.
    """
    import pandas as pd

    lines = [line for line in LEARNING_TABLE.lines(rows[rows["status"] == "ok"]) if line.settings["recipe"] != "stored"]
    off = [off_percent(line) for line in lines if not recipes or line.settings["recipe"] in recipes]
    if not any(map(len, off)):
        raise ValueError(f"no run of {', '.join(recipes) or 'any recipe'} stands beside one of stored products")
    every = pd.concat([each for each in off if len(each)])
    return Deviations(len(every), int((every > 0).sum()), every.mean(), every.sem(), every.min(), every.max())


def loss_figure(rows: pd.DataFrame) -> Figure | None:
    """By how many percent held-out loss is above that of stored matmuls, over speed: dots for seeds, bars for means.

    Beside it the same of training's loss over the steps, a line for each seed. None without a recipe beside stored
    matmuls.
    """
    from matplotlib.figure import Figure

    from cs336_systems.report.figures import OKABE_ITO, dress

    lines = {line.settings["recipe"]: line for line in LEARNING_TABLE.lines(rows[rows["status"] == "ok"])}
    stored = lines.pop("stored", None)
    found = {str(recipe): line for recipe, line in lines.items() if len(off_percent(line))}
    if stored is None or not found:
        return None
    figure = Figure(figsize=(11, 4.2), layout="constrained")
    beside, over_steps = figure.subplots(1, 2)
    words: dict[str, Any] = {"textcoords": "offset points", "fontsize": 9}
    beside.plot([1], [0], "+", color="#000000", markersize=12)
    beside.annotate("stored", (1, 0), (8, 6), **words)
    expected = _losses(stored)
    for (recipe, line), colour in zip(found.items(), OKABE_ITO, strict=False):
        off, times = off_percent(line), speedup(line)
        assert times is not None
        beside.plot([times] * len(off), off, "o", color=colour, alpha=0.5)
        beside.plot([times], [off.mean()], "_", markersize=18, markeredgewidth=2.5, color=colour)
        beside.annotate(recipe, (times, off.mean()), (10, 6), color=colour, **words)
        for seed, losses in _losses(line).items():
            if seed in expected:
                window = max(1, round(_SMOOTHED_SHARE * len(losses)))
                own, other = (each.rolling(window).mean() for each in (losses, expected[seed]))
                over_steps.plot(100 * (own / other - 1), color=colour, linewidth=1.1)
    titles = {
        beside: ("held-out", "times as fast as stored products, whole steps", "dots: seeds; bars: means; grey: ±{} %"),
        over_steps: ("training's", "step", f"a line for each seed, means over {_SMOOTHED_SHARE:.0%} of the steps"),
    }
    for axes, (which, x, title) in titles.items():
        axes.axhspan(-GOAL_PERCENT, GOAL_PERCENT, color="#000000", alpha=0.06, linewidth=0)
        axes.set_xlabel(x)
        axes.set_ylabel(f"{which} loss above that of stored products, %")
        axes.set_title(title.format(f"{GOAL_PERCENT:g}"), fontsize=10)
        dress(axes)
    beside.margins(0.35, 0.15)
    figure.suptitle(
        f"{stored.settings['size']} on {stored.settings.get('gpu', stored.settings['device'])}", fontsize=11
    )
    return figure


def _losses(line: Line) -> dict[int, pd.Series]:
    """Losses of training's steps, by seed."""
    import pandas as pd

    own = line.run[line.run["metric"] == "loss"].drop_duplicates("seed", keep="last")
    return {seed: pd.Series(samples) for seed, samples in zip(own["seed"], own["samples"], strict=True)}


EXPERIMENT = Experiment(
    "benchmark_learning",
    LearningCell,
    make_cells,
    stages,
    presented(LEARNING_TABLE.of),
    ("evaluation_loss", "least_cosine", "mean_cosine", "tokens_per_s"),
    options=Options,
)
