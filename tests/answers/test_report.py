"""The script that renders the committed documents, and these themselves."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from cs336_systems.answers import report
from cs336_systems.answers.evidence import seal
from cs336_systems.answers.rendering import documents, read_templates
from tests.report.rows import make_cell, make_frame, ms

ROOT = Path(__file__).resolve().parents[2]
PAGE = '# T\n\nfp32 takes {{ rows("context-512", size="small").number("step") }} ms.\n'


@pytest.fixture
def root(tmp_path, monkeypatch):
    """A repository of one page over one row."""
    rows = tmp_path / "profiles" / "results" / "h200" / "context-512" / "benchmark_model.csv"
    rows.parent.mkdir(parents=True)
    where = {"commit": "abc", "dirty": False, "argv": "x", "gpu": "NVIDIA H200", "device": "cuda"}
    make_frame(make_cell(ms("step", 54.5), size="small", **where)).assign(samples="").to_csv(rows, index=False)
    seal(tmp_path / "profiles", [rows])
    monkeypatch.setattr(report, "read_templates", lambda: {"page.md": PAGE})
    monkeypatch.setattr(report, "draw", lambda committed, profiles: ["figure.png"])
    monkeypatch.setattr(report, "stale_figures", lambda committed, profiles: [])
    return tmp_path


def test_documents_are_written_and_then_current(root, capsys):
    assert report.render(root, check=False) == 0
    assert (root / "page.md").read_text().endswith("-->\n\nfp32 takes 54.5 ms.\n")
    assert "not measured: ['figure.png']" in capsys.readouterr().out
    assert report.render(root, check=True) == 0


def test_check_names_a_changed_digit_and_an_unknown_name(root, monkeypatch, capsys):
    report.render(root, check=False)
    page = root / "page.md"
    right = page.read_text()
    page.write_text(right.replace("54.5", "154.5"))
    assert report.render(root, check=True) == 1
    assert "stale: page.md, line 4: 'fp32 takes 154.5 ms.' should be 'fp32 takes 54.5 ms.'" in capsys.readouterr().err
    assert "154.5" in page.read_text()
    page.write_text(right)
    monkeypatch.setattr(report, "read_templates", lambda: {"page.md": PAGE.replace("rows", "guess")})
    assert report.render(root, check=True) == 1
    assert "page.md, line 3: 'guess' is undefined" in capsys.readouterr().err
    monkeypatch.setattr(report, "read_templates", lambda: {"page.md": PAGE})


def test_help_answers_without_torch_and_lists_what_the_script_does():
    code = "import sys; sys.path.insert(0, 'scripts'); import report; assert 'torch' not in sys.modules; report.main()"
    command = [sys.executable, "-c", code, "--help"]
    found = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=False)
    assert found.returncode == 0, found.stderr
    assert all(option in found.stdout for option in ("--check", "--adopt", "--machine", "--seal"))


def test_check_and_adopt_exclude_each_other(load_script, capsys):
    assert load_script("scripts/report.py").main(["--check", "--adopt", "results"]) == 2
    assert load_script("scripts/report.py").main(["--check", "--seal"]) == 2
    assert "--check writes nothing" in capsys.readouterr().err


def test_every_template_is_a_document_or_part_of_one():
    templates = read_templates()
    included = set(re.findall(r'{% (?:include|from) "([^"]*)"', "".join(templates.values())))
    assert set(templates) == set(documents(templates)) | {f"{name}" for name in included}
    assert {"README.md", "writeup.md", "profiles/h200.md"} <= set(documents(templates))


def test_pictures_tables_and_sections_that_pages_link_exist_and_pages_stay_short():
    living = [*documents(read_templates()), "LOG.md"]
    anchors = {}
    for name in living:
        headings = re.findall(r"^#+ (.*)$", (ROOT / name).read_text(), re.MULTILINE)
        anchors[name] = {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}
    for name in living:
        prose = re.sub(r"```.*?```", "", (ROOT / name).read_text(), flags=re.DOTALL)
        for target, anchor in re.findall(r"\]\((?!https?:)([^)#]*)#?([^)]*)\)", prose):
            path = ((ROOT / name).parent / target).resolve() if target else ROOT / name
            assert path.exists(), (name, target)
            linked = path.relative_to(ROOT).as_posix()
            assert not anchor or linked not in anchors or anchor in anchors[linked], (name, target, anchor)
    words = {name: len((ROOT / name).read_text().split()) for name in living}
    assert words["writeup.md"] <= 10_000
    assert sum(words[name] for name in living if name.startswith("profiles/") and "digests" not in name) <= 15_000
