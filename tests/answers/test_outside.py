"""Figures from outside: each has a source and a date, and is quoted by its name."""

import datetime
import re

import pytest

from cs336_systems.answers.outside import given, outside, outside_table
from cs336_systems.answers.prose import typed_numbers
from cs336_systems.answers.rendering import read_templates


def test_a_figure_is_quoted_with_its_unit_and_an_unknown_one_is_an_error_that_lists_them():
    assert outside("class record") == "3.837 s"
    with pytest.raises(LookupError, match="holds no 'guess', only attention record, class record"):
        outside("guess")


def test_every_figure_has_its_source_and_date():
    table = outside_table().frame
    assert list(table) == ["figure", "what", "source", "date"]
    assert (table != "").all(axis=None)
    assert all(datetime.date.fromisoformat(date) for date in table["date"])


def test_templates_quote_figures_that_are_there():
    quoted = {name for text in read_templates().values() for name in re.findall(r'outside\("([^"]*)"\)', text)}
    assert [outside(name) for name in quoted]


def test_what_is_given_stands_as_typed():
    assert given("10 MB") == "10 MB"
    assert typed_numbers({"page.md": '{{ given("10 MB") }}'}) == []
