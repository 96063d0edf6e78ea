"""``benchmark_diloco.py``: its grid, and runs whose losses and bytes are rows, a table and a picture."""

import json
from dataclasses import replace

import pytest

from cs336_systems.config import resolve_size
from cs336_systems.costs.parallelism.local_steps import sent_bytes_per_step
from cs336_systems.experiments.diloco import TABLE, loss_figure
from cs336_systems.harness.record import read_rows
from tests.benchmarks.commands import cells_of, run_in_a_process
from tests.pretraining.trained import write_dataset


def test_each_number_of_replicas_has_one_run_of_data_parallelism_for_all_ways_to_average():
    asked = "--replicas 1 2 --agree-every 10 30 --outer-momentum 0 0.9 --steps 60 --seeds 2 --seed 5"
    cells = cells_of("diloco", *asked.split())
    plain = [cell for cell in cells if cell.agree == "every-step"]
    assert [(cell.seed, cell.world_size) for cell in plain] == [(5, 1), (5, 2), (6, 1), (6, 2)]
    assert {cell.agree_every for cell in plain} == {None}
    assert len(cells) == 4 + 2 * 2 * 2 * 2
    for cell in cells:
        options = cell.train_options
        assert options.tokens_per_step(1) == 1024  # of all replicas
        assert options.batch_size * cell.world_size * options.context_length == 1024


@pytest.mark.parametrize("dtype", ["fp32", "bf16", "autocast-bf16"])
def test_each_dtype_runs_on_gpus(dtype):
    for cell in cells_of("diloco", "--dtype", dtype, "--steps", "100", "--agree-every", "100"):
        for options in replace(cell, device="cuda").runs:
            options.check()
            options.training_case(resolve_size(options.size), 1)


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    {
        "--agree-every 0": "--agree-every must be positive, got 0",
        "--replicas 0": "--replicas must be positive, got 0",
        "--agree-every 7": "--steps 60 is no multiple of --agree-every 7",
        "--agree-every 10 --agree-fragments 3": "no multiple of --agree-fragments 3",
        "--agree-every 10 --agree-delay 10": "--agree-delay 10 must be less",
        "--agree-every 10 --outer-momentum 0.9 1.5": r"--outer-momentum must lie in \[0, 1\), got 1.5",
        "--replicas 3": "--total-batch-tokens 1,024 is no multiple of 768",
        "--first-steps 20 --agree-every 10": "--first-steps 20 of --steps 60 under --schedule cosine",
        "--first-steps 60 --agree-every 10 --schedule wsd": "--first-steps 60 of --steps 60",
        "--first-steps 15 --agree-every 10 --schedule wsd": "--first-steps 15 is no multiple of --agree-every 10",
        "--first-steps 50 --agree-every 10 --schedule wsd": "--first-steps 50 reach into the decay .* at most 49 come",
        "--data nowhere": "nowhere is no folder",
    }.items(),
)
def test_runs_that_cannot_be_are_refused(arguments, sentence):
    with pytest.raises(ValueError, match=sentence):
        cells_of("diloco", *arguments.split())


def test_bytes_of_a_sum_and_of_a_gathering():
    """Two replicas send each gradient once, four one and a half times; in 8 bits each sends its own to all others."""
    assert sent_bytes_per_step(1000, 2) == 4000
    assert sent_bytes_per_step(1000, 4, 100) == 60
    assert sent_bytes_per_step(1024, 4, 10, in_8_bits=True) == 3 * (1024 + 4 * 4) / 10
    assert sent_bytes_per_step(1000, 1, 10) == 0
    with pytest.raises(ValueError, match="got 0"):
        sent_bytes_per_step(1000, 2, 0)


@pytest.mark.slow
def test_a_run_is_a_row_for_each_metric_in_a_table_and_a_picture(tmp_path):
    pytest.importorskip("torchft")
    write_dataset(tmp_path / "data", n_train=20_000, n_evaluation=5_000)
    asked = f"--data {tmp_path}/data --out {tmp_path} --steps 4 --evaluate-every 1 --evaluation-sequences 8"
    small = "--agree-every 2 --total-batch-tokens 128 --context-length 16 --first-steps 0 2 --schedule wsd"
    code, out, err = run_in_a_process("benchmark_diloco", *asked.split(), *small.split())
    assert code == 0, err
    assert json.loads(out.splitlines()[-1])["ok"] == 3
    rows = read_rows(tmp_path / "benchmark_diloco.csv")
    plain, diloco, later = TABLE.lines(rows)
    for line, steps in ((plain, [0, 1, 2, 3, 4]), (diloco, [0, 2, 4]), (later, [0, 1, 2, 4])):
        samples = dict(zip(line.run["metric"], line.run["samples"], strict=True))
        assert samples["tokens_at"] == [128 * step for step in steps]
        assert len(samples["loss_at"]) == len(samples["sent_at"]) == len(steps)
        assert samples["held_out_loss"] == samples["loss_at"][-1:]
        if line is later:  # which began as data parallelism
            of_plain = dict(zip(plain.run["metric"], plain.run["samples"], strict=True))
            assert samples["loss_at"][:3] == of_plain["loss_at"][:3]
    assert plain.median("sent") == pytest.approx(2 * diloco.median("sent"), rel=1e-3)
    assert plain.median("loss_at") > plain.median("held_out_loss")
    table = TABLE.of(rows)
    assert list(table.frame["times less"]) == ["–", "2", "1"]
    assert (tmp_path / "benchmark_diloco.png").exists()
    assert loss_figure(rows) is not None
