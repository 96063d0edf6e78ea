"""Attention's benchmark: its refusals, a cell on the CPU, variants in dense form, and tables."""

import sys
import types

import numpy as np
import pandas as pd
import pytest
import torch
import torch.nn.functional as F

from cs336_systems.attention.shapes import validate
from cs336_systems.attention.variants import dense_attention
from cs336_systems.case import Unsupported
from cs336_systems.experiments import attention_measure
from cs336_systems.experiments.attention import ATTENTION, VARIANTS, AttentionCell, comparison_table, time_over
from cs336_systems.experiments.attention_measure import make_variant, measure
from cs336_systems.harness.isolation import PredictedOutOfMemory
from tests.benchmarks.commands import cells_of


def cell(**values) -> AttentionCell:
    shape = {"d_head": 16, "length": 300, "batch_size": 2, "heads": 4}
    return AttentionCell(
        **{"device": "cpu", "impl": "sdpa-dense-mask", "dtype": "fp32", "mask": "causal"} | shape | values
    )


def measured(**values):
    return {metric.name: metric.samples for metric in measure(cell(**values))}


def test_bad_values_are_named():
    for arguments, message in {
        "--clock harness do-bench": "--clock do-bench times CUDA devices, got --device cpu",
        "--clock device harness": "--clock device times CUDA devices, got --device cpu",
        "--grid variants --impl flash-attn-4": "--length 256: --grid variants has 4096 .a CPU takes 256 and 1024",
        "--length 77": "--length 77: --grid pytorch flash has 128, 256, 512, 1024, ",
        "--grid flash --impl tiled --length 128 17 --d-head 16": "--length 17: --grid flash has 128, 256",
        "--length 256 --d-head 24": "--d-head 24: --grid pytorch flash has 16, 32, 64, 128",
        "--grid training": "--length 256: --grid training has 1024, 2048",
        "--grid training --length 1024 --d-head 128": "no cell of --grid training has the values asked for, together",
        "--grid variants --impl flash": "--length 256: --grid variants has 4096 .a CPU takes 256 and 1024",
    }.items():
        with pytest.raises(ValueError, match=message):
            cells_of("attention", *arguments.split())


@pytest.mark.slow
def test_a_cpu_measures_attention_with_and_without_heads():
    shared = {"impl": "tiled", "heads": 6, "kv_heads": 2, "causal": True}
    for values in ({"impl": "reference"}, {"impl": "sdpa-flash", "heads": 0, "causal": True}, shared):
        metrics = measured(mask="", length=100, **values)
        assert max(metrics[f"error_{name}"][0] for name in ("o", "dq", "dk", "dv")) < 2e-6
        assert min(len(metrics[name]) for name in ("forward", "backward", "both")) >= 10


def test_a_dense_mask_and_the_first_head_alone_are_the_variant():
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, 4, 150, 16, dtype=torch.float64) for _ in range(3))
    shape, first = validate(q, k, v), validate(q[:1, :1], k[:1, :1], v[:1, :1])
    for name in VARIANTS:
        whole, of_first = (make_variant(name, each, q.device, of_heads=4) for each in (shape, first))
        wanted, _ = dense_attention(q, k, v, whole)
        alone, _ = dense_attention(q[:1, :1], k[:1, :1], v[:1, :1], of_first)
        torch.testing.assert_close(wanted[:1, :1], alone, rtol=0, atol=1e-12)
        if "softcap" not in name:
            mask = attention_measure._dense_form(whole, shape, q)
            got = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
            torch.testing.assert_close(got, wanted, rtol=0, atol=1e-5)


def test_a_cell_of_a_variant_counts_what_is_seen_by_its_clock(monkeypatch):
    monkeypatch.setattr(attention_measure, "timed", lambda run, device: [1.0 for _ in [run()]])
    monkeypatch.setattr(attention_measure, "timed_by_do_bench", lambda run, device: [2.0, 3.0])
    metrics = measured()
    assert metrics["seen_scores"][0] == pytest.approx(100 * 301 / 600)
    assert metrics["mask_memory"][0] == pytest.approx(300 * 300 / 2**30)
    full = 4 * 2 * 4 * 300 * 300 * 16
    assert metrics["forward_tflops"][0] == pytest.approx(full * 301 / 600 / 1e9)
    assert max(metrics[f"error_{name}"][0] for name in ("o", "dq", "dk", "dv")) < 1e-6
    assert metrics["both"] == [1.0]
    assert measured(clock="do-bench")["both"] == [2.0, 3.0]


def test_what_cannot_be_measured_is_told_apart(monkeypatch):
    with pytest.raises(Unsupported, match="'causal & softcap 30' does more"):
        measured(mask="causal & softcap")
    for values in ({"impl": "flex"}, {"impl": "flash", "mask": ""}):
        with pytest.raises(Unsupported, match="compiled for CUDA devices"):
            measured(**values)
    monkeypatch.setattr(attention_measure, "free_bytes", lambda device: 2**30)
    with pytest.raises(PredictedOutOfMemory, match=r"needs 68\.\d GiB, 1\.0 GiB are free"):
        measured(impl="reference", mask="", length=65_536, batch_size=1, heads=1, causal=True)


def test_flash_attention_4_gets_views_and_returns_the_output_alone(monkeypatch):
    seen = []

    def flash_attn_func(q, k, v, causal=False):
        seen.extend((q, k, v))
        heads_first = (x.transpose(1, 2) for x in (q, k, v))
        o = F.scaled_dot_product_attention(*heads_first, is_causal=causal, enable_gqa=q.shape[2] != k.shape[2])
        return o.transpose(1, 2).contiguous(), None

    monkeypatch.setitem(sys.modules, "flash_attn", types.ModuleType("flash_attn"))
    monkeypatch.setitem(sys.modules, "flash_attn.cute", types.SimpleNamespace(flash_attn_func=flash_attn_func))
    on_a_gpu = (torch.device("cuda"), torch.bfloat16)
    attend = attention_measure._flash_4(*on_a_gpu, causal=True)
    q, k, v = (torch.randn(2, heads, 50, 16) for heads in (4, 2, 2))
    wanted = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    torch.testing.assert_close(attend(q, k, v), wanted, rtol=0, atol=1e-6)
    assert [x.shape for x in seen] == [(2, 50, 4, 16), (2, 50, 2, 16), (2, 50, 2, 16)]
    assert [x.data_ptr() for x in seen] == [x.data_ptr() for x in (q, k, v)]
    alone = [x[:, 0] for x in (q, k, v)]
    torch.testing.assert_close(attend(*alone), F.scaled_dot_product_attention(*alone, is_causal=True))
    monkeypatch.setitem(sys.modules, "flash_attn.cute", None)
    for device, dtype, message in (
        (*on_a_gpu, "^flash-attn-4 is not there"),
        ("cuda", torch.float32, "multiplies in torch.bfloat16 and torch.float16, the inputs are torch.float32"),
        ("cpu", torch.bfloat16, "compiled for CUDA devices, the inputs are on cpu"),
    ):
        with pytest.raises(Unsupported, match=message):
            attention_measure._flash_4(torch.device(device), dtype, causal=True)


def test_shapes_of_training_are_measured_beside_peers():
    asked = "--grid training --impl hopper flash-attn-4 --length 16384 1024 --d-head 64 128"
    cells = cells_of("attention", *asked.split())
    assert [(each.impl, each.heads, each.kv_heads, each.d_head) for each in cells[::2]] == [
        *(("hopper", 16, 0, 64), ("hopper", 14, 0, 64), ("hopper", 32, 0, 128), ("hopper", 64, 8, 128))
    ]
    assert {each.impl for each in cells[1::2]} == {"flash-attn-4"}
    assert (cells[-1].work.kv_heads, cells[0].work.kv_heads) == (8, 16)
    assert str(cells[-1]) == "flash-attn-4 bf16 batch 1 heads 64/8 length 16384 d 128"


@pytest.mark.gpu
def test_flash_attention_4_is_as_exact_as_ours_on_a_gpu():
    values = {"device": "cuda", "dtype": "bf16", "d_head": 64, "length": 500, "mask": "", "causal": True}
    try:
        theirs = measured(**values, impl="flash-attn-4", heads=6, kv_heads=2)
    except Unsupported as missing:
        pytest.skip(str(missing))
    ours = measured(**values, impl="flash", heads=6, kv_heads=2, clock="device")
    for name in ("error_o", "error_dq", "error_dk", "error_dv"):
        assert theirs[name][0] <= 2 * ours[name][0]


@pytest.mark.gpu
@pytest.mark.timing
def test_do_bench_agrees_with_the_harness_on_a_gpu():
    values = {"device": "cuda", "dtype": "bf16", "d_head": 64, "length": 8192, "mask": "", "causal": True}
    harness, do_bench = (
        measured(**values, impl="flash", batch_size=1, heads=16, clock=clock) for clock in ("harness", "do-bench")
    )
    for name in ("forward", "backward", "both"):
        assert np.median(do_bench[name]) == pytest.approx(np.median(harness[name]), rel=0.15)
        assert len(harness[name]) >= 10


def row(impl, metric, median, *, status="ok", message="", repeat=0, **settings):
    shape = {"batch_size": 1, "heads": 2, "kv_heads": 0, "d_head": 64, "length": 1024, "causal": True, "mask": ""}
    own = {"gpu": "a GPU", "device": "cuda", "grid": "flash", "dtype": "bf16", "impl": impl, "clock": "harness"}
    outcome = {"status": status, "message": message, "metric": metric, "median": median}
    return own | shape | settings | outcome | {"argv": "a command", "repeat": repeat}


def rows_of(impl, ms, *, kept=0.25, **values):
    metrics = {"forward": ms, "backward": 2 * ms, "both": 3 * ms, "kept_for_backward": kept, "peak_memory": 1.0}
    metrics |= {"predicted_peak_memory": 1.5, "error_o": 1e-3, "error_dq": 3e-3}
    metrics |= {f"{name}_tflops": 100.0 for name in ("forward", "backward", "both")}
    return [row(impl, name, value, **values) for name, value in metrics.items()]


@pytest.mark.slow
def test_repeats_are_pooled_and_compared_with_their_neighbours():
    times = {"flash": (1.0, 2.0, 9.0), "peer": (3.0, 4.0, 9.0)}
    rows = pd.DataFrame([r for impl in times for i, ms in enumerate(times[impl]) for r in rows_of(impl, ms, repeat=i)])
    failed = pd.DataFrame([row("flex", "", None, status="oom", message="too much")])
    frame = ATTENTION.of(pd.concat([rows, failed])).frame
    assert list(frame["forward ms"]) == ["2.00", "4.00", "–"]
    assert list(frame["largest error"]) == ["3.0e-03", "3.0e-03", "–"]
    frame = comparison_table(rows).frame
    assert list(frame["flash ms"]) == ["2.00", "4.00", "6.00"]
    assert list(frame["peer / flash"]) == ["2.00"] * 3
    again = pd.DataFrame(rows_of("flash", 4.0) + rows_of("peer", 5.0)).assign(argv="a later command")
    assert list(comparison_table(pd.concat([rows, again])).frame["peer / flash"]) == ["1.25"] * 3
    shared = [r for impl in times for r in rows_of(impl, 4.0, heads=8, kv_heads=2)]
    absent = [row("absent", "", None, status="unsupported", message="is not there", heads=8, kv_heads=2)]
    frame = comparison_table(pd.DataFrame([*rows.to_dict("records"), *shared, *absent]), errors=True).frame
    assert list(frame["heads"]) == ["2"] * 3 + ["8/2"] * 3
    assert list(frame["absent / flash"]) == ["–"] * 3 + ["unsupported"] * 3
    assert list(frame["peer error"]) == ["1.0e-03", "3.0e-03", "3.0e-03"] * 2
    with pytest.raises(KeyError, match="other"):
        time_over(rows, "forward", "other", "flash")
