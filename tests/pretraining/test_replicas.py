"""Replicas that die, stall or make NaN: what is lost, who goes on, and with which bits."""

import gc
import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from cs336_systems.distributed.checkpoint_folder import survey
from cs336_systems.distributed.process_group import joined
from cs336_systems.pretraining import replicas, trainer
from cs336_systems.pretraining.agreement import Agreement
from cs336_systems.pretraining.replica_options import Fault, faults_of
from cs336_systems.pretraining.replicas import Refused, _variables, be_the_lighthouse, train_replicas
from cs336_systems.pretraining.run_log import LOG, read_run
from cs336_systems.pretraining.run_records import Dropped, End, LoggedStep, Membership
from cs336_systems.pretraining.stop_requests import StopRequests
from cs336_systems.pretraining.trainer import train
from cs336_systems.processes import FreshProcess

from .runs import Kept
from .trained import listening, losses_and_norms, options, write_dataset

pytest.importorskip("torchft")
ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def folder(tmp_path):
    """A folder with data; afterwards nobody that a test has started listens at a port."""
    write_dataset(tmp_path / "data")
    before = listening()
    yield tmp_path
    gc.collect()
    assert listening() <= before


def nothing(*_):
    pass


def run(folder, n=2, agree="every-step", tell=nothing, hear=nothing, **changes):
    """The outcome, what was told, and the log of each replica."""
    told: list[str] = []

    def note(sentence):
        told.append(sentence)
        tell(sentence)

    asked = options(folder, replicas=n, agree=agree, **{"agree_timeout": 20.0, "batch_size": 4} | changes)
    ended = train_replicas(asked, Kept, note, hear)
    logs = [asked.out / f"replica-{name}" for name in ended.logs]
    return ended.outcome, told, [log for log in logs if (log / LOG).exists()]


def train_alone(asked):
    with joined() as rank:
        train(asked, rank)


def test_replicas_train_what_one_process_trains(folder):
    """To another order of addition; and both have the same bits."""
    ended, told, logs = run(folder, steps=6)
    assert (ended.reason, ended.steps, ended.complaint, told) == ("done", 6, None, [])
    one, two = map(losses_and_norms, logs)
    assert one == two
    whole = options(folder, steps=6, out=folder / "whole", batch_size=8)
    train_alone(whole)
    for ours, theirs in zip(one, losses_and_norms(whole.out), strict=True):
        assert ours == pytest.approx(theirs, rel=2e-5)


@pytest.mark.parametrize(("at", "number"), [(1, signal.SIGTERM), (2, signal.SIGINT), (3, signal.SIGTERM)])
def test_a_signal_while_processes_are_started_ends_all_of_them(folder, monkeypatch, at, number):
    """It comes once the lighthouse is there, the first of two replicas, or both ranks of the first."""
    started = []

    class Interrupted(FreshProcess):
        def __init__(self, *args):
            super().__init__(*args)
            started.append(self)
            if len(started) == at:
                signal.raise_signal(number)

    monkeypatch.setattr(replicas, "FreshProcess", Interrupted)
    ended, told, logs = run(folder, steps=100_000, ranks_per_replica=1 + (at == 3))
    reason = "interrupted" if number == signal.SIGINT else "terminated"
    assert (ended.reason, ended.steps, logs, ended.complaint, told) == (reason, 0, [], None, [])
    assert len(started) == at
    assert not any(each.is_alive() for each in started)


def test_ctrl_c_saves_and_ends_all_replicas_after_one_step(folder):
    """A script that calls the command must see by its exit code that it was interrupted."""
    heard = []

    def interrupt(name, record):
        if isinstance(record, LoggedStep) and not heard:
            heard.append(name)
            signal.raise_signal(signal.SIGINT)

    ended, told, logs = run(folder, steps=100_000, save_every=100_000, hear=interrupt)
    assert (ended.reason, ended.complaint, told) == ("interrupted", None, [])
    ends = [read_run(log / LOG).last(End) for log in logs]
    assert [(end.reason, end.step) for end in ends if end is not None] == [("interrupted", ended.steps)] * 2
    assert survey(folder / "run")[0][-1].step == ended.steps


def test_replicas_that_end_are_asked_once_whatever_signals_come():
    """A second request would end them before they have saved."""
    heard = []
    with StopRequests(heard=lambda: heard.append(1)) as stop:
        signal.raise_signal(signal.SIGTERM)
        signal.raise_signal(signal.SIGINT)
    assert (heard, stop.asked) == ([1], "interrupted")


@pytest.mark.parametrize(("handler", "asked"), [(signal.SIG_DFL, "terminated"), (signal.SIG_IGN, None)])
def test_a_closed_terminal_asks_a_run_to_end_but_under_nohup(handler, asked):
    before = signal.signal(signal.SIGHUP, handler)
    try:
        with StopRequests() as stop:
            signal.raise_signal(signal.SIGHUP)
    finally:
        signal.signal(signal.SIGHUP, before)
    assert stop.asked == asked


@pytest.fixture
def nobody_comes_back(monkeypatch):
    monkeypatch.setattr(replicas, "_MOST_FAILURES", -1)


@pytest.mark.usefixtures("nobody_comes_back")
def test_what_one_had_in_hand_when_it_died_is_learned_by_the_others_with_the_bits_of_a_run_without_it(folder):
    ended, told, logs = run(folder, steps=5, fail="kill 1 at 0")
    assert (ended.reason, ended.steps) == ("done", 5)
    assert [line.partition(":")[0] for line in told] == ["fault", "replica 1 has died"]
    alone = options(folder, steps=5, out=folder / "alone", batch_size=4)
    train_alone(alone)
    assert losses_and_norms(logs[0]) == losses_and_norms(alone.out)
    (dropped,) = read_run(logs[0] / LOG).all(Dropped)
    assert (dropped.step, tuple(dropped.sequences), dropped.again) == (0, (0, 8), True)


def test_what_a_log_begins_with_is_known_before_others_wait_for_a_replica(folder, monkeypatch):
    """The memory that is predicted takes a dry run of the step, a second for 24 layers."""
    happened, inner = [], trainer.introduction

    class Joining(Agreement):
        def join(self, prepared, made):
            happened.append("joined")
            return super().join(prepared, made)

    def introduction(*run):
        for record in inner(*run):
            happened.append(record.kind)
            yield record

    monkeypatch.setattr(trainer, "introduction", introduction)
    asked = options(folder, steps=4)
    with joined() as rank:
        trainer.train(asked, rank, agreement=Joining())
    assert "memory" in happened and happened[-1] == "joined"
    assert [each.kind for each in read_run(asked.out / LOG).records][1 : len(happened)] == happened[:-1]


def same_steps(logs):
    """The steps in any log, each of which is the same in all that have it."""
    steps: dict[int, tuple[float, float]] = {}
    for log in logs:
        for each in read_run(log / LOG).all(LoggedStep):
            assert steps.setdefault(each.step, (each.loss, each.norm)) == (each.loss, each.norm)
    return sorted(steps)


@pytest.mark.slow
def test_a_killed_replica_comes_back_and_no_step_is_lost(folder):
    """A step that was dropped is made again with the same sequences. The run ends some time after the return."""
    back = []

    def end_once_it_is_back(name, record):
        healed = isinstance(record, Membership) and record.step > 4 and record.healed_seconds > 0
        if name == "1" and healed and not back:
            back.append(record)
            signal.raise_signal(signal.SIGTERM)

    faults = "nan 1 at 2; kill 1 at 4"
    ended, told, logs = run(folder, steps=100_000, evaluate_every=None, fail=faults, hear=end_once_it_is_back)
    assert ended.reason == "terminated", told
    assert [line for line in told if line.startswith("fault")] == [f"fault: {part}" for part in faults.split("; ")]
    assert same_steps(logs) == list(range(ended.steps))
    first, second = (read_run(log / LOG) for log in logs)
    dropped = {each.step: tuple(each.sequences) for each in first.all(Dropped)}
    assert dropped.keys() >= {2, 4}
    there = {each.step: each for each in first.all(Membership)}
    assert "1" in there[4].gone
    for step, (start, _) in dropped.items():
        assert there[step].sequence == start  # dealt again from where they were
    assert second.all(LoggedStep)[-1].step == ended.steps - 1  # it has taken over the state of the other, and trains


@pytest.mark.slow
def test_a_stalled_replica_and_a_killed_lighthouse_cost_no_step(folder):
    """One may make a step alone, if a lighthouse that is started again hears of it first; the other takes its state."""
    faults = "stall 0 at 2 for 0.5s; kill lighthouse at 4"
    ended, told, logs = run(folder, steps=8, fail=faults)
    assert (ended.reason, ended.steps) == ("done", 8), told
    assert [line for line in told if line.startswith("fault")] == [f"fault: {part}" for part in faults.split("; ")]
    assert same_steps(logs) == list(range(8))


@pytest.mark.slow
def test_a_replica_one_of_whose_ranks_stalls_beyond_the_time_out_is_started_again(folder):
    """Its other rank waits in vain, which is no bad input."""
    heard = []

    def interrupt(sentence):
        heard.append(sentence)
        if len(heard) == 2:  # the first is of the fault
            signal.raise_signal(signal.SIGINT)

    how = {"steps": 100_000, "ranks_per_replica": 2, "agree_timeout": 2.0, "save_every": None, "export": False}
    _, told, _ = run(folder, tell=interrupt, fail="stall 1 at 2 for 60s", **how)
    failed = "replica 1 has failed: DistError: another rank of this replica did not answer within 8 s"
    assert told[1] == f"{failed}; it is started again"


@pytest.mark.slow
def test_a_lighthouse_whose_port_is_taken_while_it_is_dead_is_a_sentence_and_costs_no_step(folder, monkeypatch):
    """Its replicas save what they have made, and end."""

    def elsewhere(body, *asked):
        """Start the process; a lighthouse that is started again finds its port taken."""
        if body is be_the_lighthouse and asked[0]:
            asked = taken.getsockname()[1], *asked[1:]
        return FreshProcess(body, *asked)

    monkeypatch.setattr(replicas, "FreshProcess", elsewhere)
    with socket.create_server(("::", 0), family=socket.AF_INET6) as taken:
        ended, told, logs = run(folder, steps=100_000, save_every=100_000, fail="kill lighthouse at 4")
    assert re.fullmatch(r"no lighthouse could be started at port \d+: Address already in use.*", ended.complaint), told
    assert told[-1] == ended.complaint and ended.reason == "terminated"
    made = {len(read_run(log / LOG).all(LoggedStep)) for log in logs}
    assert survey(folder / "run")[0][-1].step == ended.steps == max(made) >= 4


@pytest.mark.slow
def test_diloco_of_one_replica_that_takes_whole_steps_outside_is_plain_training(folder):
    """The change of the weights is applied as it is: by an outer learning rate of 1 without momentum."""
    outer = {"agree_every": 2, "outer_learning_rate": 1.0, "outer_momentum": 0.0}
    ended, _, logs = run(folder, 1, "diloco", steps=6, evaluate_every=None, **outer)
    assert (ended.reason, ended.steps) == ("done", 6)
    plain = options(folder, steps=6, out=folder / "plain", batch_size=4, evaluate_every=None)
    train_alone(plain)
    for ours, theirs in zip(losses_and_norms(logs[0]), losses_and_norms(plain.out), strict=True):
        assert ours == pytest.approx(theirs, rel=1e-4)


@pytest.mark.slow
def test_diloco_replicas_learn_apart_and_resume_together(folder):
    """Each has sequences of its own between averages; a later command goes on from the common weights."""
    ended, told, logs = run(folder, 2, "diloco", steps=6, agree_every=3, fail="kill 1 at 4")
    assert (ended.reason, ended.steps) == ("done", 6), told
    one = losses_and_norms(logs[0])
    assert one[0] != losses_and_norms(logs[1])[0]
    ended, _, logs = run(folder, 2, "diloco", steps=9, agree_every=3)
    assert (ended.first_step, ended.steps) == (6, 9)
    assert sum(loss for loss, _ in one[:2]) > sum(loss for loss, _ in losses_and_norms(logs[0])[-2:])


@pytest.mark.slow
def test_one_that_wakes_after_the_last_step_of_the_others_does_not_train_on_alone(folder):
    """It would learn their sequences a second time, and save its weights over theirs."""
    faults = "stall 0 at 5 for 8s"
    ended, told, logs = run(folder, 2, "diloco", steps=60, agree_every=2, save_every=60, fail=faults)
    assert (ended.reason, ended.steps, ended.complaint) == ("done", 60, None)
    assert told == [f"fault: {faults}", "replica 0 was away when the others made the last step: it is ended"]
    assert [each.step for each in read_run(logs[1] / LOG).all(LoggedStep)] == list(range(60))
    assert max(each.step for each in read_run(logs[0] / LOG).all(LoggedStep)) < 59
    assert [each.step for each in survey(folder / "run")[0]] == [60]


def test_the_one_that_saves_dies_while_its_checkpoint_is_written(folder):
    """The others make the step; what the folder holds is whole, and another one saves at the end."""
    ended, told, logs = run(folder, steps=9, save_every=5, evaluate_every=None, fail="kill 0 at 5")
    assert (ended.reason, ended.steps) == ("done", 9), told
    assert [step for step, _ in enumerate(losses_and_norms(logs[1]))] == list(range(9))
    saved, damaged = survey(folder / "run")[:2]
    assert not damaged and max(each.step for each in saved) == 9


@pytest.mark.slow
def test_a_checkpoint_goes_on_with_more_replicas_and_with_none(folder):
    run(folder, 2, steps=4)
    ended, told, logs = run(folder, 3, steps=6)
    assert (ended.reason, ended.first_step, ended.steps) == ("done", 4, 6), told
    later = [{each.step: each.loss for each in read_run(log / LOG).all(LoggedStep) if each.step >= 4} for log in logs]
    assert list(later[0]) == [4, 5] and later == [later[0]] * 3
    train_alone(asked := options(folder, steps=8, batch_size=4))
    assert [each.step for each in read_run(asked.out / LOG).all(LoggedStep)] == [6, 7]


def test_without_torchft_there_is_a_sentence(folder, monkeypatch):
    monkeypatch.setitem(sys.modules, "torchft", None)
    with pytest.raises(ValueError, match=r"^replicas that agree need torchft: uv sync --extra replicas "):
        run(folder)


def test_replicas_whose_data_are_missing_are_refused(folder):
    with pytest.raises(Refused, match="nowhere"):
        run(folder, data=folder / "nowhere")


def test_faults_are_read_by_step():
    assert faults_of("nan 2 at 80; kill 1 at 40;stall 0 at 60 for 20s") == (
        Fault("kill", 1, 40),
        Fault("stall", 0, 60, 20.0),
        Fault("nan", 2, 80),
    )


def start(folder, *arguments):
    """The command in a process of its own, to train for long."""
    command = [sys.executable, "scripts/train.py", "--size", "tiny", "--agree", "every-step", "--steps", "100000"]
    command += ["--log-every", "1", "--data", str(folder / "data"), "--out", str(folder / "run"), *arguments]
    environment = os.environ | {"PYTHONUNBUFFERED": "1"}
    return subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, env=environment)


@pytest.mark.slow
def test_nothing_stays_behind_a_command_that_is_killed(folder):
    """Neither ranks nor lighthouse nor fork server."""
    process = start(folder, "--replicas", "2")
    assert process.stdout is not None
    assert any(line.startswith("[T]") for line in process.stdout)
    below = psutil.Process(process.pid).children(recursive=True)
    assert len(below) >= 3
    process.send_signal(signal.SIGKILL)
    process.wait()
    _, alive = psutil.wait_procs(below, timeout=60)
    assert not alive


@pytest.mark.slow
def test_replicas_that_die_at_once_go_on_from_the_newest_checkpoint(folder):
    """With all of them, and as if nothing had happened."""

    def wait_for_the_checkpoint(sentence):
        """It is written in the background, while who asks for the fault waits."""
        while sentence.startswith("fault") and not survey(folder / "run")[0]:
            time.sleep(0.01)

    faults = "kill 0 at 20; kill 1 at 20"
    ended, told, logs = run(folder, steps=24, save_every=16, fail=faults, tell=wait_for_the_checkpoint)
    assert (ended.reason, ended.first_step, ended.steps) == ("done", 16, 24), told
    restarts = [line for line in told if "started again" in line]  # the first may come before the second fault
    assert len(restarts) == 2 and set(told) - set(restarts) == {"fault: kill 0 at 20", "fault: kill 1 at 20"}
    assert len(told) == 4
    undisturbed, _, others = run(folder, steps=24, save_every=16, out=folder / "undisturbed")
    assert undisturbed.reason == "done"
    for log in logs:
        assert losses_and_norms(log) == losses_and_norms(others[0])


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_replica_that_waits_in_vain_saves_and_ends_when_it_is_asked_to(folder, number):
    """Its lighthouse is gone, or does not answer, and would be waited for longer than a test may take."""
    lighthouse = FreshProcess(be_the_lighthouse, 0, 20_000)
    address = f"http://127.0.0.1:{lighthouse.receive()}"
    seldom = ["--evaluate-every", "100000", "--save-every", "100000", "--agree-timeout", "600"]
    process = start(folder, "--lighthouse", address, "--replica", "a", "--context-length", "16", *seldom)
    try:
        assert process.stdout is not None
        assert any(line.startswith("[T] step  ") for line in process.stdout)
        lighthouse.send_signal(number)
        time.sleep(1.0)
        process.send_signal(signal.SIGTERM)
        process.communicate()
    finally:
        process.kill()
        lighthouse.end()
    assert process.returncode == 0
    log = read_run(folder / "run" / "replica-a" / LOG)
    end, made = log.last(End), len(log.all(LoggedStep))
    assert end is not None and (end.reason, end.step) == ("terminated", made)
    (saved,) = survey(folder / "run")[0]
    assert saved.step == made > 0


@pytest.mark.slow
@pytest.mark.usefixtures("nobody_comes_back")
def test_who_is_not_connected_with_the_dead_one_does_not_wait_for_it(folder):
    """Of four replicas on gloo's ring each is connected with two."""
    ended, told, logs = run(folder, 4, steps=4, batch_size=2, fail="kill 3 at 2", agree_timeout=60.0)
    assert (ended.reason, ended.steps) == ("done", 4), told
    dropped = [each.seconds for log in logs for each in read_run(log / LOG).all(Dropped)]
    assert len(dropped) == 3 and max(dropped) < 60.0 / 2


def test_replicas_take_gpus_in_turn_and_share_them_where_there_are_too_few(monkeypatch):
    """NCCL takes those that share one for ranks of other hosts."""

    def gpus_and_hosts(visible, n_replicas, n_ranks):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
        places = [(replica, rank) for replica in range(n_replicas) for rank in range(n_ranks)]
        found = [_variables(rank, replica, n_ranks, len(places), 1) for replica, rank in places]
        return [each["CUDA_VISIBLE_DEVICES"] for each in found], [each.get("NCCL_HOSTID") for each in found]

    assert gpus_and_hosts("4,5,6,7", 2, 2) == (["4,5", "4,5", "6,7", "6,7"], [None] * 4)
    gpus, hosts = gpus_and_hosts("4", 2, 2)
    assert gpus == ["4"] * 4 and len(set(hosts)) == 4 and None not in hosts
