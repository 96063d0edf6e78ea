"""Tables and quoted numbers of whole models, from hand-made rows."""

import pytest

from cs336_systems.answers.committed import Committed
from cs336_systems.answers.models import (
    backward_over_forward,
    compile_seconds,
    compiled_table,
    deviations,
    first_and_rest,
    mixed_precision_table,
    peak_ratio,
    phases_table,
    warmup_table,
)
from cs336_systems.answers.vocabulary import vocabulary
from tests.report.rows import make_cell, make_frame, ms

STEP = {"size": "small", "context_length": 512, "batch_size": 4, "gpu": "NVIDIA H200"}


def step(size="small", scale=1.0, **values):
    times = (ms("forward", 2.0 * scale, 2.2 * scale), ms("backward", 4.2 * scale, 4.2 * scale))
    return make_cell(*times, ms("optimizer", 1.0, 1.0), ms("step", 7.3 * scale), **(STEP | {"size": size} | values))


def rows():
    failed = make_cell(status="predicted-oom", message="needs 192 GiB", **(STEP | {"size": "10b"}))
    sizes = ("small", "medium", "large", "xl", "2.7b")
    cells = [step(size, dtype=dtype, scale=s) for size in sizes for dtype, s in (("fp32", 2.0), ("autocast-bf16", 0.5))]
    return make_frame(*cells, failed)


def test_phases_have_means_and_deviations_and_failures_their_reason():
    found = phases_table(rows().query("dtype == 'fp32'"))
    assert found.caption == "batch 4, context 512, dtype fp32; mean ± standard deviation of 1 to 2 steps."
    lines = found.frame.set_index("size")
    assert lines.loc["small", "forward ms"] == "4.20 ± 0.28"
    assert lines.loc["small", "backward / forward"] == "2.00"
    assert lines.loc["10b", "status"] == "predicted-oom: needs 192 GiB"
    assert lines.loc["10b", "forward ms"] == "–"


def test_mixed_precision_has_ratios():
    lines = mixed_precision_table(rows()).frame.set_index("size")
    assert lines.loc["xl", "forward ratio"] == lines.loc["xl", "backward ratio"] == "4.0"
    assert lines.loc["10b", "step ratio"] == "–"


def test_forward_alone_stands_in_where_a_step_did_not_run():
    whole = [step("small", dtype=dtype) for dtype in ("fp32", "autocast-bf16")]
    alone = [
        make_cell(
            ms("forward", time, time), ms("step", time, time), **(STEP | {"size": size, "mode": "forward"} | named)
        )
        for size in ("small", "10b")
        for time, named in ((1260.0, {"dtype": "fp32"}), (155.0, {"dtype": "autocast-bf16"}))
    ]
    failed = [
        make_cell(status="predicted-oom", message="needs 192 GiB", **(STEP | {"size": "10b", "dtype": dtype}))
        for dtype in ("fp32", "autocast-bf16")
    ]
    both = make_frame(*whole, *failed, *alone)
    found = phases_table(both.query("dtype == 'fp32'"))
    assert found.caption.endswith("2 steps; (alone): forward without gradients, of a model whose step did not run.")
    lines = found.frame.set_index("size")
    assert lines.loc["small", "forward ms"] == "2.10 ± 0.14", "a step that ran is not replaced"
    assert lines.loc["10b", "forward ms"] == "1260.00 ± 0.00 (alone)"
    assert lines.loc["10b", "whole step ms"] == lines.loc["10b", "backward / forward"] == "–"
    assert lines.loc["10b", "status"] == "predicted-oom: needs 192 GiB"
    mixed = mixed_precision_table(both)
    assert "(alone): forward" in mixed.caption
    line = mixed.frame.set_index("size").loc["10b"]
    assert list(line[["forward fp32 ms", "forward autocast-bf16 ms"]]) == ["1260.0 (alone)", "155.0 (alone)"]
    assert (line["forward ratio"], line["backward ratio"]) == ("8.1", "–")


def test_compiled_blocks_stand_beside_eager_ones():
    lines = compiled_table(make_frame(step(compile="off", scale=3.0), step(compile="on", variant="compiled"))).frame
    assert lines.loc[0, "forward ratio"] == lines.loc[0, "forward + backward ratio"] == "3.00"
    assert not any("whole model" in column for column in lines.columns)


def test_a_whole_model_stands_beside_its_blocks():
    both = [
        step(size=size, compile=how, scale=scale)
        for size in ("small", "xl")
        for how, scale in (("off", 3.0), ("on", 1.0))
    ]
    lines = compiled_table(make_frame(*both, step(size="small", compile="whole-model", scale=2.0))).frame
    assert list(lines["forward whole-model ratio"]) == list(lines["step whole-model ratio"]) == ["1.50", "–"]
    assert list(lines["forward + backward ratio"]) == ["3.00", "3.00"]


def test_an_older_run_of_compiled_blocks_does_not_count():
    older = [step(compile=how, scale=9.0, argv="older") for how in ("off", "on")]
    newer = [step(compile=how, scale=scale, argv="newer") for how, scale in (("off", 3.0), ("on", 2.0))]
    lines = compiled_table(make_frame(*older, *newer)).frame
    assert list(lines["step ratio"]) == ["1.50"]


@pytest.fixture
def committed(tmp_path):
    path = tmp_path / "results" / "h200" / "context-512" / "benchmark_model.csv"
    path.parent.mkdir(parents=True)
    rows().assign(samples="").to_csv(path, index=False)
    return Committed(tmp_path, "h200")


def test_numbers_are_those_of_the_rows(committed):
    model = vocabulary(committed)["model"]
    assert model("forward", "xl", "fp32") == pytest.approx(4.2)
    assert model("forward", "xl", "fp32", statistic="mean") == pytest.approx(4.2)
    assert model("forward + backward", "xl", "autocast-bf16") == pytest.approx(3.15)
    fp32 = committed.rows("context-512", dtype="fp32").frame()
    assert min(backward_over_forward(fp32)) == pytest.approx(2.0)
    assert max(deviations(fp32)) == pytest.approx(0.2 * 2**0.5 / 4.2)


def test_a_question_takes_its_settings_in_order_and_others_by_name(committed):
    model = vocabulary(committed)["model"]
    assert model("step", dtype="fp32", size="xl") == model("step", "xl", "fp32")
    with pytest.raises(TypeError, match="'step' takes size, dtype, and other settings by name"):
        model("step", "xl", "fp32", "eager")
    with pytest.raises(TypeError, match="by name"):
        model("step", "xl", size="xl", dtype="fp32")


def test_the_first_step_is_told_from_the_others():
    cold = make_frame(make_cell(ms("step", 90.0, 10.0, 12.0), ms("warmup_step", 3000.0, 1.0), **(STEP | {"warmup": 0})))
    found = first_and_rest(cold)
    assert (found["first"], found["rest"], found["rest_std"]) == pytest.approx((90.0, 11.0, 2**0.5))
    assert compile_seconds(cold) == [3.0]
    table = warmup_table(cold)
    assert table.caption.endswith("whole steps, 3 recorded.")
    assert table.frame.loc[0, "others, ms (mean ± std)"] == "11.0 ± 1.41"


def test_the_ratio_of_peaks_is_the_datasheets():
    assert peak_ratio("bf16", "fp32") == pytest.approx(989.4 / 66.9, rel=0.01)
    with pytest.raises(KeyError):
        peak_ratio("fp3", "fp32")
