"""Options from a file, as defaults of a command line, which overrides them.

    options, rest = from_file(TrainOptions(), sys.argv[1:])      # takes --config FILE.toml out of the arguments
    options = tyro.cli(TrainOptions, args=rest, default=options)
    print(to_toml(options))                                      # a file that says the same

A file has a line for each option, named as on the command line, with dashes or underscores: ``learning-rate = 3e-4``;
``"none"`` for an option that is not to be set.
Imports no torch.
"""

import difflib
import tomllib
import types
from collections.abc import Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

Options = TypeVar("Options")
_FLAG = "--config"


def from_file(defaults: Options, arguments: Sequence[str]) -> tuple[Options, list[str]]:
    """The options as the file says that ``--config`` names, and the other arguments; without one, as given.

    Raises:
        ValueError: no file is named after ``--config``, or several are; or it is not TOML; or an option is unknown, or
            of a wrong kind; one sentence.
        OSError: it cannot be read.
    """
    rest = list(arguments)
    for place, argument in enumerate(rest):
        if argument == _FLAG or argument.startswith(f"{_FLAG}="):
            _, given, name = argument.partition("=")
            if not given:
                if place + 1 == len(rest):
                    raise ValueError(f"{_FLAG} needs a file")
                name = rest.pop(place + 1)
            del rest[place]
            if any(other.partition("=")[0] == _FLAG for other in rest):
                raise ValueError(f"{_FLAG} is given twice: one file has all options")
            return _overlaid(defaults, Path(name)), rest
    return defaults, rest


def to_toml(options: Any) -> str:
    """A line for each option."""
    names = [field.name for field in fields(options)]
    return "\n".join(f"{name.replace('_', '-')} = {_spelled(getattr(options, name))}" for name in names)


def _overlaid(defaults: Options, path: Path) -> Options:
    try:
        content = tomllib.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is not TOML: {error}") from None
    hints = get_type_hints(type(defaults))
    values = {}
    for name, value in content.items():
        key = name.replace("-", "_")
        if key not in hints:
            near = difflib.get_close_matches(key, hints, n=1)
            hint = f", did you mean {near[0].replace('_', '-')}?" if near else ""
            raise ValueError(f"{path}: unknown option {name!r}{hint}")
        values[key] = _converted(value, hints[key], f"{path}: {name}")
    return replace(defaults, **values)  # type: ignore[type-var]


def _converted(value: Any, hint: Any, where: str) -> Any:
    """A value of TOML as an option's type has it."""
    kind, parts = get_origin(hint), get_args(hint)
    if kind in (Union, types.UnionType):
        if value == "none":
            return None
        hint = next(part for part in parts if part is not type(None))
        return _converted(value, hint, where)
    if kind is Literal and value in parts and type(value) in map(type, parts):
        return value
    if kind is tuple and isinstance(value, list) and parts[-1] is Ellipsis:
        return tuple(_converted(one, parts[0], where) for one in value)
    if kind is tuple and isinstance(value, list) and len(value) == len(parts):
        return tuple(_converted(one, part, where) for one, part in zip(value, parts, strict=True))
    if hint is Path and isinstance(value, str):
        return Path(value)
    if hint is float and type(value) in (int, float):
        return float(value)
    if hint in (int, str, bool) and type(value) is hint:
        return value
    wanted = f"one of {', '.join(map(str, parts))}" if kind is Literal else _words(hint)
    raise ValueError(f"{where} must be {wanted}, got {value!r}")


def _words(hint: Any) -> str:
    if get_origin(hint) is tuple:
        parts = get_args(hint)
        return "a list" if parts[-1] is Ellipsis else f"a list of {len(parts)} numbers"
    names: dict[Any, str] = {int: "a whole number", float: "a number", bool: "true or false", Path: "a path in quotes"}
    return names.get(hint, "text in quotes")


def _spelled(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, tuple):
        return f"[{', '.join(map(_spelled, value))}]"
    if isinstance(value, int | float):
        return repr(value)
    value = "none" if value is None else value
    escaped = str(value).replace("\\", "\\\\").replace('"', '\\"')
    return f'"{escaped}"'
