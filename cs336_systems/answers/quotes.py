"""Numbers in prose that are computed, never typed: a number, and behind it in a comment the question that it answers.

    a step takes 54.5<!--= model step small fp32 --> ms, forward a third<!-- no quote --> of it

Rendered Markdown shows the number alone. The comment names a term and its arguments; a quote may divide one term by
another, and choose a form:

    2.1<!--= passes small fp32 / passes small autocast-bf16 : .1f -->      a ratio
    33<!--= model optimizer 2.7b bf16 / model step 2.7b bf16 : %.0f -->    the same in percent

Without a form the term's own counts, or three significant digits for a ratio. ``render_quotes`` writes every number
anew and leaves the rest of the text as it is; what has no rows yet reads "not measured yet".
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from cs336_systems.answers.committed import NotMeasured
from cs336_systems.report.tables import digits

PENDING = "not measured yet"

_QUOTE = re.compile(rf"(?P<shown>[-+]?\d(?:[\d,.]*\d)?(?:e[-+]?\d+)?|infinite|{PENDING})<!--= (?P<spec>[^>\n]*?) -->")
_MARK = re.compile(r"<!--=[^\n]*?(?:-->|$)", re.MULTILINE)


@dataclass(frozen=True)
class Term:
    """A number that prose may quote: a function of words, and the form in which it is shown."""

    value: Callable[..., float]
    form: str = ""
    """A format specification; ``%`` before it shows percent; empty: three significant digits."""


Terms = Mapping[str, Term]


def render_quotes(text: str, terms: Terms) -> str:
    """``text`` with every quoted number computed anew.

    Raises:
        ValueError: quotes that cannot be computed, all of them with their lines: an unknown term, wrong arguments, or
            a comment without a number before it.
    """
    problems = []

    def replacement(match: re.Match[str]) -> str:
        try:
            return f"{evaluate(match['spec'], terms)}<!--= {match['spec']} -->"
        except ValueError as error:
            problems.append(f"line {_line(text, match.start())}: {error}")
            return match[0]

    rendered = _QUOTE.sub(replacement, text)
    quoted = {match.end() for match in _QUOTE.finditer(text)}
    for stray in _MARK.finditer(text):
        if stray.end() not in quoted:
            problems.append(f"line {_line(text, stray.start())}: no number before the quote {stray[0]!r}")
    if problems:
        raise ValueError("; ".join(problems))
    return rendered


def stale_quotes(text: str, rendered: str) -> list[str]:
    """One sentence for each quoted number that rendering has changed."""
    pairs = zip(_QUOTE.finditer(text), _QUOTE.finditer(rendered), strict=True)
    return [
        f"line {_line(text, old.start())}: {old['shown']} should be {new['shown']} ({old['spec']})"
        for old, new in pairs
        if old["shown"] != new["shown"]
    ]


def without_quotes(text: str) -> str:
    """The text as a reader sees it: the numbers without their comments."""
    return _QUOTE.sub(lambda match: match["shown"], text)


def evaluate(spec: str, terms: Terms) -> str:
    """The number that a quote asks for, as it is shown.

    Raises:
        ValueError: there is no such term, its arguments are wrong, or the form is none.
    """
    formula, _, form = spec.partition(" : ")
    parts = [part.split() for part in formula.split(" / ")]
    try:
        values = [_value(words, terms) for words in parts]
    except NotMeasured:
        return PENDING
    if len(values) > 2:
        raise ValueError(f"{spec!r} divides more than once")
    value = values[0] if len(values) == 1 else values[0] / values[1]
    form = form.strip() or (terms[parts[0][0]].form if len(parts) == 1 else "")
    return shown(value, form)


def shown(value: float, form: str) -> str:
    """A number in a form (see ``Term``); ValueError for one that Python does not know."""
    if value == float("inf"):
        return "infinite"
    if not form:
        return digits(value)
    return format(100 * value, form[1:]) if form.startswith("%") else format(value, form)


def _value(words: list[str], terms: Terms) -> float:
    name, *arguments = words or [""]
    if name not in terms:
        raise ValueError(f"unknown term {name!r}: known are {', '.join(sorted(terms))}")
    try:
        return float(terms[name].value(*arguments))
    except (TypeError, LookupError) as error:
        if isinstance(error, NotMeasured):
            raise
        raise ValueError(f"{' '.join(words)!r} cannot be computed: {error}") from error


def _line(text: str, position: int) -> int:
    return text.count("\n", 0, position) + 1
