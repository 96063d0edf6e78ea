"""Shared by all commands: parsing, one sentence on bad input, and exit codes.

Imports no torch, pandas or matplotlib, so that ``--help`` and messages on bad input come at once. A benchmark has

    main = command(EXPERIMENT, __doc__)          # experiments/driver.py

    if __name__ == "__main__":
        exit_with(EXPERIMENT.name, main)

Exit codes: 0 done, 1 nothing was measured or something failed, 2 bad input, 130 Ctrl-C.
"""

import json
import os
import shutil
import sys
import textwrap
import time
import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import NoneType
from typing import Any, Literal, NoReturn, Protocol, Self, TextIO, TypeVar, get_args

import tyro

Format = Literal["auto", "markdown", "latex", "csv"]
"""The form of tables: auto draws them on a terminal and writes Markdown elsewhere."""

PACKAGE = Path(__file__).parents[1]
BAD_INPUT = 2
INTERRUPTED = 130


class HasDevice(Protocol):
    """Options of a command: a frozen dataclass for tyro, with at least a device, on which its defaults depend."""

    @property
    def device(self) -> str: ...
    @classmethod
    def default(cls, device: str) -> Self: ...


Options = TypeVar("Options", bound=HasDevice)


@dataclass(frozen=True)
class ModelOptions:
    """A trained model that a command loads."""

    model: tyro.conf.Positional[Path]
    """Folder of a run, whose newest complete checkpoint is taken; one of its checkpoints; or a Hugging Face folder."""
    device: Literal["cpu", "cuda"] = "cpu"
    """Where to run."""
    dtype: Literal["fp32", "bf16"] = "fp32"
    """Dtype in which the model computes."""

    @classmethod
    def default(cls, device: str) -> Self:
        """The defaults on a device: bf16 on a GPU, fp32 on a CPU."""
        missing: Any = tyro.MISSING
        return cls(missing, device=device, dtype="bf16" if device == "cuda" else "fp32")  # type: ignore

    def check_device(self) -> None:
        """Raise ValueError if the device does not exist."""
        if self.device == "cuda" and not n_gpus():
            raise ValueError("--device cuda needs a GPU, and there is none")

    def load(self, command: str, path: Path) -> Any:
        """Load the model at ``path``; raises what ``checkpoint.load_trained`` does."""
        from cs336_systems.pretraining.checkpoint import load_trained
        from cs336_systems.training.precision import DTYPES

        return load_trained(path, device=self.device, dtype=DTYPES[self.dtype], tell=partial(complain, command))


def n_gpus() -> int:
    """Return how many NVIDIA GPUs a process started here would see, asking only the driver; 0 without a driver."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return len([name for name in visible.split(",") if name.strip() not in ("", "-1")])
    try:
        import pynvml

        pynvml.nvmlInit()
        return pynvml.nvmlDeviceGetCount()
    except Exception:  # NVML's own errors, and a missing library
        return 0


def parse(kind: type[Options], arguments: list[str] | None, description: str | None) -> Options:
    """Parse options; defaults are those of the device that the command line names, or else of the one found here."""
    found = "cuda" if n_gpus() else "cpu"
    options = cli(kind, arguments, description, default=kind.default(found))
    if options.device == found:
        return options
    return cli(kind, arguments, description, default=kind.default(options.device))


def flags_in(arguments: Iterable[str]) -> set[str]:
    """Return the names of the options that a command line gives, such as ``--batch-size``."""
    return {word.partition("=")[0].replace("_", "-") for word in arguments if word.startswith("--")}


def cli(kind: Any, arguments: list[str] | None, description: str | None, **settings: Any) -> Any:
    """Call ``tyro.cli``; ``--help`` wraps the description to the terminal and shows the type ``X | None`` as X."""
    registry = tyro.constructors.ConstructorRegistry()
    inside = False

    @registry.primitive_rule
    def without_none(asked: Any) -> Any:
        nonlocal inside
        if inside or NoneType not in get_args(asked.type):
            return None  # leaves it to tyro's own rules
        inside = True
        spec = registry.get_primitive_spec(asked)
        inside = False
        if isinstance(spec, tyro.constructors.PrimitiveConstructorSpec):
            spec = replace(spec, metavar=spec.metavar.removeprefix("{None}|"))
        return spec

    with registry:
        return tyro.cli(kind, args=arguments, description=for_terminal(description or ""), **settings)


def for_terminal(text: str) -> str:
    """Return a module's docstring in plain text with wrapped paragraphs; indented ones, commands, are unchanged."""
    width = shutil.get_terminal_size().columns
    paragraphs = text.replace("``", "").strip().split("\n\n")
    # tyro joins lines unless they begin with a blank.
    return "\n\n".join(
        each if each.startswith("    ") else textwrap.fill(each, width, initial_indent=" ", subsequent_indent=" ")
        for each in paragraphs
    )


def complain(command: str, fault: Exception | str, *, every_rank: bool = False) -> int:
    """Print one sentence to stderr, on each node's first rank or on ``every_rank``; return the exit code of bad input.

    torchrun ends all ranks once one has exited, perhaps before the first has printed. Each rank therefore also writes
    the sentence to a file, which torchrun prints at the end of its own report.
    """
    sentence = f"{command}: {os_error(fault) if isinstance(fault, OSError) else fault}"
    if report := os.environ.get("TORCHELASTIC_ERROR_FILE"):
        message = {"message": sentence, "extraInfo": {"timestamp": str(int(time.time()))}}
        Path(report).write_text(json.dumps({"message": message}), encoding="utf-8")
    if every_rank or os.environ.get("LOCAL_RANK", "0") == "0":
        print(sentence, file=sys.stderr)
    return BAD_INPUT


def os_error(error: OSError) -> str:
    """Return the error's text, with the file if it is known."""
    return f"{error.filename}: {error.strerror}" if error.filename else str(error)


def exit_with(command: str, main: Callable[[], int], left: str = "every finished row is kept") -> NoReturn:
    """Run a command's ``main`` and exit with its code, even if its output streams fail.

    Ctrl-C outside a cell prints one sentence, not a traceback. A closed pipe (``| head -1``), a closed stdout or an
    ASCII-only terminal loses output, but never rows, figures or the exit code.

    OpenMP threads, which torch starts later, spin for about a hundred microseconds instead of the default milliseconds:
    on two cores shared with two busy programs a first training step took 2 s instead of 25.

    Args:
        left: what Ctrl-C leaves, in words.
    """
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", "10000")
    warnings.formatwarning = partial(warning_as_sentence, warnings.formatwarning)
    sys.stdout, sys.stderr = (_Lenient(stream) for stream in (sys.stdout, sys.stderr))
    try:
        code = main()
    except KeyboardInterrupt:
        print(f"{command}: interrupted; {left}", file=sys.stderr)
        code = INTERRUPTED
    sys.stdout.flush()
    if sys.stdout.broken:  # the interpreter would fail to flush it and print an error
        os._exit(code)
    sys.exit(code)


def warning_as_sentence(
    others: Callable[..., str], message: Warning | str, category: type, filename: str, *place: Any
) -> str:
    """Format a warning: one from this package without its line of code, any other with ``others``."""
    if Path(filename).is_relative_to(PACKAGE):
        return f"warning: {message}\n"
    return others(message, category, filename, *place)


class _Lenient:
    """A text stream that drops what cannot be written; ``broken`` is True after a write or flush has failed."""

    def __init__(self, stream: TextIO | None) -> None:
        self._stream = stream
        self.broken = False
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")  # type: ignore[union-attr]

    def write(self, text: str) -> int:
        self._attempt(lambda stream: stream.write(text))
        return len(text)

    def flush(self) -> None:
        self._attempt(lambda stream: stream.flush())

    def isatty(self) -> bool:
        return self._stream is not None and not self.broken and self._stream.isatty()

    def _attempt(self, action: Callable[[TextIO], Any]) -> None:
        if self._stream is None or self.broken:
            return
        try:
            action(self._stream)
        except (OSError, ValueError):  # a broken pipe, a full disk behind it, a closed file
            self.broken = True

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)
