"""The log of a run: read at every moment, torn at any byte, resumed, of another version, on a full disk."""

import errno
import json
import math
import os
import signal
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from cs336_systems.pretraining.outliers import WINDOW
from cs336_systems.pretraining.run_log import LogFile, RunLog
from cs336_systems.pretraining.run_reader import read_run
from cs336_systems.pretraining.run_records import (
    KINDS,
    Checkpoint,
    Data,
    Evaluation,
    GpuState,
    Light,
    Message,
    Options,
    Outlier,
    Quantization,
    Step,
    from_line,
    to_line,
)
from tests.pretraining.runs import Kept, opening, training, write

ROOT = Path(__file__).resolve().parents[2]
QUANTIZED = {
    "normed1": {"block": [0, 1], "absmax": [4.5, 5.0], "underflow": [0.25, 0.5], "saturation": [0.0, 0.0]},
    "dqkv": {"block": [1], "absmax": ["Infinity"], "underflow": [0.125], "saturation": [1.0]},
}
STEP = Step(3, 0.5, 1024, 2.5, 1.5, 3e-4)


@pytest.fixture
def path(tmp_path):
    return tmp_path / "runs" / "log.jsonl"


def every_kind():
    steps = training(100, stop=12, gpu_every=5, evaluate_every=6)
    return [
        *opening(100),
        *steps,
        Checkpoint(12, 2**30, 0.2, 4.1),
        Outlier(7, "loss", 9.0, 8.0),
        Quantization(10, QUANTIZED),
        Message("a warning, with [brackets]", "warning"),
    ]


def test_what_is_written_is_read(path):
    records = every_kind()
    assert {record.kind for record in records} == set(KINDS)
    write(path, *records)
    run = read_run(path)
    assert list(run.records) == records
    assert (run.n_bytes, run.torn) == (path.stat().st_size, 0)
    for line in path.read_text().splitlines():
        json.loads(line, parse_constant=lambda word: pytest.fail(f"{word} is not JSON"))


def test_a_frame_has_what_quantization_did_to_each_tensor(path):
    write(path, *opening(20))
    assert list(read_run(path).quantization) == ["step", "tensor", "block", "absmax", "underflow", "saturation"]
    write(path.with_name("other.jsonl"), *opening(20), Quantization(10, QUANTIZED))
    lines = [tuple(line) for line in read_run(path.with_name("other.jsonl")).quantization.itertuples(index=False)]
    assert lines == [
        (10, "normed1", 0, 4.5, 0.25, 0.0),
        (10, "normed1", 1, 5.0, 0.5, 0.0),
        (10, "dqkv", 1, math.inf, 0.125, 1.0),
    ]


def test_frames_have_the_steps_and_what_follows_from_them(path):
    write(path, *every_kind())
    run = read_run(path)
    steps = run.steps
    assert steps["step"].tolist() == list(range(12))
    assert steps["tokens_seen"].iloc[-1] == 12 * 524_288
    assert steps["tokens_per_s"].tolist() == [record.tokens / record.seconds for record in run.all(Step)]
    assert steps["speed_of_light"].isna().all()
    assert run.evaluations["step"].tolist() == [6, 12]
    assert run.gpu["step"].tolist() == [0, 5, 10]
    assert run.outliers["z"].tolist() == [8.0]
    assert run.last(Data).vocab_size == 4096

    write(path.with_name("fast"), *opening(2), Light({}, 1e-5), replace(STEP, tokens=1000, seconds=0.1))
    assert read_run(path.with_name("fast")).steps["speed_of_light"].tolist() == pytest.approx([0.1])


def test_columns_have_their_types_also_without_lines(path):
    write(path, *opening(5))
    run, full = read_run(path), path.with_name("full")
    write(full, *every_kind())
    for name in ("steps", "evaluations", "gpu", "outliers"):
        empty, filled = getattr(run, name), getattr(read_run(full), name)
        assert len(empty) == 0
        assert empty.dtypes.to_dict() == filled.dtypes.to_dict()


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_is_valid_json_and_comes_back(path, value):
    write(path, *opening(9), replace(STEP, loss=value), GpuState(3, None, None, None, None, "", None))
    line = path.read_text().splitlines()[-3]
    said = json.loads(line, parse_constant=lambda word: pytest.fail(f"{word} is not JSON"))
    assert said["loss"] == {"nan": "NaN", "inf": "Infinity", "-inf": "-Infinity"}[str(value)]
    run = read_run(path)
    assert repr(run.steps["loss"].iloc[0]) == repr(run.steps["loss"].dtype.type(value))
    assert run.gpu["power_w"].isna().all()
    options = Options({"clip": math.inf, "betas": (0.9, math.nan), "out": Path("runs")}, {}, 1)
    assert from_line(to_line(options)).options == {"clip": "Infinity", "betas": [0.9, "NaN"], "out": "runs"}


def test_cut_at_any_byte_at_most_the_last_line_is_lost(path):
    records = [*opening(9), STEP, replace(STEP, step=4, loss=math.nan), Message("the end")]
    write(path, *records)
    content = path.read_bytes()
    ends = [i + 1 for i, byte in enumerate(content) if byte == ord("\n")]
    cut = path.with_name("cut")
    for n_bytes in range(len(content) + 1):
        cut.write_bytes(content[:n_bytes])
        run = read_run(cut)
        whole = [end for end in ends if end <= n_bytes]
        assert len(run.records) == len(whole)
        assert (run.n_bytes, run.torn) == (max(whole, default=0), n_bytes - max(whole, default=0))


def test_a_resumed_run_cuts_off_the_torn_line_and_overtakes_the_steps_that_it_makes_again(path):
    write(path, *opening(40), *training(40, stop=25, evaluate_every=10, gpu_every=5, end=None))
    with path.open("ab") as file:
        file.write(b'{"kind": "step", "at": 17')
    again = training(40, first=20, stop=22, seed=1, evaluate_every=10, gpu_every=5, end="interrupted")
    write(path, *opening(40, first_step=20), Evaluation(20, 1.25, 10, 0.1), *again, resume=True)
    run = read_run(path)
    assert run.torn == 0
    assert run.steps["step"].tolist() == list(range(22))
    assert run.gpu["step"].tolist() == [0, 5, 10, 15, 20]
    assert run.evaluations[["step", "loss"]].to_numpy().tolist()[-1] == [20, 1.25]
    assert run.evaluations["step"].tolist() == [10, 20]
    first = read_run(path).all(Options)
    assert [options.first_step for options in first] == [0, 20]


def test_resuming_without_a_log_begins_one_and_a_new_run_never_writes_into_another(path):
    write(path, *opening(3), resume=True)
    with pytest.raises(FileExistsError):
        LogFile.open(path, resume=False)
    path.write_bytes(path.read_bytes()[:10])  # killed while the very first line was written
    write(path, *opening(3), resume=True)
    assert len(read_run(path).records) == len(list(opening(3)))


def test_two_processes_do_not_write_one_log(path):
    with RunLog(LogFile.open(path, resume=False)) as log:
        log.write(next(opening(3)))
        with path.open("ab") as file:
            file.write(b'{"kind": "st')  # a line that the first is writing
        before = path.read_bytes()
        with pytest.raises(ValueError, match=r"log.jsonl is being written by another process$"):
            LogFile.open(path, resume=True)
        assert path.read_bytes() == before
    LogFile.open(path, resume=True).close()
    assert path.read_bytes() == before[:-12]


def test_a_log_begins_with_options(path):
    with RunLog(LogFile.open(path, resume=False)) as log, pytest.raises(AssertionError, match="begins with options"):
        log.write(STEP)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"step,loss\n1,2\n", "is no log of a training run"),
        (b'{"kind": "step"}\n', "is no log of a training run"),
        (b"\x80\x00\xff", "is no log of a training run"),
        (b"\n", "is no log of a training run"),
        (b'{"kind": "options", "schema": 2, "x": 1}\n', "line 1: it is of schema 2, and this version reads 1"),
        (b'{"kind": "options", "schema": 1}\n', "line 1: it is no whole line of kind 'options'"),
    ],
)
def test_other_files_and_other_versions_are_refused_and_left_alone(path, content, message):
    path.parent.mkdir()
    path.write_bytes(content)
    for open_it in (read_run, lambda path: LogFile.open(path, resume=True)):
        with pytest.raises(ValueError, match=message):
            open_it(path)
    assert path.read_bytes() == content


@pytest.mark.parametrize("line", [b"garbage", b"[1]", b'{"step": 1}', b'{"kind": "step", "loss": "much"}', b"\x80"])
def test_a_damaged_line_inside_is_named(path, line):
    write(path, *opening(3), STEP)
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join(lines[:-1]) + line + b"\n" + lines[-1])
    with pytest.raises(ValueError, match=f"line {len(lines)}: it is no"):
        read_run(path)


def test_kinds_and_fields_that_came_later_are_passed_over(path):
    write(path, *opening(3))
    with path.open("a") as file:
        file.write('{"kind": "weather", "rain": true}\n')
        file.write(to_line(STEP).decode().replace("}", ', "mood": "fine"}'))
    assert read_run(path).all(Step) == (STEP,)


def test_a_tensor_is_refused_before_anything_is_written(path):
    with RunLog(LogFile.open(path, resume=False)) as log:
        log.write(next(opening(3)))
        size = path.stat().st_size
        with pytest.raises(TypeError, match="a log has numbers and words, got Tensor"):
            log.write(replace(STEP, loss=torch.tensor(1.0)))
    assert path.stat().st_size == size


def test_a_full_disk_is_told_once_and_leaves_whole_lines(path, monkeypatch):
    kept = Kept()
    with RunLog(LogFile.open(path, resume=False), kept) as log:
        log.write(next(opening(3)))
        write_some, room = os.write, [20]

        def full(descriptor, line):
            if not room[0]:
                raise OSError(errno.ENOSPC, "No space left on device")
            return write_some(descriptor, line[: room.pop(0)])

        with monkeypatch.context() as patch:
            room.append(0)
            patch.setattr(os, "write", full)
            log.write(STEP)
            log.write(replace(STEP, step=4))
        log.write(replace(STEP, step=5))
    assert read_run(path).steps["step"].tolist() == [5]
    assert [record.step for record in kept if isinstance(record, Step)] == [3, 4, 5]
    told = [record.text for record in kept if isinstance(record, Message)]
    assert told == ["LogFile cannot be written and will lack lines: No space left on device"]
    assert kept.closed


def test_a_session_that_cannot_begin_its_log_is_none(path, monkeypatch):
    """Else its steps would follow those that it makes again, as if all were of one session."""
    write(path, *opening(3), STEP)
    before = path.read_bytes()

    def full(descriptor, line):
        raise OSError(errno.ENOSPC, "No space left on device")

    with RunLog(LogFile.open(path, resume=True)) as log, monkeypatch.context() as patch:
        patch.setattr(os, "write", full)
        with pytest.raises(OSError, match="No space left on device: .*log.jsonl"):
            log.write(next(opening(3, first_step=1)))
    assert path.read_bytes() == before


def test_outliers_follow_their_step_into_every_sink_and_a_resumed_run_remembers(path):
    kept = Kept()
    calm = tuple(replace(STEP, step=i, loss=2 + (-1) ** i * 0.1, norm=1.0) for i in range(WINDOW + 20))
    with RunLog(LogFile.open(path, resume=False), kept) as log:
        for record in (*opening(500), *calm, replace(STEP, step=120, loss=5.0, norm=1.0)):
            log.write(record)
    assert (kept[-1].step, kept[-1].quantity, kept[-1].value) == (120, "loss", 5.0)
    assert kept[-1].z == pytest.approx(30, rel=0.02)
    assert read_run(path).all(Outlier) == (kept[-1],)
    for earlier, expected in ((read_run(path).all(Step)[:120], 1), ((), 0)):
        kept = Kept()
        with RunLog(kept, earlier=earlier) as log:
            log.write(replace(STEP, step=120, loss=5.0, norm=1.0))
        assert len(kept) == 1 + expected


def test_threads_write_whole_lines(path):
    with RunLog(LogFile.open(path, resume=False)) as log:
        log.write(next(opening(3)))
        threads = [threading.Thread(target=lambda: [log.say("x" * 500) for _ in range(200)]) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert len(read_run(path).all(Message)) == 800


@pytest.mark.slow
def test_a_killed_writer_leaves_what_it_said(path):
    code = f"""
from itertools import chain
from pathlib import Path
from cs336_systems.pretraining.run_log import LogFile, RunLog
from tests.pretraining.runs import opening, training

log = RunLog(LogFile.open(Path({str(path)!r}), resume=False))
for record in chain(opening(10**6), training(10**6)):
    log.write(record)
    if record.kind == "step" and record.step == 50:
        print("go", flush=True)
"""
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, env=environment)
    assert process.stdout.readline() == b"go\n"
    assert read_run(path).steps["step"].tolist()[:51] == list(range(51))  # while it writes
    os.kill(process.pid, signal.SIGKILL)
    process.communicate()
    steps = read_run(path).steps["step"].tolist()
    assert steps == list(range(len(steps)))
