"""``benchmark_fsdp``: its grid, its table from made-up rows, and cells measured on two gloo ranks."""

from dataclasses import replace

import pandas as pd
import pytest

from cs336_systems.experiments.fully_sharded import FULLY_SHARDED, Options, make_cells
from cs336_systems.experiments.fully_sharded_measure import measure
from cs336_systems.experiments.ranked import Effort
from cs336_systems.harness.memory import predicted_states
from cs336_systems.harness.record import Metric, parse_samples
from cs336_systems.profiling.traces import kineto
from cs336_systems.profiling.traces.kernels import collective_name
from cs336_systems.report.timeline import two_blocks
from tests.benchmarks.commands import cells_of
from tests.distributed.checks import on_ranks
from tests.report.rows import rows_of

TINY = ["--size", "tiny", "--context-length", "16", "--steps", "2", "--warmup", "0"]
WRITTEN_OUT = ["--fsdp", "ours", "--keep", "products"]
FUSED = {"dtype": ("bf16",), "attention": ("hopper",), "optimizer": ("fused",), "kernels": ("fused",)}
LONG = Options(**FUSED, size=("tiny",), context_length=(128,), batch_size=(256,), fsdp=("ours",), world_size=(2,))


def test_the_grid_takes_implementations_in_turns_and_gives_options_of_ours_to_ours_alone():
    cells = cells_of("fully_sharded", *TINY, "--repeat", "2", "--prefetch", "0", "1")
    kinds = [("ours", 0), ("ours", 1), ("torch", None), ("ddp", None)]
    assert [(cell.fsdp, cell.prefetch, cell.repeat) for cell in cells] == [
        *((*kind, 0) for kind in kinds),
        *((*kind, 1) for kind in kinds[::-1]),
    ]
    copied = replace(Options.default("cpu"), world_size=(2,), gather_by=("collectives", "copies"))
    found = [(cell.fsdp, cell.gather_by, cell.parallel.gather_by) for cell in make_cells(copied)]
    ways = [("ours", "collectives"), ("ours", "copies"), ("torch", "collectives"), ("ddp", "collectives")]
    assert found == [(fsdp, by, by) for fsdp, by in ways]


def test_peers_at_their_best_take_turns_with_what_is_ours():
    updates, peers = (
        ["--update", "after-backward", "under-backward"],
        ["--peer-checkpoint", "full", "every-1", "first-1"],
    )
    recorded = ["--trace", "x", "--recorded", "torch"]
    cells = cells_of("fully_sharded", *TINY, *WRITTEN_OUT, *updates, "--repeat", "2", *peers, *recorded)
    kinds = [("ours", "after-backward"), ("ours", "under-backward"), ("torch", "full"), ("torch", "first-1")]
    found = [(cell.fsdp, cell.checkpoint if cell.fsdp == "torch" else cell.update) for cell in cells]
    assert found == kinds + kinds[::-1]
    peer = cells[2]
    assert (peer.attention, peer.compile, peer.keep, peer.optimizer) == ("sdpa-cudnn", "on", "autograd", "torch-fused")
    quantized = ["--matmul-dtype", "e4m3", "--losses", "3"]
    ours, peer = cells_of("fully_sharded", *TINY, *WRITTEN_OUT, *peers[:2], *quantized)
    assert (ours.matmul_dtype, ours.losses, peer.matmul_dtype, peer.losses) == ("e4m3", 3, "same", 0)


def test_masters_are_counted_among_the_states():
    asked = replace(LONG, keep=("products",))
    plain, masters = (make_cells(replace(asked, master_weights=(name,)))[0] for name in ("none", "fp32"))
    more = sum(predicted_states(masters, 2).values()) - sum(predicted_states(plain, 2).values())
    assert more == pytest.approx(4 * plain.config.n_parameters / 2, rel=2e-2)


def test_what_cannot_be_had_is_refused():
    faults = {
        "copies .* bf16-compute": {"gather_by": ("copies",), "dtype": ("bf16-compute",), "keep": ("autograd",)},
        "'some'": {"peer_checkpoint": ("some",)},
    }
    for message, fault in faults.items():
        with pytest.raises(ValueError, match=message):
            make_cells(replace(LONG, **fault))
    cpu = Options.default("cpu")
    for name, value in {"prefetch": (2,), "update": ("under-backward",), "gather_by": ("copies",)}.items():
        with pytest.raises(ValueError, match=f"--{name.replace('_', '-')} is for --fsdp ours"):
            make_cells(replace(cpu, fsdp=("torch", "ddp"), **{name: value}))


# ---- measured on two ranks

GRIDS = {
    "all": ["--dtype", "bf16-compute", "--checkpoint", "full"],
    "halves": ["--dtype", "fp32", "bf16", "--keep", "products", "--fsdp", "ours", "torch"],
    "losses": [*WRITTEN_OUT, "--optimizer", "reference", "--update", "under-backward", "--dtype", "fp32", "bf16"],
    "travel": [*WRITTEN_OUT, "--dtype", "bf16", "--matmul-dtype", "e4m3", "--scaling", "tensor", "row"],
    "later": ["--fsdp", "ours", "--repeat", "2"],
}


def measure_all(rank, grids, folder):
    """The cells of every grid, the first one recorded."""
    efforts = {"all": Effort(trace=folder, recorded=("ours", "torch")), "later": Effort(later_warmup=1)}
    return {
        name: [measure(cell, rank, effort=efforts.get(name, Effort())) for cell in cells]
        for name, cells in grids.items()
    }


@pytest.fixture(scope="module")
def recordings(tmp_path_factory):
    return tmp_path_factory.mktemp("recordings")


@pytest.fixture(scope="module")
def measured(recordings):
    """(cell, metrics by name) of every grid, by one start of ranks."""
    grids = {name: cells_of("fully_sharded", *TINY, *line) for name, line in GRIDS.items()}
    grids["losses"] = [replace(cell, losses=4) for cell in grids["losses"]]
    grids["later"] = grids["later"][1:]
    found = on_ranks(measure_all, 2, grids, recordings)[0]
    return {
        name: [
            (cell, {metric.name: metric for metric in metrics})
            for cell, metrics in zip(cells, found[name], strict=True)
        ]
        for name, cells in grids.items()
    }


@pytest.mark.slow
def test_states_and_traffic_are_as_predicted_and_every_gather_is_waited_for_once(measured):
    ours, torch, ddp = ({name: each.samples[0] for name, each in found.items()} for _, found in measured["all"])
    assert abs(ours["state_error"]) < 0.1
    assert ours["sent_per_rank"] == pytest.approx(ours["predicted_sent"])
    assert ours["sent_per_rank"] == pytest.approx(torch["sent_per_rank"], rel=0.01)
    assert ours["gathers"] == 7  # four units, forward and backward, less the head, which stays
    assert 0 <= ours["late_gathers"] <= 7
    assert ddp["parameters"] == pytest.approx(2 * ours["parameters"], rel=0.01)
    [(_, later)] = measured["later"]
    times = {"forward", "backward", "optimizer", "step", "warmup_step", "tokens_per_s"}
    assert times <= later.keys() <= {*times, "peak_memory"}
    assert (len(later["warmup_step"].samples), len(later["step"].samples)) == (1, 2)


@pytest.mark.slow
def test_everything_in_bf16_holds_and_sends_half_and_fp8_travels_by_tensor(measured):
    found = {
        (cell.dtype, cell.fsdp): {name: metric.samples[0] for name, metric in metrics.items()}
        for cell, metrics in measured["halves"]
    }
    for fsdp in ("ours", "torch"):
        wide, narrow = found["fp32", fsdp], found["bf16", fsdp]
        for name in ("parameters", "gradients", "predicted_state"):
            assert narrow[name] == pytest.approx(wide[name] / 2, rel=0.01), (fsdp, name)
        assert narrow["state_error"] == pytest.approx(0, abs=1)
    for name in ("sent_per_rank", "predicted_sent"):
        assert found["bf16", "ours"][name] == pytest.approx(found["fp32", "ours"][name] / 2, rel=0.02), name
    for cell, metrics in measured["travel"]:
        assert metrics["sent_per_rank"].samples == pytest.approx(metrics["predicted_sent"].samples), cell.scaling


@pytest.mark.slow
def test_losses_are_those_of_the_reference_from_the_same_weights(measured):
    """In fp32 a step of ours is the reference's but for rounding; in bf16 it only begins with its loss."""
    for cell, metrics in measured["losses"]:
        own, exact = metrics["loss"].samples, metrics["reference_loss"].samples
        assert len(own) == len(exact) == 4
        assert exact[3] < exact[2] < exact[1] < exact[0]
        assert own[0] == pytest.approx(exact[0], rel=1e-6 if cell.dtype == "fp32" else 2e-3)
        (off,) = metrics["loss_error"].samples
        assert off == max(100 * abs(loss / right - 1) for loss, right in zip(own, exact, strict=True))
        assert off < 1e-3 if cell.dtype == "fp32" else off > 1e-3


@pytest.mark.slow
def test_recordings_show_the_collectives_of_two_blocks_and_the_table_the_ratio(measured, recordings):
    traces = [kineto.read(path) for path in recordings.glob("*.json.gz")]
    assert len(traces) == 2
    for trace in traces:
        begins, ends = two_blocks(trace)
        inside = trace.ops[(trace.ops["end"] > begins) & (trace.ops["start"] < ends)]
        assert set(inside["name"].map(collective_name)) & {"all-gather", "reduce-scatter"}
    cells, metrics = zip(*measured["all"], strict=True)
    frame = FULLY_SHARDED.of(rows_of(cells, [found.values() for found in metrics])).frame
    assert list(frame["implementation"]) == ["ours", "torch", "ddp"]
    ours, torch, _ = (found["step"].statistics()["median"] for _, found in measured["all"])
    assert float(frame["/ FSDP2"][0]) == pytest.approx(ours / torch, abs=1e-3)


# ---- made-up rows


def made_up(fsdp, ms, metric="step", **settings):
    """A metric of one cell in the rounds of one command."""
    plain = {"size": "8b", "dtype": "bf16", "attention": "hopper", "checkpoint": "none", "compile": "off"}
    said = plain | {"prefetch": "1" if fsdp == "ours" else "", "update": "after-backward", "world_size": 2} | settings
    where = {"argv": "a command", "commit": "c", "host": "h", "gpu": "g", "timestamp": "2026-01-02T00:00:00+00:00"}
    said |= where | {"fsdp": fsdp, "status": "ok", "message": ""}
    return [said | {"repeat": i} | Metric(metric, "ms", [found]).statistics() for i, found in enumerate(ms)]


def column(name, *rows):
    return list(FULLY_SHARDED.of(parse_samples(pd.DataFrame([row for each in rows for row in each]))).frame[name])


def test_ways_that_differ_in_all_are_compared_by_their_fastest():
    peer = {"attention": "sdpa-cudnn", "compile": "on"}
    rows = (
        *(made_up("ours", (43, 44)), made_up("ours", (42, 43), update="under-backward")),
        made_up("torch", (60, 62), checkpoint="full", **peer),
        made_up("torch", (50, 50), checkpoint="first-16", **peer),
    )
    assert [cell[:5] for cell in column("/ FSDP2", *rows)] == ["0.870", "0.850", "–", "–"]
    twins = made_up("ours", (43, 44)), made_up("torch", (60, 62)), made_up("torch", (50, 50), checkpoint="full")
    assert column("/ FSDP2", *twins)[0][:5] == "0.713", "the one of the same settings, not the fastest"
