"""The seconds that are predicted of a step over a mesh, beside the committed rows and by reasoning."""

from dataclasses import replace
from itertools import combinations, pairwise
from pathlib import Path

import pytest

from cs336_systems.config import MODEL_SIZES, Recipe, resolve_size
from cs336_systems.costs.parallelism.layout import Layout
from cs336_systems.costs.parallelism.seconds import SLOWED, step_seconds
from cs336_systems.costs.parallelism.step import SEND, tensor_sent
from cs336_systems.experiments.mesh import MESH, predicted_ms
from cs336_systems.hardware import find_hardware, hardware_named
from cs336_systems.harness.record import read_rows

H200 = find_hardware("NVIDIA H200")
RESULTS = Path(__file__).parents[2] / "profiles/results/h200"
PARTS = sorted(path.name for path in RESULTS.glob("mesh-*"))


def predicted_lines(part):
    """(settings, measured ms, predicted ms) of steps that have a prediction."""
    for line in MESH.lines(read_rows(RESULTS / part / "benchmark_parallelism.csv")):
        if (predicted := predicted_ms(line)) is not None:
            yield line.settings | {"commit": line.last["commit"]}, line.median("step"), predicted


def late_host(part, how):
    """Whether a step of several GPUs is so short that its time is the host's, which launches too slowly."""
    return part == "mesh-short" and how["cuda_graph"] == "off" and how["world_size"] > 1


def test_all_committed_steps_are_within_a_tenth():
    """Also of parts that are added later; short steps whose host is late have a test of their own."""
    errors = {
        (part, *map(str, how.items())): predicted / measured - 1
        for part in PARTS
        for how, measured, predicted in predicted_lines(part)
        if not late_host(part, how)
    }
    assert len(errors) >= 60
    assert not {step: error for step, error in errors.items() if abs(error) >= 0.1}


def test_short_steps_are_within_a_fifth_though_their_host_is_late_and_nearer_in_a_graph():
    launched, graphed = [], []
    for how, measured, predicted in predicted_lines("mesh-short"):
        (graphed if how["cuda_graph"] == "on" else launched).append(abs(predicted / measured - 1))
    assert (len(launched), len(graphed)) == (12, 6)
    assert max(launched) < 0.2
    assert sum(error < 0.11 for error in launched) >= 10
    assert max(graphed) < 0.05


def test_meshes_and_schedules_are_ordered_as_measured():
    """By tokens/s a GPU, of all pairs of one part and commit on as many GPUs, at one length, that differ by 3 %."""
    n_pairs, inverted = 0, []
    for part in PARTS:
        found = []
        for how, measured, predicted in predicted_lines(part):
            tokens = how["batch_size"] * how["accumulate"] / (how["tensor"] * how["context"] * how["pipeline"])
            found.append((how, tokens / measured, tokens / predicted))
        for (one, fast, predicted), (other, slow, beside) in combinations(found, 2):
            alike = all(one[name] == other[name] for name in ("commit", "world_size", "context_length", "keep"))
            if alike and one["world_size"] > 1 and abs(fast / slow - 1) > 0.03:
                n_pairs += 1
                if (fast > slow) != (predicted > beside):
                    inverted.append({(part, how["weights"], how["tensor"], how["cuda_graph"]) for how in (one, other)})
    assert n_pairs >= 100
    assert inverted == []


def test_the_leaderboards_steps_are_within_a_tenth():
    """Of ``benchmark_fsdp.py``, on two and four GPUs."""
    errors = []
    for path in RESULTS.glob("leaderboard*/benchmark_fsdp.csv"):
        if path.parent.name == "leaderboard-losses":  # a small model, whose host is late
            continue
        rows = read_rows(path)
        rows = rows[(rows["metric"] == "step") & (rows["status"] == "ok") & (rows["kernels"] == "fused")]
        for row in rows.to_dict("records"):
            how = {"shards": row["world_size"], "zero": 3, "keep": row["keep"].removesuffix("-residual")}
            recipe = Recipe() if row["matmul_dtype"] == "same" else Recipe(row["matmul_dtype"])
            case = {"micro_batch": row["batch_size"], "length": row["context_length"], "recipe": recipe}
            errors.append(1e3 * seconds(row["size"], **how, **case).total / row["median"] - 1)
    assert len(errors) >= 13 and max(map(abs, errors)) < 0.1


def seconds(size="llama3-8b", **how):
    rest = {
        name: how.pop(name)
        for name in ("network_bytes_per_s", "launches", "simulated", "recipe", "offload", "copied_from", "length")
        if name in how
    }
    return step_seconds(resolve_size(size), rest.pop("length", 8192), Layout(**how), H200, **rest)


def test_few_rows_of_tensor_ranks_go_by_collectives():
    """4,096 numbers a row: 6,144 rows of two ranks are 12 Mi elements each, 6,142 are fewer."""

    def by(tensor_by, length, **how):
        return seconds(tensor=2, length=length, tensor_by=tensor_by, **how)

    for length, same in ((6142, True), (6144, False)):
        assert (by("copies", length) == by("collectives", length)) is same
    assert by("copies", 6142, copied_from=0).waiting < 0.02 * by("copies", 6142).waiting
    four = [seconds(tensor=4, tensor_by=how) for how in ("copies", "collectives")]
    assert four[0] == four[1]  # 8,192 tokens: 8 Mi elements a rank


def test_rows_of_tensor_ranks_that_leave_their_host_go_by_collectives_at_the_networks_rate():
    def waiting(tensor, tensor_by, **how):
        return seconds("2.7b", tensor=tensor, tensor_by=tensor_by, copied_from=0, **how).waiting

    assert waiting(8, "copies") < 0.1 * waiting(8, "collectives")
    assert waiting(16, "copies") == waiting(16, "collectives")
    assert waiting(16, "copies", network_bytes_per_s=5e9) > 2 * waiting(16, "copies")


def test_copies_of_tensor_ranks_take_as_long_as_their_link():
    """Eight ranks of an RTX 4090's figures, and of four cards whose link carries 1 GB/s."""
    config = resolve_size("llama3-8b")
    for card, n_ranks, rate in (("watts=450", 8, 32e9), ("watts=450,host=1", 4, 1e9)):
        hardware = hardware_named(f"peak=165,bandwidth=1008,memory=24,{card}")
        layout = Layout(tensor=n_ranks, tensor_by="copies", keep="all-norm-swiglu", micro_batch=4, n_micro_batches=16)
        step = step_seconds(config, 8192, layout, hardware)
        sent = tensor_sent(config, 4 * 8192, layout.keep, n_ranks, 2, by="copies")[SEND]
        assert step.total > 16 * sent / rate


def test_messages_on_one_link_hide_under_the_same_kernels_once():
    """Copies of tensor ranks and ZeRO 3's gathers, and a card with twice the FLOP/s, which cannot be slower."""
    config, slow = resolve_size("llama3-8b"), "bandwidth=1008,memory=24,host=8,watts=450"
    layout = Layout.of_data(2, 3, tensor=2, tensor_by="copies", keep="input", micro_batch=2, n_micro_batches=16)
    totals = [
        step_seconds(config, 8192, layout, hardware_named(f"peak={peak},{slow}")).total for peak in (125, 250, 500)
    ]
    assert all(after < before * (1 + 1e-9) for before, after in pairwise(totals))
    copies = 16 * tensor_sent(config, 2 * 8192, "input", 2, 2, by="copies")[SEND]
    gathers = 16 * 3 * 0.5 * 2 * config.n_parameters / 2
    assert totals[-1] > (copies + gathers) / 8e9


def test_nvlink_of_pcie_cards_joins_two():
    """The same card without NVLink is as fast where four share a batch, and slower where two do."""
    bridged = hardware_named("h100-pcie")
    without = replace(bridged, link_bytes_per_s=None)

    def totals(card):
        layouts = (Layout(tensor=n, micro_batch=4) for n in (2, 4))
        return [step_seconds(resolve_size("llama3-8b"), 8192, layout, card).total for layout in layouts]

    (two, four), (two_without, four_without) = totals(bridged), totals(without)
    assert four == four_without and two < two_without
    assert hardware_named("rtx-3090").copies_reach(2) and not hardware_named("rtx-3090").copies_reach(4)
    assert not hardware_named("rtx-4090").copies_reach(2)
    assert hardware_named("h100").copies_reach(8) and hardware_named("l40s").copies_reach(8)


def test_ranks_divide_work_and_add_what_they_wait_for():
    alone, two, copies = seconds(), seconds(tensor=2), seconds(tensor=2, tensor_by="copies")
    assert (alone.waiting, alone.slowed) == (0, 0)
    assert two.compute == pytest.approx(alone.compute / 2)
    assert two.optimizer == pytest.approx(alone.optimizer / 2)
    assert copies.waiting < 0.02 * two.waiting and copies.late > 0 == two.late
    orders = {order: seconds(context=2, context_order=order) for order in ("zigzag", "ring", "gathered")}
    assert orders["ring"].compute > orders["zigzag"].compute == orders["gathered"].compute
    assert orders["gathered"].waiting > orders["zigzag"].waiting == 0
    assert seconds(shards=2, zero=3).optimizer == pytest.approx(alone.optimizer / 2)
    assert 0 < seconds(replicas=2).slowed < seconds(shards=2, zero=3).slowed


def test_zero_levels_send_what_the_paper_says():
    """Rajbhandari et al. 2020, section 7: levels 0 to 2 send as much as an all-reduce, level 3 half as much again."""
    levels = [seconds(shards=4 if zero else 1, replicas=1 if zero else 4, zero=zero).slowed for zero in range(4)]
    assert levels[0] == pytest.approx(levels[1]) == pytest.approx(levels[2])
    assert levels[3] == pytest.approx(1.5 * levels[0], rel=0.04)  # the last unit is gathered once
    several = [seconds(shards=4, zero=zero, n_micro_batches=3).slowed for zero in (1, 2, 3)]
    assert several == [pytest.approx(n * levels[1]) for n in (1, 2, 3 * levels[3] / levels[1])]


def test_rings_that_leave_their_hosts_take_the_cards_of_the_ranks_there():
    """All GPUs of a host send through eight cards; one rank of a host, beside seven of other rings, through its own."""
    fast = {"network_bytes_per_s": 1e15}
    within, across = seconds(replicas=8), seconds(replicas=16)
    bytes_of = {n: 2 * (n - 1) / n for n in (8, 16)}
    latency = SLOWED * 2 * (32 + 2) * 14e-6
    rate = within.slowed / bytes_of[8], (across.slowed - latency) / bytes_of[16]
    assert rate[1] == pytest.approx(450 / 400 * rate[0], rel=1e-6)  # eight cards of 50 GB/s, not NVLink's 450
    assert seconds(replicas=16, **fast).slowed - latency == pytest.approx(bytes_of[16] * rate[0])
    alone = seconds(replicas=4, tensor=8)
    latency = SLOWED * 2 * (32 + 2) * 14e-6 * 3
    assert alone.slowed - latency == pytest.approx(1.5 * rate[0] / 8 * 450 / 50, rel=1e-3)
    assert seconds(replicas=4, tensor=8, **fast).slowed < alone.slowed


def test_one_card_carries_a_message_between_neighbours():
    """16,384 bytes a token of 70B over 16 stages on two hosts: 2 x 15 messages of 128 MiB at 35 GB/s."""
    stages = seconds("llama3-70b", pipeline=16, n_micro_batches=16)
    assert stages.waiting == pytest.approx(30 * (14e-6 + 2 * 8192 * 8192 / 35e9))
    inside = seconds("llama3-70b", pipeline=8, n_micro_batches=8)
    assert inside.waiting == pytest.approx(14 * (25e-6 + 2 * 8192 * 8192 / 315e9))
    slow = seconds(context=16, network_bytes_per_s=25e9)
    assert seconds(context=8).waiting == 0 < seconds(context=16).waiting < slow.waiting / 2


def test_what_takes_longer_than_kernels_is_waited_for():
    """Kernels beside collectives advance at half their rate, so that collectives of twice their time are the limit."""
    slow = seconds(shards=16, zero=3, network_bytes_per_s=1e9)
    slower = seconds(shards=16, zero=3, network_bytes_per_s=0.5e9)
    assert slower.slowed + slower.compute == pytest.approx(2 * (slow.slowed + slow.compute), rel=0.01)


def test_stages_share_layers_and_stand_still_while_the_pipeline_fills():
    one, four = seconds(n_micro_batches=8), seconds(pipeline=4, n_micro_batches=8)
    assert one.bubble == 0
    assert one.compute / 4 < four.compute < 1.1 * one.compute / 4
    each = (four.compute + four.late) / 8
    assert four.bubble == pytest.approx(3 * each)
    chunks = seconds(pipeline=4, n_micro_batches=8, schedule="interleaved", chunks=2)
    assert chunks.bubble == pytest.approx(four.bubble / 2)
    assert chunks.waiting > four.waiting > 0  # rows between stages
    bounds = seconds(pipeline=4, n_micro_batches=8, schedule="zb-h1", simulated=False)
    exact = seconds(pipeline=4, n_micro_batches=8, schedule="zb-h1")
    assert 0 < bounds.bubble <= 1.0001 * exact.bubble < four.bubble
    assert replace(bounds, bubble=0) == replace(exact, bubble=0)


def test_gpus_without_nvlink_send_through_the_host():
    rtx = find_hardware("NVIDIA GeForce RTX 4090")
    nvlink = replace(rtx, link_bytes_per_s=450e9)
    by_host, direct = (step_seconds(resolve_size("llama3-8b"), 8192, Layout(replicas=4), gpu) for gpu in (rtx, nvlink))
    assert by_host.slowed > 10 * direct.slowed
    assert by_host.compute == direct.compute


def test_what_is_on_the_host_costs_its_copies():
    """70 GB of a step's moments at 44 to 51 GB/s both ways; inputs of blocks hide under the kernels beside them."""
    plain, moments = seconds("llama3-8b"), seconds(offload=frozenset({"m", "v"}))
    assert moments.optimizer == pytest.approx(4 * 8.03e9 / 44.6e9, rel=0.03)
    assert moments.optimizer > 10 * plain.optimizer
    assert (moments.compute, moments.copies) == (plain.compute, 0)
    assert seconds(offload=frozenset({"residual"})) == plain
    slow = replace(H200, host_link_bytes_per_s=1e9)
    late = step_seconds(resolve_size("llama3-8b"), 8192, Layout(), slow, offload=frozenset({"residual"}))
    assert late.copies == pytest.approx(2 * 32 * 8192 * 4096 * 2 / (55.5 / 64 * 1e9) - plain.compute, rel=0.01)


def test_fp8_takes_less_than_bf16_and_more_than_half():
    plain, quantized = seconds(), seconds(recipe=Recipe("e4m3"))
    assert 0.6 < quantized.compute / plain.compute < 0.8
    skipping = seconds(recipe=Recipe("e4m3", skip_first=16))
    assert skipping.compute == pytest.approx((plain.compute + quantized.compute) / 2)


def test_the_host_is_late_for_small_blocks_alone():
    assert seconds().late == seconds(context=2).late == 0
    assert seconds(context=4).late > 0 == seconds(context=4, launches=False).late
    assert seconds("llama3-70b", context=4).late == 0


def test_what_is_not_published_or_impossible_is_refused():
    with pytest.raises(ValueError, match="no bf16 FLOP/s, memory or host link are published for CPU"):
        step_seconds(MODEL_SIZES["tiny"], 128, Layout(), find_hardware("cpu"))
    with pytest.raises(ValueError, match="A100 SXM 80GB has no products in fp8"):
        step_seconds(MODEL_SIZES["tiny"], 128, Layout(), find_hardware("NVIDIA A100-SXM4-80GB"), recipe=Recipe("e4m3"))
    with pytest.raises(ValueError, match="32 blocks are too few for 35 parts of a pipeline"):
        seconds(pipeline=35)
    with pytest.raises(ValueError, match="tensor 3 does not divide"):
        seconds(tensor=3)
