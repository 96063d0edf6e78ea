"""Replicas as threads of one process: who takes over whose state, and what the others notice of it."""

import gc
import os
import re
import threading
import time
from dataclasses import replace
from unittest.mock import Mock

import pytest
import torch

from cs336_systems.distributed.checkpoint_state import NamedState
from cs336_systems.distributed.process_group import joined
from cs336_systems.pretraining import agreement as agreements
from cs336_systems.pretraining.preparation import prepare
from cs336_systems.pretraining.run_records import Healing, Message

from .trained import listening, options, write_dataset

os.environ["RUST_LOG"] = "error"  # read when torchft is imported
LighthouseServer = pytest.importorskip("torchft.coordination").LighthouseServer
from cs336_systems.pretraining import healing, replica_agreement  # noqa: E402  they import torchft

from .test_lookout import LookedAfterGloo  # noqa: E402

PREPARING = threading.Lock()
"""A model is made under a context that all threads share."""


class Death(Exception):
    """A replica has been killed."""


class Met(Exception):
    """From now on the others wait for this replica."""


class Replica(threading.Thread):
    """A replica that trains until it has made ``until`` steps; its fault comes where that asks.

    A test may set both while it holds ``between_steps``.

    Args:
        between_steps: a lock without which no step begins.
        spoil: whether its weights are not those that its options make.
        after: a replica that has ended, with whose steps it begins.
        fault: called with a place, "step", "all-reduce" or "commit", and the number of the step; raises ``Death``.
    """

    def __init__(self, asked, rank, address, name, between_steps, until, fault, spoil, after):
        super().__init__(name=name, daemon=True)
        self._asked, self._rank, self._address = asked, rank, address
        self._between_steps, self.until, self.fault, self._spoil = between_steps, until, fault, spoil
        self._after, self.losses, self.there, self.behind, self.error = after, {}, {}, [], None
        self.start()

    def run(self):
        try:
            self._train()
        except Death:
            pass
        except Exception as error:
            self.error = error
        finally:
            self.agreement.leave()

    def _train(self):
        self.agreement = agreements.agreement_of(self._asked, self._rank, self._address, self.name)
        with PREPARING:
            self.prepared = self._after.prepared if self._after else prepare(self._asked, self._rank)
        if self._spoil:
            next(self.prepared.step.model.parameters()).data.add_(1.0)
        step, loader = self.prepared.step, self.prepared.loader
        made = self.agreement.join(self.prepared, len(self._after.losses) if self._after else 0)
        inner = self.agreement._average

        def average(sent):
            self.fault("all-reduce", made)
            inner(sent)
            self.fault("commit", made)

        self.agreement._average = average
        while self._goes_on(made):
            time.sleep(0.03)  # so that who prepares, in another thread, has the time
            made = self.agreement.begin(made)
            self.fault("step", made)
            if self.agreement.is_behind():
                self.behind.append(made)
            self.there[made] = (self.agreement.number, self.agreement.n_there)
            for group in step.optimizer.param_groups:
                group["lr"] = self.prepared.rate(made)
            batch = [self.prepared.own(each) for each in next(loader)]
            self.agreement.reasons = torch.zeros_like(self.agreement.reasons)
            step(*batch)
            if self.agreement.kept:
                self.losses[made] = step.loss.item()
                made = self.agreement.end(made)

    def _goes_on(self, made):
        with self._between_steps:
            return made < self.until

    def wait_for(self, happened):
        """Wait until the newest (number, how many are there) satisfies ``happened``; returns the step."""
        while self.is_alive():
            there = dict(self.there)
            if there and max(there) in dict(self.losses) and happened(*there[max(there)]):
                return max(there)
            time.sleep(0.01)
        pytest.fail(f"it did not happen to {self.name}: {self.there}, {self.error}")

    def state(self):
        return state_of(self.prepared.step)


def state_of(step):
    """All weights and moments by name."""
    view = NamedState(step.model)
    return {
        name: each.values for name, each in (view.model() | view.optimizer(step.optimizer, {"scalars": {}})).items()
    }


class Site:
    """A lighthouse and the replicas that a test starts."""

    def __init__(self, folder, rank):
        self._folder, self._rank, self.replicas = folder, rank, []
        self.between_steps = threading.Lock()
        self.server = LighthouseServer("127.0.0.1:0", 1, 10_000, 20, heartbeat_timeout_ms=600)
        self._address = f"http://127.0.0.1:{self.server.address().rsplit(':', 1)[1]}"
        self._asked = options(folder, replicas=2, agree="every-step", agree_timeout=20.0, batch_size=4)

    def alone(self):
        """A run that is prepared, and how it agrees with other replicas, which it has not joined."""
        asked = self._asked, self._rank
        return prepare(*asked), agreements.agreement_of(*asked, self._address, "0")

    def start(self, name, until=1_000_000, fault=lambda place, step: None, spoil=False, after=None, **changes):
        where = self._rank, self._address, name, self.between_steps
        replica = Replica(replace(self._asked, **changes), *where, until, fault, spoil, after)
        self.replicas.append(replica)
        return replica

    def end(self, more=3):
        """Let all that live make some more steps, the same; returns the errors of all."""
        with self.between_steps:
            living = [replica for replica in self.replicas if replica.is_alive()]
            last = max((max(replica.there, default=0) for replica in living), default=0) + more + 2
            for replica in living:
                replica.until = last
        for replica in self.replicas:
            replica.join(60)
            assert not replica.is_alive(), replica.name
        return [replica.error for replica in self.replicas if replica.error is not None]


@pytest.fixture
def site(tmp_path):
    write_dataset(tmp_path / "data")
    before = listening()
    with joined() as rank:
        one = Site(tmp_path, rank)
        yield one
        one.end()
        one.server.shutdown()
        one.replicas.clear()
    gc.collect()
    assert listening() <= before


def once(place, step, action):
    """A fault that comes the first time that a replica is at this place of this step."""
    came = []

    def fault(here, now):
        if (here, now) == (place, step) and not came:
            came.append(True)
            action()

    return fault


def die():
    raise Death


def slowed(monkeypatch):
    """Let a state be of many pieces, of which the first two that are left come in a step, and the last, of a weight.

    Returns a list to which each attempt adds how many are left."""
    whole, attempts = healing.Transport.fetch, []

    def fetch(self, when, pieces, left, tensors):
        attempts.append(len(left))
        return whole(self, when, pieces, left[:2] + left[2:][-1:], tensors)

    monkeypatch.setattr(healing, "_PIECE_BYTES", 2**16)
    monkeypatch.setattr(healing.Transport, "fetch", fetch)
    return attempts


def assert_same(one, other):
    assert max(one.losses) == max(other.losses)
    ours, theirs = one.state(), other.state()
    assert ours.keys() == theirs.keys()
    for name in ours:
        assert torch.equal(ours[name], theirs[name]), name


def test_a_state_that_needs_several_steps_has_the_bits_of_its_peers_which_train_on(site, monkeypatch):
    """Weights and moments; while it is behind, the other has all of the sequences."""
    slowed(monkeypatch)
    one, two = site.start("0"), site.start("1", fault=once("step", 3, die))
    two.join(60)
    back = site.start("1")
    back.wait_for(lambda number, n_there: (number, n_there) == (1, 2))
    assert site.end() == []
    assert len(back.behind) > 2, back.behind
    assert back.behind == list(range(back.behind[0], back.behind[-1] + 1))
    assert {one.there[step] for step in back.behind} == {(0, 1)}
    assert {back.there[step] for step in back.behind} == {(-1, 1)}
    assert one.there[back.behind[-1] + 1] == (0, 2)
    assert back.losses == {step: one.losses[step] for step in back.losses}
    assert_same(one, back)
    steps = [each for each in back.agreement.told() if isinstance(each, Healing)]
    assert [each.step for each in steps] == back.behind
    assert [each.n_bytes + each.n_bytes_left for each in steps[1:]] == [each.n_bytes_left for each in steps[:-1]]
    assert steps[-1].n_bytes_left == 0 < steps[-1].n_bytes


def test_a_replica_has_made_a_step_before_others_wait_for_it_and_learns_what_it_would_have(site, monkeypatch):
    """All of the optimizer's states are there, and later steps have the bits of a run without it."""
    monkeypatch.setattr(replica_agreement, "ReportingManager", Mock(side_effect=Met))
    (warm, agreement), (cold, _) = site.alone(), site.alone()
    place, chance, guard = warm.loader.state_dict(), torch.get_rng_state(), warm.step.guard
    updates = []
    warm.step.optimizer.register_step_post_hook(lambda *_: updates.append(True))
    with pytest.raises(Met):
        agreement.join(warm, 0)
    agreement.leave()
    assert updates == [True]
    assert warm.loader.state_dict() == place and torch.equal(torch.get_rng_state(), chance)
    assert warm.step.guard is guard and guard.loss is None
    assert all(parameter.grad is None for parameter in warm.step.model.parameters())
    begun = state_of(warm.step)
    batch = next(cold.loader)
    for run in (warm, cold):
        run.step.before_update = None
        run.step(*batch)
    assert begun.keys() == state_of(cold.step).keys()
    for _ in range(2):
        batch = next(cold.loader)
        losses = [run.step(*batch) for run in (warm, cold)]
        assert torch.equal(*losses)
    ours, theirs = state_of(warm.step), state_of(cold.step)
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


def test_replicas_that_begin_alike_send_each_other_no_state(site, monkeypatch):
    """Of a large model it takes longer than they wait for each other."""
    attempts, taken = slowed(monkeypatch), []
    monkeypatch.setattr(replica_agreement.ReplicaAgreement, "_load_tensors", lambda *_: taken.append(True))
    one, two = site.start("0"), site.start("1")
    two.wait_for(lambda number, n_there: n_there == 2)
    assert site.end() == []
    assert attempts == taken == []
    assert {one.there[0], two.there[0]} == {(0, 2), (1, 2)}
    assert_same(one, two)


def test_one_that_has_made_fewer_steps_begins_with_the_whole_state_of_the_other(site, monkeypatch):
    """Also if not all of it comes at once; nobody makes a step until it has."""
    earlier = site.start("0", until=3, replicas=1)
    earlier.join(60)
    attempts = slowed(monkeypatch)
    one, two = site.start("0", after=earlier), site.start("1")
    two.wait_for(lambda number, n_there: n_there == 2)
    assert site.end() == []
    assert min(one.losses) == min(two.losses) == 3 and two.behind == []
    assert len(attempts) > 2 and attempts == sorted(attempts, reverse=True)
    assert {one.there[3], two.there[3]} == {(0, 2), (1, 2)}
    assert_same(one, two)


def test_all_begin_with_the_state_of_the_one_that_has_made_the_most_steps(site):
    """Whatever its name; two have as many, and each of the three has its bits."""
    earlier = [site.start(name, until=3) for name in "12"]
    for each in earlier:
        each.join(60)
    replicas = [site.start("0", replicas=3), *(site.start(each.name, after=each, replicas=3) for each in earlier)]
    replicas[0].wait_for(lambda number, n_there: number >= 0 and n_there == 3)
    assert site.end() == []
    assert min(step for each in replicas for step in each.losses) == 3
    for each in replicas[1:]:
        assert not any(isinstance(record, Message) for record in each.agreement.told())
        assert_same(replicas[0], each)


def test_one_that_comes_with_more_steps_than_those_who_train_says_that_it_drops_them(site):
    earlier = site.start("1", until=1, replicas=1)
    earlier.join(60)
    earlier.losses = dict.fromkeys(range(1_000))
    one = site.start("0", replicas=1)
    one.wait_for(lambda number, n_there: number == 0)
    two = site.start("1", after=earlier, replicas=1)
    two.wait_for(lambda number, n_there: n_there == 2)
    assert site.end() == []
    assert_same(one, two)
    (said,) = (each for each in two.agreement.told() if isinstance(each, Message))
    assert said.level == "warning" and re.match(r"replica 1 drops the last 9\d\d of its 1,000 steps: ", said.text)


def test_the_next_peer_goes_on_where_one_that_dies_has_stopped(site, monkeypatch):
    """Its source dies in the all-reduce, when the state has come in part; the pieces that came stay good."""
    slowed(monkeypatch)
    zero, one = site.start("0"), site.start("1")
    one.wait_for(lambda number, n_there: n_there == 2)
    killed, sent = [], []

    def die_as_source(place, step):
        back = site.replicas[-1]
        if place == "all-reduce" and len(back.behind) > 1 and not killed:
            killed.append(step)
            sent.extend(back.agreement._left)
            die()

    zero.fault = die_as_source
    back = site.start("2")
    back.wait_for(lambda number, n_there: (number, n_there) == (1, 2))
    assert site.end() == []
    assert killed and sent and back.behind[0] < killed[0] < back.behind[-1]
    assert back.losses == {step: one.losses[step] for step in back.losses}
    assert_same(one, back)


def test_one_that_dies_while_it_takes_over_a_state_costs_at_most_a_step(site, monkeypatch):
    """And nothing of what the others learn: theirs are the bits of a run in which nobody came."""
    slowed(monkeypatch)
    one = site.start("0", replicas=1)
    one.wait_for(lambda number, n_there: number == 0)

    def die_behind(place, step):
        if place == "commit" and len(threading.current_thread().behind) > 1:
            die()

    doomed = site.start("1", fault=die_behind, replicas=1)
    doomed.join(60)
    after = max(one.losses)
    one.wait_for(lambda number, n_there: max(one.losses) > after + 2)
    assert site.end() == []
    quiet = site.start("0", until=max(one.losses) + 1, replicas=1)
    quiet.join(60)
    assert quiet.losses == one.losses
    assert_same(one, quiet)


def test_one_dies_twice_in_a_row_and_two_of_three_at_once(site):
    """In the step, in the all-reduce, and once gradients are averaged; who is left makes every step once."""
    zero, one, two = (site.start(name, replicas=3) for name in "012")
    zero.wait_for(lambda number, n_there: n_there == 3)
    with site.between_steps:
        at = max(zero.there) + 2
        one.fault, two.fault = once("all-reduce", at, die), once("step", at, die)
    one.join(60), two.join(60)
    again = site.start("1", replicas=3)
    again.wait_for(lambda number, n_there: n_there == 2 and number >= 0)
    with site.between_steps:
        again.fault = once("commit", max(again.there) + 2, die)
    again.join(60)
    last = site.start("1", replicas=3)
    last.wait_for(lambda number, n_there: n_there == 2 and number >= 0)
    assert site.end() == []
    assert list(zero.losses) == list(range(len(zero.losses)))
    assert {step: zero.losses[step] for step in last.losses} == last.losses
    assert_same(zero, last)


def test_one_that_has_made_the_last_step_leaves_once_all_have(site, monkeypatch):
    """The other is late to look whether somebody has gone since its averages came, which NCCL's group asks."""

    monkeypatch.setattr(replica_agreement, "Gloo", LookedAfterGloo)
    late = site.start("0", until=4, steps=4, fault=once("commit", 3, lambda: time.sleep(1)))
    prompt = site.start("1", until=4, steps=4)
    late.join(60), prompt.join(60)
    assert (late.error, prompt.error) == (None, None)
    assert late.there[3][1] == prompt.there[3][1] == 2
    assert_same(late, prompt)


def test_who_trains_something_else_is_refused(site):
    """By option, and by weights."""
    one = site.start("0", replicas=1)
    one.wait_for(lambda number, n_there: number == 0)
    others = [site.start("1", replicas=1, seed=7), site.start("2", replicas=1, learning_rate=0.5)]
    others.append(site.start("3", replicas=1, spoil=True))
    for each, what in zip(others, ("--seed", "--learning-rate", "the checksum of weights after 0 steps"), strict=True):
        each.join(60)
        assert isinstance(each.error, ValueError)
        assert f"is unlike the others: {what}" in str(each.error)
    assert len(site.end()) == 3


def test_a_folder_belongs_to_one_replica_until_it_has_gone(site):
    """Another of its name is refused before it comes to the others."""
    dies = threading.Event()
    one, two = site.start("0"), site.start("1", fault=lambda place, step: die() if dies.is_set() else None)
    one.wait_for(lambda number, n_there: n_there == 2)
    again = site.start("1")
    again.join(60)
    assert re.match("another command writes to .*replica-1 as replica 1: give this one its own", str(again.error))
    assert not again.there
    dies.set()
    two.join(60)
    back = site.start("1")
    back.wait_for(lambda number, n_there: n_there == 2)
    assert site.end() == [again.error]


def test_one_that_stalls_beyond_the_time_out_is_given_up_and_trains_on_when_it_wakes(site):
    """It sends heartbeats, so that the others, whose step is dropped, wait for it as long as it takes."""
    asleep = once("all-reduce", 4, lambda: time.sleep(3))
    zero, one = (site.start(str(n), agree_timeout=1.0, fault=asleep if n else lambda *_: None) for n in range(2))
    zero.wait_for(lambda number, n_there: max(zero.losses) > 8)
    assert site.end() == []
    assert list(zero.losses) == list(range(len(zero.losses)))
    assert {step: zero.losses[step] for step in one.losses} == one.losses
    assert_same(zero, one)


def test_bytes_of_any_tensor_come_to_their_place(monkeypatch):
    monkeypatch.setattr(healing, "_PIECE_BYTES", 100)
    tensors = {"a": torch.randn(7, 11), "b": torch.randn(5, 9).t(), "c": torch.randn(3, dtype=torch.bfloat16)}
    others = {name: torch.zeros_like(tensor) for name, tensor in tensors.items()}
    pieces = healing.pieces_of(tensors)
    assert sum(piece.last - piece.first for piece in pieces) == sum(each.nbytes for each in tensors.values())
    for piece in reversed(pieces):
        healing.put(others[piece.name], piece, healing._bytes_of(tensors[piece.name], piece).clone())
    assert all(torch.equal(others[name], tensors[name]) for name in tensors)
