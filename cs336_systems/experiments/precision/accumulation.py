"""Sums in low precision: in order, with Kahan's compensation, and pairwise; and why each is off."""

import functools
import json
import math
from collections.abc import Callable
from dataclasses import dataclass

import pandas as pd
import torch
from torch import Tensor

from cs336_systems.experiments.precision.options import SumOptions
from cs336_systems.report.command_line import complain
from cs336_systems.report.show import show
from cs336_systems.report.tables import Table

NAME = "mixed_precision_accumulation"
DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}


@dataclass(frozen=True)
class Sum:
    """What was added up, and how far it grew."""

    total: float
    last_growth: int
    """Number of the last term that changed the total; the number of terms where they have no order."""


def in_order(n: int, term: Tensor, accumulator: torch.dtype, *, compensated: bool = False) -> Sum:
    """total = total + term, n times; torch promotes a narrower term to the accumulator's dtype.

    Compensated (Kahan 1965), what an addition rounds off is carried into the next.
    """
    total, lost, last = torch.tensor(0.0, dtype=accumulator), torch.tensor(0.0, dtype=accumulator), 0
    for i in range(1, n + 1):
        added = term - lost
        grown = total + added
        if compensated:
            lost = (grown - total) - added
        last = i if grown != total else last
        total = grown
    return Sum(total.item(), last)


def cast_up(n: int, term: Tensor, accumulator: torch.dtype) -> Sum:
    """The same with the cast written out."""
    return in_order(n, term.to(accumulator), accumulator)


kahan = functools.partial(in_order, compensated=True)


def pairwise(n: int, term: Tensor, accumulator: torch.dtype) -> Sum:
    """Halves added to halves: partial sums stay of one size, and each term is rounded log2(n) times."""
    sums = term.to(accumulator).expand(n)
    while len(sums) > 1:
        if len(sums) % 2:
            sums = torch.cat([sums, sums.new_zeros(1)])
        sums = sums[0::2] + sums[1::2]
    return Sum(sums.item(), n)


Method = Callable[[int, Tensor, torch.dtype], Sum]

EXPERIMENTS: tuple[tuple[str, Method, str, str], ...] = (
    ("in order", in_order, "fp32", "fp32"),
    ("in order", in_order, "fp16", "fp16"),
    ("in order", in_order, "fp32", "fp16"),
    ("in order, terms cast up", cast_up, "fp32", "fp16"),
    ("in order", in_order, "bf16", "bf16"),
    ("in order", in_order, "fp32", "bf16"),
    ("Kahan", kahan, "fp16", "fp16"),
    ("Kahan", kahan, "bf16", "bf16"),
    ("pairwise", pairwise, "fp16", "fp16"),
    ("pairwise", pairwise, "bf16", "bf16"),
)
"""(how, method, accumulator, terms); the first four are the handout's."""


def spacing(value: float, dtype: torch.dtype) -> float:
    """Distance from ``value`` to the next larger number of ``dtype``, for normal numbers."""
    return 2.0 ** math.floor(math.log2(abs(value))) * torch.finfo(dtype).eps


def explanation(how: str, found: Sum, n: int, exact: float, term: Tensor, accumulator: str) -> str:
    """One sentence on where the error comes from, from the numbers themselves."""
    step = spacing(found.total, DTYPES[accumulator])
    error = abs(found.total / exact - 1)
    of_terms = abs(n * term.double().item() / exact - 1)
    if how.startswith("in order") and found.last_growth < n:
        return (
            f"stuck since term {found.last_growth:,}: numbers lie {step:g} apart at {found.total:g}, and what is less "
            f"than half of that is rounded away"
        )
    if error * exact <= step / 2:
        return f"the nearest that {accumulator} has: its numbers lie {step:g} apart there"
    if of_terms > 0 and abs(error / of_terms - 1) < 0.1:
        return f"the terms were rounded before they were added; {accumulator} adds almost no error of its own"
    if how == "Kahan":
        return f"the remainder that is carried along is rounded to {accumulator}, too"
    return f"each addition rounds, to numbers {step:g} apart in the end, and the roundings do not cancel"


def run(options: SumOptions) -> pd.DataFrame:
    """One line per number of terms and experiment.

    Raises:
        ValueError: no terms, or a term or sum that fp16 cannot hold.
    """
    if not options.terms or min(options.terms) < 1:
        raise ValueError(f"--terms must be positive, got {list(options.terms)}")
    fp16 = torch.finfo(torch.float16)
    if not fp16.tiny <= options.term <= max(options.terms) * options.term <= fp16.max / 2:
        raise ValueError(
            f"--term and its sum must lie between fp16's {fp16.tiny:.2g} and {fp16.max / 2:g}, got {options.term:g}"
        )
    lines = []
    for n in options.terms:
        exact = n * options.term
        for how, method, accumulator, narrow in EXPERIMENTS:
            term = torch.tensor(options.term, dtype=DTYPES[narrow])
            found = method(n, term, DTYPES[accumulator])
            lines.append(
                {
                    "terms": n,
                    "how": how,
                    "accumulator": accumulator,
                    "dtype": narrow,
                    "exact": exact,
                    "result": found.total,
                    "relative_error": found.total / exact - 1,
                    "explanation": explanation(how, found, n, exact, term, accumulator),
                }
            )
    return pd.DataFrame(lines)


def answer(options: SumOptions) -> int:
    """Add up and print; returns the exit code."""
    try:
        frame = run(options)
    except ValueError as error:
        return complain(NAME, error)
    shown = frame.assign(
        terms=[f"{n:,}" for n in frame["terms"]],
        exact=[f"{value:g}" for value in frame["exact"]],
        result=[f"{value:.7g}" for value in frame["result"]],
        relative_error=[f"{value:+.1e}" for value in frame["relative_error"]],
    ).rename(columns={"relative_error": "relative error", "dtype": "dtype of terms"})
    show(Table(f"Sums of {options.term:g}.", shown), options.format)
    print(json.dumps({"script": NAME, "sums": frame.drop(columns="explanation").to_dict("records")}))
    return 0
