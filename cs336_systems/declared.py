"""The fields of a step or a benchmark, declared once: type, plain value, help and allowed values.

    @dataclass(frozen=True)
    class Cell:
        kernels: str = option("reference", "Operations between matmuls: ...", values=("reference", "fused"))

    Options = options_of(Cell, RunOptions)      # a command line: --kernels reference fused makes a grid of two cells

The field is also a column of rows; a field not made by ``option`` is only a column. ``like`` copies a field of another
class. Imports no torch.
"""

import dataclasses
import math
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields
from typing import Annotated, Any, Literal, TypeVar, get_type_hints

Plain = TypeVar("Plain")
_KEY = "option"
_Annotated: Any = Annotated
_Literal: Any = Literal
_Tuple: Any = tuple
"""Without the types that a checker takes them for: their arguments are known only when a program runs."""


@dataclass(frozen=True)
class Option:
    """The arguments of ``option`` for a field besides its plain value, with the same names."""

    help: str
    values: tuple[Any, ...] = ()
    typed: Any = None
    asked: Any = ...
    several: bool = True
    flag: str = ""
    aliases: tuple[str, ...] = ()
    sign: Literal["", "positive", "not negative"] = ""
    words: str | Mapping[Any, str] = ""
    shown: bool = False


def option(plain: Plain, help: str, **said: Any) -> Plain:
    """A field of a frozen dataclass that command lines offer.

    Args:
        plain: its value unless another is asked for, which rows that were measured before the field existed have.
        help: for ``--help``.
        values: all that it may be; by default what its type allows.
        typed: its type on command lines, if the field's own is wider.
        asked: the default of command lines where that is not the plain value, a tuple of several; None for one that
            depends on other options.
        several: whether several values make a grid.
        flag: the option's name, if it is not that of the field.
        aliases: other names of the option, with their hyphens.
        sign: which numbers it may be.
        words: how a value that is not plain is told to people: a text with ``{}``, or one for each such value.
        shown: whether a table's caption also names the plain value.
    """
    return field(default=plain, metadata={_KEY: Option(help, **said)})


def like(kind: type, name: str, **said: Any) -> Any:
    """The field of that name of another dataclass, declared here as well, but for what is ``said`` as to ``option``.

    Raises:
        KeyError: it has no such option.
    """
    known = {each.name: (each.default, of) for each, of in options_in(kind)}
    default, of = known[name]
    plain = said.pop("plain", default)
    return field(default=plain, metadata={_KEY: dataclasses.replace(of, **said)})


def options_in(kind: Any) -> Iterator[tuple[Any, Option]]:
    """The fields of a dataclass, or of a value of one, that are options."""
    for each in fields(kind):
        if _KEY in each.metadata:
            yield each, each.metadata[_KEY]


def option_name(each: Any) -> str:
    """The name that a field has in a dataclass of options."""
    of = each.metadata.get(_KEY)
    return of.flag.replace("-", "_") if of and of.flag else each.name


def flag(name: str) -> str:
    """An option as it is typed."""
    return f"--{name.replace('_', '-')}"


def as_typed(name: str, value: object) -> str:
    """An option with its value, as it is typed: ``--steps 3``, ``--no-export``."""
    if isinstance(value, bool):
        return flag(name if value else f"no_{name}")
    return f"{flag(name)} {shlex.join(map(str, value if isinstance(value, list | tuple) else (value,)))}"


def sign_refusal(name: str, value: float | None, sign: str) -> str | None:
    """Why the option may not be this number, if it may not; ``sign`` as of ``option``."""
    if not sign or value is None:
        return None
    if not math.isfinite(value):
        return f"{flag(name)} must be finite, got {value}"
    if value < 0 or (value == 0 and sign == "positive"):
        return f"{flag(name)} must {'be positive' if sign == 'positive' else 'not be negative'}, got {value}"
    return None


def options_of(
    kind: type, base: type, *, several: bool = True, cpu: Mapping[str, Any] | None = None, **asked: Any
) -> Any:
    """A frozen dataclass with the fields of ``base`` and an option for each field of ``kind`` that ``option`` made.

    Args:
        several: whether options that may take several values do; without it each has one.
        cpu: defaults where there is no GPU, instead of those of ``base``.
        asked: defaults that are not those of the fields.
    """
    import tyro  # a fifth of a second, which processes that parse nothing are spared

    made: dict[str, tuple[str, Any, Any]] = {}
    for declared, many in ((base, False), (kind, several)):
        hints, own = get_type_hints(declared), {each.name for each in fields(base)}
        for each, of in options_in(declared):
            name = option_name(each)
            if declared is kind and name in own:
                continue
            hint = _Literal[of.values] if of.values else of.typed or hints[each.name]
            default = asked.get(name, each.default if of.asked is ... else of.asked)
            if many and of.several:
                hint, default = _Tuple[hint, ...], default if isinstance(default, tuple | None) else (default,)
            said = tyro.conf.arg(help=of.help, aliases=of.aliases or None)
            typed = _Annotated[hint | None if default is None else hint, said]
            made[name] = (name, typed, field(default=default, metadata=each.metadata))
    options = dataclasses.make_dataclass("Options", made.values(), bases=(base,), frozen=True)
    options.__module__, options.__doc__ = base.__module__, base.__doc__
    if cpu is not None:
        options.CPU_DEFAULTS = dict(cpu)  # type: ignore[attr-defined]
    return options


def plain_values(*kinds: type) -> dict[str, str]:
    """By column, the plain value that a table's caption leaves out."""
    return {each.name: str(each.default) for kind in kinds for each, of in options_in(kind) if not of.shown}


def names_in(kind: type, last: tuple[str, ...] = ()) -> tuple[str, ...]:
    """The columns of a dataclass that are options, in their order but for the ``last`` ones."""
    names = [each.name for each, _ in options_in(kind) if each.name not in last]
    return (*names, *last)
