"""Plans that are chosen: within the caps, faster with more memory, explained; and what is said where nothing fits."""

import math
import re
from dataclasses import replace
from functools import cache

import pytest

from cs336_systems.config import ModelConfig, resolve_size
from cs336_systems.costs.rates import Rates
from cs336_systems.costs.streaming import StreamedWork
from cs336_systems.hardware import GIB, MIB, hardware_named
from cs336_systems.streaming import choose as search
from cs336_systems.streaming.choose import Caps, CapsTooSmallError, ChosenPlan, choose, chunk_sizes
from cs336_systems.streaming.explain import binds, next_gib, reasons
from cs336_systems.streaming.plan import Keep, Plan
from tests.streaming.memory_model import check

SMALL = ModelConfig("small", 64, 192, 6, 4, vocab_size=256, context_length=128)
SLOW = Rates(1e11, 1e11, 1e11, 1e10, link_alone=3e8, link_out_both=2.5e8)
"""Rates of a CPU with a narrow link."""
HOW = {"tokens_per_step": 768, "chunk": 64, "chunks": 4, "effort": 500}


@cache
def small(device: float, host: float, length: int = 64, **options) -> ChosenPlan:
    """A choice for a small model; caps in MiB."""
    return choose(SMALL, length, Caps(int(device * MIB), int(host * MIB), 0, 0), SLOW, **HOW | options)


@pytest.mark.slow
@pytest.mark.parametrize("length", [64, 128])
def test_a_choice_fits_and_runs(length: int) -> None:
    choice = small(2.5, 3, length)
    assert choice.fits
    assert choice.plan.tokens == 768
    check(choice.plan, choice.schedule)
    assert 0 < choice.plan.tokens * choice.plan.work.model_flops_per_token() <= choice.hardware_flops


@pytest.mark.slow
def test_with_all_the_memory_nothing_is_copied_or_recomputed_and_the_shortest_rounds_are_chosen() -> None:
    """Where nothing streams all rounds take the same time, but for the last bits of their sums, which no plan shall
    depend on."""
    for rate in (0.9, 1.1):
        rates = replace(SLOW, products=rate * SLOW.products)
        found = choose(
            replace(SMALL, n_layers=2),
            64,
            Caps(64 * MIB, 64 * MIB, 0, 0),
            rates,
            **HOW | {"chunks": None, "effort": 1500},
        )
        assert (found.plan.chunks, found.plan.order) == (1, "sequential")
        kinds = {str(operation.kind) for operation in found.schedule.operations}
        assert kinds.isdisjoint({"fetch", "evict", "recompute"})


@pytest.mark.slow
def test_more_memory_is_not_slower() -> None:
    speeds = [[small(device, host).tokens_per_s for host in (2.5, 5)] for device in (2.3, 4)]
    for line in (*speeds, *zip(*speeds, strict=True)):
        assert line[1] >= line[0] * 0.999, speeds


def test_page_tables_of_the_host_take_their_share_of_the_device() -> None:
    caps = Caps(3 * MIB, 3 * MIB, 0, 0, table_share=0.25)
    choice = choose(SMALL, 64, caps, SLOW, **HOW)
    slab = sum(region.n_bytes for region in choice.schedule.regions.values())
    assert slab > 0
    assert choice.device_parts["context, libraries"] == math.ceil(slab / 4)
    assert choice.fits


@pytest.mark.slow
@pytest.mark.parametrize(
    ("device", "host", "short"), [(0.3, 64, ["device"]), (2.5, 0.1, ["host"]), (0.3, 0.1, ["device", "host"])]
)
def test_where_nothing_fits_it_says_what_is_short_and_what_would_do(device: float, host: float, short: list) -> None:
    """Caps of 1 GiB, of which so many MiB are left for slots."""
    caps, how = Caps(GIB, GIB, GIB - int(device * MIB), GIB - int(host * MIB)), HOW | {"effort": 1}
    with pytest.raises(CapsTooSmallError, match=re.escape("small on sequences of 64 tokens does not fit 1 GiB")) as no:
        choose(SMALL, 64, caps, SLOW, **how)
    assert [what for what in ("device", "host") if f"the {what} is" in str(no.value)] == short
    would = re.search(r"; ([\d.e-]+) GiB of device and ([\d.e-]+) GiB of host memory would do$", str(no.value))
    assert would is not None
    enough = replace(
        caps, **{what: int(float(n) * GIB) for what, n in zip(("device", "host"), would.groups(), strict=True)}
    )
    assert choose(SMALL, 64, enough, SLOW, **how).fits


def test_it_says_why() -> None:
    choice = small(2.5, 3)
    said = " ".join(reasons(choice))
    assert binds(choice) in said
    assert f"{choice.plan.order} rounds" in said
    *_, device, host = reasons(choice)
    assert re.search(r"[1-9][\d.]* MiB of 2\.5 MiB", device)
    assert re.search(r"[1-9][\d.]* MiB of 3\.0 MiB", host)
    assert [line.endswith("would bring nothing.") for line in next_gib(choice, lambda caps: choice)] == [True] * 2


@pytest.mark.slow
def test_on_long_sequences_x_of_some_layers_is_restored(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where attention's outputs and x of all layers do not fit, and to run attention again would take longer."""

    def long() -> ChosenPlan:
        caps = Caps(int(8.6 * MIB), 6 * MIB, 0, 0)
        return choose(SMALL, 4096, caps, SLOW, chunk=512, tokens_per_step=4096, effort=2000)

    choice = long()
    assert choice.plan.input_every > 1
    check(choice.plan, choice.schedule)
    monkeypatch.setattr(search, "INPUT_EVERY", (1,))
    assert choice.tokens_per_s > 1.02 * long().tokens_per_s


@pytest.mark.slow
def test_more_effort_finds_no_slower_plan() -> None:
    """Small steps from the first plans alone kept the shape of their rounds, and ended 7 % below."""
    config = replace(resolve_size("llama3-8b"), max_context_length=None).at_context(8192)
    caps, rates = Caps(24 * GIB, 64 * GIB), Rates.of(hardware_named("rtx-4090"))
    little, much = (choose(config, 8192, caps, rates, effort=effort).tokens_per_s for effort in (16_000, 80_000))
    assert much >= little > 2100


def test_plans_and_chunks_that_cannot_be_are_refused() -> None:
    plan = {"work": StreamedWork(replace(SMALL, n_layers=2), 64, 64), "chunks": 1, "rounds": 1, "order": "sequential"}
    for how, message in (
        ({"input_every": 2, "keep": Keep(2, 1)}, r"keeps from Keep\(attention=1, .*products=1\)"),
        ({"keep": Keep(1, 2)}, r"got Keep\(attention=1, products=2\)"),
        ({"rounds": 0}, "got 0 and 1"),
        ({"order": "backwards"}, "unknown order 'backwards'"),
        ({"moments": 3}, "3 layers cannot have resident moments, of 2"),
    ):
        with pytest.raises(ValueError, match=message):
            Plan(**plan | {"keep": Keep(1, 0)} | how)
    with pytest.raises(ValueError, match="48 tokens"):
        small(3, 5, chunk=48)
    with pytest.raises(ValueError, match="^no chunks of 64 tokens make up a step of 700 tokens$"):
        small(3, 5, tokens_per_step=700)


def test_chunk_sizes() -> None:
    assert chunk_sizes(512) == [8192, 16_384]
    assert chunk_sizes(8192) == [8192, 16_384]
    assert chunk_sizes(32_768) == [32_768, 16_384, 8192, 65_536]
    assert chunk_sizes(524_288) == [32_768, 16_384]
    assert chunk_sizes(6000, least=4000) == [6000, 12_000]
    assert chunk_sizes(16_400) == [16_400, 32_800]  # half of it has no matmuls in fp8
    assert chunk_sizes(40_040) == [10_010]
