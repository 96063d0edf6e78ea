"""A subclass of torchft's manager, which agrees with other replicas on each step's group (``replica_agreement.py``)."""

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
"""The most failed attempts in a row to form a group; then the step is tried without one."""
_LOOK_S = 0.2
"""Seconds between two checks whether a replica that waits for a quorum should stop."""
_GRACE_S = 5.0
"""Seconds for which a replica that was asked to stop still waits for a quorum. Usually the others join in time, and all
stop after the same step."""
_VOTE_TIMES = 4
"""A rank waits for the votes of its replica's other ranks for this multiple of --agree-timeout. One of them may
meanwhile be waiting for a dead replica: for one time-out in an all-reduce, and for up to three on its store."""
_LARGEST = torch.finfo(torch.float8_e4m3fn).max


class _DaemonThreads(Executor):
    """Runs each call in a daemon thread, so that the process can exit while a quorum request is unanswered."""

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
    """torchft's manager with callbacks to the replica before and after each quorum; it stores the last verdict."""

    replica: "ReplicaAgreement"
    _healing: bool
    _pending_state_dict: Any
    _executor: Executor
    verdict: bool | None = None
    """The last result of ``should_commit``; the caller resets it to None."""

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
            StoppedWaiting: the replica was asked to stop, and no quorum formed in time.
            torch.distributed.DistError: the other replicas did not answer in time.
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
        """Load the peer's state. If this replica has made more steps and no replica trains yet, keep its own state and
        raise its step count instead, so that the next quorum treats it as the newest."""
        pending = self._pending_state_dict
        if pending is not None and self.replica.prefers_its_own(pending["user"]["default"]):
            self._pending_state_dict = None
            self._step += self.replica.newness  # the peer's count is of averages before training
            self.report_error(RuntimeError("this replica has made more steps than its peer"))
        else:
            super()._apply_pending_state_dict()

    def should_commit(self, timeout: timedelta | None = None) -> bool:
        self._hang_up()
        self.verdict = self._vote(timeout)
        return self.verdict

    def _vote(self, timeout: timedelta | None = None) -> bool:
        """Call torchft's ``should_commit``, whose result is the same on all ranks of this replica.

        Raises:
            torch.distributed.DistError: another rank of this replica did not answer in time.
        """
        within = timeout or _VOTE_TIMES * self._timeout
        try:
            return super().should_commit(within)
        except TimeoutError as error:  # a subclass of OSError, which callers handle as bad input
            waited = f"{within.total_seconds():g} s"
            raise dist.DistError(f"another rank of this replica did not answer within {waited}") from error

    def _hang_up(self) -> None:
        """Close the connections after an error, so that replicas that have not seen it get one, too.

        In a ring of four, one replica has no connection to the one that died, and would wait for the other two.
        """
        error = self.errored()
        if error is None or isinstance(error.original_exception, FloatingPointError):
            return
        self._pg.abort(errored=False)

    def allreduce(self, tensor: Tensor, should_quantize: bool = False, *args: Any, **kwargs: Any) -> Any:
        """Average a tensor over replicas, in place. With ``should_quantize``, on any device, each rank gathers all
        quantized tensors and sums them in the same order, so that the results are bit-identical."""
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
