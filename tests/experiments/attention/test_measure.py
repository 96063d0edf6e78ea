"""The attention cell on the CPU: each variant's dense form is the variant, and what it cannot be is said."""

import pytest
import torch
import torch.nn.functional as F

from cs336_systems.attention.shapes import validate
from cs336_systems.attention.variants import dense_attention
from cs336_systems.case import Unsupported
from cs336_systems.experiments.attention import measure as cells
from cs336_systems.experiments.attention.cells import VARIANTS, AttentionCell, Options
from cs336_systems.experiments.attention.experiment import stages
from cs336_systems.experiments.attention.measure import make_variant, measure
from cs336_systems.harness.isolation import PredictedOutOfMemory


def cell(**values) -> AttentionCell:
    defaults = {
        "device": "cpu",
        "grid": "variants",
        "impl": "sdpa-dense-mask",
        "dtype": "fp32",
        "d_head": 16,
        "length": 300,
        "batch_size": 2,
        "heads": 4,
        "causal": False,
        "mask": "causal",
        "clock": "harness",
        "autotune": False,
        "repeat": 0,
        "seed": 0,
    }
    return AttentionCell(**(defaults | values))


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


def test_errors_are_computed_in_the_first_turn_alone(monkeypatch):
    monkeypatch.setattr(cells, "timed", lambda run, device: [1.0 for _ in [run()]])
    first, later = ({metric.name for metric in measure(cell(repeat=repeat))} for repeat in range(2))
    assert first - later == {f"error_{name}" for name in ("o", "dq", "dk", "dv")}


def test_cells_of_a_dtype_share_a_process():
    both = [cell(impl=impl, d_head=d, dtype=dtype) for dtype in ("fp32", "bf16") for impl, d in (("a", 16), ("b", 64))]
    (stage,) = stages(Options(), both, [])
    assert [stage.share(one) == stage.share(both[0]) for one in both] == [True, True, False, False]
    (stage,) = stages(Options(repeat=2), both, [])
    assert len({stage.share(one) for one in both}) == 1


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_do_bench_agrees_with_the_harness_on_a_gpu():
    values = {
        "device": "cuda",
        "grid": "flash",
        "dtype": "bf16",
        "d_head": 64,
        "length": 8192,
        "mask": "",
        "causal": True,
    }
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
