"""Generated blocks: replaced, idempotent, and complained about."""

import pytest

from cs336_systems.answers.markers import render, stale_blocks

TEXT = "before\n<!-- begin: one -->\nold\n<!-- end: one -->\nafter\n"


def test_what_is_between_the_markers_is_replaced_and_the_rest_is_not():
    rendered = render(TEXT, {"one": lambda: "new"})
    assert rendered == TEXT.replace("old", "new")
    assert render(rendered, {"one": lambda: "new"}) == rendered


def test_stale_blocks_are_named():
    text = TEXT + TEXT.replace("one", "two")
    blocks = {"one": lambda: "old", "two": lambda: "new"}
    assert stale_blocks(text, render(text, blocks)) == ["two"]


@pytest.mark.parametrize(
    ("text", "message"),
    [(TEXT, "no renderer for block 'one'"), ("<!-- begin: one -->\n", "marker without a partner")],
)
def test_unknown_names_and_lone_markers_are_errors(text, message):
    with pytest.raises(ValueError, match=message):
        render(text, {})
