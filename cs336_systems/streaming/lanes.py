"""Runners of the operations of a schedule: a GPU's streams, or a CPU with a simulated host link.

Both process the list in its order and never look ahead. On a GPU each lane is a stream; a thread enqueues everything
without waiting, and operations wait for each other by events. The simulated link uses the worst order that a schedule
allows: a copy begins as soon as its lane and dependencies permit, when it invalidates its target, and ends, when it
reads its source, only if nothing else can run. So a missing dependency changes bits. It waits only for messages to be
received, and only if it can do nothing else.

    lanes = Streams(device) if device.type == "cuda" else PretendedLink()
    lanes.run(schedule, compute, copy)
"""

import random
from collections import deque
from collections.abc import Callable, Collection
from contextlib import AbstractContextManager

import torch
from torch import Tensor

from cs336_systems.costs.lanes import Lane, LaneTimes
from cs336_systems.distributed.messages import GroupMessages, Underway
from cs336_systems.distributed.process_group import peer_errors_as
from cs336_systems.streaming.schedule import Operation, Schedule

Compute = Callable[[Operation], None]
Copy = Callable[[Operation], tuple[Tensor, Tensor]]
"""Returns (source, target) of a copy, uint8 of equal size; for a message both are the memory it reads or writes."""

_BESIDE = (Lane.IN, Lane.OUT, Lane.SEND, Lane.RECEIVE)
"""The lanes of copies and messages, which overlap with kernels."""

RUBBISH = 0xFF
"""The value of every byte that a simulated copy is about to write: NaN in any float dtype."""


class Streams:
    """Streams of a GPU: the current one computes, two more copy, and two carry the messages of a ring.

    Args:
        timed: whether every operation is timed by events, which takes microseconds of its milliseconds.
    """

    def __init__(self, device: torch.device, *, timed: bool = False) -> None:
        self.device, self.timed = device, timed
        self.copies = {lane: torch.cuda.Stream(device) for lane in _BESIDE}
        self.begins: dict[int, torch.cuda.Event] = {}
        self.ends: dict[int, torch.cuda.Event] = {}
        self.first = torch.cuda.Event(enable_timing=True)

    def run(self, schedule: Schedule, compute: Compute, copy: Copy, messages: GroupMessages | None = None) -> None:
        main = torch.cuda.current_stream(self.device)
        streams = {Lane.COMPUTE: main, **self.copies}
        waited = {j for operation in schedule.operations for j in operation.waits}
        self.first.record(main)
        for stream in self.copies.values():
            stream.wait_stream(main)
        for i, operation in enumerate(schedule.operations):
            stream = streams[operation.lane]
            for j in operation.waits:
                stream.wait_event(self.ends[j])
            if self.timed:
                self._record(self.begins, i, stream)
            if operation.lane is Lane.COMPUTE:
                compute(operation)
            else:
                source, target = copy(operation)
                with torch.cuda.stream(stream):
                    if operation.place is not None:
                        target.copy_(source, non_blocking=True)
                    else:
                        begin_message(operation, target, messages).wait()  # the stream waits, not this thread
            if self.timed or i in waited:
                self._record(self.ends, i, stream)
        for stream in self.copies.values():
            main.wait_stream(stream)

    def _record(self, events: dict[int, torch.cuda.Event], i: int, stream: torch.cuda.Stream) -> None:
        if i not in events:
            events[i] = torch.cuda.Event(enable_timing=self.timed)
        events[i].record(stream)

    def times(self, schedule: Schedule) -> LaneTimes:
        """When the operations of the last step ran, if they were timed; waits for the device."""
        assert self.timed
        torch.cuda.synchronize(self.device)
        starts, ends = (
            [self.first.elapsed_time(events[i]) / 1e3 for i in range(len(schedule.operations))]
            for events in (self.begins, self.ends)
        )
        return LaneTimes([operation.lane for operation in schedule.operations], starts, ends, {})


class PretendedLink:
    """One thread that runs three lanes in an order that the schedule allows.

    Args:
        seed: of the random choice when and on which lane a copy ends although a kernel could run. With None, copies end
            only if no kernel can run, the one that began last first.
    """

    def __init__(self, seed: int | None = None) -> None:
        self.choose = None if seed is None else random.Random(seed)
        self.often, self.inward = (0.0, 0.0) if self.choose is None else (self.choose.random(), self.choose.random())

    def run(self, schedule: Schedule, compute: Compute, copy: Copy, messages: GroupMessages | None = None) -> None:
        """Raises RuntimeError if operations deadlock, DistError if another rank is gone."""
        operations = schedule.operations
        sent: list[tuple[Operation, Underway]] = []
        coming: dict[int, Underway] = {}
        queues = {lane: deque(schedule.of(lane)) for lane in Lane}
        ended: set[int] = set()
        begun: dict[Lane, tuple[int, Tensor, Tensor]] = {}

        def ready(lane: Lane) -> bool:
            if not queues[lane] or lane in begun:
                return False
            i = queues[lane][0]
            # In collectives this thread waits for all ranks, so messages that they need first must have been sent.
            unsent = operations[i].meets and (Lane.SEND in begun or any(j < i for j in queues[Lane.SEND]))
            return not unsent and ended.issuperset(operations[i].waits)

        while any(queues.values()) or begun:
            for lane in _BESIDE:
                if ready(lane):
                    i = queues[lane].popleft()
                    source, target = copy(operations[i])
                    if lane is Lane.RECEIVE:
                        source = torch.empty_like(target)
                        coming[i] = begin_message(operations[i], source, messages)
                    if lane is not Lane.SEND:
                        target.fill_(RUBBISH)
                    begun[lane] = i, source, target
            here = [lane for lane in begun if lane is not Lane.RECEIVE]
            if ready(Lane.COMPUTE) and not (here and self._sooner()):
                i = queues[Lane.COMPUTE].popleft()
                compute(operations[i])
                ended.add(i)
            elif begun:
                i, source, target = begun.pop(self._ending(here or list(begun)))
                if operations[i].lane is Lane.SEND:
                    sent.append((operations[i], begin_message(operations[i], source.clone(), messages)))
                else:
                    if i in coming:
                        _finish(operations[i], coming.pop(i))
                    target.copy_(source)
                ended.add(i)
            else:
                stuck = [queue[0] for queue in queues.values() if queue]
                raise RuntimeError(f"operations {stuck} wait for what cannot come before them")
        for operation, work in sent:
            _finish(operation, work)

    def _ending(self, begun: Collection[Lane]) -> Lane:
        """The lane of the copy that ends next."""
        if self.choose is None or len(begun) == 1:
            return list(begun)[-1]
        inward = self.choose.random() < self.inward
        return max(begun, key=lambda lane: (lane is Lane.IN) == inward)

    def _sooner(self) -> bool:
        """Whether a copy ends although a kernel could run."""
        return self.choose is not None and self.choose.random() < self.often


def begin_message(operation: Operation, memory: Tensor, messages: GroupMessages | None) -> Underway:
    """Send or receive the memory, on the current stream; DistError if the other rank is gone."""
    assert messages is not None, operation
    with _named(operation):
        return (messages.send if operation.lane is Lane.SEND else messages.receive)(memory, operation.peer)


def _finish(operation: Operation, message: Underway) -> None:
    with _named(operation):
        message.wait()


def _named(operation: Operation) -> AbstractContextManager[None]:
    """Turns an error of a message into a DistError that names chunk, round, layer and the other rank."""
    what = f"chunk {operation.chunk} of round {operation.round} at layer {operation.layer}"
    return peer_errors_as(f"{operation.kind} {what} in vain, as rank {operation.peer} has gone or is stuck")


Lanes = Streams | PretendedLink
"""Runs one step's operations after the previous step's; work that the current stream is given after ``run`` returns
waits for them."""
