"""Bytes, operations and seconds of a step under memory caps by hand and against other counters; times of lanes."""

from dataclasses import replace

import pytest

from cs336_systems.config import PRECISIONS, Lora, resolve_size
from cs336_systems.costs.flops import hardware_flops, model_flops
from cs336_systems.costs.kept import bytes_kept
from cs336_systems.costs.lanes import Lanes, simulate, simulate_ranks
from cs336_systems.costs.rates import Rates, ours_on
from cs336_systems.costs.streaming import LEVELS, MASTER_MOMENTS, StreamedWork
from cs336_systems.hardware import GIB, find_hardware, hardware_named

LLAMA = replace(resolve_size("llama3-8b"), max_context_length=None)
H200 = hardware_named("h200")
RATES = Rates.of(H200)


def test_bytes_of_llama_by_hand() -> None:
    work = StreamedWork(LLAMA, 8192, 16_384)
    assert work.layer_bytes == 2 * 218_112_000
    assert 32 * work.state_bytes / GIB == pytest.approx(52.0, abs=0.01)
    assert work.fixed_bytes / GIB == pytest.approx(7.83, abs=0.01)
    assert StreamedWork(LLAMA, 8192, 8192, moments=tuple(MASTER_MOMENTS.items())).state_bytes == 16 * 218_112_000


def test_adapters_of_llama_by_hand() -> None:
    """Rank 16 on all matrices: 16 (3 x 4096 + 6144 + 8192 + 2 (4096 + 14,336) + 18,432) = 1,310,720 a layer."""
    own, whole = (StreamedWork(LLAMA, 8192, 16_384, lora=lora) for lora in (Lora(16, 32.0), None))
    assert own.trained_parameters == 16 * (3 * 4096 + 6144 + 8192 + 3 * (4096 + 14_336)) == 1_310_720
    assert own.state_bytes == own.layer_bytes == whole.layer_bytes
    assert own.adapter_bytes == 32 * 8 * 1_310_720
    vocabulary = 2 * LLAMA.vocab_size * 4096 + 4096
    assert own.fixed_bytes - own.adapter_bytes == whole.fixed_bytes - 6 * vocabulary
    thin, products = 2 * 16_384 * 1_310_720, 2 * 16_384 * 218_103_808
    attention = own.attention_flops(0)
    assert own.hardware_flops("forward", 0, "") == products + thin + attention
    assert own.hardware_flops("backward", 0, "") == products + 5 * thin // 2 + 5 * attention // 2
    assert own.hardware_flops("head", 0, "") == 2 * whole.hardware_flops("head", 0, "") // 3
    assert own.seconds("forward", 0, "", RATES) > whole.seconds("forward", 0, "", RATES)
    assert own.seconds("backward", 0, "", RATES) < 0.75 * whole.seconds("backward", 0, "", RATES)


@pytest.mark.parametrize("context_length", [8192, 131_072])
def test_parts_are_what_a_level_keeps(context_length: int) -> None:
    """d 4096, k and v 1024 each, d_ff 14,336, 32 heads, bf16; statistics in fp32."""
    work = StreamedWork(LLAMA, context_length, 16_384)
    parts = {what: work.item_bytes(what) / 16_384 for what in ("input", "context", "attention", "products")}
    assert (parts["input"], parts["context"], parts["attention"]) == (2 * 4096 + 8, 4096, 2 * 4096 + 4 * 32)
    assert parts["input"] + parts["context"] == 12_296
    own = parts["context"] if work.is_long else 0
    everything = parts["input"] + own + parts["attention"] + parts["products"]
    assert everything == 94_344 == bytes_kept(LLAMA, 2, 8192, PRECISIONS["bf16"], "products") / 16_384


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize(("context_length", "chunk"), [(2048, 8192), (65_536, 16_384)])
def test_operations_add_up_to_the_step(level: str, context_length: int, chunk: int) -> None:
    work = StreamedWork(LLAMA, context_length, chunk)
    chunks, sequences = max(1, context_length // chunk), max(1, chunk // context_length)
    layer = [("forward", ""), ("backward", ""), ("recompute", level)]
    if work.is_long and level != "products":
        layer.append(("keys", ""))
    flops = sum(32 * work.hardware_flops(kind, c, of) for kind, of in layer for c in range(chunks))
    flops += sum(work.hardware_flops("head", c, "") for c in range(chunks))
    assert flops == hardware_flops(LLAMA, sequences, context_length, "step", attention="flash", keep=level)
    assert work.model_flops_per_token() == model_flops(LLAMA, 1, context_length, "step") / context_length


def test_measured_layer_of_an_h200() -> None:
    """LOG.md: 13.24 ms forward, 41.2 to 41.6 both, for 2 x 8,192 tokens; the head 5.6 us a token of 151,936 words."""
    work, rates = StreamedWork(LLAMA, 8192, 16_384), Rates.of(H200, sustained=ours_on(H200, "2026-11-24"))
    forward, backward = (1e3 * work.seconds(kind, 0, "products", rates) for kind in ("forward", "backward"))
    assert forward == pytest.approx(13.24, rel=0.02)
    assert forward + backward == pytest.approx(41.4, rel=0.02)
    large = StreamedWork(replace(LLAMA, vocab_size=151_936), 8192, 32_768)
    assert 1e3 * large.seconds("head", 0, "", RATES) == pytest.approx(184, rel=0.02)


def test_restoring_x_runs_the_products_behind_attention() -> None:
    """Output, gate and up, down: of forward all but attention and q, k and v."""
    work = StreamedWork(LLAMA, 65_536, 8192)
    assert work.hardware_flops("restore", 3, "") == 2 * 8192 * 4096 * (4096 + 3 * 14_336)
    before = 2 * 8192 * 4096 * (4096 + 2 * 1024) + work.attention_flops(3)
    assert work.hardware_flops("restore", 3, "") == work.hardware_flops("forward", 3, "") - before
    assert work.seconds("restore", 3, "", RATES) < work.seconds("forward", 3, "", RATES)


@pytest.mark.parametrize(("context_length", "chunk"), [(8192, 6000), (6000, 8192), (8192, 0)])
def test_chunks_divide(context_length: int, chunk: int) -> None:
    with pytest.raises(ValueError, match="does not divide"):
        StreamedWork(LLAMA, context_length, chunk)


def test_what_the_engine_gained_counts_from_its_day_and_on_cards_that_have_it() -> None:
    hopper, older = (
        [ours_on(hardware_named(card), moment) for moment in ("2026-11-27", "2026-11-29", None)]
        for card in ("h100", "rtx-4090")
    )
    assert [engine.added for engine in hopper] == [engine.added for engine in older] == [3.0, 1.0, 1.0]
    assert hopper[1].attention_backward < hopper[2].attention_backward
    assert older[1] == older[2] == hopper[1]


def test_rates_need_published_peaks() -> None:
    cpu = find_hardware("cpu")
    assert cpu is not None
    with pytest.raises(ValueError, match="CPU"):
        Rates.of(cpu)


EVEN = Rates(1, 1, 1, 1, link_alone=10, link_out_both=5, beside_copies=1, copy_latency_s=0)


def test_lanes_run_in_their_order_and_wait_for_each_other() -> None:
    times = simulate(["compute", "compute", "in"], [2, 3, 40], [(), (), ()], EVEN)
    assert (times.starts, times.ends, times.span) == ([0, 2, 0], [2, 5, 4], 5)
    assert times.busy == {"in": 4, "compute": 5, "out": 0}
    times = simulate(["in", "compute", "out"], [20, 1, 10], [(), (0,), (1,)], EVEN)
    assert (times.starts, times.span) == ([0, 2, 3], 4)
    assert times.waited_for == {"in": 2, "compute": 0, "out": 0}
    with pytest.raises(ValueError, match="operation 0 waits for 1"):
        simulate(["in", "out"], [1, 1], [(1,), ()], EVEN)


def test_a_wait_is_booked_to_the_copy_and_then_to_the_other_rank() -> None:
    early = Lanes(["in", "compute"], [10, 1], [(), (0,)])  # its copy takes one second
    late = Lanes(["compute", "compute"], [3, 1], [(), ()])
    waited = [times.waited_for for times in simulate_ranks([early, late], [[(0, 1), (1, 1)]], EVEN)]
    assert (waited[0]["in"], waited[0]["compute"]) == (1, 2)
    assert not any(waited[1].values())


def test_copies_share_the_link_and_slow_kernels() -> None:
    """Both at 5 a second until the shorter one ends after 2, then 20 more at 10; then 24 at 4 beside 15 at 5."""
    assert simulate(["in", "out"], [30, 10], [(), ()], EVEN).ends == [4, 2]
    slower = replace(EVEN, in_beside_out=0.8)
    assert simulate(["in", "out"], [24, 15], [(), ()], slower).ends == pytest.approx([4.2, 3])
    slow = replace(EVEN, link_out_both=10, beside_copies=0.75)
    assert simulate(["compute", "in", "out"], [1, 100, 100], [(), (), ()], slow).ends[0] == pytest.approx(2)
    assert simulate(["compute", "in"], [1, 100], [(), ()], slow).ends[0] == pytest.approx(4 / 3)
    assert simulate(["in"], [10], [()], replace(EVEN, copy_latency_s=0.5)).span == pytest.approx(1.5)


def test_copies_of_other_gpus_slow_those_of_one() -> None:
    """30 in take 3 alone; the first 10 beside a copy out, by half as long again; so do all beside a GPU that always
    copies."""
    shared = replace(EVEN, in_beside_gpu=0.5, out_beside_gpu=0.25)
    reader, writer = Lanes(["in"], [30], [()]), Lanes(["out"], [12], [()])
    read, written = simulate_ranks([reader, writer], [], shared)
    assert (written.span, read.span) == (pytest.approx(1.5), pytest.approx(3.5))
    beside = replace(shared, others=1)
    assert simulate(["in"], [30], [()], beside).span == pytest.approx(4.5) == beside.link_seconds(30, 0)
    assert beside.link_seconds(0, 12) == pytest.approx(1.5)
