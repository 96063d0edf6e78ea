"""Options from a file, as a command line that stands before the typed one, which overrides it.

    arguments = with_file(TrainOptions, sys.argv[1:])        # in place of --config FILE.toml the options that it has
    print(to_toml(options))                                  # a file that says the same

A file has a line for each option, named as on the command line, with dashes or underscores: ``learning-rate = 3e-4``;
``"none"`` for an option that is not to be set. Imports no torch.
"""

import tomllib
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any, get_args, get_type_hints

from cs336_systems.config import did_you_mean
from cs336_systems.declared import flag

_FLAG = "--config"


def with_file(kind: type, arguments: Sequence[str]) -> list[str]:
    """The arguments, behind those that the file says which ``--config`` names.

    Raises:
        ValueError: no file is named after ``--config``, or several are; it is not TOML; or an option is unknown.
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
            return [*_arguments(kind, Path(name)), *rest]
    return rest


def _arguments(kind: type, path: Path) -> list[str]:
    try:
        content = tomllib.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is not TOML: {error}") from None
    hints = {name.replace("_", "-"): hint for name, hint in get_type_hints(kind).items()}
    found = []
    for name, value in content.items():
        name = name.replace("_", "-")
        if name not in hints:
            raise ValueError(f"{path}: unknown option {name!r}: {did_you_mean(name, hints)}see --help")
        if isinstance(value, bool):
            found.append(flag(name) if value else flag(f"no-{name}"))
        else:
            unset = value == "none" and type(None) in get_args(hints[name])
            values = [None] if unset else value if isinstance(value, list) else [value]
            found += [flag(name), *map(str, values)]
    return found


def to_toml(options: Any) -> str:
    """A line for each option."""
    names = [field.name for field in fields(options)]
    return "\n".join(f"{name.replace('_', '-')} = {_spelled(getattr(options, name))}" for name in names)


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
