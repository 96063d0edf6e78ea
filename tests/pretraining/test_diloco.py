"""Replicas that average weights: which bits they share, what they send, and when it is data parallelism."""

from dataclasses import replace

import pytest
import torch

from cs336_systems.costs.parallelism.local_steps import sent_bytes_per_step
from cs336_systems.distributed.process_group import alone, joined
from cs336_systems.experiments.diloco_measure import Watch, lighthouse
from cs336_systems.pretraining.agreement import OUTER_MOMENTUM, agreement_of, checksum
from cs336_systems.pretraining.preparation import prepare
from cs336_systems.pretraining.run_records import LoggedStep, Model
from cs336_systems.pretraining.trainer import run_prepared
from tests.distributed.checks import on_ranks

from .trained import options, write_dataset

pytest.importorskip("torchft")


class Averages(Watch):
    """Notes at each average the checksums of the weights of all, and of this replica's own; and the last weights."""

    def __init__(self, agreement, prepared):
        super().__init__()
        self._agreement, self._parameters = agreement, list(prepared.step.model.parameters())
        asked = prepared.options
        self._apart = asked.agree_every // asked.agree_fragments if asked.agree == "diloco" else 1
        self.sent_bytes = lambda: agreement.sent_bytes
        self.common, self.own = {}, {}
        self._first = [parameter.detach().clone() for parameter in self._parameters]

    def write(self, record):
        super().write(record)
        if isinstance(record, LoggedStep) and self._agreement.at_average and (record.step + 1) % self._apart == 0:
            self.own[record.step] = checksum(self._parameters)
            with self._agreement.common_weights():
                self.common[record.step] = checksum(self._parameters)
            assert checksum(self._parameters) == self.own[record.step]
            self.sent_by_then = self.sent_bytes() - self._before
            self.last = [parameter.detach().clone() for parameter in self._parameters]
            self.moved = farthest(self.last, self._first)


def farthest(ones, others):
    """The largest distance between an element and the other's."""
    return max((one - other).abs().max().item() for one, other in zip(ones, others, strict=True))


def train_apart(rank, runs):
    """For each run checksums of common and own weights by step, bytes that were sent, the number of parameters, the
    farthest that a weight has come, and the last weights."""
    found = []
    for asked in runs:
        with lighthouse(rank) as address, alone(rank) as own:
            agreement = agreement_of(asked, own, address, str(rank.rank))
            prepared = prepare(asked, own)
            watch = Averages(agreement, prepared)
            run_prepared(prepared, own, watch, agreement=agreement)
        found.append(
            (watch.common, watch.own, watch.sent_by_then, watch.all(Model)[-1].n_parameters, watch.moved, watch.last)
        )
    return [*found, resume_apart(rank, replace(runs[2], out=runs[2].out / "apart"))]


def resume_apart(rank, asked):
    """Two replicas begin, of which the second has made four steps by itself.

    Returns their steps, weights at averages, and weights before they meet and before the first step.
    """
    asked = replace(asked, out=asked.out / str(rank.rank))
    with lighthouse(rank) as address, alone(rank) as own:
        if rank.rank:
            plain = {"agree": None, "agree_every": 100, "agree_fragments": 1, "agree_delay": 0, "agree_timeout": 60.0}
            earlier = replace(asked, replicas=1, steps=4, save_every=4, **plain)
            run_prepared(prepare(earlier, own), own)
        agreement = agreement_of(asked, own, address, str(rank.rank))
        prepared = prepare(asked, own)
        watch, join = Averages(agreement, prepared), agreement.join
        parameters, weights = list(prepared.step.model.parameters()), []

        def noted(*how):
            if rank.rank:
                for state in prepared.step.optimizer.state.values():
                    state[OUTER_MOMENTUM] = torch.full_like(state["exp_avg"], 1e-3)  # else averages would not differ
            weights.append(checksum(parameters))
            made = join(*how)
            weights.append(checksum(parameters))
            return made

        agreement.join = noted
        run_prepared(prepared, own, watch, agreement=agreement)
        steps = [record.step for record in watch.all(LoggedStep)]
    return steps, watch.common, weights


WAYS = [{"agree_fragments": 1}, {"agree_fragments": 2}, {"agree_fragments": 2, "agree_delay": 1}]
WAYS.append({"agree_fragments": 2, "agree_dtype": "fp8"})
EPS = 1e8
"""So large that AdamW is SGD with momentum, linear in gradients: the mean of its steps is its step by their mean."""
LINEAR = {"eps": EPS, "learning_rate": 0.3 * EPS, "weight_decay": 0.0, "clip": None, "agree_timeout": 30.0}
WHOLE = {"agree_every": 1, "outer_learning_rate": 1.0, "outer_momentum": 0.0}


@pytest.fixture(scope="module")
def trained(folder):
    """What two replicas tell of each way, of data parallelism, and of DiLoCo that is to be that."""
    plain = options(
        folder, replicas=2, batch_size=4, save_every=None, export=False, evaluate_every=None, warmup_steps=0
    )
    ways = [replace(plain, agree="diloco", steps=8, agree_every=4, agree_timeout=30.0, **way) for way in WAYS]
    steps = [replace(plain, agree=agree, steps=6, **LINEAR) for agree in ("every-step", "diloco")]
    once = [replace(steps[0], steps=1), replace(steps[1], steps=1, agree_every=1)]
    runs = [*ways, steps[0], replace(steps[1], **WHOLE), *once]
    return list(zip(*on_ranks(train_apart, 2, runs), strict=True))


@pytest.mark.slow
@pytest.mark.parametrize("number", range(len(WAYS)))
def test_replicas_hold_the_same_bits_after_each_average_and_send_what_arithmetic_says(trained, number):
    way = WAYS[number]
    (common, own, sent, n_parameters, *_), (peers_common, peers_own, *_) = trained[number]
    n = way["agree_fragments"]
    assert list(common) == list(range(4 // n - 1, 8, 4 // n))
    assert common == peers_common
    assert len(set(common.values())) == 2 * n  # each average moves them
    apart = n > 1 or "agree_delay" in way
    assert all((own[step] == common[step] == peers_own[step]) is not apart for step in own)
    predicted = 8 * sent_bytes_per_step(n_parameters, 2, 4, in_8_bits="agree_dtype" in way)
    assert sent == pytest.approx(predicted, rel=2e-3)


@pytest.mark.slow
def test_averages_of_whole_steps_are_data_parallelism(trained):
    """In each of six steps a weight is rounded three times more, and each difference once; twice that for its effect on
    later gradients."""
    (*_, moved, expected), (*_, found) = trained[len(WAYS)][0], trained[len(WAYS) + 1][0]
    bound = 2 * 6 * 4 * 2**-24 * max(each.abs().max().item() for each in expected)
    assert 0 < farthest(expected, found) <= bound < moved / 1000


@pytest.mark.slow
def test_the_last_average_is_the_mean_whatever_the_outer_optimizer(trained):
    """Of one step it is data parallelism, to the bound above; with the outer momentum it would go 1.33 times as far."""
    (*_, moved, expected), (*_, found) = trained[len(WAYS) + 2][0], trained[len(WAYS) + 3][0]
    bound = 2 * 4 * 2**-24 * max(each.abs().max().item() for each in expected)
    assert farthest(expected, found) <= bound < moved / 1000


@pytest.mark.slow
def test_all_begin_with_the_state_and_outer_momentum_of_the_one_that_has_made_the_most_steps(trained):
    (steps, common, (_, met)), (peers_steps, peers_common, (kept, peers_met)) = trained[-1]
    assert steps == peers_steps == [4, 5, 6, 7]
    assert common == peers_common and common
    assert (met, peers_met) == (kept, kept), "momentum alone must not move weights"


def test_averages_that_all_fail_end_the_wait_for_the_first_one(tmp_path, monkeypatch):
    from torchft.work import _DummyWork

    from cs336_systems.pretraining.torchft_manager import ReportingManager

    def fail(manager, tensor, *_, **__):
        manager.report_error(ConnectionError("the network is down"))
        return _DummyWork(tensor)

    monkeypatch.setattr(ReportingManager, "allreduce", fail)
    monkeypatch.setattr("cs336_systems.pretraining.diloco._MOST_FAILED", 3)
    write_dataset(tmp_path / "data")
    asked = options(tmp_path, agree="diloco", agree_every=2, steps=4)
    with joined() as rank, lighthouse(rank) as address:
        agreement = agreement_of(asked, rank, address, "a")
        with pytest.raises(RuntimeError, match="3 averages in a row have failed .* the last: the network is down"):
            run_prepared(prepare(asked, rank), rank, agreement=agreement)


def test_a_run_whose_steps_do_not_end_on_an_average_is_refused(tmp_path):
    """Its last steps would be neither averaged nor saved. Their number follows from the data, or from where an earlier
    run has ended."""
    write_dataset(tmp_path / "data")
    plain = options(tmp_path, evaluate_every=None, export=False)
    with joined() as rank:
        run_prepared(prepare(replace(plain, steps=5), rank), rank)
        for changes, said in (
            ({"steps": 12}, "the 7 steps from step 5 to 12 are no multiple of the 4 between two averages"),
            ({"steps": None, "epochs": 0.9, "out": tmp_path / "other"}, "the 29 steps from step 0 to 29 are"),
        ):
            asked = replace(plain, agree="diloco", agree_every=4, **changes)
            with lighthouse(rank) as address, pytest.raises(ValueError, match=said):
                agreement = agreement_of(asked, rank, address, "a")
                run_prepared(prepare(asked, rank), rank, agreement=agreement)
