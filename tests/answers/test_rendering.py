"""Templates: numbers in their forms, gaps where rows are missing, and sentences for what nobody can render."""

import pandas as pd
import pytest

from cs336_systems.answers.committed import NotMeasured
from cs336_systems.answers.rendering import PENDING, CannotRender, Pages, Pending, stale_lines
from cs336_systems.answers.vocabulary import answering
from cs336_systems.report.tables import Table

TIMES = {"small": 54.512, "xl": 697.3}


def missing():
    raise NotMeasured("no rows")


NAMES = {
    "ms": lambda size: TIMES[size],
    "share": 0.1278,
    "endless": float("inf"),
    "later": answering(missing, lambda _: Pending()),
    "table": lambda: Table("Two.", pd.DataFrame({"size": ["xl"], "ms": ["697"]})),
    "frame": lambda: pd.DataFrame({"a": [1]}),
}


def rendered(text, names=NAMES, **parts):
    """The body of a document whose title is T."""
    title, _, body = Pages({"page.md": f"# T\n{text}", **parts}, names).render("page.md").split("\n", 2)
    assert title == "# T"
    return body


@pytest.mark.parametrize(
    ("expression", "shown"),
    [
        ('ms("xl")', "697"),
        ('ms("xl") | fixed(1)', "697.3"),
        ('ms("xl") / ms("small")', "12.8"),
        ('(ms("xl") / ms("small")) | fixed(2)', "12.79"),
        ('(ms("small") / ms("xl")) | percent', "8"),
        ("share | percent(1)", "12.8"),
        ("1_234_567", "1,234,567"),
        ("(1000 * share) | ceil", "128"),
        ("endless", "infinite"),
        ("endless | fixed", "infinite"),
        ("later()", PENDING),
        ('1 - 2 * later() / ms("xl")', PENDING),
        ('(ms("xl") / later().seconds[0]) | percent(1)', PENDING),
        ("later() | max | ceil", PENDING),
    ],
)
def test_numbers_and_their_forms(expression, shown):
    assert rendered(f"It takes {{{{ {expression} }}}} ms.") == f"It takes {shown} ms."


def test_tables_and_parts_stand_where_they_are_called_and_the_template_is_named():
    page = Pages({"page.md": '# T\n{{ table() }}\n{% include "part.md" %}\nEnd\n', "part.md": "- {{ share }}\n"}, NAMES)
    title, named, *body = page.render("page.md").splitlines()
    assert (title, named) == (
        "# T",
        "<!-- Rendered by scripts/report.py from cs336_systems/answers/pages/page.md.jinja: edit that. -->",
    )
    table = ["Two.", "", "| size   |   ms |", "|:-------|-----:|", "| xl     |  697 |"]
    assert body == [*table, "- 0.128", "End"]


def test_unknown_names_are_all_named_with_their_lines():
    with pytest.raises(CannotRender) as failure:
        rendered("{{ guess(1) }}\n{{ ms(size) }}\n")
    assert failure.value.problems == [
        "page.md, line 2: unknown name 'guess'",
        "page.md, line 3: unknown name 'size'",
    ]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('\n{{ ms("tiny") }}', "page.md, line 3: 'tiny'"),
        ("{{ ms() }}", "page.md, line 2: .*missing 1 required"),
        ('{{ ms("xl") / ms("xl") | fixed }}', "page.md, line 2: unsupported operand"),
        ("{{ share.guess }}", "page.md, line 2: .*guess"),
        ("{{ frame() }}", "page.md, line 2: DataFrame is no number"),
        ("{{ ms( }}", "page.md, line 2: "),
    ],
)
def test_what_nobody_can_compute_is_an_error_with_its_line(text, message):
    with pytest.raises(CannotRender, match=message):
        rendered(text)


def test_a_part_that_fails_is_named_itself():
    with pytest.raises(CannotRender, match="part.md, line 1: 'tiny'"):
        rendered('\n{% include "part.md" %}', **{"part.md": '{{ ms("tiny") }}'})


@pytest.mark.parametrize(
    "text",
    [
        '{{ frame().to_csv("leak.csv") }}',
        "{{ ms.__globals__ }}",
        '{{ "".__class__.__mro__ }}',
        '{% include "/etc/hostname" %}',
        '{% include "../../../README.md" %}',
    ],
)
def test_templates_reach_no_files_and_no_insides(text, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(CannotRender):
        rendered(text)
    assert list(tmp_path.iterdir()) == []


def test_markdown_is_not_escaped():
    assert rendered("{{ '<a> & \"b\"' }}") == '<a> & "b"'


@pytest.mark.parametrize("changed", ["54.6", "64.5", "5.45", "545", "54.50", "-54.5", "1,054.5"])
def test_a_changed_digit_is_stale_and_named_with_its_line(changed):
    text = "first\nIt takes 54.5 ms\n"
    (sentence,) = stale_lines(text.replace("54.5", changed), text)
    assert sentence == f"line 2: 'It takes {changed} ms' should be 'It takes 54.5 ms'"
    assert stale_lines(text, text) == []


def test_lines_too_many_and_too_few_are_stale():
    assert stale_lines("a\nb\n", "a\nb\nc\n") == ["line 3: 'c' is missing"]
    assert stale_lines("a\nx\nb\n", "a\nb\n") == ["line 2: 'x' should not be there"]
