"""The log of a run: read at every moment, torn at any byte, resumed, of another version, on a full disk."""

import errno
import json
import math
import os
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from cs336_systems.pretraining.run_log import LogFile, RunLog, read_run
from cs336_systems.pretraining.run_records import (
    KINDS,
    Dropped,
    Evaluation,
    GpuState,
    Healing,
    Joined,
    Light,
    LoggedCheckpoint,
    LoggedStep,
    Membership,
    Message,
    Session,
    TaskScores,
    from_line,
    to_line,
)
from tests.pretraining.runs import Kept, opening, training, write

STEP = LoggedStep(3, 0.5, 1024, 2.5, 1.5, 3e-4)


@pytest.fixture
def path(tmp_path):
    return tmp_path / "runs" / "log.jsonl"


def no_constant(word):
    pytest.fail(f"{word} is not JSON")


def test_what_is_written_is_read_as_records_and_as_frames(path):
    steps = training(100, stop=12, gpu_every=5, evaluate_every=6)
    records = [
        *opening(100),
        *steps,
        LoggedCheckpoint(12, 2**30, 0.2, 4.1),
        Message("a warning, with [brackets]", "warning"),
        Membership(12, ["0", "b"], 1, 96, 1.5, 0.1, ["1"], [80, 96]),
        Dropped(12, "a replica died", [96, 112], True, 0.2),
        Joined(1.5, 2.0, 0.5),
        Healing(12, 2**24, 2**25, 0.2, 0.01, 0.1),
        TaskScores(12, {"arc_easy": {"acc": 0.25, "acc_stderr": 0.01}}),
    ]
    assert {record.kind for record in records} == set(KINDS)
    write(path, *records)
    run = read_run(path)
    assert list(run.records) == records
    assert run.n_bytes == path.stat().st_size
    for line in path.read_text().splitlines():
        json.loads(line, parse_constant=no_constant)
    assert run.steps["step"].tolist() == list(range(12))
    assert run.steps["tokens_seen"].iloc[-1] == 12 * 524_288
    assert run.steps["tokens_per_s"].tolist() == [record.tokens / record.seconds for record in run.all(LoggedStep)]
    assert run.steps["speed_of_light"].isna().all()
    assert run.evaluations["step"].tolist() == [6, 12]
    assert run.gpu["step"].tolist() == [0, 5, 10]
    other = path.with_name("empty")
    write(other, *opening(5), Light({}, 1e-5))
    empty = read_run(other)
    for name in ("steps", "evaluations", "gpu"):
        frame, filled = getattr(empty, name), getattr(run, name)
        assert len(frame) == 0 and frame.dtypes.to_dict() == filled.dtypes.to_dict()
    write(other, *opening(5, 0), Light({}, 1e-5), replace(STEP, tokens=1000, seconds=0.1))
    assert read_run(other).steps["speed_of_light"].tolist() == pytest.approx([0.1])


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_is_valid_json_and_comes_back(path, value):
    write(path, *opening(9), replace(STEP, loss=value), GpuState(3, None, None, None, None, "", None))
    said = json.loads(path.read_text().splitlines()[-2], parse_constant=no_constant)
    assert said["loss"] == {"nan": "NaN", "inf": "Infinity", "-inf": "-Infinity"}[str(value)]
    run = read_run(path)
    assert repr(run.steps["loss"].iloc[0]) == repr(run.steps["loss"].dtype.type(value))
    assert run.gpu["power_w"].isna().all()
    options = Session({"clip": math.inf, "betas": (0.9, math.nan), "out": Path("runs")}, {}, 1)
    assert from_line(to_line(options)).options == {"clip": "Infinity", "betas": [0.9, "NaN"], "out": "runs"}


def test_cut_at_any_byte_at_most_the_last_line_is_lost(path):
    write(path, *opening(9), STEP, replace(STEP, step=4, loss=math.nan), Message("the end"))
    content = path.read_bytes()
    ends = [i + 1 for i, byte in enumerate(content) if byte == ord("\n")]
    cut = path.with_name("cut")
    for n_bytes in {*range(0, len(content), 29), *ends, *(end - 1 for end in ends)}:
        cut.write_bytes(content[:n_bytes])
        run = read_run(cut)
        whole = [end for end in ends if end <= n_bytes]
        assert (len(run.records), run.n_bytes) == (len(whole), max(whole, default=0))


def test_a_resumed_run_cuts_off_the_torn_line_and_overtakes_the_steps_that_it_makes_again(path):
    write(path, *opening(40), *training(40, stop=25, evaluate_every=10, gpu_every=5, end=None))
    with path.open("ab") as file:
        file.write(b'{"kind": "step", "at": 17')
    again = training(40, first=20, stop=22, seed=1, evaluate_every=10, gpu_every=5, end="interrupted")
    write(path, *opening(40, first_step=20), Evaluation(20, 1.25, 10, 0.1), *again)
    run = read_run(path)
    assert run.n_bytes == path.stat().st_size
    assert run.steps["step"].tolist() == list(range(22))
    assert run.gpu["step"].tolist() == [0, 5, 10, 15, 20]
    assert run.evaluations["step"].tolist() == [10, 20]
    assert run.evaluations["loss"].iloc[-1] == 1.25
    assert [session.first_step for session in run.all(Session)] == [0, 20]
    path.write_bytes(path.read_bytes()[:10])  # killed while the very first line was written
    with RunLog(LogFile(path)) as log, pytest.raises(AssertionError, match="begins with options"):
        log.write(STEP)
    write(path, *opening(3))
    assert len(read_run(path).records) == len(list(opening(3)))


def test_two_processes_do_not_write_one_log(path):
    with RunLog(LogFile(path)) as log:
        log.write(next(opening(3)))
        with path.open("ab") as file:
            file.write(b'{"kind": "st')  # a line that the first is writing
        before = path.read_bytes()
        with pytest.raises(ValueError, match=r"log.jsonl is being written by another process$"):
            LogFile(path)
        assert path.read_bytes() == before
    LogFile(path).close()
    assert path.read_bytes() == before[:-12]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"step,loss\n1,2\n", "is no log of a training run"),
        (b'{"kind": "step"}\n', "is no log of a training run"),
        (b"\x80\x00\xff", "is no log of a training run"),
        (b'{"kind": "options", "schema": 2, "x": 1}\n', "line 1: it is of schema 2, and this version reads 1"),
        (b'{"kind": "options", "schema": 1}\n', "line 1: it is no whole line of kind 'options'"),
    ],
)
def test_other_files_and_other_versions_are_refused_and_left_alone(path, content, message):
    path.parent.mkdir()
    path.write_bytes(content)
    for open_it in (read_run, LogFile):
        with pytest.raises(ValueError, match=message):
            open_it(path)
    assert path.read_bytes() == content


def test_a_damaged_line_inside_is_named_and_other_kinds_and_fields_are_passed_over(path):
    """Of later versions, and outliers of those before 2026-11-27."""
    write(path, *opening(3), STEP)
    lines = path.read_bytes().splitlines(keepends=True)
    for line in (b"garbage", b"[1]", b'{"step": 1}', b'{"kind": "step", "loss": "much"}', b"\x80"):
        path.write_bytes(b"".join(lines[:-1]) + line + b"\n" + lines[-1])
        with pytest.raises(ValueError, match=f"line {len(lines)}: it is no"):
            read_run(path)
    other = b'{"kind": "weather", "rain": true}\n{"kind": "outlier", "step": 7, "quantity": "loss", "value": 9}\n'
    path.write_bytes(b"".join(lines[:-1]) + other + lines[-1].replace(b"}", b', "mood": "fine"}'))
    assert read_run(path).all(LoggedStep) == (STEP,)


def test_a_full_disk_is_told_once_and_leaves_whole_lines(path, monkeypatch):
    kept, write_some, room = Kept(), os.write, [20]

    def full(descriptor, line):
        if not room[0]:
            raise OSError(errno.ENOSPC, "No space left on device")
        return write_some(descriptor, line[: room.pop(0)])

    with RunLog(LogFile(path), kept) as log:
        log.write(next(opening(3)))
        size = path.stat().st_size
        with pytest.raises(TypeError, match="Tensor"):
            log.write(replace(STEP, loss=torch.tensor(1.0)))
        with monkeypatch.context() as patch:
            room.append(0)
            patch.setattr(os, "write", full)
            log.write(STEP)
            log.write(replace(STEP, step=4))
            assert path.stat().st_size == size
        log.write(replace(STEP, step=5))
    assert read_run(path).steps["step"].tolist() == [5]
    assert [record.step for record in kept if isinstance(record, LoggedStep)] == [3, 4, 5]
    (told,) = (record for record in kept if isinstance(record, Message))
    assert (told.level, kept.closed) == ("error", True) and "No space left on device" in told.text
    # A session that cannot begin is none, or its steps would follow those that it makes again, as if of one session.
    before = path.read_bytes()
    with RunLog(LogFile(path)) as log, monkeypatch.context() as patch:
        patch.setattr(os, "write", full)
        with pytest.raises(OSError, match="No space left on device: .*log.jsonl"):
            log.write(next(opening(3, first_step=1)))
    assert path.read_bytes() == before
