"""What somebody may change by hand in what is committed, each on a copy of it: ``--check`` fails and names the place.

Long documents are left out, as rendering them takes most of the time; pages that are cheap to render stand for them.
"""

import csv
import gzip
import io
import itertools
import re
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest
from PIL import Image, PngImagePlugin

from cs336_systems.answers import report
from cs336_systems.answers.evidence import BY_HAND, history, seal
from cs336_systems.answers.rendering import read_templates

ROOT = Path(__file__).resolve().parents[2]
PAGE, OVERVIEW, DIGESTS = "profiles/gpu_tests.md", "profiles/digests/README.md", "profiles/digests/h200"
GRID = "profiles/results/h200/grid/benchmark_model.csv"
FLASH = "profiles/results/h200/attention-flash-bf16/benchmark_attention.csv.gz"
FIGURE = "profiles/figures/h200_grid.png"


@pytest.fixture(scope="module")
def copy(tmp_path_factory):
    """What is committed, with its history where there is one."""
    root = tmp_path_factory.mktemp("forged") / "repository"
    if history(ROOT) is not None:
        command = ["git", "clone", "--quiet", "--shared", "--no-checkout", str(ROOT), str(root)]
        subprocess.run(command, check=True, capture_output=True)
    shutil.copytree(ROOT / "profiles", root / "profiles", ignore=shutil.ignore_patterns("tables"))
    for name in BY_HAND:
        (root / "profiles" / name).parent.resolve().mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / "profiles" / name, root / "profiles" / name)
    return root


@pytest.fixture
def checked(copy, monkeypatch, capsys):
    """Forges files, by a function of bytes for each, and returns what ``--check`` then says; they are mended after."""
    cheap = {name: text for name, text in read_templates().items() if name in (PAGE, OVERVIEW, "questions")}
    before = {}

    def check(forgeries, sealed=False, **templates):
        monkeypatch.setattr(report, "read_templates", lambda: cheap | templates)
        for name, forge in forgeries.items():
            before[copy / name] = (copy / name).read_bytes()
            (copy / name).write_bytes(forge(before[copy / name]))
        if sealed:
            seals = copy / "profiles" / "SHA256SUMS"
            before[seals] = seals.read_bytes()
            seal(copy / "profiles", [copy / name for name in forgeries])
        failed = report.render(copy, check=True)
        said = capsys.readouterr().err
        assert failed == int(bool(forgeries)), said
        return said

    yield check
    for path, content in before.items():
        path.write_bytes(content)


def cells(**values):
    """Forges a CSV, compressed or not: the columns named become the values, in every row that has samples."""

    def forge(content):
        packed = content[:2] == b"\x1f\x8b"
        plain = gzip.decompress(content) if packed else content
        lines = list(csv.DictReader(io.StringIO(plain.decode(), newline="")))
        for line in lines:
            line |= values if line["samples"] else {}
        text = io.StringIO()
        writer = csv.DictWriter(text, lines[0], lineterminator="\n")
        writer.writeheader()
        writer.writerows(lines)
        return gzip.compress(text.getvalue().encode()) if packed else text.getvalue().encode()

    return forge


def text(old, new):
    """Forges a text: one place of it."""

    def forge(content):
        assert content.count(old.encode())
        return content.replace(old.encode(), new.encode(), 1)

    return forge


def one_pixel(content):
    """Forges a picture that keeps all it says about itself."""
    with Image.open(io.BytesIO(content)) as picture:
        said = PngImagePlugin.PngInfo()
        for key in ("Source", "Software"):
            said.add_text(key, picture.info[key])
        pixels = np.asarray(picture).copy()
    pixels[5, 5] = 0
    forged = io.BytesIO()
    Image.fromarray(pixels).save(forged, "PNG", pnginfo=said)
    return forged.getvalue()


def test_what_is_committed_passes(checked):
    said = checked({})
    assert said == "" or said.startswith("commits are not checked")


def test_samples_that_are_not_those_of_the_statistics(checked):
    said = checked({name: cells(samples="[99, 99, 99]") for name in (GRID, FLASH)}, sealed=True)
    for name, statistic in itertools.product((GRID, FLASH), ("median", "mean", "std", "p10", "p90", "n")):
        assert re.search(rf"^{name}: line \d+: in \d+ of \d+ rows, here {statistic} is ", said, re.MULTILINE)


def test_a_row_of_uncommitted_changes(checked):
    assert f"{GRID}: line 2: " in (said := checked({GRID: cells(dirty="True")}, sealed=True))
    assert "uncommitted changes" in said


@pytest.mark.skipif(history(ROOT) is None, reason="needs the repository's history")
def test_a_commit_that_is_not_in_the_history(checked):
    forged = "0123456789abcdef0123456789abcdef01234567"
    said = checked({GRID: cells(commit=forged), "profiles/gpu_tests.csv": text("fb68f66", "fb68f67")}, sealed=True)
    assert f"{GRID}: line 2: " in said and f"not in the history, here {forged}" in said
    assert "profiles/gpu_tests.csv, line 2: commit fb68f67 is not in the history" in said


def test_rows_that_agree_with_themselves_but_are_not_those_adopted(checked):
    said = checked({GRID: lambda content: b"\n".join(content.split(b"\n")[:-2]) + b"\n"})
    assert f"{GRID} was changed since" in said
    assert f"{FIGURE} was drawn from other rows" in said


@pytest.mark.parametrize("sealed", [False, True])
def test_a_figure_that_another_replaced(checked, copy, sealed):
    other = (copy / "profiles/figures/goodput.png").read_bytes()
    said = checked({FIGURE: lambda _: other}, sealed)
    assert f"{FIGURE} was drawn from other rows" in said
    assert (f"{FIGURE} was changed since" in said) is not sealed


def test_a_figure_that_was_painted_over(checked):
    said = checked({FIGURE: one_pixel})
    assert f"{FIGURE} was changed since" in said
    assert "other rows" not in said


def test_a_recording_that_was_edited(checked):
    table = f"{DIGESTS}/memory/memory-2.7b-b4-c128-fp32-step-allocations.csv"
    said = checked({table: text("100", "101"), OVERVIEW: text("nsys-autocast", "nsys")})
    assert f"{table} was changed since" in said
    assert f"stale: {OVERVIEW}, line " in said


def test_a_page_of_test_runs_that_was_edited(checked):
    said = checked({PAGE: text("17 passed", "27 passed")})
    assert f"stale: {PAGE}, line " in said and "27 passed" in said


def test_outcomes_of_test_runs_and_figures_of_others_that_were_edited(checked):
    outside = "cs336_systems/answers/outside.csv"
    said = checked({"profiles/gpu_tests.csv": text("7 passed", "8 passed"), outside: text("150k", "120k")})
    assert "profiles/gpu_tests.csv was changed since" in said
    assert f"{outside} was changed since" in said


def test_a_table_beside_a_page_that_was_edited_or_that_no_page_links(checked, copy, monkeypatch):
    page, table = "profiles/page.md", copy / "profiles/tables/collectives.csv"
    template = '# T\n\n{{ csv("collectives", collectives_table(rows("collectives"))) }}\n'
    monkeypatch.setattr(report, "draw", lambda committed, profiles: [])
    others = {name: text for name, text in read_templates().items() if name in (OVERVIEW, "questions")}
    monkeypatch.setattr(report, "read_templates", lambda: {page: template} | others)
    assert report.render(copy, check=False) == 0
    said = checked({"profiles/tables/collectives.csv": text("all_reduce", "all_gather")}, **{page: template})
    assert "stale: profiles/tables/collectives.csv, line 2" in said
    (copy / page).unlink()
    table.unlink()
    table.write_text("a,b\n")
    assert report.render(copy, check=True) == 1
    table.unlink()


def test_numbers_typed_into_a_template_and_its_page(checked):
    quote = '{{ nsys("annotated_step", "small", 512, "step") }}'
    before = read_templates()[OVERVIEW]
    line = before[: before.index(quote)].count("\n") + 1
    typed = "218, of 434 in 5.364, 9.3 of 129 GiB"
    said = checked({OVERVIEW: text("58.1", typed)}, **{OVERVIEW: before.replace(quote, typed)})
    for number in ("218", "434", "5.364", "9.3", "129 GiB"):
        assert f"answers/pages/{OVERVIEW}.jinja, line {line}: '{number}' is typed, not quoted" in said
    assert "stale" not in said
