"""torchft's manager, which agrees on each step's group, as replicas need it (``replica_agreement.py``)."""

import math
import threading
import time
from collections.abc import Callable
from concurrent.futures import Executor, Future
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import AllgatherOptions
from torch.nn.functional import pad
from torchft.manager import Manager, _ManagedWork
from torchft.work import _DummyWork

from cs336_systems.costs.parallelism.local_steps import SCALED
from cs336_systems.pretraining.agreement import StoppedWaiting

if TYPE_CHECKING:
    from cs336_systems.pretraining.replica_agreement import ReplicaAgreement

_RETRIES = 20
"""Failed attempts in a row to form a group before a step is tried without one."""
_LOOK_S = 0.2
"""Seconds between two looks at whether a replica that waits for a quorum is to end."""
_GRACE_S = 5.0
"""Seconds for which a replica that is asked to end still waits for a quorum. Mostly the others come, and all end after
the same step."""
_VOTE_TIMES = 4
"""For how many times --agree-timeout a rank waits for the votes of its replica's others. One of them may wait in vain
for another replica meanwhile: once in an all-reduce, up to three times for the store of one that has died."""
_LARGEST = torch.finfo(torch.float8_e4m3fn).max


class _DaemonThreads(Executor):
    """Runs each call in a daemon thread, so that a process can end while nobody answers for a quorum."""

    def submit(self, call: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        future: Future[Any] = Future()

        def run() -> None:
            try:
                future.set_result(call(*args, **kwargs))
            except Exception as error:
                future.set_exception(error)

        threading.Thread(target=run, name="quorum", daemon=True).start()
        return future


class ReportingManager(Manager):
    """torchft's manager, which tells its replica of each quorum and keeps each verdict."""

    replica: "ReplicaAgreement"
    _healing: bool
    _pending_state_dict: Any
    _executor: Executor
    verdict: bool | None = None
    """The last result of ``should_commit``, until somebody resets it."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self._executor.shutdown()
        self._executor = _DaemonThreads()

    def start_quorum(self, *args: Any, **kwargs: Any) -> None:
        began = time.perf_counter()
        self.replica.before_quorum()
        for _ in range(_RETRIES):
            if self.replica.is_behind():
                self._step = 0  # tells the quorum that it lacks state
            super().start_quorum(*args, **kwargs)
            if self._use_async_quorum:  # torchft then counts only replicas that have the state as participants
                self.wait_quorum()
                if self._healing:
                    self._apply_pending_state_dict()
                    self._healing = False
            if self.errored() is None:
                break
            self._hang_up()
            self._vote()  # returns False, and the lighthouse forms another group
        self.replica.after_quorum(time.perf_counter() - began)

    def wait_quorum(self) -> None:
        """Wait for the quorum.

        Raises:
            StoppedWaiting: the replica is to end, and no quorum comes.
            torch.distributed.DistError: others did not answer in time.
        """
        assert self._quorum_future is not None
        gives_up_at = math.inf
        while time.monotonic() < gives_up_at:
            try:
                return self._quorum_future.result(_LOOK_S)
            except TimeoutError as error:
                if self._quorum_future.done():  # the quorum itself timed out
                    raise dist.DistError("the other replicas did not answer in time") from error
            if gives_up_at == math.inf and self.replica.is_to_end():
                gives_up_at = time.monotonic() + _GRACE_S
        raise StoppedWaiting(f"asked to end, and no quorum came within {_GRACE_S:g} s")

    def _apply_pending_state_dict(self) -> None:
        """Take over the peer's state, unless this replica has more steps and nobody trains yet: then all meet again,
        and torchft takes this replica's step for the newest."""
        pending = self._pending_state_dict
        if pending is not None and self.replica.prefers_its_own(pending["user"]["default"]):
            self._pending_state_dict = None
            self._step += self.replica.newness  # its peer's step is of averages in which nobody has trained
            self.report_error(RuntimeError("this replica has made more steps than its peer"))
        else:
            super()._apply_pending_state_dict()

    def should_commit(self, timeout: timedelta | None = None) -> bool:
        self._hang_up()
        self.verdict = self._vote(timeout)
        return self.verdict

    def _vote(self, timeout: timedelta | None = None) -> bool:
        """torchft's ``should_commit``, on which the ranks of this replica agree.

        Raises:
            torch.distributed.DistError: one of them did not answer in time.
        """
        within = timeout or _VOTE_TIMES * self._timeout
        try:
            return super().should_commit(within)
        except TimeoutError as error:  # an OSError, for which others would take it
            waited = f"{within.total_seconds():g} s"
            raise dist.DistError(f"another rank of this replica did not answer within {waited}") from error

    def _hang_up(self) -> None:
        """After an error that other replicas may not have met, close the connections, so that all meet one.

        On a ring of four, one replica has no connection with the one that died, and would wait for the other two.
        """
        error = self.errored()
        if error is None or isinstance(error.original_exception, FloatingPointError):
            return
        self._pg.abort(errored=False)

    def allreduce(self, tensor: Tensor, should_quantize: bool = False, *args: Any, **kwargs: Any) -> Any:
        """Average over replicas; in 8 bits on any device, each rank gathers all and takes the mean in the same order,
        so that all have the same bits."""
        if not should_quantize:
            return super().allreduce(tensor, False, *args, **kwargs)
        if self.errored():
            return _DummyWork(tensor)
        if not self.is_participating():
            tensor.zero_()
        own, n_there = in_8_bits(tensor), self.num_participants()
        of_all = [torch.empty_like(own) for _ in range(self._pg.size())]

        def mean(_: Any) -> Tensor:
            return tensor.copy_(torch.stack([from_8_bits(each, tensor) for each in of_all]).sum(0) / n_there)

        try:
            work = _ManagedWork(self, self._pg.allgather([of_all], [own], AllgatherOptions()), tensor)
        except RuntimeError as error:
            self.report_error(error)
            return _DummyWork(tensor)
        work.get_future().then(mean)
        return work


def in_8_bits(tensor: Tensor) -> Tensor:
    """Return (n bytes,) uint8: a float32 scale for each ``SCALED`` elements, then all elements in float8 e4m3."""
    flat = tensor.detach().flatten().float()
    rows = pad(flat, (0, -len(flat) % SCALED)).view(-1, SCALED)
    scales = (rows.abs().amax(1, keepdim=True) / _LARGEST).clamp_min(torch.finfo(torch.float32).tiny)
    values = (rows / scales).to(torch.float8_e4m3fn).flatten()[: len(flat)]
    return torch.cat([scales.flatten().view(torch.uint8), values.view(torch.uint8)])


def from_8_bits(sent: Tensor, like: Tensor) -> Tensor:
    """Return the tensor that ``in_8_bits`` encoded, with the shape and dtype of ``like``."""
    scales, values = sent.tensor_split([len(sent) - like.numel()])
    each = scales.view(torch.float32).repeat_interleave(SCALED)[: like.numel()]
    return (values.view(torch.float8_e4m3fn).float() * each).view(like.shape).to(like.dtype)
