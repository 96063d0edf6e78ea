"""A plain loop over transformers' model learns what our trainer does."""

import json

import pytest

from cs336_systems.pretraining.run_log import LOG, read_run
from cs336_systems.pretraining.run_records import Device, Evaluation, LoggedStep
from tests.pretraining.trained import write_dataset

pytest.importorskip("transformers")

SMALL = "--data data --steps 12 --context-length 16 --batch-size 4 --accumulate 2 --warmup-steps 2 --out compared"


@pytest.mark.parametrize("own", ["--z-loss 1e-4 --keep all", "--walltime 60"])
def test_what_the_other_run_does_not_have_is_refused(own, load_script, tmp_path, monkeypatch, capsys):
    script = load_script("scripts/compare_with_transformers.py")
    monkeypatch.setattr(script, "n_gpus", lambda: 0)
    assert script.main([*own.split(), "--out", str(tmp_path / "out")]) == 2
    assert f"{own.split()[0]} " in (said := capsys.readouterr().err) and "the other run does not have" in said
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert script.main(["--out", str(tmp_path / "out")]) == 2
    assert "the other run is of one rank, got 2" in capsys.readouterr().err


@pytest.mark.slow
def test_both_runs_learn_the_same(load_script, tmp_path, monkeypatch, capfd):
    script = load_script("scripts/compare_with_transformers.py")
    monkeypatch.setattr(script, "n_gpus", lambda: 0)
    monkeypatch.chdir(tmp_path)
    write_dataset(tmp_path / "data")
    arguments = [*SMALL.split(), "--learning-rate", "1e-2", "--no-export"]
    assert script.main(arguments) == 0
    out, err = capfd.readouterr()
    assert "Loading" not in err, "a bar that no terminal shows"
    assert read_run(tmp_path / "compared" / "transformers" / LOG).last(Evaluation).seconds > 1e-3
    about = [read_run(tmp_path / "compared" / name / LOG).last(Device) for name in ("ours", "transformers")]
    assert about[0].provenance == about[1].provenance and about[0].provenance["commit"], "which adopting a log asks for"
    said = json.loads(out.splitlines()[-1])
    assert said["steps"] == 12 and abs(said["off_percent"]) < 1e-3
    ours, theirs = (read_run(tmp_path / "compared" / name / LOG).all(LoggedStep) for name in ("ours", "transformers"))
    for one, other in zip(ours, theirs, strict=True):
        assert (one.step, one.learning_rate, one.tokens) == (other.step, other.learning_rate, other.tokens)
        assert one.loss == pytest.approx(other.loss, rel=1e-5)
        assert one.norm == pytest.approx(other.norm, rel=1e-4)
    assert ours[-1].loss < ours[0].loss
    assert script.main(arguments) == 2
    assert "compared is there: both runs begin from the beginning" in capfd.readouterr().err
