"""Render README.md, writeup.md and the pages in profiles/ from ``pages/``, and find where a document differs.

A template is the document with Jinja's calls in it. A number or a table is a call, names are those of ``vocabulary``:

    {% set model = rows("context-512", mode="step").asked("size", "dtype") %}
    a step takes {{ model("step", "small", "fp32") }} ms
    {{ (model("step", "small", "fp32") / model("step", "small", "bf16")) | fixed(1) }} times as fast
    {{ shown("context-512", step_table(rows("context-512")), ["size", "total ms"], {"dtype": "fp32"}) }}

Numbers show three significant digits, whole ones all of theirs; the filters ``fixed(places)``, ``percent(places)`` and
``ceil`` choose another form. A number that no row holds fails. Templates see no files but each other, and of objects
only what this package's own classes make public.

**Typed numbers.** Text and code spans hold no number that was measured or read somewhere: one with a unit, with
decimals, or of three digits or more is quoted from rows, from arithmetic or by ``outside(name)``; ``given(text)`` takes
sizes of memory that were set. The named models' shapes, powers of two and of ten, and years are free unless a unit
follows, as are versions of software and parts of names (H200). Not searched are calls, code blocks, the handout's
questions (paragraphs in italics), comments and targets of links. Not policed are whole numbers below a hundred without
a unit, words such as "nine tenths" or "twice" (a number in words is found before a unit), and whether a sentence is
true.
"""

import math
import os
import re
import traceback
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import astuple
from itertools import zip_longest
from pathlib import Path
from typing import Any

from jinja2 import FunctionLoader, StrictUndefined, TemplateError, TemplateSyntaxError, Undefined
from jinja2.sandbox import ImmutableSandboxedEnvironment

from cs336_systems.answers.calculations import LAYER
from cs336_systems.answers.pivot import part_of
from cs336_systems.config import MODEL_SIZES
from cs336_systems.costs.parallelism.mesh import XXL
from cs336_systems.report.tables import Table, digits

PAGES = Path(__file__).parent / "pages"
FOLDER = "cs336_systems/answers/pages"
TABLES = "profiles/tables"
"""Where the CSV files of long tables lie."""


class CannotRender(ValueError):
    """A template asks for what nobody knows; the message names template and line."""


class Pages:
    """The templates below a folder, with the names that they may use.

    Args:
        templates: by path of the document, or of a part that documents include.
        names: functions and values that templates may use.
    """

    def __init__(self, templates: Mapping[str, str], names: Mapping[str, Any]) -> None:
        self._templates = dict(templates)
        self.files: dict[str, str] = {}
        """CSV files that documents link, by path in the repository; complete when all documents are rendered."""
        self._document = ""
        self._environment = _Environment(
            loader=FunctionLoader(self._source),
            undefined=StrictUndefined,
            autoescape=False,
            finalize=_shown,
            keep_trailing_newline=True,
            trim_blocks=True,
        )
        self._environment.globals = {**names, "shown": self._table_beside, "csv": self._csv}
        self._environment.filters |= {"fixed": _fixed, "percent": _percent, "ceil": math.ceil}

    def render(self, name: str) -> str:
        """A document.

        Raises:
            CannotRender: the first unknown name, or call that fails.
        """
        self._document = name
        try:
            title, _, rest = self._environment.get_template(name).render().partition("\n")
        except (TemplateError, ArithmeticError, LookupError, TypeError, ValueError, AttributeError) as error:
            raise CannotRender(f"{self._place(name, error)}: {error}") from error
        return f"{title}\n<!-- Rendered by scripts/report.py from {FOLDER}/{name}.jinja: edit that. -->\n{rest}"

    def _table_beside(
        self, name: str, table: Table, columns: Sequence[str] = (), where: Mapping[str, Any] | None = None
    ) -> str:
        """Part of a table, and below it a link to the whole one."""
        shown = part_of(table, columns, where)
        rest = "columns" if len(shown.frame) == len(table.frame) else f"{len(table.frame)} lines"
        return f"{shown.markdown()}\n\nAll {rest}: {self._csv(name, table)}."

    def _csv(self, name: str, table: Table) -> str:
        """Write a table beside the pages; a link to it from this page."""
        path = f"{TABLES}/{name}.csv"
        if self.files.setdefault(path, table.csv()) != table.csv():
            raise ValueError(f"two tables are called {name!r}")
        return f"[{name}.csv]({os.path.relpath(path, Path(self._document).parent)})"

    def _source(self, name: str) -> tuple[str, str, None] | None:
        """A template and the file name by which a traceback calls it."""
        return (self._templates[name], name, None) if name in self._templates else None

    def _place(self, name: str, error: Exception) -> str:
        """The template and line at which it failed; the generated code of a template has the template's file name."""
        if isinstance(error, TemplateSyntaxError):
            return f"{error.filename or name}, line {error.lineno}"
        frames = traceback.extract_tb(error.__traceback__)
        inside = [(frame.filename, frame.lineno) for frame in frames if frame.filename in self._templates]
        return "{}, line {}".format(*(inside or [(name, 1)])[-1])


class _Environment(ImmutableSandboxedEnvironment):
    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        """Public attributes of this package's own objects: nothing else leads to files or commands."""
        return type(obj).__module__.startswith("cs336_systems.") and super().is_safe_attribute(obj, attr, value)


def _shown(value: Any) -> str:
    if isinstance(value, Table):
        return value.markdown()
    if isinstance(value, (str, Undefined)):
        return str(value)
    if isinstance(value, int):
        return f"{value:,}"
    if not isinstance(value, float):
        raise TypeError(f"{type(value).__name__} is no number, text or table")
    return "infinite" if math.isinf(value) else digits(value)


def _fixed(value: Any, places: int = 0) -> Any:
    return value if value == math.inf else f"{value:,.{places}f}"


def _percent(value: Any, places: int = 0) -> Any:
    return _fixed(100 * value, places)


def read_templates() -> dict[str, str]:
    """Every template, by the path of its document in the repository."""
    return {
        path.relative_to(PAGES).with_suffix("").as_posix(): path.read_text(encoding="utf-8")
        for path in PAGES.rglob("*.jinja")
    }


def documents(templates: Mapping[str, str]) -> list[str]:
    """Those that have a title; the others are parts that documents include."""
    return sorted(name for name, text in templates.items() if re.search("^# ", text, re.MULTILINE))


def stale_line(text: str, rendered: str) -> str:
    """A sentence on the first line of a document that is not as rendered, from some characters before they differ."""
    lines = enumerate(zip_longest(text.split("\n"), rendered.split("\n"), fillvalue="(no line)"), start=1)
    number, (was, now) = next((n, pair) for n, pair in lines if pair[0] != pair[1])
    same = next((k for k, (a, b) in enumerate(zip(was, now, strict=False)) if a != b), min(len(was), len(now)))
    start = max(0, same - 20)
    return f"line {number}: {was[start : same + 40]!r} should be {now[start : same + 40]!r}"


_UNITS = (
    *("ns", "us", "µs", "ms", "s", "seconds?", "minutes?", "hours?", "days?"),
    *("[KMGT]i?B(?:/s)?", "[MG]bit/s", "[kMGT]?FLOPs?(?:/s)?", "tokens/s", "[MG]Hz", "k?W", "%", "per ?cent", "times"),
)
_UNIT = re.compile(rf"(?:\*\*)?[\s\u00a0-]?(?:{'|'.join(_UNITS)})(?![\w/])|[×x](?![\w(])(?! ?\d)| ×(?! ?[\w(])")
_NUMBER = re.compile(r"(?<![\w.,^])(?<![A-Za-z]-)\d(?:[\d,_]*\d)?(?:\.\d+)*")
_IN_WORDS = re.compile(
    r"\b(?:two|three|four|five|six|seven|eight|nine|ten|eleven|twelve|half) "
    r"(?:ms|us|µs|[KMGT]i?B(?:/s)?|tokens/s|[kMGT]?FLOPs?/s|%|per ?cent)(?![\w/])"
)
_SOFTWARE = "torch|triton|python|cuda|cudnn|ptxas|driver|nccl|nsight|nsys|matplotlib"
_PART_OF_MORE = re.compile(rf"(?:(?:{_SOFTWARE})[ -]\(?|[A-Za-z)] ?/ ?)$", re.IGNORECASE)
"""Before a number: the name of software whose version it is, or a letter that it divides."""

_SHAPES = {
    value
    for shape in (*map(astuple, MODEL_SIZES.values()), astuple(LAYER), astuple(XXL.layer))
    for value in shape
    if isinstance(value, (int, float)) and value >= 100
}

_SKIPPED = (
    r"^```.*?^```",  # code
    r"\{%.*?%\}|\{\{.*?\}\}|\{#.*?#\}",  # Jinja's own
    r"<!--.*?-->",
    r"\]\([^)\s]*\)",
    r"https?://\S+",
    r"^(?: {4}|\t).*?$",
    r"^\*(?!\*)(?:(?!\n\n).)*?(?<!\*)\*$",  # a question of the handout
)


def typed_numbers(templates: Mapping[str, str]) -> list[str]:
    """One sentence for each number that is typed by hand, with its template and line."""
    return [
        f"{name}.jinja, line {line}: {number!r} is typed, not quoted"
        for name, text in sorted(templates.items())
        for line, number in sorted(set(_in_text(text)))
    ]


def _in_text(text: str) -> Iterator[tuple[int, str]]:
    """Numbers of the text between calls: line, and the number with its unit."""
    for pattern in _SKIPPED:
        text = re.sub(pattern, _blank, text, flags=re.MULTILINE | re.DOTALL)
    return ((text.count("\n", 0, start) + 1, number) for start, number in _numbers(text))


def _blank(match: re.Match[str]) -> str:
    """As many lines, of nothing that reads as text."""
    return "\0" + "\n" * match[0].count("\n")


def _numbers(text: str) -> Iterator[tuple[int, str]]:
    for match in _NUMBER.finditer(text):
        unit = _UNIT.match(text, match.end())
        named = not unit and re.match("[A-Za-z_]", text[match.end() : match.end() + 1])
        if named or match[0].count(".") > 1 or _PART_OF_MORE.search(text, 0, match.start()):
            continue
        if unit or not _is_free(match[0]):
            yield match.start(), match[0] + (unit[0] if unit else "")
    yield from ((match.start(), match[0]) for match in _IN_WORDS.finditer(text))


def _is_free(number: str) -> bool:
    """Whether a number without a unit may be typed."""
    if "." in number:
        return False
    value = int(re.sub("[,_]", "", number))
    power = value & (value - 1) == 0 or (set(str(value)[1:]) == {"0"} and str(value)[0] == "1")
    return value < 100 or power or 1990 <= value < 2040 or value in _SHAPES
