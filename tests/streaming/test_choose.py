"""Plans that are chosen: within the caps, faster with more memory, explained; and what is said where nothing fits."""

import math
import random
import re
from collections.abc import Iterator
from dataclasses import replace
from functools import cache, lru_cache
from itertools import pairwise

import pytest

from cs336_systems.config import ModelConfig, resolve_size
from cs336_systems.costs.lanes import simulate
from cs336_systems.costs.streaming import Rates, StreamedWork
from cs336_systems.hardware import GIB, find_hardware
from cs336_systems.streaming import choose as search
from cs336_systems.streaming.candidate import Candidate, _with_residents_for_products
from cs336_systems.streaming.choice import Caps, CapsTooSmallError, Choice
from cs336_systems.streaming.choose import _Search, choose, chunk_sizes
from cs336_systems.streaming.estimate import Layout, Levels, LevelsByHost, WorkSeconds
from cs336_systems.streaming.explain import binds, end_seconds, next_gib, reasons
from cs336_systems.streaming.plan import Order, Plan
from tests.streaming.memory_model import check

H200 = find_hardware("NVIDIA H200")
assert H200 is not None
RATES = Rates.of(H200)
MIB = 1024**2
SMALL = ModelConfig("small", 64, 192, 6, 4, vocab_size=256, context_length=128)
SLOW = Rates(1e11, 1e11, 1e11, 1e10, link_alone=3e8, link_out_both=2.5e8)
"""Of a CPU with a narrow link."""


@pytest.fixture(autouse=True, scope="module")
def levels_of_a_layout_are_shared() -> Iterator[None]:
    """Most of a search's time, and the host's cap, in which most searches here differ, changes nothing about them."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(LevelsByHost, "of", lru_cache(8192)(LevelsByHost.of))
        yield


@cache
def small(device: float, host: float, length: int = 64, **options) -> Choice:
    """Of a small model; caps in MiB."""
    caps = Caps(int(device * MIB), int(host * MIB), 0, 0)
    return choose(SMALL, length, caps, SLOW, least_chunk=32, tokens_per_step=768, effort=1500, **options)


@pytest.mark.parametrize(("device", "host", "length"), [(64, 64, 64), (2.5, 3, 64), (2.5, 3, 128), (2.2, 9, 128)])
def test_a_choice_fits_and_runs(device: float, host: float, length: int) -> None:
    choice = small(device, host, length)
    assert choice.fits
    assert choice.plan.tokens == 768
    check(choice.plan, choice.schedule)
    assert 0 < choice.model_flops_per_s <= choice.hardware_flops_per_s


def test_where_the_best_do_not_fit_after_all_others_are_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    whole, seen = _Search.choice, []

    def refuse_the_best(search: _Search, candidate: Candidate) -> Choice | None:
        seen.append(candidate)
        return None if len(seen) <= 30 else whole(search, candidate)

    monkeypatch.setattr(_Search, "choice", refuse_the_best)
    assert small.__wrapped__(2.5, 3).fits
    assert len(seen) == 31


def test_with_all_the_memory_nothing_is_copied_or_computed_again() -> None:
    choice = small(64, 64)
    assert {str(operation.kind) for operation in choice.schedule.operations}.isdisjoint({"fetch", "evict", "recompute"})
    assert choice.plan.order == "sequential"


@pytest.mark.slow
@pytest.mark.parametrize("rate", [0.9, 1.0, 1.1, 1.3])
def test_of_rounds_that_take_the_same_time_the_shortest_are_chosen(rate: float) -> None:
    """Where nothing streams they all do, but for the last bits of their sums, which no plan shall depend on."""
    rates = replace(SLOW, products=rate * SLOW.products)
    assert choose(SMALL, 64, Caps(64 * MIB, 64 * MIB, 0, 0), rates, chunk=64, tokens_per_step=768).plan.chunks == 1


def test_more_memory_is_never_slower() -> None:
    speeds = [[small(device, host).tokens_per_s for host in (2.5, 5)] for device in (2.3, 4)]
    for line in (*speeds, *zip(*speeds, strict=True)):
        assert line[1] >= line[0] * 0.999, speeds


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(12))
def test_more_host_memory_is_not_slower_whatever_the_caps(seed: int) -> None:
    rng = random.Random(seed)
    device, length = rng.uniform(0.9, 2.2), rng.choice((64, 128))
    check_none_is_slower([(device, host, length) for host in sorted(rng.uniform(1, 4) for _ in range(6))])


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(6))
def test_more_device_memory_is_not_slower_whatever_the_caps(seed: int) -> None:
    rng = random.Random(seed)
    host, length = rng.uniform(1.5, 4), rng.choice((64, 128))
    check_none_is_slower([(device, host, length) for device in sorted(rng.uniform(0.9, 2.6) for _ in range(6))])


@pytest.mark.parametrize("more", [1, -2])
@pytest.mark.parametrize("order", ["sequential", "interleaved"])
@pytest.mark.parametrize("tokens", [128, 64])
def test_residents_take_the_memory_of_products_and_give_it_back(order: Order, more: int, tokens: int) -> None:
    """To half a pair; in all rounds, which may keep different numbers of them. Moments that stream need larger slots
    than products of few tokens.
    """
    work = StreamedWork(SMALL, tokens, tokens)
    layout = Layout(work, WorkSeconds.of(work, SLOW), 8, order, 3, 0, 0)
    slot = layout.slot_bytes["products"]
    assert (slot > work.item_bytes("products")) == (tokens == 64)
    edges = Levels(40, 36) if order == "interleaved" else Levels(32, 24)
    candidate = Candidate(layout, Levels(32, 24), edges, 12, 2**30, tokens_per_s=0.0)
    after = _with_residents_for_products(candidate, more)
    assert after is not None
    assert after.layout.weights == 3 + more
    for now, before in ((after.levels, candidate.levels), (after.edges, candidate.edges)):
        assert abs((before.products - now.products) * slot - more * work.layer_bytes) <= slot / 2
        assert now.attention == before.attention
    assert _with_residents_for_products(candidate, -4) == _with_residents_for_products(candidate, -3)
    assert _with_residents_for_products(after, 0) is None


def check_none_is_slower(rising: list[tuple[float, float, int]]) -> None:
    """Than the one before it."""
    speeds = []
    for one in rising:
        try:
            speeds.append(small(*one).tokens_per_s)
        except CapsTooSmallError:
            speeds.append(0.0)
    assert [(a, b) for a, b in pairwise(speeds) if b < 0.99 * a] == [], (rising, speeds)


def test_a_few_rounds_show_how_fast_all_of_them_are() -> None:
    """Also where the first and the last keep less than the others: the link is behind in all but these."""
    config = replace(resolve_size("llama3-1b"), context_length=1024)
    work = StreamedWork(config, 1024, 8192)
    search = _Search(config, 1024, Caps(8 * GIB, 20 * GIB), RATES, None, True, None, 0, [work], None)
    layout = Layout(
        work, WorkSeconds.of(work, RATES), chunks=2, order="interleaved", weights=16, gradients=0, moments=0
    )
    candidate = Candidate(layout, Levels(32, 14), Levels(28, 2), 12, search._ring_bytes(work), tokens_per_s=0.0)
    whole = search.choice(candidate)
    assert whole is not None
    assert search.simulate(candidate).tokens_per_s == pytest.approx(whole.tokens_per_s, rel=0.002)


def test_page_tables_of_the_host_take_their_share_of_the_device() -> None:
    caps = Caps(3 * MIB, 3 * MIB, 0, 0, table_share=0.25)
    choice = choose(SMALL, 64, caps, SLOW, least_chunk=32, tokens_per_step=768, effort=1500)
    slab = sum(region.n_bytes for region in choice.schedule.regions.values())
    assert slab > 0
    assert choice.device_parts["context, libraries"] == math.ceil(slab / 4)
    assert choice.fits
    least = {}
    for share in (0.0, 0.25):
        none = Caps(1024, 64 * MIB, 0, 0, share)
        with pytest.raises(CapsTooSmallError) as no:
            choose(SMALL, 64, none, SLOW, least_chunk=32, tokens_per_step=768)
        would = re.search(r"; ([\d.e-]+) GiB of device", str(no.value))
        assert would is not None
        least[share] = replace(none, device=int(float(would[1]) * GIB))
        assert choose(SMALL, 64, least[share], SLOW, least_chunk=32, tokens_per_step=768, effort=1).fits
    with pytest.raises(CapsTooSmallError, match="the device is"):
        choose(SMALL, 64, replace(least[0.25], device=least[0.0].device), SLOW, least_chunk=32, tokens_per_step=768)


def test_orders_and_chunks_can_be_asked_for() -> None:
    for order in ("sequential", "interleaved"):
        assert small(3, 5, order=order).plan.order == order
    assert small(3, 5, chunk=64).plan.work.chunk == 64
    with pytest.raises(ValueError, match="48 tokens does not divide"):
        small(3, 5, chunk=48)


@pytest.mark.parametrize(
    ("device", "host", "short"), [(0.3, 64, ("device",)), (2.5, 0.1, ("host",)), (0.3, 0.1, ("device", "host"))]
)
def test_where_nothing_fits_it_says_what_would(device: float, host: float, short: tuple[str, ...]) -> None:
    """Caps of 1 GiB, of which so many MiB are left for slots."""
    left = GIB - int(device * MIB), GIB - int(host * MIB)
    with pytest.raises(CapsTooSmallError, match=re.escape("small on sequences of 64 tokens does not fit 1 GiB")) as no:
        choose(SMALL, 64, Caps(GIB, GIB, *left), SLOW, least_chunk=32)
    message = str(no.value)
    assert [what for what in ("device", "host") if f"the {what} is" in message] == list(short)
    would = re.search(r"; ([\d.]+) GiB of device and ([\d.]+) GiB of host", message)
    assert would is not None
    device_cap, host_cap = (int(float(n) * GIB) for n in would.groups())
    assert choose(SMALL, 64, Caps(device_cap, host_cap, *left), SLOW, least_chunk=32, effort=1).fits


@pytest.mark.slow
def test_it_says_why() -> None:
    choice = small(2.5, 3)
    said = " ".join(reasons(choice))
    assert binds(choice) in said
    assert "interleaved rounds" in said or "sequential rounds" in said
    assert "Clipping by the global norm" in said
    assert end_seconds(choice) > 0
    more = list(next_gib(choice, lambda caps: small(caps.device / MIB, caps.host / MIB)))
    assert len(more) == 2
    assert "of device memory would bring" in more[0]


def test_on_long_sequences_x_of_some_layers_is_restored(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where attention's outputs and x of all layers do not fit, and to run attention again would take longer."""

    def long() -> Choice:
        caps = Caps(int(8.5 * MIB), 6 * MIB, 0, 0)
        return choose(SMALL, 4096, caps, SLOW, chunk=512, tokens_per_step=4096, effort=4000)

    choice = long()
    assert choice.plan.input_every > 1
    check(choice.plan, choice.schedule)
    ordinal = "2nd" if choice.plan.input_every == 2 else f"{choice.plan.input_every}"
    assert f"but x itself of every {ordinal}" in " ".join(reasons(choice))
    monkeypatch.setattr(search, "INPUT_EVERY", (1,))
    assert choice.tokens_per_s > 1.03 * long().tokens_per_s


@pytest.mark.parametrize(
    ("levels", "message"),
    [
        (("attention", "products"), "layer 1 keeps input or attention, got products"),
        (("input", "attention"), "layer 0 keeps attention, got input"),
    ],
)
def test_what_layers_keep_where_x_is_restored(levels: tuple[str, str], message: str) -> None:
    work = StreamedWork(replace(SMALL, n_layers=2), 64, 64)
    with pytest.raises(ValueError, match=f"where x is kept of every 2 layers, {message}"):
        Plan(work, 1, 1, "sequential", tuple((level,) for level in levels), (), input_every=2)
    with pytest.raises(ValueError, match="input_every must be at least 1, got 0"):
        Plan(work, 1, 1, "sequential", (("input",),) * 2, (), input_every=0)


def test_chunk_sizes() -> None:
    assert chunk_sizes(512) == [8192, 16_384]
    assert chunk_sizes(8192) == [8192, 16_384]
    assert chunk_sizes(32_768) == [32_768, 16_384, 8192, 65_536]
    assert chunk_sizes(524_288) == [32_768, 16_384]
    assert chunk_sizes(6000, least=4000) == [6000, 12_000]


def llama(size: str, device: int, host: int, length: int, effort: int) -> Choice:
    config = replace(resolve_size(size), max_context_length=None, context_length=length)
    return choose(config, length, Caps(device * GIB, host * GIB), RATES, effort=effort)


@pytest.mark.slow
def test_a_gib_less_changes_the_plan_of_an_h200() -> None:
    caps = (8, 12), (7, 12), (8, 11)
    plans = [llama("llama3-1b", device, host, 8192, 10_000).plan for device, host in caps]
    assert plans[0] not in plans[1:]


@pytest.mark.slow
def test_more_host_memory_is_not_slower_on_long_sequences() -> None:
    speeds = [llama("llama3-8b", 24, host, 32_768, 6000).tokens_per_s for host in (80, 120, 144)]
    assert speeds == sorted(speeds)


def test_a_schedule_survives_other_speeds() -> None:
    """Events order it, whatever the times are: at any rates all lanes come to their ends."""
    schedule = small(2.5, 3).schedule
    for amount in (0.0, 1.0):
        times = simulate(
            [str(operation.lane) for operation in schedule.operations],
            [amount] * len(schedule.operations),
            [operation.waits for operation in schedule.operations],
            SLOW,
        )
        assert all(end >= start for start, end in zip(times.starts, times.ends, strict=True))
