"""The trainer's interface for keeping replicas of one model in agreement.

    agreement = Agreement()                                         # of a run of one world: nothing to agree on
    agreement = agreement_of(options, rank, lighthouse, name)       # of a replica (``replica_agreement.py``)

The trainer calls, in this order: ``join`` once its state is prepared; for each step ``begin`` before it takes data,
``step.before_update`` inside, and ``end``; and ``leave``. A replica whose number of steps differs from the others'
fetches their state in ``join``, ``begin`` or ``end``, which then return another number of steps than the trainer's.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from cs336_systems.distributed.process_group import Rank
from cs336_systems.pretraining.options import TrainOptions
from cs336_systems.pretraining.replica_options import require_torchft
from cs336_systems.pretraining.run_records import Evaluation, LoggedCheckpoint, LoggedStep, Membership, Message, Record
from cs336_systems.pretraining.stop_requests import StopRequests

if TYPE_CHECKING:
    from cs336_systems.pretraining.preparation import PreparedRun
    from cs336_systems.pretraining.run_log import Sink

OUTER_MOMENTUM = "outer_momentum"
"""The outer optimizer's momentum among the states of a parameter in a checkpoint."""


class StoppedWaiting(RuntimeError):
    """A world that waits for others has been requested to end, and the others do not come."""


Trouble = Callable[[int], bool]
"""Told the number of a step in whose middle this replica is; returns whether its gradients are to be NaN."""


class Agreement:
    """The agreement of a world that trains alone, and the interface of those with other worlds.

    Attributes:
        on: whether there may be other worlds.
        number: the number of this world among the live ones; -1 before ``join``.
        n_there: the number of live worlds.
        kept: whether the last step counts; if not, its data are used again.
        at_average: whether the last step ended in an average, after which it is possible to save, evaluate or stop.
        reasons: (n,) of this world's ranks that have each reason to stop, and after a step at an average of all.
        hopeless: why this world must stop: its own numbers were not finite twice in a row.
        stop: who asks this world to end, as the trainer sets it before ``join``.
    """

    on = False
    number, n_there = 0, 1
    kept = at_average = True
    reasons: Tensor
    hopeless: str | None = None
    stop: StopRequests | None = None

    @property
    def sent_bytes(self) -> float:
        """Bytes that this rank has sent to other worlds, except for states that they fetched."""
        return 0.0

    @property
    def first(self) -> bool:
        """Whether this world evaluates and saves for all."""
        return self.number == 0

    def folder(self, out: Path) -> Path:
        """The folder of this world's log in that of the run."""
        return out

    def join(self, prepared: "PreparedRun", made: int) -> int:
        """Begin, after ``made`` steps; returns the steps that are made when this returns; raises ``StoppedWaiting``."""
        for state in getattr(prepared.step.optimizer, "state", {}).values():
            state.pop(OUTER_MOMENTUM, None)  # the run was under DiLoCo before
        return made

    def begin(self, made: int) -> int:
        """Before a step: agree on who is there, and which sequences each takes; raises ``StoppedWaiting``."""
        return made

    def end(self, made: int) -> int:
        """After a step that counts."""
        return made + 1

    @contextmanager
    def common_weights(self) -> Iterator[None]:
        """While this is open after a step at an average, the model has the weights that are the same in all worlds."""
        yield

    @contextmanager
    def saving(self) -> Iterator[None]:
        """While this is open, the optimizer holds all that a checkpoint needs, and the model the common weights."""
        yield

    def told(self) -> list[Record]:
        """Records of what has happened since the last call."""
        return []

    def leave(self) -> None:
        """Leave the other worlds, which are notified."""


def agreement_of(
    options: TrainOptions, rank: Rank, lighthouse: str, name: str, trouble: Trouble = lambda step: False
) -> Agreement:
    """How the replica of that name agrees with others at the lighthouse; a collective of its ranks.

    Raises:
        ValueError: torchft is not installed, or the name is too long.
    """
    require_torchft()
    from cs336_systems.pretraining.diloco import OuterSteps
    from cs336_systems.pretraining.every_step import EveryStep

    kind = OuterSteps if options.agree == "diloco" else EveryStep
    return kind(options, rank, lighthouse, name, trouble)


class FirstAlone:
    """A sink that passes on the first world's records and all warnings; records before steps, once it is first."""

    def __init__(self, sink: "Sink", agreement: Agreement) -> None:
        self._sink, self._agreement = sink, agreement
        self._held: list[Record] = []

    def write(self, record: Record) -> None:
        if self._agreement.first:
            for held in self._held:
                self._sink.write(held)
            self._held.clear()
            self._sink.write(record)
        elif isinstance(record, Message) and record.level != "info":
            self._sink.write(record)
        elif not isinstance(record, LoggedStep | Evaluation | LoggedCheckpoint | Membership):
            self._held.append(record)

    def close(self) -> None:
        self._sink.close()


def checksum(tensors: list[Tensor]) -> int:
    """A sum over the bits of tensors, to compare weights; it does not depend on order."""
    total = 0
    for tensor in tensors:
        bits = tensor.detach().contiguous().view(torch.uint8 if tensor.element_size() == 1 else torch.int16)
        total = (total * 31 + int(bits.sum(dtype=torch.int64))) % 2**61
    return total
