"""The FSDP benchmark: its grid, what it refuses, and the table of a real, tiny measurement on two ranks."""

from dataclasses import asdict, replace

import pandas as pd
import pytest

from cs336_systems.distributed.process_group import Rank
from cs336_systems.distributed.spawn import spawn
from cs336_systems.experiments.fully_sharded import FULLY_SHARDED
from cs336_systems.experiments.fully_sharded_measure import measure
from cs336_systems.experiments.ranked import EFFORT, Effort
from cs336_systems.harness.record import Metric, parse_samples
from cs336_systems.profiling.traces import kineto
from cs336_systems.profiling.traces.kernels import collective_name
from cs336_systems.report.timeline import two_blocks
from tests.benchmarks.commands import cells_of

TINY = ["--size", "tiny", "--context-length", "16", "--steps", "2", "--warmup", "0"]


def measure_all(rank: Rank, cells, folder):
    return [measure(cell, rank, effort=Effort(trace=folder, recorded=("ours", "torch"))) for cell in cells]


@pytest.fixture(scope="module")
def recordings(tmp_path_factory):
    return tmp_path_factory.mktemp("recordings")


@pytest.fixture(scope="module")
def rows(recordings):
    """Ours, FSDP2 and DDP on two ranks, as a CSV would hold them."""
    cells = cells_of("fully_sharded", *TINY, "--dtype", "bf16-compute", "--checkpoint", "full")
    measured = spawn(measure_all, 2, cells, recordings, timeout_s=90)[0]
    where = {"gpu": "", "status": "ok", "message": ""}
    return parse_samples(
        pd.DataFrame(
            asdict(cell) | where | metric.statistics()
            for cell, metrics in zip(cells, measured, strict=True)
            for metric in metrics
        )
    )


def measure_one(rank: Rank, cell, effort=EFFORT):
    return measure(cell, rank, effort=effort)


@pytest.mark.slow
def test_a_later_turn_takes_times_alone():
    (cell,) = cells_of("fully_sharded", *TINY, "--fsdp", "ours")
    metrics = spawn(measure_one, 2, replace(cell, repeat=1), Effort(later_warmup=1), timeout_s=60)[0]
    taken = {metric.name: metric.samples for metric in metrics}
    assert taken.keys() == {"forward", "backward", "optimizer", "step", "warmup_step", "tokens_per_s", "peak_memory"}
    assert (len(taken["warmup_step"]), len(taken["step"])) == (1, 2)


@pytest.mark.slow
def test_everything_in_bf16_holds_and_sends_half():
    """Written-out blocks of ours beside FSDP2: both hold 8 bytes per parameter over two ranks, as predicted."""
    cells = cells_of("fully_sharded", *TINY, "--dtype", "fp32", "bf16", "--keep", "products", "--fsdp", "ours", "torch")
    found = {}
    for cell in cells:
        metrics = spawn(measure_one, 2, cell, timeout_s=90)[0]
        found[cell.dtype, cell.fsdp] = {metric.name: metric.statistics()["median"] for metric in metrics}
    for fsdp in ("ours", "torch"):
        wide, narrow = found["fp32", fsdp], found["bf16", fsdp]
        for name in ("parameters", "gradients", "predicted_state"):
            assert narrow[name] == pytest.approx(wide[name] / 2, rel=0.01), (fsdp, name)
        assert narrow["state_error"] == pytest.approx(0, abs=1)
    for name in ("sent_per_rank", "predicted_sent"):
        assert found["bf16", "ours"][name] == pytest.approx(found["fp32", "ours"][name] / 2, rel=0.02), name


@pytest.mark.slow
def test_losses_are_those_of_the_reference_from_the_same_weights():
    """In fp32 a step of ours is the reference's but for rounding; in bf16 it only begins with its loss."""
    written_out = ["--fsdp", "ours", "--keep", "products", "--optimizer", "reference", "--update", "under-backward"]
    cells = cells_of("fully_sharded", *TINY, *written_out, "--dtype", "fp32", "bf16", "--losses", "4")
    for cell, metrics in zip(cells, spawn(measure_all, 2, cells, None, timeout_s=90)[0], strict=True):
        found = {metric.name: metric.samples for metric in metrics}
        own, exact = found["loss"], found["reference_loss"]
        assert len(own) == len(exact) == 4
        assert exact[3] < exact[2] < exact[1] < exact[0]
        assert own[0] == pytest.approx(exact[0], rel=1e-6 if cell.dtype == "fp32" else 2e-3)
        (off,) = found["loss_error"]
        assert off == max(100 * abs(loss / right - 1) for loss, right in zip(own, exact, strict=True))
        assert off < 1e-3 if cell.dtype == "fp32" else off > 1e-3


@pytest.mark.slow
def test_bytes_that_travel_are_predicted():
    """Blocks of which every shard is tiles send a byte an element in gathers, and what they agree on before."""
    arguments = ["--fsdp", "ours", "--keep", "products", "--dtype", "bf16", "--matmul-dtype", "e4m3", "--scaling"]
    cells = cells_of("fully_sharded", *TINY, *arguments, "tensor", "row")
    for cell, metrics in zip(cells, spawn(measure_all, 2, cells, None, timeout_s=90)[0], strict=True):
        found = {metric.name: metric.samples[0] for metric in metrics}
        assert found["sent_per_rank"] == pytest.approx(found["predicted_sent"]), cell.scaling


def test_recordings_show_the_collectives_of_two_blocks(rows, recordings):
    traces = [kineto.read(path) for path in recordings.glob("*.json.gz")]
    assert len(traces) == 2
    for trace in traces:
        found = two_blocks(trace)
        assert list(found.blocks["name"]) == ["layers.1", "layers.0"]
        names = set(found.collectives["name"].map(collective_name))
        assert names & {"all-gather", "reduce-scatter"}, names


def medians(rows, implementation):
    own = rows[rows["fsdp"] == implementation]
    return dict(zip(own["metric"], own["median"], strict=True))


def test_the_grid_takes_implementations_in_turns_and_gives_look_ahead_to_ours_alone():
    cells = cells_of("fully_sharded", *TINY, "--repeat", "2", "--prefetch", "0", "1")
    kinds = [("ours", 0), ("ours", 1), ("torch", None), ("ddp", None)]
    assert [(cell.fsdp, cell.prefetch) for cell in cells] == kinds + kinds[::-1]
    assert [cell.repeat for cell in cells] == [0] * 4 + [1] * 4
    assert {cell.world_size for cell in cells} == {2}


def test_peers_at_their_best_take_turns_with_what_is_ours():
    written_out = ["--fsdp", "ours", "--keep", "products", "--update", "after-backward", "under-backward"]
    peers = ["--peer-checkpoint", "full", "every-1", "first-1"]
    cells = cells_of("fully_sharded", *TINY, *written_out, "--repeat", "2", *peers)
    kinds = [("ours", "after-backward"), ("ours", "under-backward"), ("torch", "full"), ("torch", "first-1")]
    found = [(cell.fsdp, cell.checkpoint if cell.fsdp == "torch" else cell.update) for cell in cells]
    assert found == kinds + kinds[::-1]
    peer = cells[2]
    assert (peer.attention, peer.compile, peer.keep, peer.optimizer) == ("sdpa-cudnn", "on", "autograd", "torch-fused")
    assert (peer.size, peer.dtype, peer.batch_size, peer.steps) == ("tiny", "fp32", 1, 2)
    quantized = cells_of(
        "fully_sharded", *TINY, *written_out[:4], *peers[:2], "--matmul-dtype", "e4m3", "--losses", "3"
    )
    assert [(cell.fsdp, cell.matmul_dtype, cell.losses) for cell in quantized] == [
        ("ours", "e4m3", 3),
        ("torch", "same", 0),
    ]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--peer-checkpoint", "some"], "unknown checkpoint policy 'some'"),
        (["--do-bench", "on"], "--do-bench on: triton's do_bench times CUDA devices, got --device cpu"),
        (["--losses", "-1"], "--losses must not be negative, got -1"),
    ],
)
def test_bad_values_are_named(arguments, message):
    with pytest.raises(ValueError) as caught:
        cells_of("fully_sharded", *TINY, *arguments)
    assert message in str(caught.value)


@pytest.mark.slow
def test_states_and_traffic_are_as_predicted_and_every_gather_is_waited_for_once(rows):
    ours, torch, ddp = (medians(rows, name) for name in ("ours", "torch", "ddp"))
    assert abs(ours["state_error"]) < 0.1
    assert ours["sent_per_rank"] == pytest.approx(ours["predicted_sent"])
    assert ours["sent_per_rank"] == pytest.approx(torch["sent_per_rank"], rel=0.01)
    assert ours["gathers"] == 7  # four units, forward and backward, less the head, which stays
    assert 0 <= ours["late_gathers"] <= 7
    assert ddp["parameters"] == pytest.approx(2 * ours["parameters"], rel=0.01)


def test_rows_of_an_earlier_command_are_not_pooled_with_the_newest(rows):
    """A run of 98.4 ms appended to by one of 58.8 ms is shown as 58.8 ms."""
    stamped = rows.assign(argv="a command", commit="c", timestamp="2026-01-02T00:00:00+00:00")
    older = stamped.assign(timestamp="2026-01-01T00:00:00+00:00", median=1000 * rows["median"])
    alone, appended = (FULLY_SHARDED.of(frame).frame for frame in (stamped, pd.concat([older, stamped])))
    assert appended.to_dict("records") == alone.to_dict("records")


@pytest.mark.slow
def test_the_table_has_a_line_per_implementation_and_their_ratio(rows):
    frame = FULLY_SHARDED.of(rows).frame
    assert list(frame["implementation"]) == ["ours", "torch", "ddp"]
    assert float(frame["/ FSDP2"][0]) == pytest.approx(
        medians(rows, "ours")["step"] / medians(rows, "torch")["step"], abs=1e-3
    )
    assert list(frame["/ FSDP2"][1:2]) == ["–"]
    assert list(frame["status"]) == ["ok"] * 3


def made_up(fsdp, ms, **settings):
    """The step of one cell in two rounds of one command."""
    plain = {"size": "8b", "dtype": "bf16", "attention": "hopper", "checkpoint": "none", "compile": "off"}
    said = plain | {"prefetch": "1" if fsdp == "ours" else "", "update": "after-backward", "world_size": 2} | settings
    where = {"argv": "a command", "commit": "c", "host": "h", "gpu": "g", "timestamp": "2026-01-02T00:00:00+00:00"}
    said |= where | {"fsdp": fsdp, "status": "ok", "message": ""}
    return [said | {"repeat": i} | Metric("step", "ms", [found]).statistics() for i, found in enumerate(ms)]


def test_ways_that_differ_in_all_are_compared_by_their_fastest():
    peer = {"attention": "sdpa-cudnn", "compile": "on"}
    rows = parse_samples(
        pd.DataFrame(
            [
                *made_up("ours", (43, 44)),
                *made_up("ours", (42, 43), update="under-backward"),
                *made_up("torch", (60, 62), checkpoint="full", **peer),
                *made_up("torch", (50, 50), checkpoint="first-16", **peer),
            ]
        )
    )
    frame = FULLY_SHARDED.of(rows).frame
    assert [cell[:5] for cell in frame["/ FSDP2"]] == ["0.870", "0.850", "–", "–"]
    assert [cell[:5] for cell in frame["/ ours"]] == ["–", "–", "1.435", "1.177"]
    twins = [*made_up("ours", (43, 44)), *made_up("torch", (60, 62)), *made_up("torch", (50, 50), checkpoint="full")]
    frame = FULLY_SHARDED.of(parse_samples(pd.DataFrame(twins))).frame
    assert frame["/ FSDP2"][0][:5] == "0.713", "the one of the same settings, not the fastest"
    assert [cell[:5] for cell in frame["/ ours"]] == ["–", "–", "1.150"]


def test_ranks_scale_against_one_of_the_same_implementation():
    def rates(fsdp, rate, world_size):
        (row,) = made_up(fsdp, (1,), world_size=world_size, steps=10 if world_size == 1 else 5)
        return row | Metric("tokens_per_s", "1/s", [rate]).statistics()

    rows = [rates("ours", 390.0, 4), rates("torch", 380.0, 4), rates("ours", 100.0, 1)]
    assert list(FULLY_SHARDED.of(parse_samples(pd.DataFrame(rows))).frame["scaling %"]) == ["97.5", "–", "100.0"]
