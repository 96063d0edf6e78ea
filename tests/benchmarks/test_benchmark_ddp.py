"""benchmark_ddp.py: its grid, what it refuses, and its table from rows; one real run lies in tests/experiments."""

import dataclasses

import pytest

from cs336_systems.experiments.data_parallel import DATA_PARALLEL
from cs336_systems.harness.record import Metric, read_rows
from cs336_systems.harness.sweep import Outcome, make_rows, outcome_rows
from tests.benchmarks.commands import cells_of


def test_bucket_sizes_multiply_only_the_rungs_that_have_them():
    made = cells_of("data_parallel", "--bucket-size-mb", "1", "10", "--world-size", "1", "2")
    assert [(cell.ddp, cell.bucket_size_mb) for cell in made if cell.world_size == 2] == [
        *(("naive", None), ("flat", None), ("overlapped", None)),
        *(("bucketed", 1.0), ("bucketed", 10.0), ("torch", 1.0), ("torch", 10.0)),
    ]
    assert len(made) == 14
    assert len({cell.name for cell in made}) == 14


def test_defaults_of_a_cpu():
    made = cells_of("data_parallel")
    assert {(cell.size, cell.world_size, cell.context_length) for cell in made} == {("tiny", 2, 128)}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--max-ctas", "-1"), "--max-ctas must not be negative, got -1"),
        (("--max-ctas", "0", "8"), "--max-ctas 8 needs --device cuda: thread blocks are NCCL's, and a CPU has gloo"),
    ],
)
def test_bad_input(arguments, message):
    with pytest.raises(ValueError, match=message.replace("^", r"\^")):
        cells_of("data_parallel", *arguments)


def outcome(cell, step_ms, **where):
    tokens = cell.world_size * 512
    metrics = [
        Metric("step", "ms", [step_ms]),
        Metric("local_step", "ms", [step_ms - 1]),
        Metric("exposed", "ms", [1.0], derived=True),
        Metric("exposed_share", "%", [100 / step_ms], derived=True),
        Metric("tokens_per_s", "1/s", [tokens / step_ms * 1e3], derived=True),
    ]
    made = Outcome(cell, "ok", metrics=metrics)
    made.rows = make_rows("benchmark_ddp", made, {"provenance": where})
    return made


def test_the_table_scales_against_one_rank_of_the_same_rung():
    one, two = cells_of("data_parallel", "--ddp", "bucketed", "--world-size", "1", "2")
    naive = dataclasses.replace(two, ddp="naive", bucket_size_mb=None)
    failed = Outcome(naive, "oom", "no room")
    failed.rows = make_rows("benchmark_ddp", failed, {"metrics": []})
    table = DATA_PARALLEL.of(outcome_rows([outcome(one, 10.0), outcome(two, 12.5), failed]))
    assert table.frame["scaling %"].tolist() == ["100.0", "80.0", "–"]
    assert table.frame["bucket MiB"].tolist() == ["25", "25", ""]
    assert table.frame["exposed %"].tolist() == ["10.0", "8.0", "–"]
    assert table.frame["status"].tolist() == ["ok", "ok", "oom: no room"]
    assert "batch" in table.caption
    in_turns = dataclasses.replace(one, steps=one.steps + 5, warmup=one.warmup + 1)
    shown = DATA_PARALLEL.of(outcome_rows([outcome(in_turns, 10.0), outcome(two, 12.5)])).frame["scaling %"]
    assert shown.tolist() == ["100.0", "80.0"]
    for elsewhere in (outcome(two, 12.5, host="another"), outcome(two, 12.5, commit="another")):
        shown = DATA_PARALLEL.of(outcome_rows([outcome(one, 10.0), elsewhere])).frame["scaling %"]
        assert shown.tolist() == ["100.0", "–"]
    again = [outcome(one, 10.0, commit="a"), outcome(two, 12.5, commit="a"), outcome(one, 8.0, commit="b")]
    assert DATA_PARALLEL.of(outcome_rows(again)).frame["scaling %"].tolist() == ["100.0", "80.0"]


def test_few_thread_blocks_are_a_cell_of_their_own_and_scale_against_one_rank_which_sends_nothing():
    one, two = cells_of("data_parallel", "--ddp", "bucketed", "--world-size", "1", "2")
    few = dataclasses.replace(two, max_ctas=8)
    assert (few.name, few.parallel.max_ctas) == (two.name.replace("-2ranks", "-8ctas-2ranks"), 8)
    assert str(few).startswith("bucketed 25 MiB by 8 thread blocks on 2 ranks: ")
    table = DATA_PARALLEL.of(outcome_rows([outcome(one, 10.0), outcome(two, 12.5), outcome(few, 10.5)]))
    assert table.frame["thread blocks"].tolist() == [0, 0, 8]
    assert table.frame["scaling %"].tolist() == ["100.0", "80.0", "95.2"]
    assert "thread blocks" not in DATA_PARALLEL.of(outcome_rows([outcome(one, 10.0), outcome(two, 12.5)])).caption


def test_rows_of_before_thread_blocks_could_be_limited_are_read_as_nccls_choice(tmp_path):
    (cell,) = cells_of("data_parallel", "--ddp", "bucketed")
    rows = outcome_rows([outcome(cell, 10.0)])
    path = tmp_path / "benchmark_ddp.csv"
    rows.assign(samples="").drop(columns="max_ctas").to_csv(path, index=False)
    assert read_rows(path)["max_ctas"].tolist() == [0] * len(rows)


def test_each_rung_stands_beside_torchs_in_the_same_round_with_what_rounds_differ_by():
    cells = cells_of("data_parallel", "--ddp", "naive", "bucketed", "torch", "--repeat", "2")
    times = dict(zip(cells, (12.0, 9.0, 10.0, 20.0, 19.0, 22.0), strict=True))
    table = DATA_PARALLEL.of(outcome_rows([outcome(cell, ms) for cell, ms in times.items()]))
    assert table.frame["/ torch"].tolist() == ["1.150 (1.100–1.200)", "0.925 (0.900–0.950)", "–"]
    assert table.frame["exposed ms"].tolist() == ["1.00 (1.00–1.00)"] * 3
    torch_elsewhere = [outcome(cell, ms, host="b" if cell.ddp == "torch" else "a") for cell, ms in times.items()]
    assert "/ torch" not in DATA_PARALLEL.of(outcome_rows(torch_elsewhere)).frame
