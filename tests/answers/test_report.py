"""The script that renders the committed documents, and these themselves."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from cs336_systems.answers import report
from cs336_systems.answers.rendering import documents, read_templates
from tests.report.rows import make_cell, make_frame, ms

ROOT = Path(__file__).resolve().parents[2]
PAGE = '# T\n\nfp32 takes {{ model("step", "small", "fp32") }} ms.\n'


@pytest.fixture
def root(tmp_path, monkeypatch):
    """A repository of one page over one row."""
    folder = tmp_path / "profiles" / "results" / "h200" / "context-512"
    folder.mkdir(parents=True)
    cell = make_cell(ms("step", 54.5), size="small", commit="abc", argv="x", gpu="NVIDIA H200", device="cuda")
    make_frame(cell).assign(samples="").to_csv(folder / "benchmark_model.csv", index=False)
    monkeypatch.setattr(report, "read_templates", lambda: {"page.md": PAGE})
    monkeypatch.setattr(report, "draw", lambda committed, folder: ["figure.png"])
    return tmp_path


def test_documents_are_written_and_then_current(root, capsys):
    assert report.render(root, check=False) == 0
    assert (root / "page.md").read_text().endswith("-->\n\nfp32 takes 54.5 ms.\n")
    assert "not measured: ['figure.png']" in capsys.readouterr().out
    assert report.render(root, check=True) == 0


def test_check_names_a_changed_digit_an_unknown_name_and_rows_without_provenance(root, monkeypatch, capsys):
    report.render(root, check=False)
    page = root / "page.md"
    right = page.read_text()
    page.write_text(right.replace("54.5", "154.5"))
    assert report.render(root, check=True) == 1
    assert "stale: page.md, line 4: 'fp32 takes 154.5 ms.' should be 'fp32 takes 54.5 ms.'" in capsys.readouterr().err
    assert "154.5" in page.read_text()
    page.write_text(right)
    monkeypatch.setattr(report, "read_templates", lambda: {"page.md": PAGE.replace("model", "guess")})
    assert report.render(root, check=True) == 1
    assert "page.md, line 3: unknown name 'guess'" in capsys.readouterr().err
    monkeypatch.setattr(report, "read_templates", lambda: {"page.md": PAGE})
    monkeypatch.setattr("cs336_systems.answers.committed.missing_provenance", lambda rows: ["line 2: no commit"])
    assert report.render(root, check=True) == 1
    assert "without provenance: results/h200/context-512/benchmark_model.csv, line 2" in capsys.readouterr().err


def test_help_answers_without_torch_and_lists_what_the_script_does():
    code = "import sys; sys.path.insert(0, 'scripts'); import report; assert 'torch' not in sys.modules; report.main()"
    command = [sys.executable, "-c", code, "--help"]
    found = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=False)
    assert found.returncode == 0, found.stderr
    assert all(option in found.stdout for option in ("--check", "--adopt", "--machine", "--replace"))


def test_check_and_adopt_exclude_each_other(load_script, capsys):
    assert load_script("scripts/report.py").main(["--check", "--adopt", "results"]) == 2
    assert "--check writes nothing" in capsys.readouterr().err


def test_every_template_is_a_document_or_part_of_one():
    templates = read_templates()
    assert documents(templates) == ["README.md", "profiles/attention.md", "profiles/h200.md", "writeup.md"]
    included = set(re.findall(r'{% include "([^"]*)" %}', "".join(templates.values())))
    assert set(templates) == set(documents(templates)) | included


def test_every_question_of_the_written_answers_has_its_section_and_every_picture_its_file():
    text = (ROOT / "writeup.md").read_text()
    for picture in re.findall(r"\]\((profiles/[^)]*\.png)\)", text):
        assert (ROOT / picture).exists(), picture
    headings = set(re.findall(r"^## (.*)$", text, re.MULTILINE))
    anchors = {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}
    linked = set(re.findall(r"\]\(#([\w-]+)\)", text))
    assert linked <= anchors, linked - anchors
    assert {heading for heading in anchors if heading not in linked} <= {"index"}
