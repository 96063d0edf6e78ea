"""Attention's benchmark: a cell on the CPU, variants in dense form, the search of tiles, tables and figures."""

import numpy as np
import pandas as pd
import pytest
import torch
import torch.nn.functional as F

from cs336_systems.attention.flash import tiles
from cs336_systems.attention.flash.tiles import KERNELS, Tile, committed_tile, tile_for, use_tile
from cs336_systems.attention.shapes import validate
from cs336_systems.attention.variants import dense_attention
from cs336_systems.case import Unsupported
from cs336_systems.config import ATTENTIONS
from cs336_systems.costs.attention import AttentionWork
from cs336_systems.experiments import attention_measure as cells
from cs336_systems.experiments.attention import (
    ATTENTION,
    VARIANTS,
    AttentionCell,
    Options,
    account_table,
    comparison_table,
    length_tables,
    stages,
    tile_table,
    time_of,
)
from cs336_systems.experiments.attention_figures import MASKED, SEEN, SKIPPED, masks_figure, picture, scaling_figure
from cs336_systems.experiments.attention_measure import candidates, make_variant, measure, search_tiles
from cs336_systems.harness.isolation import PredictedOutOfMemory


def cell(**values) -> AttentionCell:
    shape = {"d_head": 16, "length": 300, "batch_size": 2, "heads": 4}
    return AttentionCell(
        **{"device": "cpu", "impl": "sdpa-dense-mask", "dtype": "fp32", "mask": "causal"} | shape | values
    )


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in VARIANTS if "softcap" not in name])
def test_a_dense_mask_is_the_variant(name):
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, 4, 300, 16) for _ in range(3))
    shape = validate(q, k, v)
    variant = make_variant(name, shape, q.device, of_heads=4)
    dense = cells._dense_form(variant, shape, q)
    assert dense.dtype == (torch.bool if variant.score_formula is None else torch.float32)
    wanted, _ = dense_attention(q.double(), k.double(), v.double(), variant)
    got = F.scaled_dot_product_attention(q, k, v, attn_mask=dense)
    torch.testing.assert_close(got.double(), wanted, rtol=0, atol=1e-5)


def test_the_first_head_of_many_is_the_variant_of_the_oracle():
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, 4, 300, 16, dtype=torch.float64) for _ in range(3))
    for name in VARIANTS:
        whole = make_variant(name, validate(q, k, v), q.device, of_heads=4)
        first = make_variant(name, validate(q[:1, :1], k[:1, :1], v[:1, :1]), q.device, of_heads=4)
        o, _ = dense_attention(q, k, v, whole)
        alone, _ = dense_attention(q[:1, :1], k[:1, :1], v[:1, :1], first)
        torch.testing.assert_close(o[:1, :1], alone, rtol=0, atol=1e-12)


def test_what_is_no_sum_is_unsupported():
    with pytest.raises(Unsupported, match="can add to scores, and 'causal & softcap 30' does more"):
        measure(cell(mask="causal & softcap"))
    with pytest.raises(Unsupported, match="flex is compiled for CUDA devices"):
        measure(cell(impl="flex"))


def test_a_cell_of_a_variant_counts_what_is_seen(monkeypatch):
    monkeypatch.setattr(cells, "timed", lambda run, device: [1.0 for _ in [run()]])
    metrics = {metric.name: metric.samples for metric in measure(cell(mask="causal"))}
    assert metrics["seen_scores"][0] == pytest.approx(100 * 301 / 600)
    assert metrics["mask_memory"][0] == pytest.approx(300 * 300 / 2**30)
    full = 4 * 2 * 4 * 300 * 300 * 16
    assert metrics["forward_tflops"][0] == pytest.approx(full * 301 / 600 / 1e9)
    assert max(metrics[f"error_{name}"][0] for name in ("o", "dq", "dk", "dv")) < 1e-6


def test_do_bench_takes_the_times_of_its_cells(monkeypatch):
    monkeypatch.setattr(cells, "timed", lambda run, device: [1.0 for _ in [run()]])
    monkeypatch.setattr(cells, "timed_by_do_bench", lambda run, device: [2.0, 3.0, 4.0] if run() is not None else [])
    metrics = {metric.name: metric.samples for metric in measure(cell(clock="do-bench"))}
    assert all(metrics[name] == [2.0, 3.0, 4.0] for name in ("forward", "backward", "both"))
    assert {m.name: m.samples for m in measure(cell())}["both"] == [1.0]


def test_cells_of_a_dtype_share_a_process():
    both = [cell(impl=impl, d_head=d, dtype=dtype) for dtype in ("fp32", "bf16") for impl, d in (("a", 16), ("b", 64))]
    (stage,) = stages(Options(), both, [])
    assert [stage.share(one) == stage.share(both[0]) for one in both] == [True, True, False, False]
    (stage,) = stages(Options(repeat=2), both, [])
    assert len({stage.share(one) for one in both}) == 1


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_do_bench_agrees_with_the_harness_on_a_gpu():
    values = {"device": "cuda", "dtype": "bf16", "d_head": 64, "length": 8192, "mask": "", "causal": True}
    times = {}
    for clock in ("harness", "do-bench"):
        torch.manual_seed(0)
        metrics = {m.name: m for m in measure(cell(**values, impl="flash", batch_size=1, heads=16, clock=clock))}
        times[clock] = {name: metrics[name].statistics()["median"] for name in ("forward", "backward", "both")}
        assert metrics["both"].unit == "ms" and len(metrics["both"].samples) >= 10
    assert times["do-bench"] == pytest.approx(times["harness"], rel=0.15)


def test_what_cannot_fit_is_predicted_with_both_figures(monkeypatch):
    monkeypatch.setattr(cells, "free_bytes", lambda device: 2**30)
    with pytest.raises(PredictedOutOfMemory, match=r"needs 68\.\d GiB, 1\.0 GiB are free"):
        measure(cell(impl="reference", mask="", length=65_536, batch_size=1, heads=1, causal=True))


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("d_head", [16, 64, 80, 128, 256])
@pytest.mark.parametrize("element_size", [2, 4])
def test_the_committed_tile_comes_first_and_none_twice(kernel, d_head, element_size):
    found = candidates(kernel, d_head, element_size)
    assert found[0] == committed_tile(kernel, d_head, element_size)
    assert len(set(found)) == len(found)
    if element_size == 2:
        assert all((tile.block_k if kernel == "dkdv" else tile.block_q) >= 64 for tile in found[1:])


def test_a_tile_in_use_leaves_the_table_alone(monkeypatch):
    monkeypatch.setattr(tiles, "_replaced", {})
    committed = tile_for("dq", 100, 2)
    other = Tile(64, 32, 4, 2)
    use_tile("dq", 128, 2, other)
    assert tile_for("dq", 100, 2) == other
    assert committed_tile("dq", 100, 2) == committed
    assert candidates("dq", 128, 2)[0] == committed
    assert tile_for("dq", 64, 2) == committed_tile("dq", 64, 2)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_search_times_the_committed_tile_of_every_kernel(monkeypatch):
    monkeypatch.setattr(
        "cs336_systems.experiments.attention_measure.candidates",
        lambda *key: [committed_tile(*key), Tile(32, 32, 4, 2)],
    )
    q, k, v, do = (torch.randn(1, 2, 300, 64, device="cuda", dtype=torch.bfloat16) for _ in range(4))
    found = list(search_tiles(q, k, v, do, causal=True))
    assert [timing.kernel for timing in found] == list(KERNELS)
    for timing in found:
        assert committed_tile(timing.kernel, 64, 2) in timing.samples_ms
        assert timing.best in timing.samples_ms
        assert all(len(samples) == 15 for samples in timing.samples_ms.values())


def row(impl, metric, median, *, status="ok", message="", repeat=0, **settings):
    shape = {"batch_size": 1, "heads": 2, "d_head": 64, "length": 1024, "causal": True, "mask": ""}
    own = {
        "gpu": "a GPU",
        "device": "cuda",
        "grid": "flash",
        "dtype": "bf16",
        **shape,
        "impl": impl,
        "clock": "harness",
    }
    outcome = {"status": status, "message": message, "metric": metric, "median": median}
    return own | settings | outcome | {"argv": "a command", "repeat": repeat}


def rows_of(impl, ms, *, kept=0.25, **values):
    metrics = {"forward": ms, "backward": 2 * ms, "both": 3 * ms, "kept_for_backward": kept, "peak_memory": 1.0}
    metrics |= {"predicted_peak_memory": 1.5, "error_o": 1e-3, "error_dq": 3e-3}
    metrics |= {f"{name}_tflops": 100.0 for name in ("forward", "backward", "both")}
    return [row(impl, name, value, **values) for name, value in metrics.items()]


def test_a_cell_is_a_line_and_a_failure_says_why():
    rows = pd.DataFrame([*rows_of("flash", 2.0), row("flex", "", None, status="oom", message="too much")])
    frame = ATTENTION.of(rows).frame
    assert list(frame["impl"]) == ["flash", "flex"]
    assert list(frame["both ms"]) == ["6.00", "–"]
    assert list(frame["largest error"]) == ["3.0e-03", "–"]
    assert list(frame["status"]) == ["ok", "oom: too much"]
    assert "mask GiB" not in frame.columns


def test_repeats_are_pooled_and_compared_with_their_neighbours():
    times = {"flash": (1.0, 2.0, 9.0), "peer": (3.0, 4.0, 9.0)}
    rows = pd.DataFrame([r for impl in times for i, ms in enumerate(times[impl]) for r in rows_of(impl, ms, repeat=i)])
    assert list(ATTENTION.of(rows).frame["forward ms"]) == ["2.00", "4.00"]
    frame = comparison_table(rows).frame
    assert list(frame["flash ms"]) == ["2.00", "4.00", "6.00"]
    assert list(frame["peer / flash"]) == ["2.00"] * 3
    again = pd.DataFrame(rows_of("flash", 4.0) + rows_of("peer", 5.0)).assign(argv="a later command")
    frame = comparison_table(pd.concat([rows, again])).frame
    assert list(frame["flash ms"]) == ["4.00", "8.00", "12.0"]
    assert list(frame["peer / flash"]) == ["1.25"] * 3
    with pytest.raises(ValueError, match="no row holds the metric 'forward' of 'other'"):
        time_of(rows, "forward", "other")


def test_lengths_are_lines_and_gaps_are_told_from_failures():
    rows = rows_of("flash", 2.0) + rows_of("flash", 4.0, length=2048)
    rows += [row("peer", "", None, status="unsupported", length=2048)]
    frame = length_tables(pd.DataFrame(rows), "both")[0].frame
    assert list(frame["length"]) == ["1,024", "2,048"]
    assert list(frame["flash"]) == ["6.00", "12.0"]
    assert list(frame["peer"]) == ["", "unsupported"]


def test_the_account_adds_up():
    work = AttentionWork(8, 1, 1, 4096, 4096, 16, causal=True)
    frame = account_table(work, 4).frame
    for column, compiled in (("eager", False), ("compiled", True)):
        parts = frame[column].astype(float)
        assert parts[1:4].sum() == pytest.approx(parts[4], rel=0.01)
        assert parts[4] == pytest.approx(work.materialised_bytes(4, compiled=compiled) / 2**30, rel=0.01)


def test_tiles_are_sorted_by_time():
    rows = pd.DataFrame([row("flash", f"tile dq {tile}", ms) for tile, ms in (("a", 2.0), ("b", 1.0), ("c", 4.0))])
    frame = tile_table(rows, most=2).frame
    assert list(frame["tile"]) == ["b", "a"]
    assert list(frame["of the fastest"]) == ["1.000", "2.000"]


def test_a_figure_of_one_shape_and_of_what_memory_ended():
    ran = [r for i in range(9) for n in (128, 4096) for r in rows_of(f"impl {i}", n, kept=n * n / 1e9, length=n)]
    older = [r for n in (128, 4096) for r in rows_of("impl 0", 7.0, kept=7.0, length=n)]
    ended = [row("impl 0", "", None, status="oom", length=8192)]
    figure = scaling_figure(pd.DataFrame(older + ran + ended))
    times, memory = figure.axes
    impls = [line for line in times.lines if line.get_label().startswith("impl")]
    assert [line.get_label() for line in impls] == [f"impl {i}" for i in range(9)]
    assert all((list(line.get_xdata()), list(line.get_ydata())) == ([128, 4096], [384, 12288]) for line in impls)
    assert len({(line.get_color(), line.get_marker()) for line in impls}) == len(impls) == len(ATTENTIONS)
    assert list(memory.lines[0].get_ydata()) == pytest.approx([1024 * n * n / 1e9 for n in (128, 4096)])
    assert [text.get_text() for text in memory.texts] == ["∝ length²"]
    (edge,) = (line for line in times.lines if line.get_label() == "_impl 0 oom")
    assert list(edge.get_xdata()) == [8192]
    with pytest.raises(ValueError, match="takes one shape, got"):
        scaling_figure(pd.DataFrame(ran + rows_of("flash", 1.0, d_head=128)))
    assert scaling_figure(pd.DataFrame(ended)) is None


def test_a_block_without_a_seen_score_is_skipped():
    mask = torch.ones(256, 256, dtype=torch.bool).tril()
    found = picture(mask)
    assert (found[:128, 128:] == SKIPPED).all()
    assert (found[128:, :128] == SEEN).all()
    assert np.array_equal(found[:128, :128] == MASKED, ~mask[:128, :128].numpy())


def test_every_mask_has_its_picture_and_its_shares():
    figure = masks_figure(512)
    shown = {axes.get_title(loc="left"): axes for axes in figure.axes}
    assert list(shown)[:2] == ["full", "causal"] and len(shown) == 8
    assert (shown["full"].images[0].get_array() == SEEN).all()
    assert shown["full"].texts[0].get_text() == "100 % seen, 0 % of blocks skipped"
    assert shown["causal"].texts[0].get_text() == "50 % seen, 38 % of blocks skipped"  # 6 of 16 blocks
    assert shown["causal, the last 256 queries"].images[0].get_array().shape == (256, 512)


def test_the_command_draws_where_it_is_told(load_script, tmp_path, capsys):
    main = load_script("scripts/draw_masks.py").main
    assert main(["--length", "512", "--out", str(tmp_path)]) == 0
    assert (tmp_path / "attention_masks.png").exists()
    assert capsys.readouterr().out == f"drew {tmp_path / 'attention_masks.png'}\n"


@pytest.mark.parametrize("length", ["100", "256", "1000"])
def test_bad_input_is_one_sentence(load_script, length, capsys):
    assert load_script("scripts/draw_masks.py").main(["--length", length]) == 2
    error = capsys.readouterr().err
    assert error == f"draw_masks: --length must be a multiple of 128, at least 512, got {length}\n"
