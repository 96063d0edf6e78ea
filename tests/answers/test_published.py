"""Published steps beside predictions: every figure has its row, and errors are those that the page tells of."""

from dataclasses import replace

import pytest

from cs336_systems.answers import training
from cs336_systems.answers.published import STEPS, WITHIN, Published, PublishedStep, ours, torchtitan
from cs336_systems.config import resolve_size
from cs336_systems.costs.kept import keep_of_blocks, recomputed_flops


def test_predictions_are_within_a_fifth_and_torchtitans_only_as_its_program():
    """As this suite on H100s of 700 W, all eight of torchtitan's would be a quarter to a half too short."""
    tables, summary = Published().answer()
    assert summary["steps"] == len(STEPS) == len(tables[0].frame) == 24
    assert summary["within 20 %"] == 24
    assert abs(summary["largest"]) < WITHIN
    for step in STEPS:
        as_ours = step.error(ours())
        if step.name.startswith("torchtitan"):
            assert -0.55 < as_ours < -0.2
        else:
            assert abs(as_ours) < WITHIN
            assert step.program() == ours()
    assert summary["within 20 % as ours on 700 W"] == 16
    publishers = tables[1].frame.astype(str)
    assert list(publishers["steps"]) == list(publishers["within 20 %"]) == ["14", "2", "8"]
    assert list(publishers["as ours on 700 W: within 20 %"]) == ["14", "2", "0"]


def test_torchtitan_has_slower_attention_and_hides_a_part_of_what_copies_do():
    program, here = torchtitan(), ours()
    assert 0.5 < program.sustained.attention_forward / here.sustained.attention_forward < 0.6
    assert 0.5 < program.sustained.attention_backward / here.sustained.attention_backward < 0.65
    assert replace(program.sustained, attention_forward=0, attention_backward=0) == replace(
        here.sustained, attention_forward=0, attention_backward=0
    )
    asynchronous = next(step for step in STEPS if step.name == "torchtitan 70b copies 256")
    seconds = [asynchronous.predicted_s(replace(program, hidden=share)) for share in (0.0, 0.25, 1.0)]
    assert seconds[1] == pytest.approx(0.75 * seconds[0] + 0.25 * seconds[2])
    waiting = next(step for step in STEPS if step.name == "torchtitan 70b 256")
    assert seconds[0] == waiting.predicted_s(program)


def test_checkpointing_by_operator_recomputes_every_second_product():
    step = next(step for step in STEPS if step.name == "torchtitan 8b 8")
    config = resolve_size(step.size)
    d, key = config.d_model, config.d_kv
    every_second = d * key + d * d + d * config.d_ff  # of q, k, v, the output's, w1, w3, w2
    blocks = keep_of_blocks(step.layout.keep, config.n_layers)
    found = sum(recomputed_flops(config, 1, 8192, kept, attention=1) for kept in blocks)
    assert found == config.n_layers * 2 * 8192 * every_second


def test_layouts_use_the_gpus_and_sequences_that_were_published():
    for step in STEPS:
        layout = step.layout
        assert layout.n_ranks == step.n_gpus
        assert layout.data * layout.micro_batch * layout.n_micro_batches == step.n_sequences


def test_rates_become_seconds(monkeypatch):
    step = PublishedStep("a step", "llama3-8b", 8, 16, {"zero": 3})
    for figure, seconds in (
        ("2.5 s", 2.5),
        ("8,192 tokens/s a GPU", 2.0),
        # 6 x (8.03e9 - 525e6 of the embedding) + 12 x 32 x 4096 x 8192 a token
        ("400 TFLOP/s a GPU", 2 * 8192 * 5.79e10 / 400e12),
    ):
        monkeypatch.setattr(training, "outside", lambda name, figure=figure: figure)
        assert step.seconds == pytest.approx(seconds, rel=1e-2)
    monkeypatch.setattr(training, "outside", lambda name: "3 furlongs")
    with pytest.raises(ValueError, match="'furlongs', which is no time"):
        _ = step.seconds
