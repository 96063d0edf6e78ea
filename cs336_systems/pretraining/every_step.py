"""Replicas that average their gradients in every step, and drop a step during which one of them dies."""

import time
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from cs336_systems.distributed.checkpoint_state import OPTIMIZER
from cs336_systems.pretraining.healing import Fetching, Piece, pieces_of
from cs336_systems.pretraining.replica_agreement import ReplicaAgreement, own_gradients, said_of
from cs336_systems.pretraining.run_records import Dropped, Healing
from cs336_systems.training.step import TrainStep

_BUCKET_BYTES = 25 * 1024**2
"""Bucket size: a bucket takes no more gradients once it has this many bytes."""
_SMALL_BYTES = 2**16
"""Tensors of fewer bytes, such as counters and norms' weights, are sent with a state's description, not in pieces."""
_MOST_IN_VAIN = 20
"""A healing replica gives up after this many steps in a row without a new piece."""


class EveryStep(ReplicaAgreement):
    """Averages gradients in each step; the replicas' states are bit-identical.

    A replica that returns makes each step with the others, but trains on no sequences until it has their state.
    """

    in_pieces = True
    _come_to = False
    _n_not_finite = 0
    _left: list[int] | None = None
    """Numbers of the pieces of the peer's state still to be received; None for a replica with the whole state."""
    _n_in_vain = 0
    _since = _took_s = 0.0
    _fetching: Fetching | None = None

    def _come(self) -> None:
        while True:
            self.manager.start_quorum()
            if self._all_there or self.is_behind():  # it lacks the state of replicas that train
                self._come_to = True  # this quorum is the first step's
                return
            time.sleep(0.05)

    def begin(self, made: int) -> int:
        self._made, self._began = made, time.perf_counter()
        if not self._come_to:
            self.manager.start_quorum()
        self._come_to = False
        return self._made

    def is_behind(self) -> bool:
        return self._left is not None

    def before_quorum(self) -> None:
        super().before_quorum()
        if self._took_s:
            self._healed, self._transport.seconds, self._took_s = True, self._took_s, 0.0

    def after_quorum(self, seconds: float) -> None:
        super().after_quorum(seconds)
        if self.is_behind() and self.number >= 0:
            raise RuntimeError(f"replica {self._name} has lost all others before it had their state")

    def _state(self) -> dict[str, Any]:
        """Start to serve the state in pieces, and return its description with the small tensors."""
        self._wait_for_update()
        tensors, settings = self._tensors()
        large = {name: tensor for name, tensor in tensors.items() if tensor.nbytes >= _SMALL_BYTES}
        large = dict(sorted(large.items(), key=lambda item: not item[0].startswith(OPTIMIZER)))
        pieces, when = pieces_of(large), self.manager.current_step()
        self._transport.offer(str(when), large, pieces)
        about = self._description(settings) | {"pieces": list(map(tuple, pieces)), "when": when}
        about |= {"whole": not self.is_behind()}
        small = {name: each for name, each in tensors.items() if name not in large}
        if self._rank.device.type == "cpu":  # on a GPU torchft copies them, on a stream that waits for no other
            small = {name: each.clone() for name, each in small.items()}
        return about | {"tensors": small}

    def _load(self, state: dict[str, Any]) -> None:
        if self._fetching is not None:  # left by a failed quorum
            self._fetching.pause()
        self._check_alike(state)
        session_begins = state["when"] == 0  # torchft counts from 0 in each session: no step was made in this one
        if session_begins and not state["whole"]:
            raise RuntimeError("all replicas that had the whole state have died")
        if session_begins and not self.is_behind() and state["made"] == self._made:
            return  # the state is the same: with equal step counts the check above compares checksums of weights
        pieces = [Piece(*each) for each in state["pieces"]]
        if self._left is None or state["made"] != self._made:
            own, moments = self._tensors()[0], {each.name for each in pieces if each.name.startswith(OPTIMIZER)}
            self._load_tensors(state["tensors"] | {name: own[name] for name in moments}, state["settings"])
            self._prepared.loader.load_state_dict(state["loader"])
            self._made, self._left, self._since = state["made"], list(range(len(pieces))), time.perf_counter()
        self._fetching = self._transport.fetch(str(state["when"]), pieces, self._left, self._tensors()[0])
        if session_begins:
            self._take_all(self._fetching)

    def _take_all(self, fetching: Fetching) -> None:
        """Wait for all pieces; if some are not received, the next quorum fetches them."""
        self._fetching = None
        fetching.finish()
        if self._take(fetching) and not self._left:
            self._left, self._healed = None, True
            self._transport.seconds = time.perf_counter() - self._since
        else:
            self.manager.report_error(RuntimeError("parts of the others' state have not come"))

    def _take(self, fetching: Fetching) -> set[int]:
        """Count the received pieces as done, before this step's update; return their numbers."""
        assert self._left is not None
        came, pieces = fetching.came, fetching.pieces
        moments = {number for number in self._left if pieces[number].name.startswith(OPTIMIZER)}
        if not moments <= came:  # weights would be updated with incomplete moments
            came = moments & came
        torch.autograd.graph.increment_version(tuple(self._step.model.parameters()))
        self._n_in_vain = 0 if came or not self._left else self._n_in_vain + 1
        self._left = [number for number in self._left if number not in came]
        if self._n_in_vain >= _MOST_IN_VAIN:
            raise RuntimeError(f"nothing of the others' state has come in {_MOST_IN_VAIN} steps")
        return came

    def _has_all(self) -> bool:
        """Return whether every rank of this replica has received all pieces; a collective."""
        n_left = torch.tensor([float(len(self._left or ()))], device=self._rank.device)
        if self._rank.world_size > 1:
            dist.all_reduce(n_left)
        return not n_left.item()

    def rehearse(self, step: TrainStep) -> bool:
        _finite([flat for flat, _ in _packed(own_gradients(step))])
        return super().rehearse(step)

    def before_update(self, step: TrainStep) -> bool:
        assert step.loss is not None
        gradients = self._gradients(step)
        loss = step.loss.detach().float().reshape(1)
        flats = list(_packed(gradients))
        sent = [torch.cat([loss, self.reasons.to(loss)]), *(flat for flat, _ in flats)]
        own_is_finite = _finite(sent) or self.is_behind()
        times = [time.perf_counter()]
        self._average(sent)
        finite = _finite(sent)  # waits for the device; then the group knows whether a member has gone
        times.append(time.perf_counter())
        fetching, self._fetching = self._fetching, None
        if fetching is not None:
            fetching.pause()  # before the vote: after it the peers serve no pieces
        times.append(time.perf_counter())
        if (gone := self._group.errored()) is not None:
            self.manager.report_error(gone)
        elif self.manager.errored() is None and not finite:
            self.manager.report_error(FloatingPointError("a loss or a gradient is not finite"))
        error = self.manager.errored()
        self.kept = self.manager.should_commit()
        if fetching is not None:
            self._note(fetching, self._take(fetching), times)
            if self._has_all() and self.kept:
                self._left, self._took_s = None, time.perf_counter() - self._since
        if self.kept:
            for flat, parts in flats:
                for part, values in zip(parts, flat.split([part.numel() for part in parts]), strict=True):
                    if part.data_ptr() != values.data_ptr():
                        part.copy_(values.view_as(part))
            step.loss, self.reasons, self._n_not_finite = sent[0][0], sent[0][1:], 0
            if self._made + 1 == self._prepared.n_steps or self.reasons.any():
                # A replica leaves after its last step. If another still waited for this step's averages, its step would
                # be dropped. This extra average is reached only by replicas that have made the step.
                self._average(met := [torch.zeros(1, device=loss.device)])
                _finite(met)
        else:
            self._drop(error.original_exception if error else None, own_is_finite)
        return self.kept

    def _note(self, fetching: Fetching, came: set[int], times: list[float]) -> None:
        """Record the bytes received and still missing, and the seconds until gradients, averages and last piece."""
        sizes = [piece.last - piece.first for piece in fetching.pieces]
        seconds = [now - before for before, now in pairwise([fetching.began, *times])]
        n_bytes = sum(sizes[number] for number in came), sum(sizes[number] for number in self._left or ())
        self._records.append(Healing(self._made, *n_bytes, *seconds))

    def _average(self, sent: list[Tensor]) -> None:
        for work in [self.manager.allreduce(flat) for flat in sent]:
            work.wait()

    def _drop(self, error: Exception | None, own_is_finite: bool) -> None:
        """Record why the step is dropped, and rewind the loader by one batch."""
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
    """Return whether all elements are finite; waits for the device."""
    return bool(torch.stack(torch._foreach_norm(tensors, ord=float("inf"))).isfinite().all())


def _packed(tensors: list[Tensor]) -> Iterator[tuple[Tensor, list[Tensor]]]:
    """Yield flat buckets of one dtype, each with its tensors; a large contiguous tensor is a bucket without a copy."""
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
