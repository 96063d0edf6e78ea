"""How fast does a run train? Tokens/s, once steady, of train.py's trainer and of transformers, with Liger or torchao.

Tokens are random, as only speed is measured. ``training_measure.py`` runs a cell; here are the grid, the table of all
runs, what several ranks gain over one of the same command, and a figure of the fastest run of each way.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any

from cs336_systems.config import ATTENTIONS, MODEL_SIZES, check_known, resolve_size
from cs336_systems.declared import like, option, options_of
from cs336_systems.experiments.driver import Experiment, measured_by, one_stage, presented
from cs336_systems.experiments.fp8 import RECIPES
from cs336_systems.experiments.options import RunOptions, cell_of
from cs336_systems.pretraining.options import TrainOptions
from cs336_systems.ranks import Parallel
from cs336_systems.report.results import COMMAND, MAIN, Column, Line, ResultTable, Spread

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure

TORCHAO = {"torchao-tensorwise": "e4m3-e5m2", "torchao-rowwise": "e4m3-row"}
"""Ways of torchao, and the recipe of ours that has the same formats and scales."""

TRL: dict[str, dict[str, Any]] = {
    "trl": {},
    "trl-compiled": {"torch_compile": True},
    "trl-flex": {"attn_implementation": "flex_attention"},
    "trl-flash": {"attn_implementation": "flash_attention_4"},
    "trl-flash-compiled": {"attn_implementation": "flash_attention_4", "torch_compile": True},
}
"""Ways of TRL's SFTTrainer, with their further arguments; ``attn_implementation``, by default sdpa, is the model's."""

LIGER = ("transformers-liger", "transformers-liger-cudnn", "transformers-liger-whole")
"""Ways of transformers' model with Liger's kernels; whole: compiled as one graph."""

LIBRARIES = {
    "ours": (),
    "input-gradients": (),
    **dict.fromkeys(("transformers", "transformers-cudnn"), ("transformers",)),
    **dict.fromkeys(LIGER, ("transformers", "liger-kernel")),
    **dict.fromkeys(TORCHAO, ("transformers", "torchao")),
    **dict.fromkeys(TRL, ("trl", "transformers", "liger-kernel", "flash-attn-4")),
}
"""The ways to train, and the distributions that each takes."""

UNSHARDED = (0, 1, 2)
"""ZeRO levels in rows of ranks that share nothing. Today's say 0; earlier ones say what was asked for, of which 1 and 2
did nothing there, while 3 gathered on one rank what was whole."""

MEDIANS = ("tokens_per_s", "speed_of_light", "peak_memory", "predicted_peak_memory")
_RUN = ("device", "size", "context_length", "batch_size", "dtype", "seed")
_WORDS = ("kernels", "keep", "attention", "cuda_graph", "matmul_kernels", "offload")
"""Columns that are options of train.py, for all ways and for ours."""
OURS = ("ours", "input-gradients")
"""Ways that run our blocks."""


@dataclass(frozen=True)
class TrainingRunCell:
    """A run; the fields are columns."""

    device: str = "cuda"
    size: str = option("qwen2.5-0.5b", "Named model sizes.")
    how: str = option(
        "ours",
        "ours: the trainer of train.py. The others: a plain loop over transformers' model, compiled whole on a GPU; "
        "with Liger's kernels, each block compiled by itself (whole: as one); with cuDNN's attention (cudnn) or the "
        "one that torch chooses; with torchao's float8 in blocks, one scale per tensor or row, each block and the loss "
        "compiled by itself; TRL's SFTTrainer, for packed conversations, with Liger. "
        "input-gradients: ours, but only forward and gradients of inputs: a bound on how fast adapters train.",
        values=tuple(LIBRARIES),
        asked=("ours", "transformers", "transformers-liger"),
    )
    context_length: int = option(1024, "Tokens per sequence.", several=False, sign="positive")
    batch_size: int = option(32, "Sequences per micro-batch.", several=False, sign="positive")
    total_batch_tokens: int = option(524_288, "Tokens per step over all ranks.", several=False)
    world_size: int = option(1, "Ranks, for ours; under torchrun those that it has started. [default: 1]", asked=None)
    zero: int = option(
        0, "What is sharded among ranks, as for train.py; one rank and independent ones are at 0.", values=(0, 1, 2, 3)
    )
    gather_by: str = option("collectives", "For --zero 3, as for train.py.", values=("collectives", "copies"))
    tensor: int = like(Parallel, "tensor", shown=False)
    context: int = like(Parallel, "context", shown=False)
    apart: str = option(
        "off",
        "For ours, independent replicas: each rank trains its own model on its share of the tokens, at the same time "
        "and without communication. The slowest rank's steps count.",
        values=("off", "on"),
    )
    dtype: str = option(
        "bf16", "Dtype of parameters, gradients, moments and matmuls.", values=("fp32", "bf16"), several=False
    )
    recipe: str = option(
        "stored",
        "For ours, matmuls of blocks: stored, in --dtype; e4m3 with one scale per tensor, or with scales by row, also "
        "with gradients in e5m2, or with scales by block.",
        values=tuple(RECIPES),
    )
    kernels: str = option("fused", "For ours, as for train.py.", values=("reference", "fused"))
    keep: str = option("products", "For ours, what blocks keep for backward, as for train.py.")
    attention: str = option("hopper", "For ours, as for train.py.")
    cuda_graph: str = option("on", "For ours, as for train.py.", values=("off", "on"))
    matmul_kernels: str = option("library", "For ours, as for train.py.", values=("library", "measured"))
    offload: str = option("none", "For ours, as for train.py, but joined by hyphens, as in m-v.")
    conversations: str = option(
        "off",
        "For ours and TRL, train on conversations of 50 to 1,500 tokens at context 2,048, else in proportion. Two "
        "thirds of their tokens are targets. packed: several a row; padded: one a row; off: no conversations.",
        values=("off", "packed", "padded"),
    )
    lora_rank: int = option(
        0, "For ours, rank of LoRA adapters, which alone are trained; 0 trains all weights.", sign="not negative"
    )
    warmup: int = option(6, "Steps before the recorded ones.", several=False, sign="not negative")
    seconds: float = option(60.0, "Least duration of the recorded steps.", several=False, sign="positive")
    seed: int = 0
    data: str = "random tokens"
    """The tokens; the speed does not depend on them."""
    library: str = ""
    """Others' libraries, with versions."""

    @property
    def variant(self) -> str:
        return self.how

    @property
    def lengths(self) -> tuple[int, int]:
        """The fewest and the most tokens of a conversation."""
        return max(3, self.context_length * 50 // 2048), self.context_length * 1500 // 2048

    @property
    def n_together(self) -> int:
        """Ranks that share a step."""
        return 1 if self.apart == "on" else self.world_size

    @property
    def train_options(self) -> TrainOptions:
        """The run as train.py would be asked for it, without its folders; independent replicas each run their share."""
        asked: dict[str, Any] = {}
        if self.device == "cpu":
            asked = {name: TrainOptions.CPU_DEFAULTS[name] for name in ("optimizer", "kernels")}
        ours = ("zero", "gather_by", "tensor", "context", *_WORDS) if self.how in OURS else ()
        asked |= {name: getattr(self, name) for name in (*_RUN, *ours)}
        if self.how in OURS:
            recipe = RECIPES[self.recipe]
            asked |= {"matmul_dtype": recipe.matmul, "gradient_dtype": recipe.gradient, "scaling": recipe.scaling}
            asked["offload"] = () if self.offload == "none" else tuple(self.offload.split("-"))
        asked |= {"packing": self.how in OURS and self.conversations == "packed", "lora_rank": self.lora_rank or None}
        asked["total_batch_tokens"] = self.total_batch_tokens * self.n_together // self.world_size
        return TrainOptions(steps=1_000_000, evaluate_every=None, save_every=None, export=False, **asked)

    def __str__(self) -> str:
        shared = f"ZeRO {self.zero}, {self.gather_by}" if self.n_together > 1 else "independent"
        sizes = {"tensor": self.tensor, "context": self.context}
        shared += "".join(f", {name} {size}" for name, size in sizes.items() if size > 1)
        ranks = f"on {self.world_size} ranks, {shared}" if self.world_size > 1 else ""
        shape = f"{self.size} {self.batch_size} x {self.context_length} {self.dtype}"
        graph = "CUDA graph" if self.cuda_graph == "on" else ""
        away = f"offload {self.offload}" if self.offload not in ("", "none") else ""
        rows = f"{self.conversations} conversations" if self.conversations != "off" else ""
        lora = f"LoRA of rank {self.lora_rank}" if self.lora_rank else ""
        words = (shape, self.how, self.recipe, self.kernels, self.keep, away, self.attention, graph, rows, lora, ranks)
        return " ".join(filter(None, words))


CPU = {
    **{"size": ("tiny",), "how": ("ours",), "context_length": 128, "batch_size": 4, "total_batch_tokens": 1024},
    **{"dtype": "fp32", "kernels": ("reference",), "keep": ("autograd",), "attention": ("reference",)},
    **{"cuda_graph": ("off",), "warmup": 3, "seconds": 5.0},
}
Options: Any = options_of(TrainingRunCell, RunOptions, cpu=CPU)


def make_cells(options: Any) -> list[TrainingRunCell]:
    """Each size in each way; what others do not have is asked of ours alone. Ranks that share nothing run once, at
    ZeRO 0; the ways to gather differ at ZeRO 3 only."""
    for name in options.attention:
        check_known("attention", name, ATTENTIONS)
    if "off" not in options.apart and max(options.world_size or (1,)) == 1:
        raise ValueError("--apart on needs --world-size of 2 or more, got 1")
    of_ranks: dict[str, tuple[Any, ...]] = {"world_size": (1,), "zero": (0,), "gather_by": ("collectives",)}
    of_ranks |= {"apart": ("off",), "tensor": (1,), "context": (1,)}
    cells = []
    for size, how in itertools.product(options.size, options.how):
        resolve_size(size)
        ways = of_ranks | dict.fromkeys(_WORDS, ("",)) | {"recipe": (TORCHAO.get(how, "stored"),)}
        ways |= {"conversations": ("packed" if how in TRL else "off",), "lora_rank": (0,)}
        if how == "ours":
            ways = {name: getattr(options, name) for name in ways}
        elif how == "input-gradients":
            ways |= {name: getattr(options, name) for name in (*_WORDS, "conversations")} | {"cuda_graph": ("off",)}
        for values in itertools.product(*ways.values()):
            own = dict(zip(ways, values, strict=True)) | {"size": size, "how": how, "library": _library(how)}
            if own["world_size"] == 1 or own["apart"] == "on":
                own |= {"zero": 0, "apart": "off" if own["world_size"] == 1 else "on", "tensor": 1, "context": 1}
            own["gather_by"] = own["gather_by"] if own["zero"] == 3 else "collectives"
            cell = cell_of(TrainingRunCell, options, data=TrainingRunCell.data, **own)
            replace(cell, apart="off").train_options.micro_batches(cell.world_size)
            if how in OURS:
                cell.train_options.check()
            cells.append(cell)
    return list(dict.fromkeys(cells))


def _library(how: str) -> str:
    """The installed libraries of a way, with versions."""
    found = []
    for name in LIBRARIES[how]:
        with suppress(PackageNotFoundError):
            found.append(f"{name} {version(name)}")
    return ", ".join(found)


def _speedup(line: Line) -> Spread | None:
    stored = None if line.settings["recipe"] == "stored" else line.peer(recipe="stored")
    return line.repeats_over("tokens_per_s", stored)


def _over_one_rank(line: Line) -> Spread | None:
    if line.settings["world_size"] == 1:
        return None
    alone: dict[str, Any] = {"world_size": 1, "gather_by": "collectives", "apart": "off"}
    said = {name: str(line.settings.get(name, "")) for name in ("tensor", "context")}  # which older rows do not say
    alone |= {name: 1 for name, size in said.items() if size not in ("", "nan", "None", "1")}
    ratios = (line.repeats_over("tokens_per_s", line.peer(zero=zero, **alone)) for zero in UNSHARDED)
    return next(filter(None, ratios), None)


def _of_conversations(metric: str, line: Line) -> float | None:
    return None if line.settings.get("conversations", "off") == "off" else line.median(metric)


def _over_fastest(line: Line, *ways: str, **settings: object) -> Spread | None:
    """Useful tokens/s over those of the fastest line of these ways in the same command, with these settings and of the
    same size, context and recipe; None if there is none.
    """
    same = {name: line.settings.get(name) for name in ("size", "context_length", "recipe")} | settings
    peers = (
        peer
        for peer in line.lines.values()
        if peer.settings["how"] in ways
        and all(str(peer.settings.get(name)) == str(value) for name, value in same.items())
    )
    ratios = filter(None, (line.repeats_over("useful_tokens_per_s", peer) for peer in peers))
    return min(ratios, key=lambda ratio: ratio.median, default=None)


def _over_pre_training(line: Line) -> Spread | None:
    if line.settings.get("conversations", "off") == "off":
        return None
    return _over_fastest(line, "ours", conversations="off", lora_rank=0)


def _over_trl(line: Line) -> Spread | None:
    """Useful tokens/s over those of TRL's fastest way in the same command."""
    if line.settings["how"] != "ours" or line.settings.get("conversations", "off") == "off":
        return None
    return _over_fastest(line, *TRL)


def _over_input_gradients(line: Line) -> Spread | None:
    adapts = str(line.settings.get("lora_rank", 0)) not in ("0", "")
    return _over_fastest(line, "input-gradients", recipe="stored") if adapts else None


def _first_loss(line: Line) -> float | None:
    losses = line.run.loc[line.run["metric"] == "loss", "samples"]
    return next(iter(losses.iloc[-1]), None) if len(losses) else None


TRAINING_TABLE = ResultTable(
    settings=(
        *("gpu", "device", "size", "batch_size", "context_length", "total_batch_tokens", "dtype", "how"),
        *("world_size", "zero", "gather_by", "tensor", "context", "apart", "recipe", *_WORDS),
        *("conversations", "lora_rank"),
        *("data", "warmup", "seconds"),
    ),
    always=("size", "how", "recipe"),
    columns=(
        Column("step ms", "step", ",.1f"),
        Column("tokens/s", "tokens_per_s", ",.0f", rank=MAIN, note="median of the steps after the first few"),
        *(
            Column(f"{name}/s", partial(_of_conversations, f"{name}_per_s"), ",.0f", optional=True, note=note)
            for name, note in (("useful_tokens", "without padding"), ("targets", "tokens of answers"))
        ),
        Column(
            "x pre-training",
            _over_pre_training,
            ".3f",
            optional=True,
            note="useful tokens/s / pre-training's in the same command",
        ),
        Column(
            "x TRL", _over_trl, ".3f", optional=True, note="useful tokens/s / its fastest setting's in the same command"
        ),
        Column("x input gradients", _over_input_gradients, ".3f", optional=True),
        Column("x", _speedup, ".3f", optional=True, note="speed-up over unquantized products in the same command"),
        Column("x one rank", _over_one_rank, ".3f", optional=True, note="speed-up over one rank in the same command"),
        Column("speed of light %", "speed_of_light", ".1f", optional=True),
        Column("peak GiB", "peak_memory", ".1f", optional=True, little=True),
        Column("predicted GiB", "predicted_peak_memory", ".1f", optional=True, little=True),
        Column("loss", _first_loss, ".4f", optional=True, note="nats per token in the first step after the warm-up"),
        Column("library", lambda line: line.last.get("library") or None, optional=True),
    ),
)


def fastest(rows: pd.DataFrame) -> pd.DataFrame:
    """The fastest run on one rank of each size, way and recipe, in the order in which they were first measured.

    Columns: the settings, ``COMMAND``, and ``MEDIANS``, NaN where a run has no such row.
    """
    import pandas as pd

    from cs336_systems.harness.runs import newest_run, pooled

    alone = rows[(rows["status"] == "ok") & (rows["world_size"].astype(int) == 1)]
    settings = [name for name in TRAINING_TABLE.settings if name in rows]
    best: dict[tuple[Any, ...], dict[Any, Any]] = {}
    for _, cell in alone.groupby(settings, sort=False, dropna=False):
        newest = newest_run(cell)
        medians = pooled(newest).set_index("metric")["median"]
        run: dict[str, Any] = {name: newest[name].iloc[-1] for name in (*settings, *COMMAND)}
        run |= {name: float(medians.get(name, math.nan)) for name in MEDIANS}
        way = run["size"], run["how"], run["recipe"]
        if way not in best or run["tokens_per_s"] > best[way]["tokens_per_s"]:
            best[way] = run
    return pd.DataFrame(best.values())


def rates_figure(rows: pd.DataFrame, others: Mapping[str, Mapping[str, float]]) -> Figure | None:
    """A panel for each size, with a bar for the fastest run of each way and recipe: thousands of tokens per second.

    Args:
        others: tokens per second by size that were not measured here, by who says so; in grey.
    """
    from cs336_systems.report.figures import OKABE_ITO, panels

    best = fastest(rows)
    if best.empty:
        return None
    rates = best.assign(way=best["how"].where(best["recipe"] == "stored", best["how"] + ", " + best["recipe"]))
    rates = rates.sort_values("recipe", key=lambda recipe: recipe != "stored", kind="stable")
    table = rates.pivot_table(index="way", columns="size", values="tokens_per_s", sort=False) / 1000
    colours = [OKABE_ITO[0 if way.startswith("ours") else 4] for way in table.index] + ["0.7"] * len(others)
    for name, quoted in others.items():
        for size, rate in quoted.items():
            table.loc[name, size] = rate / 1000
    sizes = [size for size in MODEL_SIZES if size in table]
    figure, axes = panels(len(sizes), len(sizes), 2.2, 0.6 + 0.3 * len(table), sharey=True)
    for panel, size in zip(axes, sizes, strict=True):
        thousands = table[size].fillna(0.0)
        bars = panel.barh(table.index, thousands, color=colours, height=0.7)
        panel.bar_label(bars, [f"{rate:.3g}" if rate else "" for rate in thousands], padding=3, fontsize=8)
        panel.set_xlim(right=1.25 * thousands.max())
        panel.set_title(size, fontsize=10)
        panel.set_xlabel("1,000 tokens/s", fontsize=9)
    axes[0].invert_yaxis()
    first = best.iloc[0]
    what = f"parameters in {first['dtype']}, sequences of {first['context_length']:,}"
    figure.suptitle(f"Training on one {first['gpu'] or first['device']}: {what}", fontsize=11)
    return figure


EXPERIMENT = Experiment(
    "benchmark_training",
    TrainingRunCell,
    make_cells,
    one_stage(measured_by("training_measure"), lambda cell: cell.seconds + 30.0),
    presented(TRAINING_TABLE.of, {"": partial(rates_figure, others={})}),
    ("tokens_per_s", "step", "speed_of_light", "peak_memory"),
    options=Options,
    default_worlds=lambda device: (1,),
)
