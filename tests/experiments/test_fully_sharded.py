"""What the FSDP benchmark's grid chooses itself, and where a recorded step's time goes, from made-up rows."""

from dataclasses import replace

import pandas as pd
import pytest

from cs336_systems.experiments.fully_sharded import Options, make_cells
from cs336_systems.experiments.fully_sharded_breakdown import breakdown_figure, breakdown_table, recorded_lines
from cs336_systems.harness.fit import predicted_states
from cs336_systems.harness.record import Metric, parse_samples

LEADERBOARD = Options(
    size=("leaderboard-8b",),
    context_length=(32_768,),
    batch_size=(1,),
    dtype=("bf16",),
    attention=("hopper",),
    optimizer=("fused",),
    kernels=("fused",),
    fsdp=("ours",),
    world_size=(2,),
)


def test_a_budget_decides_what_blocks_keep_and_says_why(capsys):
    (cell,) = make_cells(replace(LEADERBOARD, memory_budget_gib=133.0, peer_checkpoint=()))
    assert cell.keep.endswith("+products")
    told = capsys.readouterr().err
    assert f"within 133 GiB, least recomputation: keep {cell.keep}: predicted peak 13" in told
    assert "SwiGLU recomputed" in told
    (alone, peer) = make_cells(replace(LEADERBOARD, memory_budget_gib=60.0, peer_checkpoint=("full",)))
    assert (peer.keep, peer.checkpoint) == ("autograd", "full")
    assert alone.keep != cell.keep


def test_masters_are_among_the_states_that_are_predicted(capsys):
    for update in ("after-backward", "under-backward"):
        plain, masters = (
            make_cells(replace(LEADERBOARD, keep=("products",), update=(update,), master_weights=(master,)))[0]
            for master in ("none", "fp32")
        )
        more = predicted_states(masters, 2) - predicted_states(plain, 2)
        assert more == pytest.approx(4 * plain.config.n_parameters / 2, rel=1e-3)
    (alone,) = make_cells(replace(LEADERBOARD, memory_budget_gib=133.0, master_weights=("fp32",)))
    assert alone.keep != make_cells(replace(LEADERBOARD, memory_budget_gib=133.0))[0].keep
    assert "fused kernels masters in fp32 within 133 GiB" in capsys.readouterr().err


def test_what_cannot_be_had_is_refused():
    faults = {
        "got inf": {"memory_budget_gib": float("inf")},
        "--memory-budget-gib chooses": {"memory_budget_gib": 100.0, "keep": ("all",)},
        "fits 10 GiB for leaderboard-8b": {"memory_budget_gib": 10.0},
    }
    for message, fault in faults.items():
        with pytest.raises(ValueError, match=message):
            make_cells(replace(LEADERBOARD, **fault))
    for name, value in {"prefetch": (2,), "update": ("under-backward",), "gather_by": ("copies",)}.items():
        with pytest.raises(ValueError, match=f"--{name.replace('_', '-')} is for --fsdp ours"):
            make_cells(replace(Options.default("cpu"), fsdp=("torch", "ddp"), **{name: value}))


def test_weights_that_are_cast_are_not_copied():
    copied = replace(Options.default("cpu"), world_size=(2,), gather_by=("collectives", "copies"))
    found = [(cell.fsdp, cell.gather_by) for cell in make_cells(copied)]
    assert found == [("ours", "collectives"), ("ours", "copies"), ("torch", "collectives"), ("ddp", "collectives")]
    assert [cell.parallel.gather_by for cell in make_cells(copied)] == [gather_by for _, gather_by in found]
    with pytest.raises(ValueError, match="--gather-by copies (.*) --dtype bf16-compute casts them"):
        make_cells(replace(copied, dtype=("bf16-compute",)))


PARTS = {"forward_products": 800.0, "forward_attention": 500.0, "backward_products": 1250.0, "backward_idle": 2.0}


def rows(**settings) -> pd.DataFrame:
    plain = {"gpu": "NVIDIA H200", "size": "leaderboard-8b", "batch_size": 1, "context_length": 32_768, "dtype": "bf16"}
    plain |= {"fsdp": "ours", "world_size": 2, "keep": "products", "repeat": 0, "status": "ok", "message": ""}
    metrics = [Metric("step", "ms", [4300.0]), *(Metric(name, "ms", [ms, ms + 2]) for name, ms in PARTS.items())]
    return parse_samples(pd.DataFrame([plain | settings | metric.statistics() for metric in metrics]))


def test_every_part_stands_beside_its_bound():
    (line,) = recorded_lines(rows())
    frame = breakdown_table(line).frame.set_index("kind")
    assert list(frame.index) == ["products", "attention", "elementwise", "optimizer", "communication", "idle", "all"]
    assert frame.loc["products", ["forward ms", "forward least"]].tolist() == ["801.0", "579.4"]
    assert frame.loc["products", "above least"] == "561.0"  # 801 + 1,251 less 579.4 and 911.5, unrounded
    assert frame.loc["all", "step ms"] == f"{sum(PARTS.values()) + 4:,.1f}"
    assert frame.loc["optimizer", "optimizer least"] == "11.8"
    figure = breakdown_figure(rows())
    labels = [label.get_text() for label in figure.axes[0].get_yticklabels()]
    assert labels == ["forward: products", "forward: attention", "backward: products", "backward: idle"]


@pytest.mark.parametrize("unknown", [{"gpu": ""}, {"keep": "autograd"}, {"dtype": "bf16-compute"}])
def test_what_has_no_bounds_is_shown_without(unknown):
    (line,) = recorded_lines(rows(**unknown))
    frame = breakdown_table(line).frame.set_index("kind")
    assert frame.loc["products", ["forward ms", "forward least", "above least"]].tolist() == ["801.0", "–", "–"]
    assert breakdown_figure(rows(**unknown)) is None


def test_steps_that_were_not_recorded_have_none():
    unrecorded = rows()[rows()["metric"] == "step"]
    assert recorded_lines(unrecorded) == []
    assert breakdown_figure(unrecorded) is None
