"""What somebody may change by hand, on a copy of some of what is committed: ``--check`` fails and names the place.

Many forgeries share one check, as checking takes seconds; each must be named.
"""

import csv
import gzip
import io
import json
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest
from PIL import Image, PngImagePlugin

from cs336_systems.answers import evidence, report
from cs336_systems.answers.evidence import SUMS, history, seal
from cs336_systems.answers.rendering import read_templates
from cs336_systems.answers.vocabulary import given

ROOT = Path(__file__).resolve().parents[2]
RESULTS = "profiles/results/h200"
GRID, FLASH = f"{RESULTS}/grid/benchmark_model.csv", f"{RESULTS}/attention-flash-bf16/benchmark_attention.csv.gz"
TRAINING, RUN = f"{RESULTS}/training/benchmark_training.csv", "profiles/runs/h200/100m-400/log.jsonl"
NSYS, FIGURE = "profiles/digests/h200/nsys/profile_model.csv", "profiles/figures/h200_grid.png"
PAGE, OVERVIEW = "profiles/gpu_tests.md", "profiles/digests/README.md"
TESTS, OUTSIDE = "profiles/gpu_tests.csv", "cs336_systems/answers/outside.csv"
GRAPHS = ("h200_training",)
FIGURES = [f"profiles/figures/{n}.png" for n in (*GRAPHS, "h200_attention_bf16_d64", "h200_attention_bf16_d128")]
SCHEDULES, CARDS = "profiles/figures/pipeline_schedules.png", "profiles/figures/predicted_cards.png"
SEALED = (GRID, FLASH, TRAINING, RUN, NSYS, FIGURE, SCHEDULES, CARDS, *FIGURES, TESTS, OUTSIDE)


@pytest.fixture(scope="module")
def copy(tmp_path_factory):
    """Some of what is committed, with its history where there is one."""
    root = tmp_path_factory.mktemp("forged") / "repository"
    if history(ROOT) is not None:
        command = ["git", "clone", "--quiet", "--shared", "--no-checkout", str(ROOT), str(root)]
        subprocess.run(command, check=True, capture_output=True)
    for name in (*SEALED, PAGE, OVERVIEW):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, root / name)
    seal(root / "profiles", [root / name for name in SEALED])
    return root


@pytest.fixture
def checked(copy, monkeypatch, capsys):
    """Forges files, by a function of bytes for each, and returns what ``--check`` then says; they are mended after."""
    cheap = {name: text for name, text in read_templates().items() if name in (PAGE, OVERVIEW, "questions")}
    before = {copy / "profiles" / SUMS: (copy / "profiles" / SUMS).read_bytes()}

    def check(forgeries, sealed=False, **templates):
        monkeypatch.setattr(report, "read_templates", lambda: cheap | templates)
        for name, forge in forgeries.items():
            before[copy / name] = (copy / name).read_bytes()
            (copy / name).write_bytes(forge(before[copy / name]))
        if sealed:
            seal(copy / "profiles", [copy / name for name in forgeries])
        failed = report.render(copy, check=True)
        said = capsys.readouterr().err
        assert failed == int(bool(forgeries)), said
        return said

    yield check
    for path, content in before.items():
        path.write_bytes(content)


def rows(*forgeries):
    """Forges a CSV, compressed or not: each forgery changes the newest row of a metric that no other one changes."""

    def forge(content):
        packed = content[:2] == b"\x1f\x8b"
        lines = list(
            csv.DictReader(io.StringIO((gzip.decompress(content) if packed else content).decode(), newline=""))
        )
        for metric, change in forgeries:
            line = next(line for line in reversed(lines) if line["metric"] == metric)
            line |= change(line)
        text = io.StringIO()
        writer = csv.DictWriter(text, lines[0], lineterminator="\n")
        writer.writeheader()
        writer.writerows(lines)
        return gzip.compress(text.getvalue().encode()) if packed else text.getvalue().encode()

    return forge


def times(factor):
    """Every statistic of a derived metric, so that the row agrees with itself and with the samples of its time."""
    return lambda line: {
        name: f"{factor * float(line[name]):.7g}" if line[name] else ""
        for name in ("median", "mean", "std", "p10", "p90")
    }


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


def faster(content):
    """Forges a log of a run: every step takes half its time."""
    records = map(json.loads, content.splitlines())
    halved = (each | {"seconds": each["seconds"] / 2} if each["kind"] == "step" else each for each in records)
    return b"".join(json.dumps(each).encode() + b"\n" for each in halved)


@pytest.mark.slow
def test_everything_that_is_committed_proves_itself():
    pages = [name.removeprefix("profiles/") for name in read_templates()]
    assert evidence.problems(ROOT / "profiles", history(ROOT), pages) == []


@pytest.mark.slow
def test_what_is_sealed_again_but_contradicts_itself_other_rows_or_the_history(checked, copy):
    known = history(ROOT) is not None
    assert (said := checked({})) == "" or said.startswith("commits are not checked")
    grid = (
        *(("tokens_per_s", times(2)), ("mfu", times(1.1)), ("matmul_ceiling_share", times(0.9)), ("hfu", times(9))),
        ("copy_ceiling", lambda line: {"dirty": "True"}),
        ("matmul_ceiling", lambda line: {"commit": "0123456789abcdef0123456789abcdef01234567"}),
    )
    said = checked(
        {
            GRID: rows(*grid),
            FLASH: rows(("forward_peak_share", times(1.5)), ("both", lambda line: {"samples": "[99, 99, 99]"})),
            TRAINING: rows(("tokens_per_s", times(1.01)), ("speed_of_light", times(3))),
            RUN: faster,
            TESTS: text("fb68f66", "fb68f67"),
            FIGURE: lambda _: (copy / SCHEDULES).read_bytes(),
        },
        sealed=True,
    )
    for name, words in (
        *((FLASH, f"here {statistic} is") for statistic in ("median", "mean", "std", "p10", "p90", "n")),
        *((GRID, "uncommitted changes"), (GRID, "here tokens_per_s times step is"), (GRID, "here mfu is")),
        *(
            (GRID, "here matmul_ceiling_share is"),
            (GRID, "above 100 % of a limit"),
            (FLASH, "here forward_peak_share is"),
        ),
        *((TRAINING, "here tokens_per_s times step is"), (TRAINING, "above 100 % of a limit")),
        *((RUN, "s apart, and its steps and evaluations took"), (FIGURE, "was drawn from other rows")),
        *(((GRID, "not in the history, here 0123456789abc"), (TESTS, "commit fb68f67 is not in")) if known else ()),
    ):
        assert any(line.startswith(name) and words in line for line in said.splitlines()), (name, words, said)
    assert "was changed since" not in said


@pytest.mark.slow
def test_what_is_changed_without_a_seal_is_named(checked):
    said = checked(
        {
            GRID: lambda content: b"\n".join(content.split(b"\n")[:-2]) + b"\n",
            SCHEDULES: one_pixel,
            RUN: lambda content: content.replace(b'"loss": 1', b'"loss": 0', 1),
            TESTS: text(" passed", " failed"),
            OUTSIDE: text("150k", "120k"),
            PAGE: text(" passed", " failed"),
            OVERVIEW: text("nsys-autocast", "nsys"),
        }
    )
    for name in (GRID, SCHEDULES, RUN, TESTS):
        assert f"{name} was changed since" in said
    assert f"{OUTSIDE} was changed since" in said and f"{FIGURE} was drawn from other rows" in said
    assert f"{SCHEDULES} was drawn" not in said
    assert f"stale: {PAGE}, line " in said and f"stale: {OVERVIEW}, line " in said


@pytest.mark.slow
def test_numbers_typed_into_a_template_and_results_given_as_settings(checked):
    quote = '{{ nsys("annotated_step", "small", 512, "step") }}'
    before = read_templates()[OVERVIEW]
    line = before[: before.index(quote)].count("\n") + 1
    typed = "218, of 434 in 5.364, `9.3` of 129 GiB and seven per cent"
    said = checked({OVERVIEW: text("58.1", typed)}, **{OVERVIEW: before.replace(quote, typed)})
    for number in ("218", "434", "5.364", "9.3", "129 GiB", "seven per cent"):
        assert f"answers/pages/{OVERVIEW}.jinja, line {line}: '{number}' is typed, not quoted" in said
    assert "stale" not in said
    given_result = before.replace(quote, '{{ given("3.21 ms") }}')
    assert "'3.21 ms' is no size" in checked({OVERVIEW: lambda content: content}, **{OVERVIEW: given_result})
    for result in ("58.9 GiB", "97 %", "3,286", "1.35", "4,150 ms"):
        with pytest.raises(ValueError, match=result):
            given(result)
    assert given("1, 10 and 100 MB") and given("24 / 75 GiB") and given("24 / 75")


@pytest.mark.slow
def test_a_table_beside_a_page_that_was_edited_or_that_no_page_links(checked, copy, monkeypatch):
    page, table = "profiles/page.md", "profiles/tables/small.csv"
    template = '# T\n\n{{ csv("small", step_table(rows("grid", size="small", dtype="fp32"))) }}\n'
    monkeypatch.setattr(report, "draw", lambda committed, profiles: [])
    monkeypatch.setattr(report, "read_templates", lambda: read_templates() | {page: template})
    monkeypatch.setattr(report, "documents", lambda templates: [page, PAGE, OVERVIEW])
    assert report.render(copy, check=False) == 0
    assert f"stale: {table}, line 2" in checked({table: text("small", "large")}, **{page: template})
    monkeypatch.setattr(report, "documents", lambda templates: [PAGE, OVERVIEW])
    assert f"{table}: no page links it" in checked({table: lambda content: content})
    for name in (page, table):
        (copy / name).unlink()
