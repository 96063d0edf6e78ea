"""A cell measured in its own process, and the ways in which that can end.

A fresh process means that no cell inherits another's memory, caches, compiled code or broken CUDA context, and that a
cell which is killed, hangs or runs out of memory costs only itself. A *measure* is a module-level function from a cell
to its metrics; how it ends is the cell's status:

    ok             its metrics
    predicted-oom  it raised ``PredictedOutOfMemory``: the cell would not fit, and was not tried
    oom            the allocator refused, or the kernel's out-of-memory killer struck
    unsupported    it raised ``Unsupported``
    timeout        it took too long and was killed
    error          anything else, with the message; the traceback goes to stderr
    interrupted    Ctrl-C in the parent
"""

import functools
import gc
import re
import sys
import textwrap
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection
from typing import Any, ClassVar, Protocol

import torch

from cs336_systems.case import Unsupported
from cs336_systems.harness.memory import mark_used
from cs336_systems.harness.provenance import device_state, versions
from cs336_systems.harness.record import Metric
from cs336_systems.processes import Died, FreshProcess


class Cell(Protocol):
    """What a measurement needs to know of a benchmark's frozen dataclass; its fields become columns.

    A cell that is to be measured by several ranks together has a ``world_size`` as well.
    """

    __dataclass_fields__: ClassVar[dict[str, Any]]

    @property
    def device(self) -> str: ...
    @property
    def seed(self) -> int: ...
    @property
    def variant(self) -> str: ...


Measure = Callable[..., list[Metric]]
"""``measure(cell)``, or ``measure(cell, rank)`` of a cell with a ``world_size``."""

Report = dict[str, Any]
"""``status``, ``message``, ``metrics``, ``provenance``, and what is known of ``state_before`` and ``state_after``."""

_CUDA_OUT_OF_MEMORY = re.compile(
    r"Tried to allocate (\S+ \S+)\. .* total capacity of (\S+ \S+) of which .*"
    r"Of the allocated memory (\S+ \S+) is allocated by PyTorch, and (\S+ \S+) is reserved by PyTorch but unallocated",
    re.DOTALL,
)
"""What torch's allocator says of itself."""

_OUT_OF_MEMORY = ("can't allocate memory", "CUDA error: out of memory", "CUBLAS_STATUS_ALLOC_FAILED")
"""How errors of other types say that memory has run out."""

_MESSAGE_WIDTH = 200
"""Characters of an unexpected error that go into its row; the traceback on stderr has the rest."""


class PredictedOutOfMemory(Exception):
    """The cell would need more memory than is free; the message holds both figures."""


def measure_here(
    cell: Cell, device: torch.device, measure: Callable[[], list[Metric]], tell: Callable[[Report], None]
) -> tuple[Report, BaseException | None]:
    """Tell where the cell runs, measure, and leave nothing behind; how it went, and what was raised."""
    cause: BaseException | None = None
    try:
        provenance = versions(device)
        if device.type == "cuda":
            provenance["gpu_count"] = getattr(cell, "world_size", 1)
        tell({"provenance": provenance, "state_before": device_state(device)})
        metrics = measure()
        for metric in metrics:
            metric.statistics()
        report: Report = {"status": "ok", "message": "", "metrics": metrics}
    except (Exception, SystemExit) as error:
        report, cause = classify(error), error
    with suppress(Exception):
        report["state_after"] = device_state(device)
    mark_used()
    gc.collect()
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()
    return report, cause


def blank_report() -> Report:
    """What is known of a cell that has not begun; the provenance is a CPU's, as no device was reached."""
    return {"metrics": [], "provenance": versions(torch.device("cpu"))}


@contextmanager
def reported(timeout_s: float) -> Iterator[Report]:
    """A report to be filled in, whose status is what ended the cell from outside; prints its traceback."""
    report: Report = {"metrics": []}
    try:
        report |= blank_report()
        yield report
    except TimeoutError:
        report |= {"status": "timeout", "message": f"took longer than {timeout_s:g} s and was killed"}
    except KeyboardInterrupt:
        report |= {"status": "interrupted", "message": "Ctrl-C"}
    except Died as death:
        how = str(death) if death.out_of_memory else f"the cell's process {death}"
        report |= {"status": "oom" if death.out_of_memory else "error", "message": how}
    print(report.pop("traceback", ""), file=sys.stderr, end="")


def measure_in(process: FreshProcess, cell: Cell, deadline: float, report: Report) -> None:
    """Let a process whose body is ``serve`` measure one more cell; ``report`` takes what it tells.

    Raises:
        TimeoutError: it has not ended by the deadline, a value of ``time.monotonic``.
        Died: the process has.
    """
    with suppress(ConnectionError):  # if it has died, so says the next line
        process.connection.send(cell)
    while "status" not in report:
        report.update(process.receive(deadline))


def serve(connection: Connection, measure: Measure) -> None:
    """Body of a fresh process: measure what arrives until the parent hangs up."""
    with suppress(EOFError):
        while True:
            cell: Cell = connection.recv()
            device = torch.device(cell.device)
            report, _ = measure_here(cell, device, functools.partial(measure, cell), connection.send)
            connection.send(report)


def classify(error: BaseException) -> Report:
    """Status and one-line message of what ended a measurement."""
    if isinstance(error, PredictedOutOfMemory):
        return {"status": "predicted-oom", "message": str(error)}
    if isinstance(error, Unsupported):
        return {"status": "unsupported", "message": str(error)}
    if found := _CUDA_OUT_OF_MEMORY.search(str(error)):
        asked, whole, allocated, cached = found.groups()
        message = f"asked for {asked} of {whole}, {allocated} in tensors and {cached} in free pieces too small"
        return {"status": "oom", "message": message}
    message = textwrap.shorten(f"{type(error).__name__}: {error}".splitlines()[0], _MESSAGE_WIDTH, placeholder=" ...")
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)) or any(sign in str(error) for sign in _OUT_OF_MEMORY):
        return {"status": "oom", "message": message}
    return {"status": "error", "message": message, "traceback": traceback.format_exc()}
