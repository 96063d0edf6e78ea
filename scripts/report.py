"""Render every table, figure and quoted number of README.md, writeup.md and profiles/ from the committed rows.

uv run scripts/report.py            # rewrite what is stale, draw the figures
uv run scripts/report.py --check    # write nothing; exit code 1 names what is stale, unknown or without provenance

Tables stand in marked blocks (``answers/markers.py``), numbers in prose before a comment that says what they are
(``answers/quotes.py``). Figures are not compared: PNGs vary with the libraries that draw them.
"""

import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pandas as pd
import torch
import tyro

from cs336_systems.answers import arithmetic, attention, distributed, experiments, memory, models, profiles
from cs336_systems.answers.committed import Committed, NotMeasured
from cs336_systems.answers.documents import once, render_document, section
from cs336_systems.answers.quotes import Term
from cs336_systems.experiments.leaks import flops_against_time, launch_overhead, matmul_data, roofline_knee
from cs336_systems.experiments.parallelism import questions
from cs336_systems.experiments.precision import accumulation
from cs336_systems.experiments.precision import autocast as autocast_dtypes
from cs336_systems.experiments.precision.pretended_cuda import cuda_autocast, pretended_cuda
from cs336_systems.report.tables import Table

ROOT = Path(__file__).resolve().parents[1]
FIGURES = ROOT / "profiles" / "figures"
H200 = ROOT / "profiles" / "h200.md"
DOCUMENTS = (ROOT / "README.md", H200, ROOT / "profiles" / "attention.md", ROOT / "writeup.md")
HANDOUT_SUMS = 4
"""Of the experiments of mixed_precision_accumulation.py the first ones are the handout's."""

LEAKS = (matmul_data, roofline_knee, launch_overhead, flops_against_time)
ANALYSES: experiments.Analyses = {leak.NAME: leak.analyse for leak in LEAKS}
"""Of the experiments in scripts/abstraction_leaks."""


@dataclass(frozen=True)
class Options:
    """Render every table, figure and quoted number from the committed rows."""

    check: bool = False
    """Write nothing; fail if something is stale, unknown or without provenance."""


def sums_table() -> Table:
    """The handout's four sums of a thousand hundredths."""
    frame = accumulation.run(accumulation.Options(terms=(1000,))).head(HANDOUT_SUMS)
    frame = frame.assign(
        result=[f"{value:.7g}" for value in frame["result"]],
        relative_error=[f"{value:+.1e}" for value in frame["relative_error"]],
    )
    names = {"relative_error": "relative error", "dtype": "dtype of terms"}
    return Table("1,000 times 0.01; exact: 10.", frame.drop(columns=["terms", "exact"]).rename(columns=names))


def accumulated(accumulator: str, dtype: str, terms: str) -> float:
    """A sum of hundredths in order."""
    found = accumulation.in_order(
        int(terms),
        torch.tensor(0.01, dtype=accumulation.DTYPES[dtype]),
        accumulation.DTYPES[accumulator],
    )
    return found.total


def toy_table() -> Table:
    """Dtypes of the handout's toy model under CUDA's autocast, with its layer norm and the loss."""
    lines: dict[str, dict[str, str]] = {}
    for name, dtype in (("fp16", torch.float16), ("bf16", torch.bfloat16)):
        seen: dict[str, list[str]] = {}
        with pretended_cuda(), cuda_autocast(dtype):
            model = autocast_dtypes.ToyModel(autocast_dtypes.N_IN, autocast_dtypes.N_CLASSES)
            watched = {"first layer": model.fc1, "relu": model.relu, "LayerNorm": model.ln}
            with autocast_dtypes.watched_outputs(watched, seen):
                logits = model(torch.randn(autocast_dtypes.BATCH, autocast_dtypes.N_IN))
            targets = torch.zeros(autocast_dtypes.BATCH, dtype=torch.int64)
            loss = torch.nn.functional.cross_entropy(logits, targets)
        for tensor, what in ((next(model.parameters()), "parameters"), (logits, "logits"), (loss, "loss")):
            autocast_dtypes.note(seen, what, tensor)
        seen["gradients"] = seen["parameters"]
        lines = {tensor: lines.get(tensor, {"tensor": tensor}) | {name: found[0]} for tensor, found in seen.items()}
    order = ["parameters", "first layer, output", "relu, output", "LayerNorm, output", "logits", "loss", "gradients"]
    return Table("The toy model under CUDA's autocast.", pd.DataFrame([lines[tensor] for tensor in order]))


def answers(question: type, names: list[str]) -> dict[str, Callable[[], str]]:
    """The tables of a question of scripts/parallelism.py, at its defaults, as blocks."""
    return {name: lambda i=i: question().answer()[0][i].markdown() for i, name in enumerate(names)}  # type: ignore[misc]


def build(committed: Committed) -> tuple[dict[str, Callable[[], str]], dict[str, Term]]:
    """Every block and every term that a document may name."""
    terms = {
        **models.terms(committed),
        **attention.terms(committed),
        **profiles.terms(committed),
        **memory.terms(committed),
        **distributed.terms(committed),
        **experiments.terms(committed, ANALYSES),
        **arithmetic.terms(),
        "accumulated": Term(accumulated, ".7g"),
    }
    blocks = {
        "h200-findings": lambda: section(H200, "Findings", terms),
        **models.blocks(committed),
        **attention.blocks(committed),
        **profiles.blocks(committed),
        **memory.blocks(committed),
        **distributed.blocks(committed),
        **experiments.blocks(committed, ANALYSES),
        "sums": lambda: sums_table().markdown(),
        "toy-dtypes": lambda: toy_table().markdown(),
        **answers(questions.Ring, ["ring"]),
        **answers(questions.Forms, ["forms"]),
        **answers(questions.Mesh, ["mesh"]),
        **answers(questions.Accounting, ["accounting-memory", "accounting-thresholds", "accounting-remedies"]),
        **answers(questions.Pipeline, ["pipeline"]),
        **answers(questions.Scaling, ["scaling", "scaling-cases"]),
        **answers(questions.Failures, ["failures"]),
    }
    return once(blocks), terms


def draw(committed: Committed) -> list[str]:
    """Draw every figure whose rows are there; the names of the others."""
    drawings = {
        **models.figures(committed, FIGURES),
        **attention.figures(committed, FIGURES),
        **memory.figures(committed, FIGURES),
        **distributed.figures(committed, FIGURES),
        **experiments.figures(committed, ANALYSES, FIGURES),
        **arithmetic.figures(FIGURES),
    }
    FIGURES.mkdir(parents=True, exist_ok=True)
    missing = []
    for path, drawing in drawings.items():
        try:
            drawing(path)
        except NotMeasured:
            missing.append(path.name)
    return missing


def main() -> int:
    """Render, or compare."""
    options = tyro.cli(Options, description=__doc__)
    committed = Committed(ROOT / "profiles", "h200")
    blocks, terms = build(committed)
    stale, problems = [], []
    for document in DOCUMENTS:
        name = document.name
        found = render_document(document.read_text(), blocks, terms)
        stale += [f"{name}: {what}" for what in found.stale]
        problems += [f"{name}: {what}" for what in found.problems]
        if found.stale and not options.check:
            document.write_text(found.text)
    problems += [f"without provenance: {problem}" for problem in committed.problems]
    for problem in problems:
        print(problem, file=sys.stderr)
    if options.check:
        for what in stale:
            print(f"stale: {what}", file=sys.stderr)
        if stale:
            print("run scripts/report.py", file=sys.stderr)
        return 1 if stale or problems else 0
    missing = draw(committed)
    print(f"rendered {'; '.join(stale) or 'nothing: all was current'}; drew the figures")
    if missing:
        print(f"not measured yet: {', '.join(missing)}")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
