"""Replicas that average their gradients in every step, and drop a step in which one of them dies."""

import time
from collections.abc import Iterator

import torch
from torch import Tensor

from cs336_systems.pretraining.replica_agreement import ReplicaAgreement, said_of
from cs336_systems.pretraining.run_records import Dropped
from cs336_systems.training.step import TrainStep

_BUCKET_BYTES = 25 * 1024**2
"""Bytes of gradients that travel together."""


class EveryStep(ReplicaAgreement):
    """Gradients are averaged in each step; all replicas hold the same bits."""

    _come_to = False
    _n_not_finite = 0

    def _come(self) -> None:
        while True:
            self._manager.start_quorum()
            if self._all_there:
                self._come_to = True  # this quorum is the first step's
                return
            time.sleep(0.05)

    def begin(self, made: int) -> int:
        self._made, self._began = made, time.perf_counter()
        if not self._come_to:
            self._manager.start_quorum()
        self._come_to = False
        return self._made

    def before_update(self, step: TrainStep) -> bool:
        assert step.loss is not None
        gradients = self._gradients(step)
        loss = step.loss.detach().float().reshape(1)
        flats = list(_packed(gradients))
        sent = [torch.cat([loss, self.reasons.to(loss)]), *(flat for flat, _ in flats)]
        own_is_finite = _finite(sent)
        self._average(sent)
        if self._manager.errored() is None and not _finite(sent):
            self._manager.report_error(FloatingPointError("a loss or a gradient is not finite"))
        error = self._manager.errored()
        self.kept = self._manager.should_commit()
        if self.kept:
            for flat, parts in flats:
                for part, values in zip(parts, flat.split([part.numel() for part in parts]), strict=True):
                    if part.data_ptr() != values.data_ptr():
                        part.copy_(values.view_as(part))
            step.loss, self.reasons, self._n_not_finite = sent[0][0], sent[0][1:], 0
        else:
            self._drop(error.original_exception if error else None, own_is_finite)
        return self.kept

    def _average(self, sent: list[Tensor]) -> None:
        for work in [self._manager.allreduce(flat) for flat in sent]:
            work.wait()

    def _drop(self, error: Exception | None, own_is_finite: bool) -> None:
        """Note why the step is dropped."""
        reason = said_of(error)
        if isinstance(error, FloatingPointError):
            whose = "" if own_is_finite else f": that of replica {self._name}"
            reason, self._n_not_finite = reason + whose, self._n_not_finite + 1
            if self._n_not_finite > 1 and not own_is_finite:
                self.hopeless = f"step {self._made}: a loss or a gradient of replica {self._name} is not finite again"
        loader = self._prepared.loader
        loader.go_back()
        last = loader.taken + self.n_there * loader.batch_size
        seconds = time.perf_counter() - self._began
        self._records.append(Dropped(self._made, reason, (loader.taken, last), True, seconds))


def _finite(tensors: list[Tensor]) -> bool:
    """Whether all numbers are; waits for the device."""
    return bool(torch.stack(torch._foreach_norm(tensors, ord=float("inf"))).isfinite().all())


def _packed(tensors: list[Tensor]) -> Iterator[tuple[Tensor, list[Tensor]]]:
    """Buckets of one dtype, flat, each with its parts; a large tensor that is contiguous is a bucket itself."""
    waiting: dict[torch.dtype, list[Tensor]] = {}
    for tensor in tensors:
        if tensor.nbytes >= _BUCKET_BYTES and tensor.is_contiguous():
            yield tensor.view(-1), [tensor]
            continue
        parts = waiting.setdefault(tensor.dtype, [])
        parts.append(tensor)
        if sum(part.nbytes for part in parts) >= _BUCKET_BYTES:
            yield torch.cat([part.reshape(-1) for part in parts]), waiting.pop(tensor.dtype)
    for parts in waiting.values():
        yield torch.cat([part.reshape(-1) for part in parts]), parts
