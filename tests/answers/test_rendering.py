"""Templates: numbers in their forms, tables beside pages, typed numbers, and what nobody can render."""

import pandas as pd
import pytest

from cs336_systems.answers.committed import NotMeasured
from cs336_systems.answers.rendering import CannotRender, Pages, stale_line, typed_numbers
from cs336_systems.answers.vocabulary import memory_of
from cs336_systems.report.tables import Table

TIMES = {"small": 54.512, "xl": 697.3}


def missing():
    raise NotMeasured("no rows")


NAMES = {
    "ms": lambda size: TIMES[size],
    "share": 0.1278,
    "endless": float("inf"),
    "later": missing,
    "table": lambda: Table("Two.", pd.DataFrame({"size": ["xl", "xl2"], "ms": ["697", "600"]})),
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
    ],
)
def test_numbers_and_their_forms(expression, shown):
    assert rendered(f"It takes {{{{ {expression} }}}} ms.") == f"It takes {shown} ms."


def test_the_memory_of_a_card_is_that_of_its_datasheet():
    assert memory_of("h100") == "80 GB, 3.35 TB/s" and memory_of("h200") == "141 GB, 4.8 TB/s"
    with pytest.raises(ValueError, match="h20000"):
        memory_of("h20000")


def test_tables_and_parts_stand_where_they_are_called_and_the_template_is_named():
    page = Pages({"page.md": '# T\n{{ table() }}\n{% include "part.md" %}\nEnd\n', "part.md": "- {{ share }}\n"}, NAMES)
    title, named, *body = page.render("page.md").splitlines()
    assert (title, named) == (
        "# T",
        "<!-- Rendered by scripts/report.py from cs336_systems/answers/pages/page.md.jinja: edit that. -->",
    )
    table = ["Two.", "", "| size   |   ms |", "|:-------|-----:|", "| xl     |  697 |", "| xl2    |  600 |"]
    assert body == [*table, "- 0.128", "End"]


def test_what_nobody_can_compute_is_an_error_with_its_line():
    for text, message in (
        ('\n{{ ms("tiny") }}', "page.md, line 3: 'tiny'"),
        ("\n\n{{ guess(1) }}", "page.md, line 4: 'guess' is undefined"),
        ("{{ ms() }}", "page.md, line 2: .*missing 1 required"),
        ("{{ later() }}", "page.md, line 2: no rows"),
        ("{{ share.guess }}", "page.md, line 2: .*guess"),
        ("{{ frame() }}", "page.md, line 2: DataFrame is no number"),
        ("{{ ms( }}", "page.md, line 2: "),
    ):
        with pytest.raises(CannotRender, match=message):
            rendered(text)
    with pytest.raises(CannotRender, match="part.md, line 1: 'tiny'"):
        rendered('\n{% include "part.md" %}', **{"part.md": '{{ ms("tiny") }}'})


def test_templates_reach_no_files_and_no_insides(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for text in (
        '{{ frame().to_csv("leak.csv") }}',
        "{{ ms.__globals__ }}",
        '{{ "".__class__.__mro__ }}',
        '{% include "/etc/hostname" %}',
        '{% include "../../../README.md" %}',
    ):
        with pytest.raises(CannotRender):
            rendered(text)
    assert list(tmp_path.iterdir()) == []


def test_markdown_is_not_escaped():
    assert rendered("{{ '<a> & \"b\"' }}") == '<a> & "b"'


def test_a_table_beside_a_page_is_linked_from_where_the_page_is():
    call = '# T\n{{ shown("two", table(), ["ms"], {"size": "xl"}) }}'
    pages = Pages({"writeup.md": call, "profiles/a.md": call}, NAMES)
    assert "\n|   ms |\n|-----:|\n|  697 |\n" in pages.render("writeup.md")
    assert "All 2 lines: [two.csv](profiles/tables/two.csv)." in pages.render("writeup.md")
    assert "All columns: [two.csv](profiles/tables/two.csv)." in rendered('{{ shown("two", table()) }}')
    assert "[two.csv](tables/two.csv)" in pages.render("profiles/a.md")
    assert pages.files == {"profiles/tables/two.csv": "size,ms\nxl,697\nxl2,600\n"}
    for wrong in ('shown("two", table(), ["s"])', 'shown("two", table(), where={"size": "small"})'):
        with pytest.raises(CannotRender):
            rendered(f"{{{{ {wrong} }}}}")


def test_the_first_line_that_differs_is_named():
    text = "first\nIt takes 54.5 ms\n"
    for changed in ("54.6", "64.5", "545", "54.50", "1,054.5"):
        sentence = stale_line(text.replace("54.5", changed), text)
        assert sentence == f"line 2: 'It takes {changed} ms' should be 'It takes 54.5 ms'"
    assert stale_line("a\nb\n", "a\nb\nc\n") == "line 3: '' should be 'c'"
    assert stale_line("a\nx\nb\n", "a\nb\n") == "line 2: 'x' should be 'b'"
    assert stale_line("a", "a\n").startswith("line 2")


def typed(text):
    """The numbers that a template of this text is blamed for."""
    return [sentence.split("'")[1] for sentence in typed_numbers({"page.md": text})]


def test_a_typed_number_is_found_wherever_it_stands():
    numbers = ("129 GiB", "5.364 ms", "434", "1,260", "0.15", "16 times", "3x", "2×", "40 %", "7 s")
    units = ("400 Gbit/s", "12 µs", "30 TFLOP/s", "4 tokens/s", "700 W", "1024 ms")
    for number in (*numbers, *units, "seven per cent", "two GiB"):
        for around in ("**{}**", "| a | {} |", "`{}`", "{}\n{{{{ x }}}} ms"):
            assert typed(around.format(number)) == [number]
    assert typed("**12** ms") == ["12** ms"] and typed("a 12-GiB block") == ["12-GiB"]
    assert typed("12\u00a0ms") == [r"12\xa0ms"]


def test_settings_names_code_questions_and_calls_are_left_alone():
    for text in (
        "batch 4, context 512, 65,536 tokens, 100 or 1,000 steps, in 2026",
        "on an H100, `2.7b` and 2.7b, sm80, ZB-H1, 1F1B",
        "d_model 2560 and d_ff 10240; vocabulary 151,936; XXL has 53248",
        "torch 2.11, Triton 3.6, ptxas 13.3, Python (3.11 or newer), 2.11.0",
        "4 × 512 × 2560 bytes, 8 × 8, 6 B D F / (N C), N / 2 times, N/2 times, 10⁵, 2 (n − 1)/n",
        "two days, nine tenths\n\n```bash\n318 ms\n```\n\n    318 ms\n\n<!-- 318 ms -->[a](b-318.png) https://a.b/318",
        "*Question of 318 ms\nand 434 lines?*\n",
        '{{ model("318 ms", 434)["9.3"] | fixed(2) }} ms, {{ 4 * x / GIB }}{# 318 ms #}',
    ):
        assert typed(text) == [], text


def test_each_typed_number_is_named_with_template_and_line():
    text = "# T\n\n```\ncode\n```\n{% set a = b(\n1) %}\nit is 318\n\n{{ x }} and\n434\n"
    assert typed_numbers({"b.md": "5.364", "a.md": text}) == [
        "a.md.jinja, line 8: '318' is typed, not quoted",
        "a.md.jinja, line 11: '434' is typed, not quoted",
        "b.md.jinja, line 1: '5.364' is typed, not quoted",
    ]
