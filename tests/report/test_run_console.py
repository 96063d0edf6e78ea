"""Lines and tables of a run, piped and on a terminal."""

import io
import re
from dataclasses import replace

import pytest
from rich.console import Console

from cs336_systems.config import MODEL_SIZES
from cs336_systems.costs.speed_of_light import speed_of_light
from cs336_systems.hardware import find_hardware
from cs336_systems.pretraining.run_log import RunLog
from cs336_systems.pretraining.run_records import (
    Evaluation,
    Light,
    LoggedCheckpoint,
    LoggedStep,
    Membership,
    Memory,
    Message,
    Session,
)
from cs336_systems.report.run_console import RunConsole
from tests.pretraining.runs import opening, training

STEP = LoggedStep(7, 1.869, 65_536, 3.2826, 4.3155, 3e-4)
BEGIN = Session({"size": "tiny"}, {"size": "tiny"}, 1000)
LIGHT = Light({}, 0.429 * 1.869 / 65_536)


@pytest.fixture
def shown():
    """What the console writes of some records."""

    def shown(*records, terminal=False, every=1):
        out = io.StringIO()
        with RunLog(RunConsole(every, Console(file=out, force_terminal=terminal, width=100))) as log:
            for record in records:
                log.write(record)
        return out.getvalue()

    return shown


def test_a_line_for_each_step(shown):
    said = Evaluation(8, 3.119, 100, 1.1034), LoggedCheckpoint(8, 2964369408, 0.21, 4.1021, 1e-5)
    last = LoggedCheckpoint(9, 2964369408, 9.0, 15.0, 8.79), LoggedCheckpoint(10, 2_524_416, 0.002, 0.1, 0.0)
    lines = shown(BEGIN, LIGHT, STEP, *said, *last).splitlines()
    assert lines[-5:] == [
        "[T] step    7 [  0.8%] | time  1869 ms | norm  4.3155 | loss  3.2826 | lr 3.0e-04 | tps  35,065 | sol 42.9%"
        " | left 0:30:54",
        "[V] step    8 [  0.8%] | time  1103 ms | loss  3.1190",
        "[C] step    8 [  0.8%] | stall   210 ms | written  4102 ms | 2.76 GiB",
        "[C] step    9 [  0.9%] | stall  9000 ms | for the one before  8790 ms | written 15000 ms | 2.76 GiB",
        "[C] step   10 [  1.0%] | stall   2.0 ms | written   100 ms | 2.4 MiB",
    ]


def test_replicas_that_are_there_and_that_died(shown):
    alone = Membership(40, ["0", "2"], 0, 640, 1.5, 0.0, ["1"], [0, 0])
    back = Membership(50, ["0", "1"], 0, 800, 0.1, 0.12, ["1"], [640, 720])
    assert [line.partition(" | ")[2] for line in shown(BEGIN, alone, back).splitlines()[-2:]] == [
        "there: 0, 2; died: 1",
        "there: 0, 1, state taken over in 0.12 s; died: 1 (is back), its part of sequences 640 to 719 is lost",
    ]


def test_the_time_left_is_that_of_usual_steps_and_gradients_that_come_later_are_explained(shown):
    steps = [replace(STEP, step=step, seconds=600.0 if step == 0 else 2.0) for step in range(100)]
    assert "left 0:30:00" in shown(BEGIN, *steps).splitlines()[-1], "900 of 1,000 steps"
    assert "no gradients yet" in shown(BEGIN, Memory({"weights": 2**20, "gradients": 0}))


def test_every_so_many_steps_but_always_what_is_not_finite(shown):
    steps = [replace(STEP, step=step, loss=float("nan") if step == 13 else 2.0) for step in range(30)]
    said = shown(BEGIN, *steps, every=10)
    assert re.findall(r"\[T\] step +(\d+)", said) == ["0", "10", "13", "20"]
    with pytest.raises(ValueError, match="got every 0"):
        RunConsole(0)


def test_what_begins_is_few_lines(shown):
    light = speed_of_light(MODEL_SIZES["qwen2.5-0.5b"], 1024, find_hardware("NVIDIA H200"), block_dtype="fp8")
    said = shown(*opening(100, light=light))
    assert len(said.splitlines()) <= 15 and max(map(len, said.splitlines())) < 200
    for part in (
        *("--size qwen2.5-0.5b, --schedule wsd; else", "1 x NVIDIA H200, 141.0 GiB each", "494,032,768 parameters"),
        *("250,000 held out", "activations 30.00", "489,232 tokens/s", "blocks in fp8 53.1 %"),
    ):
        assert part in said, part
    assert "betas" not in said
    said = shown(*opening(100, first_step=40))
    assert "Resumed after 40 of 100 steps" in said
    assert "Speed of light: the device's peak is not known" in said
    lines = shown(BEGIN, Memory({"weights": 2**30, "free": 2**31}, {"weights": 2**30 + 2**25})).splitlines()
    assert [line.partition("GiB: ")[2] for line in lines[1:]] == ["weights 1.00, free 2.00", "weights 1.03"]


def test_a_terminal_has_colours_a_bar_and_whole_lines(shown):
    records = [
        *opening(40),
        *training(40, stop=30),
        replace(STEP, step=30, loss=float("nan")),
        Message("one [red] word"),
    ]
    said = shown(*records, terminal=True)
    assert "\x1b[1;31m[T] step 30" in said
    assert "31 of 40 steps" in said
    assert "one [red] word" in said
    assert "\x1b[?25h" in said, "the cursor is not back"
    piped = shown(*records)
    assert "\x1b" not in piped
    assert "━" not in piped
    assert len(re.findall(r"^\[T\]", piped, re.MULTILINE)) == 31
