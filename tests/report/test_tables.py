"""Tables from hand-made rows: every cell is a line, every number is legible, no failure looks like a result."""

import io
import re

import pandas as pd
import pytest
from rich.console import Console

from cs336_systems.experiments.model import step_table
from cs336_systems.report.tables import Table, digits
from tests.report.rows import ceiling, make_cell, make_frame, ms, rate

STEP = (
    ms("forward", 1.0, 1.2, 1.4),
    ms("backward", 20.0, 22.0, 24.0),
    ms("optimizer", 0.5, 0.5, 0.5),
    ms("step", 1234.0, 1300.0, 1350.0),
    rate("tokens_per_s", 98461.5),
    rate("model_tflops", 0.04321),
    rate("mfu", 41.26),
    rate("matmul_ceiling_share", 55.55),
    rate("peak_memory", 12.34),
    rate("predicted_peak_memory", 9.876),
)


def line(frame: pd.DataFrame, **settings: object) -> dict:
    """The only line of the table with these settings."""
    for column, value in settings.items():
        frame = frame[frame[column] == value]
    assert len(frame) == 1
    return frame.iloc[0].to_dict()


def test_one_line_with_every_number():
    table = step_table(make_frame(ceiling(), make_cell(*STEP)))
    assert line(table.frame) == {
        "size": "tiny",
        "forward ms": "1.20 (1.04–1.36)",
        "backward ms": "22.0 (20.4–23.6)",
        "optimizer ms": "0.500 (0.500–0.500)",
        "total ms": "1,300 (1,247–1,340)",
        "tokens/s": "98,462",
        "TFLOP/s": "0.0432",
        "MFU %": "41.3",
        "% of ceiling": "55.5",
        "peak GiB": "12.3",
        "predicted GiB": "9.88",
        "status": "ok",
    }


def test_a_failed_cell_is_a_line_with_its_reason_and_without_numbers():
    only_forward = make_cell(ms("forward", 1.0), ms("step", 1.0), size="small")
    failed = make_cell(status="oom", message="why it failed", size="10b")
    frame = step_table(make_frame(make_cell(*STEP), failed, only_forward)).frame
    assert set(line(frame, size="10b").values()) == {"10b", "–", "oom: why it failed"}
    assert line(frame, size="small")["backward ms"] == line(frame, size="small")["MFU %"] == "–"


def test_three_digits_without_an_exponent():
    values = (123456.7, 99.96, 0.9996, 0.01234, 0.0000123456, 0.0)
    assert [*map(digits, values)] == ["123,457", "100", "1.00", "0.0123", "0.0000123", "0.00"]


TABLE = Table(
    "50 % of R&D_cost #1",
    pd.DataFrame({"size": ["a_b", "c"], "MFU %": ["1.0", "22.0"], "status": ["ok", "error: 5 % & {x} #2 \\ ~ $3 ^"]}),
)


def test_latex_escapes_what_is_special():
    text = TABLE.latex()
    caption, cell = r"\caption{50 \% of R\&D\_cost \#1}", r"5 \% \& \{x\} \#2 \textbackslash"
    for piece in (caption, r"MFU \%", r"a\_b", cell, r"\$3"):
        assert piece in text


def on_terminal(table: Table, width: int) -> str:
    text = io.StringIO()
    Console(file=text, width=width).print(table.rich(width))
    return text.getvalue()


def test_rich_takes_no_message_for_markup():
    message = "error: index [/red] out of [0, 1]"
    rendered = on_terminal(Table("sizes [a, b]", pd.DataFrame({"status": [message]})), 120)
    assert message in rendered
    assert "sizes [a, b]" in rendered


def left_out_of(table: Table, width: int) -> list[str]:
    rendered = " ".join(on_terminal(table, width).split())
    return rendered.partition("for: ")[2].partition(". Piped")[0].split(", ") if "No room in" in rendered else []


def lines_on_terminal(table: Table, width: int) -> list[str]:
    """The lines below the rule and above the notes."""
    rendered = on_terminal(table, width).splitlines()
    rule = next(i for i, line in enumerate(rendered) if line.startswith("─"))
    assert all(len(line) <= width for line in rendered)
    return rendered[rule + 1 : rule + 1 + len(table.frame)]


@pytest.mark.parametrize("width", [60, 250])
def test_a_line_stays_a_line_at_any_width_and_what_is_left_out_is_named(width):
    failed = make_cell(status="oom", message="no room " * 20, size="10b")
    table = step_table(make_frame(make_cell(*STEP), failed))
    ok, oom = lines_on_terminal(table, width)
    assert ok.startswith("tiny ")
    assert "1,300 (1,247–1,340)" in ok
    assert oom.startswith("10b ")
    assert "oom: no room" in oom
    left_out = left_out_of(table, width)
    assert len(re.split(r" {2,}", ok.strip())) == len(set(table.frame) - set(left_out))
    assert bool(left_out) == (width < 160)
