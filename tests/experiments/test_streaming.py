"""The benchmark of steps under caps: its grid, what it refuses, and a tiny model that really runs."""

import json
import re
from dataclasses import replace

import pandas as pd
import pytest

from cs336_systems.case import Unsupported
from cs336_systems.experiments.streaming import Options, make_cells, slower_with_more
from cs336_systems.experiments.streaming_measure import case_of, measure, measure_peer
from cs336_systems.harness.isolation import PredictedOutOfMemory
from cs336_systems.harness.record import read_rows
from tests.benchmarks.commands import cells_of, run


def test_caps_make_a_grid_and_a_tiny_model_has_defaults_of_its_own():
    options = Options(size=("llama3-8b",), device_gib=(16, 24), host_gib=(60, 96), context_length=(8192, 32_768))
    found = [(cell.context_length, cell.device_gib, cell.host_gib) for cell in make_cells(options)]
    assert found == [(length, gib, host) for length in (8192, 32_768) for gib in (16, 24) for host in (60, 96)]
    assert make_cells(options)[-1].config.context_length == 32_768
    tiny, resident, large = make_cells(Options(size=("tiny", "llama3-8b")))
    assert (tiny.context_length, tiny.chunk, tiny.tokens_per_step) == (64, 32, 512)
    assert tiny.device_gib < resident.device_gib < 0.01
    assert (large.context_length, large.device_gib, large.host_gib, large.chunk) == (8192, 24, 75, 0)


def test_peers_run_without_caps_once_for_each_length():
    *_, two, three = make_cells(Options(size=("tiny",), context_length=(32, 64), peers=("compiled", "fsdp2-offload")))
    found = [(cell.peer, cell.context_length, cell.device_gib) for cell in (two, three)]
    assert found == [("compiled", 64, 0), ("fsdp2-offload", 64, 0)]
    assert case_of(replace(two, device="cuda")).compile == "on"
    long = case_of(replace(three, size="llama3-8b", context_length=32_768, tokens_per_step=131_072))
    assert (long.batch_size, long.accumulate, long.checkpoint, long.parallel.on_host) == (1, 4, "full", True)
    short = case_of(replace(two, size="llama3-8b", context_length=1024, tokens_per_step=0))
    assert (short.batch_size, short.accumulate, short.parallel.wrapper) == (8, 8, "none")
    larger = case_of(replace(two, size="llama3-8b", context_length=8192, tokens_per_step=65_536, chunk=32_768))
    assert (larger.batch_size, larger.accumulate) == (4, 2)


@pytest.mark.slow
@pytest.mark.parametrize("peer", ["compiled", "fsdp2-offload"])
def test_a_peer_is_measured(peer):
    *_, cell = cells_of("streaming", "--peers", peer, "--steps", "1", "--warmup", "0")
    found = {metric.name: metric.samples for metric in measure_peer(cell)}
    assert found["planned_tokens_per_step"] == [512]
    assert found["tokens_per_s"] == pytest.approx([512 / ms * 1e3 for ms in found["step"]])
    assert found["host_in_use"][0] > 0.05


@pytest.mark.parametrize(
    ("arguments", "value"),
    [
        (("--device-gib", "0"), "--device-gib .* 0"),
        (("--host-gib", "inf"), "got inf"),
        (("--chunk", "7"), "--chunk 7"),
        (("--chunk", "8", "--recipe", "stored", "e4m3"), "--chunk 8: matmuls in fp8"),
        (("--context-length", "40", "--chunk", "80", "--recipe", "e4m3"), "--context-length 40: matmuls in fp8"),
        (("--tokens-per-step", "32"), "--tokens-per-step 32 .* 64"),
        (("--timeline",), "--out"),
        (("--world-size", "3"), "--world-size 3: the 2 layers of tiny"),
        (("--world-size", "2", "--peers", "compiled"), "--peers compiled .* --world-size 2"),
        (("--peers", "compiled", "--gpu", "h200"), "--peers compiled"),
        (("--gpu", "l40"), "--gpu l40: did you mean l4"),
        (("--gpu", "a100", "--size", "llama3-8b", "--recipe", "e4m3"), "--recipe e4m3: A100 40GB has no products"),
        (("--gpu", "l4", "--size", "llama3-8b"), "--device-gib 24 is more than L4 has, 22.5 GiB"),
        (("--gpu", "h200"), "--gpu simulates models for GPUs: give --size"),
        (("--size", "huge"), "'huge'"),
    ],
)
def test_bad_values_are_named(arguments, value):
    with pytest.raises(ValueError, match=value):
        cells_of("streaming", *arguments)


def test_a_large_model_is_not_run_on_a_cpu():
    (cell,) = cells_of("streaming", "--size", "llama3-1b", "--device-gib", "16")
    with pytest.raises(Unsupported, match="--gpu h200"):
        measure(cell)


def test_quantized_matmuls_make_plans_of_their_own():
    stored, quantized = cells_of("streaming", "--gpu", "h100", "--size", "llama3-1b", "--tokens-per-step", "65536",
                                 "--device-gib", "12", "--host-gib", "24", "--recipe", "stored", "e4m3")  # fmt: skip
    first, second = ({metric.name: metric.samples[0] for metric in measure(cell)} for cell in (stored, quantized))
    assert second["simulated_tokens_per_s"] > 1.1 * first["simulated_tokens_per_s"]
    assert max(one["planned_device"] for one in (first, second)) <= 12
    assert "e4m3" in str(quantized) and "stored" not in str(stored)


@pytest.mark.gpu
@pytest.mark.parametrize("recipe", ["stored", "e4m3"])
def test_a_small_model_runs_under_caps_on_a_gpu(tmp_path, device_to_itself, recipe):
    """With all that a large one needs: caps, a pinned slab, streams with times, the picture."""
    (cell,) = cells_of("streaming", "--size", "small", "--context-length", "2048", "--device-gib", "2.5", "--host-gib",
                       "16", "--tokens-per-step", "65536", "--steps", "2", "--recipe", recipe,
                       device="cuda")  # fmt: skip
    found = {metric.name: metric.samples for metric in measure(cell, tmp_path)}
    assert found["device_in_use"][0] <= 2.5
    assert found["host_in_use"][0] <= 16
    assert len(found["tokens_per_s"]) == 2
    assert 0 < found["link_in"][0] < 100
    name = "small_2048_2.5_16" + ("" if recipe == "stored" else f"_{recipe}")
    assert (tmp_path / f"timeline_{name}.csv").exists()


def test_a_cell_that_holds_no_plan_says_what_is_short_and_nothing_that_its_columns_say():
    (cell,) = cells_of("streaming", "--gpu", "h200", "--device-gib", "0.0001", "--host-gib", "0.0001")
    with pytest.raises(PredictedOutOfMemory, match=r"^the device is \S+ GiB short and the host is \S+ GiB short; "):
        measure(cell)


@pytest.mark.slow
def test_a_tiny_model_runs_under_caps_on_a_cpu(tmp_path, capsys):
    code, out, _ = run("benchmark_streaming", capsys, "--timeline", "--recipe", "stored", "e4m3", "--out", tmp_path)
    assert code == 0
    assert {cell["status"] for cell in json.loads(out.splitlines()[-1])["cells"]} == {"ok"}
    assert re.search(r"\| +0\.0009\d+ \|", out), "in use, in GiB"
    rows = read_rows(tmp_path / "benchmark_streaming.csv")
    for _, cell in rows.groupby(["device_gib", "recipe"]):
        found = cell.set_index("metric")["median"]
        assert found["device_in_use"] <= cell["device_gib"].iloc[0]
        assert found["host_in_use"] <= cell["host_gib"].iloc[0]
        assert found["tokens_per_s"] > 0
    stored = rows[rows["recipe"] == "stored"]
    assert stored.loc[stored["metric"] == "host_in_use", "median"].nunique() == 2
    assert sorted(path.name for path in tmp_path.glob("*.png")) == [
        *(
            f"benchmark_streaming_timeline_tiny_64_{gib}_0.001{recipe}.png"
            for gib in ("0.001", "0.002")
            for recipe in ("", "_e4m3")
        ),
        "benchmark_streaming_tiny_64.png",
    ]


@pytest.mark.slow
def test_two_ranks_run_beside_one(tmp_path, capsys):
    asked = ("--world-size", "1", "2", "--device-gib", "0.002", "--steps", "1", "--warmup", "0", "--timeline")
    code, out, _ = run("benchmark_streaming", capsys, *asked, "--out", tmp_path)
    assert code == 0
    rows = read_rows(tmp_path / "benchmark_streaming.csv")
    rates = rows[rows["metric"] == "tokens_per_s"].set_index("ranks")["median"]
    assert f"{100 * rates[2] / rates[1] / 2:.1f}" in out
    pictures = {path.name.rpartition("_")[2] for path in tmp_path.glob("*timeline*rank*.png")}
    assert pictures == {"rank0.png", "rank1.png"}


def test_pairs_of_limits_whose_plan_is_slower_with_more_memory():
    rates = {(6, 12): 100.0, (6, 24): 98.0, (8, 12): 110.0, (8, 24): 110.0}
    rows = [
        ("h200", None, size, 1024, device, host, "simulated_tokens_per_s", rate * factor)
        for size, factor in (("llama3-1b", 1.0), ("llama3-8b", 0.1))
        for (device, host), rate in rates.items()
    ]
    names = ["gpu", "simulated_device", "size", "context_length", "device_gib", "host_gib", "metric", "median"]
    found = slower_with_more(pd.DataFrame(rows, columns=names))
    assert found == {"pairs": 10, "slower": 2, "largest": pytest.approx(0.02)}
