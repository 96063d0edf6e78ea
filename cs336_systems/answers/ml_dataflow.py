"""The steps that ml_dataflow published, as its rules place them, and what they should cost by this suite's arithmetic.

``ml_dataflow.csv`` has 1,130 cells of https://github.com/als244/ml_dataflow (bench/reproduce_results/recorded_data): a
card, a model, a length, and limits on device and host memory, with what that engine then used and reached. Only limits,
model and length are read for a prediction. ``place`` follows its rules (transformer_record_throughput.c): chunks of
8,192 tokens, on a data-centre card of Hopper 16,384; as many sequences a round as have a layer's weights in
activations; as many whole layers on the device as fit; of what lies on the host, attention's output first, then all,
if the link keeps up with that.

Rounds are sequential, so a step is a ``Plan`` of ``streaming/plan.py`` with other bytes, and its seconds are those of
``streaming/estimate.py``.

    place(Cell("h100", 8, 8192, 24, 75)).device_gib, step_seconds(cell, rates)
"""

import csv
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache
from itertools import product
from pathlib import Path

from cs336_systems.config import ModelConfig, resolve_size
from cs336_systems.costs.rates import OURS, Rates, Sustained
from cs336_systems.costs.streaming import StreamedWork
from cs336_systems.hardware import GIB, Hardware, hardware_named
from cs336_systems.streaming.estimate import WorkSeconds
from cs336_systems.streaming.plan import Keep, Plan

CELLS = Path(__file__).with_name("ml_dataflow.csv")

_LLAMA = resolve_size("llama3-8b")
MODELS: dict[str, ModelConfig] = {
    "1": replace(resolve_size("llama3-1b"), tie_embeddings=False),
    "8": _LLAMA,
    "15": replace(_LLAMA, name="llama3-8b of 64 layers", n_layers=64),
    "32": resolve_size("qwen2.5-32b"),
}
"""By the names in the file; what its MFU and tokens/s say of FLOPs a token is theirs to 0.1 %."""

SHARES = replace(
    OURS,
    products=1.113,
    attention_forward=0.910,
    attention_backward=0.861,
    memory=0.388,
    link_alone=0.860,
    link_out_both=0.687,
    narrow_forward=0.598,
    narrow_backward=0.816,
)
"""This engine's shares of a card's rates, the same for all cards, fitted on the named tenth of each card's cells."""
FITTED = (
    *("products", "attention_forward", "attention_backward", "memory"),
    *("link_alone", "link_out_both", "narrow_forward", "narrow_backward"),
)

_MIB = 2**20
_WORKSPACE = GIB // 2
"""What attention needs beside sequences of more than 8,192 tokens; its rules say 1 GiB, and steps ran that then do not
fit. With half, ran or not is right for most cells."""
_FEW_LAYERS = 3
_EFFICIENCY = 0.6
"""The share of the peak that it expects of a step, where it asks whether the link keeps up."""
_LINK_EFFICIENCY = 0.75
"""The share of the link's published rate that it expects."""
_STEP_S, _OF_1B = 6.0, 1.0
"""Seconds that a step of 1B should take, from which its rounds follow."""


@dataclass(frozen=True)
class Cell:
    """A model and a length under two limits, and what was published of it; no rate of a cell that failed."""

    gpu: str
    model: str
    length: int
    device_cap_gib: int
    host_cap_gib: int
    rounds: int = 1
    tokens_per_s: float | None = None
    device_gib: float = 0.0
    host_gib: float = 0.0
    recomputed: float = 0.0

    @property
    def config(self) -> ModelConfig:
        return replace(MODELS[self.model], max_context_length=None).at_context(self.length)

    @property
    def hardware(self) -> Hardware:
        if self.gpu not in _CARDS:
            raise ValueError(f"no card {self.gpu!r} in a file of cells: known are {', '.join(_CARDS)}")
        return hardware_named(_CARDS[self.gpu])


_CARDS = {
    "h100": "h100 sxm",
    "rtx3090": "rtx 3090",
    "a100": "a100 sxm 80gb",
    "rtx4090": "rtx 4090",
    "rtx5090": "rtx 5090",
}


class TooLittleMemory(ValueError):
    """Its rules place no step within these limits."""


@dataclass(frozen=True)
class Placed(Plan):
    """A plan with the bytes that its rules give it."""

    leaving: tuple[tuple[str, int, int], ...] = ()
    """Levels of the pairs of layer and chunk that leave the device, how many of each do, and the bytes of one."""
    room: int = 0
    """Pairs that have a slot on the device."""
    device_bytes: float = 0.0
    host_bytes_used: float = 0.0

    def evicted_bytes(self, keep: Keep) -> float:
        return sum(n * n_bytes for _, n, n_bytes in self.leaving)


def read_cells(path: Path = CELLS) -> list[Cell]:
    """The cells of a file."""
    with path.open(newline="", encoding="utf-8") as file:
        return [
            Cell(
                *(row["gpu"], row["model_b"], int(row["seq_len"])),
                *(int(row["device_cap_gib"]), int(row["host_cap_gib"]), int(row["rounds_per_step"])),
                *(float(row["tokens_per_s"]), float(row["device_used_gib"]), float(row["host_used_gib"])),
                float(row["recompute_share"]),
            )
            for row in csv.DictReader(file)
        ]


_SWEEPS = (512, 32_768, 262_144)
"""The shortest lengths of its sweeps."""


def failed_cells(cells: list[Cell]) -> Iterator[Cell]:
    """The cells that were swept and are missing: there the engine had failed.

    A length was swept over the grid of all limits with which it ran, and over smaller ones of the next shorter length
    of its sweep, as sweeps are by file: short, medium and long.
    """
    for gpu, model in dict.fromkeys((cell.gpu, cell.model) for cell in cells):
        before: list[set[int]] = [set(), set()]
        for length in sorted({cell.length for cell in cells if (cell.gpu, cell.model) == (gpu, model)}):
            ran = {
                (cell.device_cap_gib, cell.host_cap_gib)
                for cell in cells
                if (cell.gpu, cell.model, cell.length) == (gpu, model, length)
            }
            own = [set(values) for values in zip(*ran, strict=True)]
            before = [set(), set()] if length in _SWEEPS else before
            smaller = [{cap for cap in old if cap < min(new)} for old, new in zip(before, own, strict=True)]
            for limits in product(*(sorted(new | old) for new, old in zip(own, smaller, strict=True))):
                if limits not in ran:
                    yield Cell(gpu, model, length, *limits)
            before = own


@cache
def place(cell: Cell) -> Placed:
    """The plan of a step.

    Raises:
        TooLittleMemory: none fits the limits.
    """
    config, length, hardware = cell.config, cell.length, cell.hardware
    least = 16_384 if cell.gpu == "h100" else 8192
    chunk = least * math.ceil(length / least) if length < least else least
    chunk = least if length <= least else next(n for n in range(least, length + 1) if length % n == 0)
    work = StreamedWork(config, length, chunk)
    d, d_kv, d_ff, words, layers = config.d_model, config.d_kv, config.d_ff, config.vocab_size, config.n_layers
    per_sequence = work.chunks_per_sequence
    full = chunk * (2 * (4 * d + 2 * d_kv + 2 * d_ff))
    layer = work.layer_bytes
    groups = max(1, round(layer / full / per_sequence))
    chunks, pairs = per_sequence * groups, per_sequence * groups * layers

    workspace = 200 * _MIB + (_WORKSPACE if length > 8192 else 0)
    context = 2 * 2 * max(chunk, length) * d_kv * 2
    table = words * d * 2
    ends = 8 * table
    fixed = workspace + context + ends + 2 * chunks * chunk * d * 2 + chunk * words * 2 + 2 * chunk * d * 2 + full
    fixed += chunk * ((d + words) * 2 + 4) + chunk * (d + d_ff) * 2 + 200 * _MIB
    left = cell.device_cap_gib * GIB - fixed
    if left < 2 * layer + 2 * full:
        raise TooLittleMemory(f"{(2 * layer + 2 * full - left) / GIB:.2f} GiB of the device are missing")
    whole = min(layers, int(left // (2 * layer + chunks * full)))
    weights, gradients = max(1, whole), max(1, whole)
    slots = whole * chunks if whole else int((left - 2 * layer) // full)
    spare = left - weights * 2 * layer - slots * full
    if 0 < whole < layers:
        if spare > layer:
            weights, spare = weights + 1, spare - layer
        slots += min(pairs - slots, int(spare // full))
    slots = min(slots, pairs)
    used = fixed + (weights + gradients) * layer + slots * full

    state = 2 * table + 4 * layers * layer + 2 * chunks * chunk * d * 2
    host = cell.host_cap_gib * GIB - state
    home = pairs - slots
    only = chunk * (2 * (d + 2 * d_kv) + 8)
    attended = only + chunk * (2 * d + 4 * config.n_heads)
    if host < home * only:
        raise TooLittleMemory(f"{(home * only - host) / GIB:.2f} GiB of the host are missing")
    n_attention = min(home, int((host - home * only) // (attended - only)))
    n_only = home - n_attention
    n_full = min(n_attention, int((host - n_attention * attended - n_only * only) // (full - attended)))
    n_attention -= n_full
    if n_only == 0 and length <= chunk and home >= slots:
        windows = home // slots
        peak = hardware.peak("bf16")
        assert peak is not None and hardware.host_link_bytes_per_s is not None
        flops = work.hardware_flops("forward", 0, "products") * slots
        most = flops / (_EFFICIENCY * peak) * _LINK_EFFICIENCY * hardware.host_link_bytes_per_s
        room = int(max(0.0, most - attended * slots) // (full - attended))
        if attended * slots > most:
            n_full = 0
        elif room == 0:
            n_full = min(n_full, home % slots)
        else:
            n_full = min(n_full, home - max(0, slots - room) * windows)
        n_attention = home - n_full
    kept = n_full * full + n_attention * attended + n_only * only
    keep = Keep(n_full + n_attention + slots, n_full + slots)
    return Placed(
        work,
        chunks,
        cell.rounds,
        "sequential",
        keep,
        weights=min(layers, weights),
        gradients=min(layers, gradients),
        clipping=False,
        leaving=(("products", n_full, full), ("attention", n_attention, attended), ("input", n_only, only)),
        room=slots,
        device_bytes=used,
        host_bytes_used=state + kept,
    )


def fits(cell: Cell) -> bool:
    """Whether its rules place a step within the limits."""
    try:
        place(cell)
    except TooLittleMemory:
        return False
    return True


def name(cell: Cell) -> str:
    """What tells a cell from all others."""
    return f"{cell.gpu} {cell.model} {cell.length} {cell.device_cap_gib} {cell.host_cap_gib}"


def predicted_rate(cell: Cell, sustained: Sustained) -> float:
    """Predicted tokens/s with the engine's shares; errors as of ``place``."""
    plan = place(cell)
    return plan.tokens / step_seconds(plan, Rates.of(cell.hardware, sustained=sustained))


def step_seconds(plan: Plan, rates: Rates) -> float:
    """Seconds of a step, all rounds one after the other.

    With one block for weights and one for gradients, nothing can be fetched beside the kernels of another layer. With
    room for the pairs of few layers, a pair's copy is waited for by those soon behind it, so that pairs of which all
    is kept, whose copies take longer than their kernels, do not make up for others.
    """
    seconds = WorkSeconds.of(plan.work, rates)
    of_round = seconds.of_round(plan, plan.keep, alone=True)
    if plan.weights == plan.gradients == 1:
        of_round += plan.n_layers * 4 * plan.work.layer_bytes / rates.link_alone
    if isinstance(plan, Placed) and plan.room < _FEW_LAYERS * plan.chunks:
        of_round += _uneven(plan, seconds)
    return plan.rounds * of_round + seconds.of_optimizer(plan)


def _uneven(plan: Placed, seconds: WorkSeconds) -> float:
    """Seconds by which copies of pairs outlast the kernels beside them, beyond what they do on average."""
    forward, backward = seconds.forward / plan.n_layers, seconds.backward / plan.n_layers
    again = {"products": 0.0, "attention": seconds.recompute_attention, "input": seconds.recompute_input}
    found = 0.0
    for kernels in (dict.fromkeys(again, forward), {level: backward + more for level, more in again.items()}):
        pairs = [(n, n_bytes / seconds.rates.link_alone - kernels[level]) for level, n, n_bytes in plan.leaving]
        one_by_one = sum(n * max(0.0, late) for n, late in pairs)
        found += one_by_one - max(0.0, sum(n * late for n, late in pairs))
    return found
