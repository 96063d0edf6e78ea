"""Whole documents, and the script that renders the committed ones."""

import re
import sys
from pathlib import Path

import pytest

from cs336_systems.answers.committed import NotMeasured
from cs336_systems.answers.documents import once, render_document, section
from cs336_systems.answers.quotes import Term, evaluate

ROOT = Path(__file__).resolve().parents[2]
TERMS = {"answer": Term(lambda: 42.0, ".0f")}
TEXT = "# T\n\n## Found\n\n- It is 41<!--= answer -->.\n\n## More\n\n<!-- begin: table -->\nold\n<!-- end: table -->\n"


def absent() -> str:
    raise NotMeasured("no rows")


def test_blocks_and_numbers_are_rendered_once_and_for_all():
    found = render_document(TEXT, {"table": lambda: "new"}, TERMS)
    assert found.text == TEXT.replace("old", "new").replace("41", "42")
    assert found.stale == ["block table", "line 5: 41 should be 42 (answer)"]
    assert found.problems == []
    again = render_document(found.text, {"table": lambda: "new"}, TERMS)
    assert (again.text, again.stale, again.problems) == (found.text, [], [])


def test_what_cannot_be_rendered_is_a_problem_and_stays():
    found = render_document(TEXT.replace("answer", "question"), {}, TERMS)
    assert found.text == TEXT.replace("answer", "question")
    assert [problem.partition(":")[0] for problem in found.problems] == ["no renderer for block 'table'", "line 5"]


def test_blocks_are_computed_once_and_say_what_is_missing():
    calls = []
    blocks = once({"counted": lambda: calls.append(1) or "x", "absent": absent})
    assert blocks["counted"]() + blocks["counted"]() == "xx"
    assert len(calls) == 1
    assert blocks["absent"]() == "**Not measured yet:** no rows."


def test_a_section_is_shown_elsewhere_without_its_marks(tmp_path):
    document = tmp_path / "page.md"
    document.write_text(TEXT)
    assert section(document, "Found", TERMS) == "- It is 42."
    with pytest.raises(ValueError, match="no section 'Lost'"):
        section(document, "Lost", TERMS)


@pytest.fixture
def script(load_script, monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    return load_script("scripts/report.py")


def run(script, monkeypatch, documents, *arguments):
    monkeypatch.setattr(script, "DOCUMENTS", tuple(documents))
    monkeypatch.setattr(sys, "argv", ["report.py", *arguments])
    return script.main()


def test_check_names_a_changed_digit_an_unknown_quote_and_rows_without_provenance(
    script, monkeypatch, tmp_path, capsys
):
    page = tmp_path / "page.md"
    _, terms = script.build(script.Committed(ROOT / "profiles", "h200"))
    now = evaluate("model step small fp32", terms)
    right = f"fp32 takes {now}<!--= model step small fp32 --> ms.\n"
    page.write_text(right)
    assert run(script, monkeypatch, [page], "--check") == 0, capsys.readouterr().err
    page.write_text(right.replace(now, f"1{now}"))
    assert run(script, monkeypatch, [page], "--check") == 1
    assert f"page.md: line 1: 1{now} should be {now}" in capsys.readouterr().err
    page.write_text(right.replace("model step", "guess"))
    assert run(script, monkeypatch, [page], "--check") == 1
    assert "page.md: line 1: unknown term 'guess'" in capsys.readouterr().err
    monkeypatch.setattr("cs336_systems.answers.committed.missing_provenance", lambda rows: ["line 2: no commit"])
    page.write_text(right)
    assert run(script, monkeypatch, [page], "--check") == 1
    assert "without provenance: " in capsys.readouterr().err


def test_every_block_and_picture_of_the_written_answers_is_known(script):
    """Each question of both editions has its section, each picture its file."""
    text = (ROOT / "writeup.md").read_text()
    for picture in re.findall(r"\]\((profiles/[^)]*\.png)\)", text):
        assert (ROOT / picture).exists(), picture
    headings = set(re.findall(r"^## (.*)$", text, re.MULTILINE))
    anchors = {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}
    linked = set(re.findall(r"\]\(#([\w-]+)\)", text))
    assert linked <= anchors, linked - anchors
    assert {heading for heading in anchors if heading not in linked} <= {"index"}
