"""Mixtures: exact shares in any stretch, each source in its own epochs, resumed to the bit, evaluated by source."""

import re
import shutil
from dataclasses import replace
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
import torch

from cs336_systems.pretraining.loader import Loader, Sequences
from cs336_systems.pretraining.mixture import Mixture
from cs336_systems.pretraining.run_log import LOG, read_run
from cs336_systems.pretraining.run_records import Data, Evaluation, LoggedStep
from cs336_systems.pretraining.sources import sources_of
from cs336_systems.pretraining.trainer import train
from tests.pretraining.trained import counting, losses_and_norms, options, write_chat, write_dataset

SHARES = [Fraction("0.5"), Fraction("0.3"), Fraction("0.2")]


def mixture():
    """Three sources of 7, 5 and 11 sequences of 4 tokens, told apart by their first tokens."""
    streams = [counting(4 * n + 1, vocab_size=1) for n in (7, 5, 11)]
    for i, stream in enumerate(streams):
        stream.files[0].tokens[:] += 100 * i
    return Mixture({name: Sequences(stream, 4, 1000) for name, stream in zip("abc", streams, strict=True)}, SHARES)


def first_tokens(loader, n):
    return torch.cat([next(loader)[0][:, 0] for _ in range(n)]).numpy()


def test_every_stretch_has_the_shares_and_every_source_its_epochs():
    with Loader(mixture(), 10, seed=3) as loader:
        source, number = np.divmod(first_tokens(loader, 60), 100)
        epochs = loader.epochs()
    for start in range(0, 600, 10):
        counts = np.bincount(source[start : start + 10], minlength=3)
        assert np.abs(counts - [5, 3, 2]).max() <= 1
    for i, n in enumerate((7, 5, 11)):
        own = number[source == i] // 4
        whole = own[: len(own) // n * n].reshape(-1, n)
        assert (np.sort(whole, axis=1) == np.arange(n)).all()
        assert not (whole[0] == whole[1]).all()
        assert epochs["abc"[i]] == len(own) / n


def test_ranks_share_a_batch_and_a_state_goes_on_anywhere():
    with Loader(mixture(), 6, seed=3) as loader:
        whole = first_tokens(loader, 20).reshape(20, 6)
    ranks = []
    for rank in range(2):
        with Loader(mixture(), 6, rank=rank, world_size=2, seed=3) as loader:
            ranks.append(first_tokens(loader, 20).reshape(20, 3))
    assert (np.concatenate(ranks, axis=1) == whole).all()
    with Loader(mixture(), 6, seed=3) as loader:
        first_tokens(loader, 7)
        state = loader.state_dict()
    with Loader(mixture(), 6, seed=3) as loader:
        loader.load_state_dict(state)
        assert (first_tokens(loader, 13).reshape(13, 6) == whole[7:]).all()
    other = Mixture(mixture().parts, [Fraction("0.4"), Fraction("0.4"), Fraction("0.2")])
    with (
        Loader(other, 6, seed=3) as loader,
        pytest.raises(ValueError, match="the share of source 1: 0.5 in the data of the saved run, 0.4"),
    ):
        loader.load_state_dict(state)


@pytest.mark.parametrize(
    ("data", "sentence"),
    [
        (["a=0.7", "b=0.2"], "--data a=0.7 b=0.2: the shares add up to 0.9, not to 1"),
        (["a", "b"], "--data a: of several sources each has a share above 0, as in web=0.7 code=0.3"),
        (["a=0", "b=1"], "--data a=0: of several sources each has a share above 0"),
        (["a=x", "b=1"], "--data a=x: of several"),
        (["a=0.5", "a=0.5"], "a folder is named twice"),
    ],
)
def test_bad_shares_are_one_sentence(data, sentence):
    with pytest.raises(ValueError, match=re.escape(sentence)):
        sources_of([Path(each) for each in data])


def test_a_run_on_a_mixture_resumes_to_the_bit_and_evaluates_each_source(alone, tmp_path):
    write_dataset(tmp_path / "web")
    write_dataset(tmp_path / "code", n_train=2500, n_evaluation=300)
    data = (Path(f"{tmp_path}/web=0.75"), Path(f"{tmp_path}/code=0.25"))
    run = options(tmp_path, data=data, out=tmp_path / "run")
    train(replace(run, walltime=1e-9, save_every=1), alone)
    train(run, alone)
    train(replace(run, out=tmp_path / "straight"), alone)
    assert losses_and_norms(run.out) == losses_and_norms(tmp_path / "straight")
    log = read_run(run.out / LOG)
    last = log.last(Evaluation)
    web, code = (last.by_source[str(tmp_path / name)] for name in ("web", "code"))
    assert last.loss == pytest.approx(0.75 * web["loss"] + 0.25 * code["loss"])
    assert (web["epochs"], code["epochs"]) == (pytest.approx(60 / 249), pytest.approx(20 / 156))
    assert log.last(Data).train_tokens == 6500
    assert log.last(Data).steps_per_epoch == pytest.approx((249 + 156) / 8)


def test_a_run_on_packed_conversations_of_two_sources_resumes_to_the_bit_in_its_middle(alone, tmp_path):
    """After three of eight steps, in the second epoch of one source and the first of the other."""
    write_chat(tmp_path / "sums")
    write_chat(tmp_path / "tales", lengths=range(3, 15), held_out=(6, 8))
    data = (Path(f"{tmp_path}/sums=0.75"), Path(f"{tmp_path}/tales=0.25"))
    run = options(tmp_path, data=data, steps=8, packing=True, batch_size=4, evaluate_every=4, save_every=3)
    train(replace(run, out=tmp_path / "straight", keep_last=9), alone)
    shutil.copytree(tmp_path / "straight" / "step-00000003", run.out / "step-00000003")
    outcome = train(run, alone)
    assert (outcome.first_step, outcome.steps) == (3, 8)
    logs = [read_run(each / LOG) for each in (run.out, tmp_path / "straight")]
    steps = [[(one.step, one.loss, one.norm) for one in log.all(LoggedStep) if one.step >= 3] for log in logs]
    assert steps[0] == steps[1] and len(steps[0]) == 5
    found = [log.last(Evaluation) for log in logs]
    assert found[0].by_source == found[1].by_source and found[0].loss == found[1].loss


def test_sources_that_do_not_mix_are_named(alone, tmp_path):
    write_dataset(tmp_path / "text")
    write_dataset(tmp_path / "all-learned", n_evaluation=None)
    write_chat(tmp_path / "chat")
    for other, sentence in (("chat", "do not mix: one has conversations"), ("all-learned", "holds out nothing to")):
        data = (Path(f"{tmp_path}/text=0.5"), Path(f"{tmp_path}/{other}=0.5"))
        with pytest.raises(ValueError, match=f"{other}.* {sentence}"):
            train(options(tmp_path, data=data), alone)
