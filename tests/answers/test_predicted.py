"""Predictions beside published steps: which tenth is fitted on, that the fit gives the committed shares, the errors."""

import csv
from dataclasses import replace

import numpy as np
import pytest

from cs336_systems.answers import llmq, ml_dataflow
from cs336_systems.answers.own_steps import PARTS, own_steps
from cs336_systems.answers.predicted import (
    Cards,
    errors_of,
    fit,
    fitted_and_rest,
    llmq_engine,
    ml_dataflow_engine,
    named_tenth,
    relative_errors,
)
from cs336_systems.costs.rates import OURS
from cs336_systems.costs.speed_of_light import speed_of_light
from cs336_systems.hardware import GIB

ENGINES = {"ml_dataflow": ml_dataflow_engine(), "llm.q": llmq_engine()}


def test_a_tenth_is_named_by_hash_alone():
    names = [f"step {n}" for n in range(200)]
    tenth = named_tenth(names)
    assert len(tenth) == 20 and tenth < set(names)
    assert tenth == named_tenth(list(reversed(names)))
    assert len(named_tenth(names[:5])) == 2


def test_a_fit_finds_the_shares_that_steps_were_made_with():
    """Of 10 units of work in products and 1 byte, with one step in eight an outlier."""
    made = replace(OURS, products=0.8, memory=0.3)

    class Step:
        def __init__(self, n):
            self.n = n
            self.tokens_per_s = self.rate(made) * (2 if n % 8 == 0 else 1)

        def rate(self, shares):
            return 1 / (self.n / shares.products + 5 / shares.memory)

    found = fit([[Step(n) for n in range(1, 41)]], OURS, ("products", "memory"))
    assert (found.products, found.memory) == (pytest.approx(0.8, rel=0.03), pytest.approx(0.3, rel=0.03))
    assert found.link_alone == OURS.link_alone


def test_llmq_shares_are_those_of_the_named_tenth():
    engine = ENGINES["llm.q"]
    found = fit([fitted_and_rest(steps)[0] for steps in engine.cards.values()], engine.unfitted, engine.fitted)
    for name in engine.fitted:
        assert getattr(found, name) == pytest.approx(getattr(engine.shares, name), rel=2e-3)


def test_ml_dataflow_shares_cannot_be_bettered_on_the_named_tenth():
    """Least absolute errors: no share of its own, 5 % up or down, has less of them on both cards together."""
    engine = ENGINES["ml_dataflow"]
    tenths = [fitted_and_rest(steps)[0] for steps in engine.cards.values()]

    def missed(shares):
        return sum(np.abs(np.log1p(relative_errors(tenth, shares))).mean() for tenth in tenths)

    least = missed(engine.shares)
    for name in engine.fitted:
        for factor in (0.95, 1.05):
            changed = replace(engine.shares, **{name: factor * getattr(engine.shares, name)})
            assert missed(changed) > 0.99 * least, (name, factor)


@pytest.mark.parametrize(
    ("name", "most"), [("ml_dataflow", {"h100": 0.12, "rtx3090": 0.12}), ("llm.q", {"one": 0.10, "several": 0.15})]
)
def test_nine_of_ten_that_nothing_was_fitted_on_are_near(name, most):
    engine = ENGINES[name]
    for card in engine.cards:
        for group, errors, n_fitted in errors_of(engine, card):
            assert n_fitted >= 2
            assert np.quantile(np.abs(errors), 0.9) < most[group.split(", ")[-1]], group
            assert np.median(np.abs(errors)) < 0.06


def test_a_card_that_nothing_is_fitted_on_is_within_a_fifth():
    engine = ENGINES["llm.q"]
    for card in engine.cards:
        for _, errors, n_fitted in errors_of(engine, card, known=False):
            assert n_fitted == 0 and np.quantile(np.abs(errors), 0.9) < 0.2


def test_what_ran_fits_and_what_failed_does_not():
    for engine in ENGINES.values():
        for right, of in engine.feasible.values():
            assert right / of >= 0.98
    assert all(row.fits for row in llmq.read_rows())
    cells = ml_dataflow.read_cells()
    assert len(cells) == 1130
    failed = {
        (cell.model, cell.length, cell.device_cap_gib, cell.host_cap_gib) for cell in ml_dataflow.failed_cells(cells)
    }
    assert ("8", 131_072, 30, 96) in failed  # its notes: 128k needs 112 GiB of the host
    placed = [(ml_dataflow.place(cell), cell) for cell in cells if cell.fits]
    assert np.median([abs(plan.device_bytes / GIB - cell.device_gib) for plan, cell in placed]) < 0.5
    assert all(plan.tokens == cell.rounds * plan.round_tokens for plan, cell in placed)


def test_rows_agree_with_the_share_of_the_speed_of_light_that_they_say():
    with llmq.ROWS.open(newline="", encoding="utf-8") as file:
        said = [float(row["speed_of_light_percent"]) for row in csv.DictReader(file)]
    for row, percent in zip(llmq.read_rows(), said, strict=True):
        block = "fp8" if row.recipe.quantized else "bf16"
        light = speed_of_light(row.config, 1024, row.hardware, block_dtype=block, n_devices=row.n_gpus)
        assert 100 * light.share(row.tokens_per_s) == pytest.approx(percent, rel=0.02)


def test_options_become_this_suites_words():
    row = llmq.Row("H100x8", "--model=Qwen2.5-7B --matmul-dtype=e4m3 --batch-size=16 -grad-accumulation=4 "
                   "--recompute-swiglu --recompute-att --offload-residual --shard-weights", 1.0)  # fmt: skip
    assert row.keep == "all-swiglu-qkv-attention" and row.offload == {"residual"}
    assert (row.layout.zero, row.layout.shards, row.tokens) == (3, 8, 8 * 4 * 16 * 1024)
    assert row.recipe.quantized
    with pytest.raises(ValueError, match="no machine 'TPUx4'"):
        _ = replace(row, machine="TPUx4").hardware


def test_a_card_of_another_file_is_predicted_without_its_steps(tmp_path):
    lines = ml_dataflow.CELLS.read_text(encoding="utf-8").splitlines()
    other = [line.replace("rtx3090", "rtx5090") for line in lines if line.startswith("rtx3090")]
    (tmp_path / "other.csv").write_text("\n".join([lines[0], *other]), encoding="utf-8")
    _, summary = Cards(cells=tmp_path / "other.csv").answer()
    assert summary["ml_dataflow rtx5090"]["fitted on"] == 0
    assert summary["ml_dataflow rtx5090"]["steps"] == len(other)
    with pytest.raises(ValueError, match="--without h200: did you mean"):
        Cards(without="h200").answer()


def test_own_steps_are_near_and_their_peaks_nearer():
    """Rates are fitted on some of those of one H200; H100s, several GPUs and all peaks are not."""
    steps = own_steps((*PARTS, "h200/choice"))
    assert len(steps) > 100 and {step.group for step in steps} >= {"H200, one", "H200, several", "H100, one"}
    errors = np.abs([step.seconds_error for step in steps])
    assert np.mean(errors <= 0.05) > 0.95 and errors.max() < 0.06
    assert max(abs(step.memory_error) for step in steps if step.memory_error is not None) < 0.03
