"""The steps that ml_dataflow published, as its rules place them, and what they should cost by this suite's arithmetic.

``ml_dataflow.csv`` has 1,130 cells of https://github.com/als244/ml_dataflow (bench/reproduce_results/recorded_data): a
card, a model, a length, and limits on device and host memory, with what that engine then used and reached. A prediction
reads limits, model, length and rounds a step. ``place`` follows the engine's rules
(transformer_record_throughput.c): chunks of 8,192 tokens, on Hopper 16,384; as many sequences a round as have a layer's
weights in activations; as many whole layers on the device as fit; of what lies on the host, attention's output first,
then all, if the link keeps up with that.

Rounds are sequential, so a step is a ``Plan`` of ``streaming/plan.py`` with other bytes, and its seconds are those of
``streaming/estimate.py``.

    place(Cell("h100", "8", 8192, 24, 75)).device_bytes, cell.rate(SHARES)
"""

import csv
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache
from itertools import product
from pathlib import Path
from typing import NamedTuple

from cs336_systems.config import ModelConfig, resolve_size
from cs336_systems.costs.rates import OURS, Rates, Sustained
from cs336_systems.costs.streaming import StreamedWork
from cs336_systems.hardware import GIB, MIB, Hardware, hardware_named
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
    products=1.168,
    attention_forward=0.925,
    attention_backward=0.856,
    memory=0.353,
    link_alone=0.896,
    link_out_both=0.654,
    narrow_forward=0.491,
    narrow_backward=0.922,
)
"""This engine's shares of a card's rates, the same for all cards, fitted on the named tenth of each card's cells."""
FITTED = (
    *("products", "attention_forward", "attention_backward", "memory"),
    *("link_alone", "link_out_both", "narrow_forward", "narrow_backward"),
)

_WORKSPACE, _WITHOUT_WORKSPACE = GIB // 2, 8192
"""Bytes of attention's workspace, and the tokens of the longest sequence without one. Its rules say 1 GiB, with which
some steps that ran would not fit; with half of it the prediction is right for most cells."""
_FEW_LAYERS = 3
"""Layers with room for whose pairs copies are waited for pair by pair."""
_EFFICIENCY = 0.6
"""The share of the peak that it expects of a step, where it asks whether the link keeps up."""
_LINK_EFFICIENCY = 0.75
"""The share of the link's published rate that it expects."""


@dataclass(frozen=True)
class Cell:
    """A model and a length under two limits, and what was published of it; no rate of a cell that failed."""

    card: str
    model: str
    length: int
    device_cap_gib: int
    host_cap_gib: int
    rounds: int = 1
    tokens_per_s: float | None = None
    device_gib: float = 0.0

    @property
    def config(self) -> ModelConfig:
        return replace(MODELS[self.model], max_context_length=None).at_context(self.length)

    @property
    def hardware(self) -> Hardware:
        if self.card not in _CARDS:
            raise ValueError(f"no card {self.card!r} in a file of cells: known are {', '.join(_CARDS)}")
        return hardware_named(_CARDS[self.card])

    @property
    def name(self) -> str:
        """Tells the cell from all others."""
        return f"{self.card} {self.model} {self.length} {self.device_cap_gib} {self.host_cap_gib}"

    @property
    def fits(self) -> bool:
        """Whether its rules place a step within the limits."""
        try:
            place(self)
        except TooLittleMemory:
            return False
        return True

    def rate(self, sustained: Sustained) -> float:
        """Predicted tokens/s with the engine's shares; errors as of ``place``."""
        plan = place(self)
        return plan.tokens / step_seconds(plan, Rates.of(self.hardware, sustained=sustained))


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

    def evicted_bytes(self, keep: Keep) -> float:
        return sum(n * n_bytes for _, n, n_bytes in self.leaving)


def read_cells(path: Path = CELLS) -> list[Cell]:
    with path.open(newline="", encoding="utf-8") as file:
        return [
            Cell(
                *(row["gpu"], row["model_b"], int(row["seq_len"])),
                *(int(row["device_cap_gib"]), int(row["host_cap_gib"]), int(row["rounds_per_step"])),
                *(float(row["tokens_per_s"]), float(row["device_used_gib"])),
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
    for card, model in dict.fromkeys((cell.card, cell.model) for cell in cells):
        before: list[set[int]] = [set(), set()]
        for length in sorted({cell.length for cell in cells if (cell.card, cell.model) == (card, model)}):
            ran = {
                (cell.device_cap_gib, cell.host_cap_gib)
                for cell in cells
                if (cell.card, cell.model, cell.length) == (card, model, length)
            }
            own = [set(values) for values in zip(*ran, strict=True)]
            before = [set(), set()] if length in _SWEEPS else before
            smaller = [{cap for cap in old if cap < min(new)} for old, new in zip(before, own, strict=True)]
            for limits in product(*(sorted(new | old) for new, old in zip(own, smaller, strict=True))):
                if limits not in ran:
                    yield Cell(card, model, length, *limits)
            before = own


class _Pairs(NamedTuple):
    """The pairs of layer and chunk of a round, and bytes of what one keeps by level."""

    chunks: int
    n: int
    products: int
    attention: int
    input: int


@cache
def place(cell: Cell) -> Placed:
    """The plan of a step.

    Raises:
        TooLittleMemory: none fits the limits.
    """
    config, length, n = cell.config, cell.length, 16_384 if cell.card == "h100" else 8192
    chunk = n if length <= n else next(each for each in range(n, length + 1) if length % each == 0)
    work = StreamedWork(config, length, chunk)
    least = chunk * (2 * (config.d_model + 2 * config.d_kv) + 8)
    attended = least + chunk * (2 * config.d_model + 4 * config.n_heads)
    whole = chunk * 2 * (4 * config.d_model + 2 * config.d_kv + 2 * config.d_ff)
    groups = max(1, round(work.layer_bytes / whole / work.chunks_per_sequence))
    chunks = work.chunks_per_sequence * groups
    pairs = _Pairs(chunks, chunks * config.n_layers, whole, attended, least)
    weights, gradients, room, device_bytes = _on_device(cell, work, pairs)
    leaving = _on_host(cell, work, pairs, room)
    n_products, n_attention = leaving[0][1], leaving[1][1]
    return Placed(
        work,
        chunks,
        cell.rounds,
        "sequential",
        Keep(n_products + n_attention + room, n_products + room),
        weights=weights,
        gradients=gradients,
        clipping=False,
        leaving=leaving,
        room=room,
        device_bytes=device_bytes,
    )


def _on_device(cell: Cell, work: StreamedWork, pairs: _Pairs) -> tuple[int, int, int, float]:
    """Blocks of weights and of gradients, pairs that have room, and all bytes: whole layers as far as they fit."""
    config, layer, chunk, n_layers = work.config, work.layer_bytes, work.chunk, work.config.n_layers
    d_model, words = config.d_model, config.vocab_size
    logits, row = chunk * words * 2, chunk * d_model * 2
    fixed = 400 * MIB + (_WORKSPACE if cell.length > _WITHOUT_WORKSPACE else 0)
    fixed += 2 * 2 * max(chunk, cell.length) * config.d_kv * 2  # keys and values of a sequence, and their gradients
    fixed += 2 * 8 * words * d_model  # embedding and head with all their state
    fixed += 2 * pairs.chunks * row + 2 * row + pairs.products  # between layers, norms again, gradients of one pair
    fixed += 2 * logits + row + 4 * chunk + chunk * (d_model + config.d_ff) * 2  # head, and a workspace
    left = cell.device_cap_gib * GIB - fixed
    if (short := 2 * layer + 2 * pairs.products - left) > 0:
        raise TooLittleMemory(f"{short / GIB:.2f} GiB of the device are missing")
    whole = min(n_layers, int(left // (2 * layer + pairs.chunks * pairs.products)))
    weights = gradients = max(1, whole)
    room = whole * pairs.chunks if whole else int((left - 2 * layer) // pairs.products)
    spare = left - 2 * weights * layer - room * pairs.products
    if 0 < whole < n_layers:
        if spare > layer:
            weights, spare = weights + 1, spare - layer
        room += int(spare // pairs.products)
    room = min(room, pairs.n)
    used = fixed + (weights + gradients) * layer + room * pairs.products
    return min(n_layers, weights), min(n_layers, gradients), room, used


def _on_host(cell: Cell, work: StreamedWork, pairs: _Pairs, room: int) -> tuple[tuple[str, int, int], ...]:
    """How many pairs leave the device at each level, and the bytes of one."""
    config = work.config
    state = 2 * config.vocab_size * config.d_model * 2 + 4 * config.n_layers * work.layer_bytes
    state += 2 * pairs.chunks * work.chunk * config.d_model * 2
    left, home = int(cell.host_cap_gib * GIB) - state, pairs.n - room
    if (short := home * pairs.input - left) > 0:
        raise TooLittleMemory(f"{short / GIB:.2f} GiB of the host are missing")
    n_attention = min(home, (left - home * pairs.input) // (pairs.attention - pairs.input))
    n_input = home - n_attention
    left -= n_attention * pairs.attention + n_input * pairs.input
    n_products = min(n_attention, left // (pairs.products - pairs.attention))
    if n_input == 0 and not work.is_long and home >= room:
        n_products = min(n_products, _carried(cell, work, pairs, room))
    n_attention -= n_products
    return (
        ("products", n_products, pairs.products),
        ("attention", n_attention, pairs.attention),
        ("input", n_input, pairs.input),
    )


def _carried(cell: Cell, work: StreamedWork, pairs: _Pairs, room: int) -> int:
    """The most pairs of which all may leave, so that the link keeps up: by windows of as many pairs as have room."""
    home = pairs.n - room
    flops_per_s, link = cell.hardware.peaks("bf16")[0], cell.hardware.host_link_bytes_per_s
    assert link is not None
    seconds = room * work.hardware_flops("forward", 0, "products") / (_EFFICIENCY * flops_per_s)
    spare = seconds * _LINK_EFFICIENCY * link - room * pairs.attention
    if spare < 0:
        return 0
    of_window = int(spare // (pairs.products - pairs.attention))
    if of_window == 0:
        return home % room
    return home - max(0, room - of_window) * (home // room)


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
