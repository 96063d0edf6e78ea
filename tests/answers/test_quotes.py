"""Numbers in prose: computed from terms, compared digit by digit, and refused if nobody knows them."""

import pytest

from cs336_systems.answers.committed import NotMeasured
from cs336_systems.answers.quotes import (
    PENDING,
    Term,
    evaluate,
    render_quotes,
    stale_quotes,
    without_quotes,
)

TIMES = {"small": 54.512, "xl": 697.3}


def missing(part: str) -> float:
    raise NotMeasured(part)


TERMS = {"ms": Term(lambda size: TIMES[size]), "share": Term(lambda: 0.1278, "%.1f"), "later": Term(missing)}


def test_a_number_is_written_anew_and_nothing_else():
    text = "It takes 54.4<!--= ms small --> ms, or (1.2<!--= share -->) 3 times."
    rendered = render_quotes(text, TERMS)
    assert rendered == "It takes 54.5<!--= ms small --> ms, or (12.8<!--= share -->) 3 times."
    assert render_quotes(rendered, TERMS) == rendered
    assert without_quotes(rendered) == "It takes 54.5 ms, or (12.8) 3 times."


@pytest.mark.parametrize("changed", ["54.6", "64.5", "5.45", "545", "54.50", "-54.5", "1,054.5"])
def test_a_changed_digit_is_stale_and_named_with_its_line(changed):
    text = f"first\nIt takes {changed}<!--= ms small --> ms"
    sentences = stale_quotes(text, render_quotes(text, TERMS))
    assert sentences == [f"line 2: {changed} should be 54.5 (ms small)"]


def test_a_current_number_is_not_stale():
    text = "It takes 54.5<!--= ms small -->. A sentence ends.\n"
    assert stale_quotes(text, render_quotes(text, TERMS)) == []


@pytest.mark.parametrize(
    ("spec", "shown"),
    [
        ("ms xl", "697"),
        ("ms xl : .1f", "697.3"),
        ("ms xl / ms small", "12.8"),
        ("ms xl / ms small : .2f", "12.79"),
        ("ms small / ms xl : %.0f", "8"),
        ("share", "12.8"),
        ("share : .3f", "0.128"),
        ("later ddp", PENDING),
        ("later ddp / ms xl", PENDING),
    ],
)
def test_terms_ratios_and_forms(spec, shown):
    assert evaluate(spec, TERMS) == shown


def test_what_is_not_measured_becomes_a_number_when_it_is():
    text = f"takes {PENDING}<!--= ms small --> ms and {PENDING}<!--= later ddp -->"
    assert render_quotes(text, TERMS) == f"takes 54.5<!--= ms small --> ms and {PENDING}<!--= later ddp -->"
    assert render_quotes("54.5<!--= later ddp -->", TERMS) == f"{PENDING}<!--= later ddp -->"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("1<!--= speed small -->", "line 1: unknown term 'speed': known are later, ms, share"),
        ("\n1<!--= ms -->", "line 2: 'ms' cannot be computed"),
        ("1<!--= ms tiny -->", "'ms tiny' cannot be computed"),
        ("1<!--= ms xl / ms xl / ms xl -->", "divides more than once"),
        ("1<!--= ms xl : zzz -->", "Invalid format|Unknown format"),
        ("one<!--= ms small -->", "no number before the quote"),
        ("1 <!--= ms small -->", "no number before the quote"),
    ],
)
def test_what_nobody_can_compute_is_an_error_with_its_line(text, message):
    with pytest.raises(ValueError, match=message):
        render_quotes(text, TERMS)


def test_all_problems_are_named_at_once():
    with pytest.raises(ValueError, match=r"line 1: unknown term 'a'.*line 2: unknown term 'b'"):
        render_quotes("1<!--= a -->\n2<!--= b -->", TERMS)
