"""What does a training step cost under limits on device and host memory? A plan for them, simulated and measured.

With ``--gpu`` a device of ``hardware.py`` is simulated, on any machine; without it the step runs here, within a fence
on a GPU (``streaming_measure.py``). Weights and tokens are random. With ``--world-size`` ranks form a ring: each has
some of the layers and limits of its own, and activations go from rank to rank. Peers train the same model without caps:
``compiled`` all on the device, ``fsdp2-offload`` with state on the host by torch's own means.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from cs336_systems.config import FP8_QUANTUM, ModelConfig, resolve_size
from cs336_systems.declared import option, options_of
from cs336_systems.experiments.driver import Experiment, Stage, measured_by, presented
from cs336_systems.experiments.fp8 import RECIPES
from cs336_systems.experiments.options import RunOptions, every
from cs336_systems.hardware import GIB, Hardware, hardware_named
from cs336_systems.report.results import MAIN, Column, Line, ResultTable

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure

    from cs336_systems.harness.sweep import Outcome

STREAMED_RECIPES = tuple(name for name, recipe in RECIPES.items() if recipe.scaling == "tensor")

CPU_PLANS_FOR = "h200"
"""The device for which a step is planned that runs on a CPU."""


@dataclass(frozen=True)
class StreamingCell:
    """A model and a length under two memory limits; the fields are columns."""

    device: str
    simulated_device: str
    """Name of the device, if nothing is measured."""
    size: str = option(
        "llama3-8b",
        "Named model sizes; weights are random, so sequences may be longer than the published models were trained for.",
    )
    context_length: int = option(
        0, "Tokens per sequence; by default 8192, and 64 for tiny.", asked=None, sign="positive"
    )
    device_gib: float = option(
        0.0,
        "Limits on device memory: all that the process has there, CUDA's context included; by default 24; for tiny "
        "two, of which only one holds the model.",
        asked=None,
        sign="positive",
    )
    host_gib: float = option(
        0.0, "Limits on the process's host memory; by default 75, and 0.001 for tiny.", asked=None, sign="positive"
    )
    chunk: int = option(
        0,
        "Tokens that a layer processes at a time; by default the fastest, and 32 for tiny. Of peers those of a "
        "micro-batch, in whole sequences; by default 8192.",
        asked=None,
        several=False,
        sign="positive",
    )
    tokens_per_step: int = option(
        0,
        "Tokens per step; by default enough to make the optimizer's share small, and 512 for tiny.",
        asked=None,
        several=False,
        sign="positive",
    )
    ranks: int = option(
        1,
        "Numbers of ranks to which layers are dealt in turn, each on its own GPU, each within these limits.",
        flag="world-size",
        asked=None,
    )
    recipe: str = option(
        "stored",
        "Matmuls of blocks: stored, in bf16; e4m3, in fp8 with one scale per tensor; e4m3-e5m2, with gradients in "
        "e5m2. Utilization is in percent of bf16's peak for all of them.",
        values=STREAMED_RECIPES,
    )
    warmup: int = option(
        1,
        "Steps before the recorded ones; they are long, so clocks have settled after one.",
        several=False,
        sign="not negative",
    )
    steps: int = option(3, "Recorded steps.", several=False, sign="positive")
    seed: int = 0
    peer: str = ""
    """The peer that runs instead of a streamed step; it has no limits, 0 in their columns."""

    @property
    def variant(self) -> str:
        return "simulated" if self.simulated_device else self.peer or "measured"

    @property
    def config(self) -> ModelConfig:
        return replace(resolve_size(self.size), max_context_length=None).at_context(self.context_length)

    def __str__(self) -> str:
        limits = self.peer or f"within {self.device_gib:g} / {self.host_gib:g} GiB"
        ring = f" on each of {self.ranks} ranks" if self.ranks > 1 else ""
        recipe = "" if self.recipe == "stored" else f" {self.recipe}"
        return f"{self.size} {self.context_length:,}{recipe} {limits}{ring}"


@dataclass(frozen=True)
class RingCell(StreamingCell):
    """A cell that a ring of ranks measures together."""

    @property
    def world_size(self) -> int:
        return self.ranks


@dataclass(frozen=True)
class Asked(RunOptions):
    """What does a training step cost under limits on device and host memory?"""

    CPU_DEFAULTS: ClassVar = {"size": ("tiny",)}
    peers: tuple[Literal["compiled", "fsdp2-offload"], ...] = ()
    """Also measure the same model without limits, in the same run: compiled, plain PyTorch under torch.compile, all on
    the device; fsdp2-offload, torch's FSDP2 with state and optimizer on the host, blocks compiled and checkpointed."""
    gpu: str | None = None
    """Simulate this device and measure nothing: h200, h100, b200, a100-sxm-80gb, rtx-5090 ... (hardware.py)."""
    explain: bool = False
    """Also print for each plan what lies where, what limits its speed, and what one more GiB of either memory would
    bring, for which two more plans are searched."""
    timeline: bool = False
    """Write and draw into --out when kernels and copies run: measured on a GPU, else simulated."""


Options: Any = options_of(StreamingCell, Asked)

_SETS = ("context_length", "device_gib", "host_gib")
_DEFAULTS: dict[str, Any] = dict(zip(_SETS, ((8192,), (24.0,), (75.0,)), strict=True))
_TINY: dict[str, Any] = dict(zip(_SETS, ((64,), (0.001, 0.002), (0.001,)), strict=True))


def make_cells(options: Any) -> list[StreamingCell]:
    """The grid, and the peers of each length."""
    of_step = ("chunk", "tokens_per_step")
    given = {name: value for name in (*_SETS, *of_step) if (value := getattr(options, name)) is not None}
    if options.timeline and options.out is None:
        raise ValueError("--timeline draws in the folder of --out, which is not given")
    gpu = hardware_named(options.gpu) if options.gpu else None
    simulated = gpu.name if gpu else ""
    if options.peers and simulated:
        raise ValueError(f"--peers {options.peers[0]} is measured: --gpu goes without")
    cells: list[StreamingCell] = []
    worlds = options.world_size or (1,)
    if options.peers and worlds != (1,):
        raise ValueError(f"--peers {options.peers[0]} runs on one rank, got --world-size {max(worlds)}")
    for name in (resolve_size(size).name for size in options.size):
        usual = (
            _TINY | {"chunk": 32, "tokens_per_step": 512} if name == "tiny" else _DEFAULTS | dict.fromkeys(of_step, 0)
        )
        asked = usual | given
        if gpu:
            if name == "tiny" and "device_gib" not in given:
                raise ValueError("--gpu simulates models for GPUs: give --size, as llama3-8b")
            _check_gpu(gpu, asked["device_gib"], options.recipe)
        for length in asked["context_length"]:
            _check_tokens(length, asked["chunk"], asked["tokens_per_step"], quantized=set(options.recipe) != {"stored"})
        if (n_layers := resolve_size(name).n_layers) < max(worlds):
            raise ValueError(f"--world-size {max(worlds)}: the {n_layers} layers of {name} leave ranks without one")
        own: dict[str, Any] = {"size": [name], "simulated_device": [simulated], "ranks": worlds, "peer": [""]}
        own |= {each: asked[each] for each in _SETS} | {each: [asked[each]] for each in of_step}
        free = own | {"device_gib": [0.0], "host_gib": [0.0], "peer": options.peers}
        free |= {"chunk": [given.get("chunk", 0)], "recipe": ["stored"]}
        for cell in every(StreamingCell, options, **own) + every(StreamingCell, options, **free):
            in_ring = cell.ranks > 1 and not simulated  # one process simulates all ranks
            cells.append(RingCell(**vars(cell)) if in_ring else cell)
    return cells


def _check_gpu(gpu: Hardware, device_gib: Sequence[float], recipes: Sequence[str]) -> None:
    """Raises ValueError for what a device that is simulated cannot run."""
    memory = (gpu.memory_bytes or math.inf) / GIB
    if max(device_gib) > memory:
        raise ValueError(f"--device-gib {max(device_gib):g} is more than {gpu.name} has, {memory:.1f} GiB")
    if not gpu.peak("fp8") and (fp8 := [recipe for recipe in recipes if recipe != "stored"]):
        raise ValueError(f"--recipe {fp8[0]}: {gpu.name} has no products in fp8")


def _check_tokens(context_length: int, chunk: int, tokens_per_step: int, *, quantized: bool) -> None:
    """Raises ValueError unless steps are of whole sequences, these of whole chunks or the other way round, and matmuls
    take as many tokens."""
    for name, tokens in (("context-length", context_length), ("chunk", chunk)):
        if quantized and tokens % FP8_QUANTUM:
            raise ValueError(f"--{name} {tokens}: matmuls in fp8 take numbers of tokens that {FP8_QUANTUM} divides")
    round_tokens = max(context_length, chunk)
    if chunk and round_tokens % min(context_length, chunk):
        raise ValueError(f"--chunk {chunk}: neither divides sequences of {context_length} tokens nor holds whole ones")
    if tokens_per_step % round_tokens:
        raise ValueError(f"--tokens-per-step {tokens_per_step} is no multiple of {round_tokens}, the least of a round")


def stages(options: Any, cells: Sequence[StreamingCell], outcomes: list[Outcome]) -> list[Stage]:
    """All cells, with pictures beside the rows if they are asked for; those that are simulated share a process."""
    pictures = options.out if options.timeline else None
    own, peers = ([cell for cell in cells if bool(cell.peer) is wanted] for wanted in (False, True))
    streamed = partial(measured_by("streaming_measure"), pictures=pictures, explain=options.explain)
    return [
        *(
            Stage(list(same), streamed, share=lambda cell: cell.simulated_device or cell)
            for _, same in itertools.groupby(own, lambda cell: isinstance(cell, RingCell))
        ),
        Stage(peers, measured_by("streaming_measure", "measure_peer")),
    ]


def _share(metric: str, line: Line) -> float | None:
    """The share as measured, else as simulated."""
    found = line.median(metric)
    return line.median(f"simulated_{metric}") if found is None else found


SCALING = "tokens/s / (GPUs x the tokens/s of one GPU), both measured, else both simulated"
"""Note of a column of ``_scaling``."""


def _scaling(line: Line) -> float | None:
    """Tokens/s of a ring, in % of n ranks times the tokens/s of one rank under the same limits."""
    ranks, one = line.settings.get("ranks", 1), line.peer(ranks=1)
    ratios = (line.over(metric, one) for metric in ("tokens_per_s", "simulated_tokens_per_s"))
    ratio = next((each for each in ratios if each is not None), None)
    return None if ratio is None or ranks == 1 else 100 * ratio / ranks


STREAMING_TABLE = ResultTable(
    settings=(
        *("gpu", "device", "simulated_device", "size", "context_length", "device_gib", "host_gib", "chunk"),
        *("tokens_per_step", "recipe", "peer", "ranks", "warmup", "steps"),
    ),
    always=("size", "context_length", "device_gib", "host_gib"),
    labels={
        "device_gib": "device GiB",
        "host_gib": "host GiB",
        "simulated_device": "simulated device",
        "context_length": "length",
        "ranks": "GPUs",
    },
    columns=(
        Column("tokens/s", "tokens_per_s", ",.0f", rank=MAIN, optional=True),
        Column("simulated", "simulated_tokens_per_s", ",.0f", rank=MAIN, note="tokens/s"),
        Column(
            "sim / measured", "simulated_over_measured", ".3f", note="simulated / measured step time", optional=True
        ),
        Column("over one %", _scaling, ".1f", note=SCALING, optional=True),
        Column("MFU %", "mfu", ".1f", optional=True),
        Column("HFU %", "hfu", ".1f", optional=True),
        Column("sim MFU %", "simulated_mfu", ".1f", rank=2),
        Column("sim HFU %", "simulated_hfu", ".1f", rank=2),
        Column(
            "in %",
            partial(_share, "link_in"),
            ".0f",
            rank=2,
            note="of the step the link to the device is busy",
        ),
        Column("out %", partial(_share, "link_out"), ".0f", rank=2, note="the same for the link from the device"),
        Column("idle %", partial(_share, "compute_idle"), ".1f", rank=2, note="of the step no kernel runs"),
        Column("again %", partial(_share, "recompute"), ".1f", rank=2, note="of the step, recomputation"),
        Column("in use GiB", "device_in_use", ".2f", note="device memory", optional=True, little=True),
        Column(
            "on the host GiB",
            "host_in_use",
            ".2f",
            rank=2,
            note="host memory of the process",
            optional=True,
            little=True,
        ),
        Column("tokens a step", "planned_tokens_per_step", ",.0f", rank=3),
        Column("step ms", "step", rank=3, optional=True),
    ),
)

_OF = ["gpu", "simulated_device", "size", "context_length"]


def slower_with_more(rows: pd.DataFrame) -> dict[str, float]:
    """Count the pairs of cells in which more memory, of the device, the host or both, comes with a slower plan.

    Returns:
        ``pairs`` in all, how many are ``slower``, and the ``largest`` loss as a share of the rate with less memory.
    """
    cells = rows[rows["metric"] == "simulated_tokens_per_s"][[*_OF, "device_gib", "host_gib", "median"]]
    both = cells.merge(cells, on=_OF, suffixes=("", "_more"))
    more = both[(both["device_gib_more"] >= both["device_gib"]) & (both["host_gib_more"] >= both["host_gib"])]
    more = more[(more["device_gib_more"] > more["device_gib"]) | (more["host_gib_more"] > more["host_gib"])]
    losses = 1 - more["median_more"] / more["median"]
    return {"pairs": len(more), "slower": int((losses > 0).sum()), "largest": max(0.0, float(losses.max()))}


def heatmaps(rows: pd.DataFrame) -> Iterator[tuple[str, Figure]]:
    """(name, figure) for every model and length on one rank, not quantized; peers have no capacities."""
    alone = rows[(rows["device_gib"] > 0) & (rows["ranks"] == 1) & (rows["recipe"] == "stored")]
    for _, own in alone.groupby(_OF, sort=False, dropna=False):
        _, simulated, size, length = own.iloc[0][_OF]
        if (figure := heatmap_figure(own)) is not None:
            yield "_".join(filter(None, (size, f"{length:g}", simulated))), figure


def heatmap_figure(rows: pd.DataFrame) -> Figure | None:
    """Draw tokens/s of one model on one device over device and host memory, a map for each length.

    Measured cells are drawn where there are any, else simulated ones. A cell without a number holds no plan, or failed.
    """
    from cs336_systems.harness.runs import newest
    from cs336_systems.report.figures import panels

    found = newest(rows, ["device", *_OF, "device_gib", "host_gib", "chunk", "tokens_per_step"])
    measured = (found["metric"] == "tokens_per_s").any()
    wanted = found["metric"] == ("tokens_per_s" if measured else "simulated_tokens_per_s")
    if not wanted.any():
        return None
    lengths = found.assign(median=found["median"].where(wanted)).groupby("context_length")
    figure, axes = panels(len(lengths), 3, 3.6, 3.0)
    for panel, (length, cells) in zip(axes, lengths, strict=True):
        grid = cells.pivot_table(index="host_gib", columns="device_gib", values="median", aggfunc="max", dropna=False)
        panel.imshow(grid.to_numpy(dtype=float), origin="lower", aspect="auto", cmap="cividis")
        panel.set_xticks(range(grid.shape[1]), [f"{gib:g}" for gib in grid.columns])
        panel.set_yticks(range(grid.shape[0]), [f"{gib:g}" for gib in grid.index])
        panel.set(xlabel="device memory, GiB", ylabel="host memory, GiB", title=f"sequences of {length:,}")
        panel.grid(visible=False)
        rates = grid.to_numpy(dtype=float)
        middle = (grid.min().min() + grid.max().max()) / 2
        for i, j in itertools.product(*map(range, grid.shape)):
            text, pale = f"{rates[i, j]:,.0f}".replace("nan", "none"), not rates[i, j] <= middle
            panel.text(j, i, text, ha="center", va="center", color="black" if pale else "white", fontsize=9)
    gpu, simulated, size, _ = found.iloc[0][_OF]
    where = f"measured on {gpu}" if measured else f"simulated for {simulated or CPU_PLANS_FOR.upper()}"
    figure.suptitle(f"{size}, tokens per second under caps, {where}", fontsize=11)
    return figure


def present(outcomes: list[Outcome], options: Any, csv: Path | None) -> None:
    """The table, and heatmaps of all rows of the file."""
    presented(STREAMING_TABLE.of)(outcomes, options, csv)
    if options.device == "cpu" and not options.gpu:
        print(f"Plans and what is simulated are those of an {CPU_PLANS_FOR.upper()}, beside steps that ran on a CPU.\n")
    if csv:
        from cs336_systems.harness.record import read_rows
        from cs336_systems.report.figures import save

        for name, figure in heatmaps(read_rows(csv)):
            save(figure, csv.with_name(f"{csv.stem}_{name}.png"))


EXPERIMENT = Experiment(
    "benchmark_streaming",
    StreamingCell,
    make_cells,
    stages,
    present,
    ("tokens_per_s", "simulated_tokens_per_s", "mfu", "simulated_mfu", "simulated_over_measured", "device_in_use"),
    options=Options,
    default_worlds=lambda device: (1,),
)
