"""A run of one process: it learns, is told as it was, resumes to the bit, and ends in a sentence where it must."""

import gc
import math
import shutil
import signal
from dataclasses import replace
from itertools import count
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest
import torch

from cs336_systems.distributed import background_checkpoint
from cs336_systems.distributed.checkpoint import complete_checkpoints
from cs336_systems.pretraining import preparation, run_log, trainer
from cs336_systems.pretraining.checkpoint import load_weights
from cs336_systems.pretraining.export import export
from cs336_systems.pretraining.loader import epoch_order
from cs336_systems.pretraining.preparation import prepare
from cs336_systems.pretraining.resuming import resume
from cs336_systems.pretraining.run_log import LOG, read_run
from cs336_systems.pretraining.run_records import (
    Data,
    End,
    Evaluation,
    Light,
    LoggedStep,
    Memory,
    Message,
    Model,
    Session,
)
from cs336_systems.pretraining.trainer import NonFiniteStep, train
from cs336_systems.training import TrainStep
from tests.pretraining.runs import Kept
from tests.pretraining.trained import EXPLODING, assert_equal_weights, copy_until, losses_and_norms, options, said_by


@pytest.fixture(scope="module")
def whole(alone, folder):
    """A folder with data, and a run of ten steps with a checkpoint after each."""
    train(options(folder, save_every=1, keep_last=20), alone)
    return folder


@pytest.mark.slow
def test_a_run_learns_and_says_so(whole):
    run = read_run(whole / "run" / LOG)
    losses = [loss for loss, _ in losses_and_norms(whole / "run")]
    assert losses[-1] < losses[0] - 0.3
    assert run.last(Session).options["context_length"] == 16
    assert run.last(Data).tokens_per_step == 128
    assert run.last(Memory).predicted_bytes["in all"] > 4 * run.last(Model).n_parameters * 4
    assert run.last(End) == End(10, "done", at=run.last(End).at)
    evaluations = run.all(Evaluation)
    assert [(one.step, one.tokens) for one in evaluations] == [(0, 192), (5, 192), (10, 192)]
    assert evaluations[2].loss < evaluations[1].loss < evaluations[0].loss
    expected = options(whole).rate_of(10)
    assert [step.learning_rate for step in run.all(LoggedStep)] == [expected(step) for step in range(10)]
    assert all(step.seconds > 0 for step in run.all(LoggedStep))
    assert (whole / "run" / "run.json").exists()


@pytest.mark.slow
def test_a_run_that_resumes_is_the_run_that_was_not_interrupted_and_keeps_some_checkpoints(whole, alone, tmp_path):
    copy_until(4, whole / "run", tmp_path / "run")
    outcome = train(options(tmp_path, data=whole / "data", save_every=1, keep_last=2, keep_every=4), alone)
    assert (outcome.first_step, outcome.steps, outcome.reason) == (4, 10, "done")
    assert losses_and_norms(tmp_path / "run") == losses_and_norms(whole / "run")
    assert_equal_weights(tmp_path / "run", whole / "run")
    assert not list((tmp_path / "run").glob(".*"))
    assert said_by(tmp_path / "run") == ["unlike the session before: --keep-last 2 (20), --keep-every 4 (None)"]
    stay = [path.name for path in complete_checkpoints(tmp_path / "run")]
    assert stay == [f"step-{step:08d}" for step in (4, 8, 9, 10)]


@pytest.mark.slow
def test_a_run_goes_on_from_a_step_of_another_which_stays_as_it_is(whole, alone, tmp_path):
    def there():
        return {path: (path.stat().st_mtime_ns, path.stat().st_size) for path in (whole / "run").rglob("*")}

    before, source = there(), whole / "run" / "step-00000004"
    asked = options(whole, out=tmp_path / "run", resume_from=source, save_every=3, keep_last=20)
    described = (shutil.copytree(whole / "run", tmp_path / "turned") / "run.json").read_text()
    (tmp_path / "turned" / "run.json").write_text(described.replace('"rope_theta": 10000.0', '"rope_theta": 500.0'))
    for changes, said in (
        ({"resume_from": whole / "run" / "step-00000011"}, f"step-00000011 does not exist: {whole / 'run'} has step-0"),
        ({"resume_from": tmp_path / "400"}, "400 does not exist$"),
        ({"resume_from": whole / "data"}, "data is no complete checkpoint, nor a run that has one"),
        ({"resume_from": whole / "data", "out": whole / "data"}, "a run that goes on from an earlier step has a new"),
        ({"resume_from": tmp_path / "turned"}, "another model: rope_theta is 500.0 there and 10000.0 here; repeat its"),
        ({"steps": 3}, "step-00000004 has made more than the 3 steps"),
    ):
        with pytest.raises(ValueError, match=said) as refusal:
            train(replace(asked, **changes), alone)
        assert "\n" not in str(refusal.value)
    outcome = train(replace(asked, walltime=1e-9), alone)
    assert (outcome.first_step, outcome.reason) == (4, "walltime")
    assert there() == before
    with pytest.raises(ValueError, match="a run that goes on from an earlier step has a new folder"):
        train(replace(asked, out=whole / "run"), alone)  # which has checkpoints
    said = [f"goes on from {source}", "unlike the session before: --save-every 3 (1)"]
    assert said_by(tmp_path / "run") == said
    outcome = train(asked, alone)  # the same command goes on from its own checkpoint
    assert outcome.first_step > 4 and outcome.steps == 10
    assert said_by(tmp_path / "run") == said
    steps = read_run(tmp_path / "run" / LOG).all(LoggedStep)
    assert [(one.loss, one.norm) for one in steps] == losses_and_norms(whole / "run")[4:]
    assert_equal_weights(tmp_path / "run", whole / "run")
    elsewhere = whole / "run" / "step-00000006"
    train(replace(asked, resume_from=elsewhere), alone)
    assert f"--resume-from {elsewhere} is passed over: " in said_by(tmp_path / "run")[2]
    newest = options(whole, out=tmp_path / "more", resume_from=whole / "run", steps=12, keep_best=True)
    outcome = train(newest, alone)  # where the loss of the other run's best does not count
    assert (outcome.first_step, outcome.steps, outcome.best_step) == (10, 12, 12)
    _, changed = said_by(tmp_path / "more")
    assert changed.startswith("unlike the session before: --steps 12 (10), ")


@pytest.mark.slow
def test_a_damaged_checkpoint_is_passed_over_which_the_log_says(whole, alone, tmp_path, recwarn):
    copy_until(8, whole / "run", tmp_path / "run")
    with next((tmp_path / "run" / "step-00000008").glob("*.safetensors")).open("r+b") as file:
        file.seek(5000)
        file.write(b"other")
    assert train(options(tmp_path, data=whole / "data", save_every=None, export=False), alone).first_step == 7
    _, said = read_run(tmp_path / "run" / LOG).all(Message)
    assert said.level == "warning" and "step-00000008" in said.text and not recwarn.list
    assert losses_and_norms(tmp_path / "run") == losses_and_norms(whole / "run")


@pytest.mark.slow
def test_a_run_that_is_done_is_left_and_one_that_resumes_has_its_own_hyperparameters(whole, alone):
    before = losses_and_norms(whole / "run")
    outcome = train(options(whole), alone)
    assert (outcome.first_step, outcome.steps, outcome.reason) == (10, 10, "done")
    assert losses_and_norms(whole / "run") == before
    prepared = prepare(options(whole, steps=12, weight_decay=0.3, betas=(0.5, 0.6), eps=1e-3), alone)
    with prepared.loader:
        assert resume(prepared, pytest.fail)[0] == 10
    matrices, others = prepared.step.optimizer.param_groups
    assert (matrices["weight_decay"], others["weight_decay"]) == (0.3, 0.0)
    assert all((group["betas"], group["eps"]) == ((0.5, 0.6), 1e-3) for group in (matrices, others))


@pytest.mark.slow
def test_a_run_that_resumes_with_other_steps_says_what_that_changes(whole, alone, tmp_path):
    """As on another number of ranks: 249 sequences, of which 8 steps take 8 and 2 steps take 6."""
    copy_until(8, whole / "run", tmp_path / "run")
    train(options(tmp_path, data=whole / "data", batch_size=6, save_every=1), alone)
    messages = read_run(tmp_path / "run" / LOG).all(Message)
    (said,) = (message for message in messages if "tokens now" in message.text)
    assert said.level == "warning" and "96 tokens now and had 128 before step 8" in said.text
    assert f"{(8 * 8 + 2 * 6) / 249:.2f} epochs" in said.text and "--total-batch-tokens 128 --batch-size 2" in said.text


@pytest.mark.slow
def test_a_step_that_is_not_finite_ends_the_run_and_names_the_tensor(whole, alone, tmp_path):
    """Meanwhile the collector leaves older objects alone, until the run ends."""

    class Counted(Kept):
        def write(self, record):
            self.append(gc.get_freeze_count())

    before, during = gc.get_freeze_count(), Counted()
    asked = options(tmp_path, data=whole / "data", **EXPLODING)
    with pytest.raises(NonFiniteStep, match=r"step 1: .*, norm (nan|inf)"):
        train(asked, alone, during)
    assert during[0] == before >= gc.get_freeze_count()  # Python 3.12 begins with some
    assert during[-1] > before + 100_000
    run = read_run(tmp_path / "run" / LOG)
    assert (run.last(End).reason, run.last(End).step) == ("failed", 1)
    assert [message.level for message in run.all(Message)] == ["error"]
    assert [path.name for path in complete_checkpoints(tmp_path / "run")] == ["step-00000001"]


@pytest.mark.slow
def test_a_run_that_is_told_to_end_makes_the_step_that_is_queued_next_and_no_more(whole, alone, tmp_path, monkeypatch):
    """Told while it queues its fourth step; that this one had to be the last is known when the fifth is queued."""
    queue, asked = TrainStep.__call__, count()

    def told_in_the_fourth(step, *batch):
        if next(asked) == 3:
            signal.raise_signal(signal.SIGTERM)
        return queue(step, *batch)

    monkeypatch.setattr(TrainStep, "__call__", told_in_the_fourth)
    outcome = train(options(whole, out=tmp_path / "run", zero=1, evaluate_every=None), alone)
    assert (outcome.reason, outcome.steps) == ("terminated", 5)
    assert any("--zero 1 shards nothing" in text for text in said_by(tmp_path / "run"))


@pytest.mark.slow
def test_a_loss_alone_that_is_not_finite_is_noticed_before_the_model_changes(whole, alone, tmp_path, monkeypatch):
    loss_of, n_calls = TrainStep.loss_of, count()

    def infinite_once(self, *batch):
        return loss_of(self, *batch) + (math.inf if torch.is_grad_enabled() and next(n_calls) == 3 else 0.0)

    monkeypatch.setattr(TrainStep, "loss_of", infinite_once)
    prepared = prepare(options(tmp_path, data=whole / "data", save_every=3, keep_last=20), alone)
    with pytest.raises(NonFiniteStep, match=r"step 3: loss inf, norm \d"):
        trainer.run_prepared(prepared, alone)
    saved = load_weights(tmp_path / "run")
    assert saved.step == 3
    parameters = dict(prepared.step.model.named_parameters())
    assert all(torch.equal(parameters[name], tensor) for name, tensor in saved.weights.items())


@pytest.mark.slow
def test_weights_of_hugging_face_are_trained_further_on_tokens_that_they_know(whole, alone, tmp_path):
    source = load_weights(whole / "run")
    export(tmp_path / "hf", source.weights, source.model)
    asked = options(tmp_path, data=whole / "data", init=tmp_path / "hf", steps=1, warmup_steps=0, learning_rate=0.0)
    train(asked, alone)
    assert_equal_weights(tmp_path / "run", whole / "run")
    evaluation, again = read_run(tmp_path / "run" / LOG).all(Evaluation)
    assert (evaluation.step, again.step, again.loss) == (0, 1, evaluation.loss)
    assert evaluation.loss == pytest.approx(read_run(whole / "run" / LOG).last(Evaluation).loss, rel=2**-20)
    tokenizer = tmp_path / "hf" / "tokenizer.json"
    for content in (tokenizer.read_text().replace('"b"', '"bb"'), "{"):
        tokenizer.write_text(content)
        with pytest.raises(ValueError, match=r"hf" if content == "{" else r"data has other tokens than .*hf"):
            train(replace(asked, out=tmp_path / "other"), alone)
    tokenizer.unlink()
    assert train(replace(asked, out=tmp_path / "other"), alone).steps == 1


@pytest.mark.slow
@pytest.mark.parametrize("split", ["train", "evaluation"])
def test_what_was_learned_before_a_broken_token_is_saved(whole, alone, split, tmp_path):
    data = shutil.copytree(whole / "data", tmp_path / "data")
    tokens = np.memmap(data / f"{split}-00000.bin", "<u4", "r+", offset=1024)
    sound = tokens.copy()
    of_seventh_batch = epoch_order(249, seed=0, epoch=0)[6 * 8 + 3]
    tokens[16 * of_seventh_batch + 5 if split == "train" else 100] = 77_777
    asked = options(tmp_path, evaluate_every=7, save_every=9)
    with pytest.raises(ValueError, match=f"token 77777 is beyond the model's vocabulary of 320: .*{split}-00000.bin"):
        train(asked, alone)
    made = 6 if split == "train" else 0  # held-out tokens are read before the first step
    names = [checkpoint.name for checkpoint in complete_checkpoints(tmp_path / "run")]
    assert names == ([f"step-{made:08d}"] if made else [])
    run = read_run(tmp_path / "run" / LOG)
    assert (run.last(End).step, run.last(End).reason) == (made, "failed")
    assert "77777" in run.last(Message).text
    tokens[:] = sound
    assert train(asked, alone).first_step == made
    assert losses_and_norms(tmp_path / "run") == losses_and_norms(whole / "run")


def test_the_best_is_kept_and_a_run_without_gain_ends(whole, alone, tmp_path, monkeypatch):
    """Whatever is learned, the held-out losses after 0, 1, 2, ... steps are these."""
    losses = [0.5, 9.0, 3.0, 2.0, 5.0, 4.0, 2.0, 1.0]
    evaluated = iter(losses)
    monkeypatch.setattr(trainer, "evaluate", lambda *_: (next(evaluated), 192))
    asked = options(tmp_path, data=whole / "data", evaluate_every=1, save_every=5, keep_last=1, keep_best=True)
    first = train(replace(asked, walltime=1e-9), alone)
    assert first.steps == 1
    run = read_run(asked.out / LOG)
    (said,) = (each.text for each in run.all(Message) if "before training" in each.text)
    assert isinstance(run.records[-1], End)
    assert said.startswith("the lowest held-out loss of a checkpoint, 9.0000 of step 1, is above")
    evaluated = iter(losses[2:])
    outcome = train(replace(asked, stop_after_no_gain=3), alone)
    assert (outcome.reason, outcome.steps, outcome.best_step) == ("no gain", 6, 3)
    again = train(replace(asked, stop_after_no_gain=3), alone)
    assert (again.reason, again.first_step, again.steps) == ("no gain", 6, 6)
    assert read_run(asked.out / LOG).last(End).reason == "no gain"
    assert [one.name for one in complete_checkpoints(asked.out)] == ["step-00000003", "step-00000006"]
    evaluated = iter(losses[7:] + [8.0] * 9)
    assert train(asked, alone).best_step == 7  # the lowest loss, and the evaluations since, are in the checkpoint
    assert [one.name for one in complete_checkpoints(asked.out)] == ["step-00000007", "step-00000010"]


@pytest.mark.slow
def test_a_z_loss_is_learned_and_not_evaluated(whole, alone, tmp_path):
    asked = options(tmp_path, data=whole / "data", keep="all", steps=1, warmup_steps=0, learning_rate=0.0)
    for z_loss in (0.0, 0.5):
        train(replace(asked, out=tmp_path / str(z_loss), z_loss=z_loss), alone)
    without, with_it = (read_run(tmp_path / name / LOG) for name in ("0.0", "0.5"))
    lse = math.log(320)  # of nearly equal logits
    more = with_it.last(LoggedStep).loss - without.last(LoggedStep).loss
    assert more == pytest.approx(0.5 * lse**2, rel=0.1)
    assert with_it.last(Evaluation).loss == without.last(Evaluation).loss


@pytest.mark.slow
def test_a_full_disk_costs_a_checkpoint_and_no_step(whole, alone, tmp_path, monkeypatch):
    write, failing = background_checkpoint.write, [5]

    def write_or_fail(folder, collected, *arguments):
        if collected.marker["step"] in failing:
            raise OSError(28, "No space left on device")
        return write(folder, collected, *arguments)

    monkeypatch.setattr(background_checkpoint, "write", write_or_fail)
    asked = options(tmp_path, data=whole / "data")
    outcome = train(asked, alone)
    assert (outcome.steps, outcome.complaint) == (10, None)
    (said,) = read_run(tmp_path / "run" / LOG).all(Message)
    assert (said.level, said.text) == ("error", "no checkpoint of step 5: [Errno 28] No space left on device")
    assert losses_and_norms(tmp_path / "run") == losses_and_norms(whole / "run")
    failing.append(10)
    outcome = train(replace(asked, out=tmp_path / "other"), alone)
    assert not complete_checkpoints(tmp_path / "other")
    assert outcome.complaint.startswith("no checkpoint of step 10")


def test_where_the_log_cannot_go_on_nor_does_the_run(whole, alone, tmp_path, monkeypatch):
    shutil.copytree(whole / "run", tmp_path / "run")
    before = (tmp_path / "run" / LOG).read_bytes()
    monkeypatch.setattr(run_log.os, "write", Mock(side_effect=OSError(28, "No space left on device")))
    with pytest.raises(OSError, match="No space left on device: .*log.jsonl"):
        train(options(tmp_path, data=whole / "data", steps=12), alone)
    assert (tmp_path / "run" / LOG).read_bytes() == before
    assert load_weights(tmp_path / "run").step == 10


@pytest.mark.slow
def test_what_cannot_go_on_is_said_and_nothing_lost(whole, alone, tmp_path):
    before = {path: path.stat().st_mtime_ns for path in (whole / "run").rglob("*")}
    for changes, value in (
        ({"size": "small"}, "model tiny"),
        ({"steps": 9}, "step-00000010 has made more than the 9 steps"),
        ({"seed": 1}, "seed: 0 in the data of the saved run, 1 in this one's"),
        ({"context_length": 501}, "502"),
        ({"init": Path("nowhere")}, "nowhere"),
        ({"cuda_graph": "on"}, "got cpu"),
        ({"warmup_steps": 11}, "got 11"),
    ):
        with pytest.raises((ValueError, OSError)) as refusal:
            train(options(whole, **changes), alone)
        assert value in str(refusal.value)
        assert "\n" not in str(refusal.value)
    assert {path: path.stat().st_mtime_ns for path in (whole / "run").rglob("*")} == before
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / LOG).write_text("Once upon a time.")
    with pytest.raises(ValueError, match=r"log.jsonl is no log of a training run"):
        train(options(tmp_path, data=whole / "data"), alone)
    assert (tmp_path / "run" / LOG).read_text() == "Once upon a time."


@pytest.mark.slow
def test_a_run_in_fp8_resumes_to_the_bit(whole, alone, tmp_path):
    fp8 = {"data": whole / "data", "matmul_dtype": "e4m3", "gradient_dtype": "e5m2", "fp8_skip_first": 1}
    train(options(tmp_path, **fp8, out=tmp_path / "whole", accumulate=2), alone)
    copy_until(5, tmp_path / "whole", tmp_path / "resumed")
    assert train(options(tmp_path, **fp8, out=tmp_path / "resumed", accumulate=2), alone).first_step == 5
    in_fp8, stored = losses_and_norms(tmp_path / "whole"), losses_and_norms(whole / "run")
    assert losses_and_norms(tmp_path / "resumed") == in_fp8 != stored
    assert_equal_weights(tmp_path / "resumed", tmp_path / "whole")
    parts = {"blocks": "fp8", "stored blocks": "fp32", "attention": "fp32", "head": "fp32"}
    light = read_run(tmp_path / "whole" / LOG).last(Light)
    assert {name: part["dtype"] for name, part in light.parts.items()} == parts


def test_too_few_ranks_are_refused_before_data_are_made(alone, tmp_path, monkeypatch):
    monkeypatch.setattr(preparation, "default_data", lambda: pytest.fail("data were made"))
    with pytest.raises(ValueError, match="tensor 2 needs a multiple of 2 ranks, got 1"):
        prepare(options(tmp_path, data=None, tensor=2, keep="products"), alone)


def test_data_that_another_run_makes_meanwhile_serve(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    def made_by_another(options):
        preparation.default_folder(options, None).mkdir(parents=True)
        raise OSError(39, "Directory not empty")

    def full_disk(options):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(preparation, "default_folder", lambda options, corpus: tmp_path / "data")
    monkeypatch.setattr(preparation, "tokenize", full_disk)
    with pytest.raises(OSError, match="No space"):
        preparation.default_data()
    monkeypatch.setattr(preparation, "tokenize", made_by_another)
    assert preparation.default_data() == tmp_path / "data"
