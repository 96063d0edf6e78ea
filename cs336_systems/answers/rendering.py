"""Render README.md, writeup.md and the pages in profiles/ from ``pages/``, and find where a document differs.

A template is the document with Jinja's calls in it. A number or a table is a call, names are those of ``vocabulary``:

    a step takes {{ model("step", "small", "fp32") }} ms
    {{ (model("step", "small", "fp32") / model("step", "small", "bf16")) | fixed(1) }} times as fast
    {{ phases_table(rows("context-512", mode="step", dtype="fp32")) }}

Numbers show three significant digits, whole ones all of theirs; the filters ``fixed(places)``, ``percent(places)`` and
``ceil`` choose another form. What waits for rows reads "not measured yet", also inside arithmetic. Text holds no number
that was found out or read somewhere (``prose.py``): ``outside(name)`` and ``given(text)`` declare what is not computed.
Templates see no files but each other, and of objects only what this package's own classes make public.
"""

import difflib
import math
import re
import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jinja2 import FunctionLoader, StrictUndefined, TemplateError, TemplateSyntaxError, Undefined, nodes
from jinja2.meta import find_undeclared_variables
from jinja2.sandbox import ImmutableSandboxedEnvironment

from cs336_systems.report.tables import Table, digits

PAGES = Path(__file__).parent / "pages"
FOLDER = "cs336_systems/answers/pages"
PENDING = "not measured yet"


class Pending:
    """A number or table that waits for rows: whatever is asked of it or computed with it, it stays one."""

    def __init__(self, text: str = PENDING) -> None:
        self._text = text

    def __str__(self) -> str:
        return self._text

    def _itself(self, *_: object) -> "Pending":
        return self

    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __truediv__ = __rtruediv__ = _itself
    __pow__ = __rpow__ = __getitem__ = _itself

    def __iter__(self) -> Any:
        return iter([self])

    def __getattr__(self, name: str) -> "Pending":
        if name.startswith("_"):
            raise AttributeError(name)
        return self


class CannotRender(ValueError):
    """A template that asks for what nobody knows; ``problems`` name template and line."""

    def __init__(self, problems: list[str]) -> None:
        super().__init__("; ".join(problems))
        self.problems = problems


class Pages:
    """The templates below a folder, with the names that they may use.

    Args:
        templates: by path of the document, or of a part that documents include.
        names: functions and values that templates may use.
    """

    def __init__(self, templates: Mapping[str, str], names: Mapping[str, Any]) -> None:
        self._templates = dict(templates)
        self._environment = _Environment(
            loader=FunctionLoader(self._source),
            undefined=StrictUndefined,
            autoescape=False,
            finalize=_shown,
            keep_trailing_newline=True,
            trim_blocks=True,
        )
        self._environment.globals = dict(names)
        self._environment.filters |= {"fixed": _fixed, "percent": _percent, "ceil": _ceil}

    def render(self, name: str) -> str:
        """A document.

        Raises:
            CannotRender: unknown names, all of them; or the first call that fails.
        """
        if unknown := self._unknown_names(name):
            raise CannotRender(unknown)
        try:
            title, _, rest = self._environment.get_template(name).render().partition("\n")
        except (TemplateError, ArithmeticError, LookupError, TypeError, ValueError, AttributeError) as error:
            raise CannotRender([f"{self._place(name, error)}: {error}"]) from error
        return f"{title}\n<!-- Rendered by scripts/report.py from {FOLDER}/{name}.jinja: edit that. -->\n{rest}"

    def _source(self, name: str) -> tuple[str, str, None] | None:
        """A template and the file name by which a traceback calls it."""
        return (self._templates[name], name, None) if name in self._templates else None

    def _unknown_names(self, name: str) -> list[str]:
        """In a template and in those that it includes."""
        try:
            tree = self._environment.parse(self._templates[name])
        except TemplateError as error:
            raise CannotRender([f"{self._place(name, error)}: {error}"]) from error
        unknown = find_undeclared_variables(tree) - set(self._environment.globals)
        places = [(node.lineno, node.name) for node in tree.find_all(nodes.Name) if node.name in unknown]
        return [f"{name}, line {line}: unknown name {word!r}" for line, word in sorted(places)]

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
    if isinstance(value, (str, Pending, Undefined)):
        return str(value)
    if isinstance(value, int):
        return f"{value:,}"
    if not isinstance(value, float):
        raise TypeError(f"{type(value).__name__} is no number, text or table")
    return "infinite" if math.isinf(value) else digits(value)


def _fixed(value: Any, places: int = 0) -> Any:
    return value if isinstance(value, Pending) or value == math.inf else f"{value:,.{places}f}"


def _percent(value: Any, places: int = 0) -> Any:
    return _fixed(100 * value, places)


def _ceil(value: Any) -> Any:
    return value if isinstance(value, Pending) else math.ceil(value)


def read_templates() -> dict[str, str]:
    """Every template, by the path of its document in the repository."""
    return {path.relative_to(PAGES).with_suffix("").as_posix(): path.read_text() for path in PAGES.rglob("*.jinja")}


def documents(templates: Mapping[str, str]) -> list[str]:
    """Those that have a title; the others are parts that documents include."""
    return sorted(name for name, text in templates.items() if re.search("^# ", text, re.MULTILINE))


def stale_lines(text: str, rendered: str) -> list[str]:
    """One sentence for each line of a document that is not as rendered."""
    old, new = text.splitlines(), rendered.splitlines()
    found = []
    for kind, i, i_end, j, j_end in difflib.SequenceMatcher(None, old, new, autojunk=False).get_opcodes():
        if kind == "equal":
            continue
        for step in range(max(i_end - i, j_end - j)):
            was = old[i + step] if i + step < i_end else None
            now = new[j + step] if j + step < j_end else None
            found.append(f"line {min(i + step, i_end - (i_end > i)) + 1}: {_difference(was, now)}")
    return found


def _difference(was: str | None, now: str | None) -> str:
    """What stands and what should, from some characters before the first that differs."""
    if was is None or now is None:
        return f"{now[:60]!r} is missing" if now is not None else f"{(was or '')[:60]!r} should not be there"
    same = next((k for k, (a, b) in enumerate(zip(was, now, strict=False)) if a != b), min(len(was), len(now)))
    start = max(0, same - 20)
    return f"{was[start : same + 40]!r} should be {now[start : same + 40]!r}"
