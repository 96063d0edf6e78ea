"""Options of fault-tolerant replicas: how they agree, their names, and the faults to inject.

    --replicas 4 --agree every-step --fail "kill 1 at 40; stall 0 at 60 for 20s; nan 2 at 80"

Without ``--agree``, ``--replicas`` is a dimension of the mesh (hybrid sharding). Imports no torch.
"""

import os
import re
import time
from contextlib import closing
from dataclasses import dataclass
from http.client import HTTPConnection, HTTPException
from typing import Literal
from urllib.parse import urlsplit

from cs336_systems.case import Unsupported
from cs336_systems.declared import option

Agree = Literal["every-step", "diloco"]
FaultKind = Literal["kill", "stall", "nan"]

LIGHTHOUSE = "lighthouse"
_ANSWER_S = 3.0
"""Seconds within which a lighthouse must answer."""
_START_S = 6.0
"""Seconds of retries, as a lighthouse may just be starting; a command with a wrong address ends within ten seconds."""
_PAGE_BYTES = 4096
"""Bytes read of a page to recognise a lighthouse's."""

_FAULT = re.compile(r"(kill|nan) (\d+|lighthouse) at (\d+)|(stall) (\d+) at (\d+) for (\d+(?:\.\d+)?) ?s")


def require_torchft() -> None:
    """Raise Unsupported unless torchft is installed."""
    os.environ.setdefault("RUST_LOG", "error")  # torchft prints several lines a step otherwise
    try:
        import torchft  # noqa: F401
    except ImportError as error:
        raise Unsupported(f"replicas that agree need torchft: uv sync --extra replicas ({error})") from None


def check_lighthouse(lighthouse: str) -> None:
    """Raise ValueError unless a lighthouse serves its HTTP page at the address.

    With a wrong address a replica would wait an hour for a quorum. A command calls this before it imports torch, which
    takes longer than this check.
    """
    until = time.monotonic() + _START_S
    try:
        parts = urlsplit(lighthouse)
        scheme, host, port = parts.scheme, (parts.hostname or "").encode("idna").decode(), parts.port
    except ValueError:  # also from the IDNA encoding, which host lookups use
        scheme, host, port = "", "", None
    if scheme != "http" or not host or port is None:
        raise ValueError(f"--lighthouse must be an address such as http://node0:29510, got {lighthouse!r}")
    page = None
    while page is None:
        try:
            with closing(HTTPConnection(host, port, timeout=_ANSWER_S)) as connection:
                connection.request("GET", "/")
                answer = connection.getresponse()
                page = answer.read(_PAGE_BYTES)
        except (OSError, HTTPException) as error:
            if time.monotonic() > until:
                raise ValueError(f"no lighthouse answers at {lighthouse}: {error}") from None
            time.sleep(0.1)
    if b"Lighthouse" not in page:
        raise ValueError(f"no lighthouse answers at {lighthouse}, but something else: {answer.status} {answer.reason}")


@dataclass(frozen=True)
class ReplicaFields:
    """The options of a run about replicas that agree, besides their number."""

    agree: Agree | None = None
    """How --replicas, each a training world of its own that may die and return, stay one model: every-step averages
    gradients in each step; diloco averages changes of weights every --agree-every steps. None makes replicas a
    dimension of one world, which dies as a whole. Needs the extra replicas."""
    agree_every: int = option(100, "Steps of each replica between two averages of --agree diloco.", sign="positive")
    agree_fragments: int = option(
        1, "Parts of the weights that --agree diloco averages one after the other.", sign="positive"
    )
    agree_delay: int = option(
        0, "Steps for which --agree diloco trains on while an average is under way.", sign="not negative"
    )
    agree_dtype: Literal["same", "fp8"] = "same"
    """Dtype in which --agree diloco sends changes of weights: their own, or fp8 with a scale for each 256."""
    agree_timeout: float = option(
        60.0,
        "Seconds for which replicas wait for one that lives but does not answer. One that is killed is noticed sooner.",
        sign="positive",
    )
    outer_learning_rate: float = option(
        0.7,
        "Learning rate of the outer optimizer of --agree diloco, SGD on changes of weights. A run's last average sets "
        "weights to the mean of the replicas' instead.",
        sign="not negative",
    )
    outer_momentum: float = option(
        0.9, "Nesterov momentum of the outer optimizer; 0 is plain SGD.", sign="not negative"
    )
    ranks_per_replica: int = option(
        1, "Ranks of each replica that this command starts, among which --zero and the mesh divide.", sign="positive"
    )
    lighthouse: str | None = None
    """Address of a lighthouse that runs already, as http://node0:29510 (torchft_lighthouse starts one): this command,
    or its torchrun, is then one replica. By default the command starts a lighthouse and all replicas here."""
    replica: str | None = None
    """Name of this replica at the --lighthouse, unlike those of the others."""
    fail: str | None = None
    """Faults to try replicas with, as in "kill 1 at 40; stall 0 at 60 for 20s; nan 2 at 80; kill lighthouse at 90":
    real signals to replica 1 in step 40, and so on."""


@dataclass(frozen=True)
class Fault:
    """A fault to inject during a replica's step.

    Attributes:
        replica: number of the replica whose step triggers the fault.
        seconds: duration of a stall.
        whom: the lighthouse, if the fault is its; else empty.
    """

    kind: FaultKind
    replica: int
    step: int
    seconds: float = 0.0
    whom: str = ""

    def __str__(self) -> str:
        """Return the fault in the syntax of ``--fail``."""
        return f"{self.kind} {self.whom or self.replica} at {self.step}" + f" for {self.seconds:g}s" * (
            self.kind == "stall"
        )


def faults_of(fail: str | None) -> tuple[Fault, ...]:
    """Parse ``--fail``; return the faults in order of their steps.

    Raises:
        ValueError: a fault does not have this syntax.
    """
    found = []
    for part in (part.strip() for part in (fail or "").split(";")):
        if not part:
            continue
        if (match := _FAULT.fullmatch(part)) is None:
            raise ValueError(f'--fail has "kill 1 at 40", "nan 2 at 80" or "stall 0 at 60 for 20s", got {part!r}')
        kind, replica, step, stall, stalled, at, seconds = match.groups()
        if replica == LIGHTHOUSE:
            if kind == "nan":
                raise ValueError(f"--fail cannot give a lighthouse NaN, got {part!r}")
            found.append(Fault("kill", 0, int(step), whom=LIGHTHOUSE))
        elif stall:
            found.append(Fault("stall", int(stalled), int(at), float(seconds)))
        else:
            found.append(Fault(kind, int(replica), int(step)))  # type: ignore[arg-type]
    return tuple(sorted(found, key=lambda fault: fault.step))
