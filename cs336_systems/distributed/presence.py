"""Which ranks are alive, and whether all are about to run the same units.

Each rank sends a heartbeat every second, and its reason when it leaves, so that ranks that wait for it need not time
out.

    presence = presence_of_this_rank()          # begins the heartbeats
    with presence.waiting(store, {1: "a key"}): # rank 1 should set it; if rank 1 has left, this sets "has left: ..."
        store.get("a key")
    leave("ValueError: ...")

If rank 0 gathers one expert's weights while rank 1 gathers another's, the collective hangs, aborts or mixes the two.
Ranks under FSDP therefore tell each other when a forward or a backward begins and ends, and which units they call if
these differ from the last forward's (``Agreement``). They communicate between hosts through the store: no device waits,
and no collective is added. One comparison takes about 0.2 ms of host time (2 ranks of one machine); a step has three.
"""

import atexit
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any

import torch.distributed as dist

HAS_LEFT = "has left: "

_SILENCE_S = 7.0
"""Seconds without a heartbeat after which a rank counts as gone: many times what Python threads wait for each other."""
_BEAT_S = 1.0


class Presence:
    """This rank in the default group, from now until ``leave``, which the end of the process calls at the latest."""

    def __init__(self) -> None:
        store: Any = dist.distributed_c10d._get_default_store()
        self._store: Any = store.clone()
        self._rank = dist.get_rank()
        self._left = threading.Event()
        self._awaited: tuple[Any, Mapping[int, str]] | None = None
        self._heard: dict[int, tuple[bytes, float]] = {}  # the last heartbeat of a rank, and when it was first seen
        threading.Thread(target=self._live, name="presence", daemon=True).start()
        atexit.register(self.leave, "its process has ended")

    @contextmanager
    def waiting(self, store: Any, keys: Mapping[int, str]) -> Iterator[None]:
        """Watch ranks while the body waits for the keys that they set; ``store`` is a connection for the watcher."""
        self._awaited = store, keys
        try:
            yield
        finally:
            self._awaited = None

    def leave(self, cause: str) -> None:
        """Publish why this rank leaves, unless that has been done."""
        if not self._left.is_set():
            self._left.set()
            atexit.unregister(self.leave)
            with suppress(Exception):
                self._store.set(f"left {self._rank}", cause)

    def _live(self) -> None:
        n = 0
        with suppress(Exception):  # the store has gone, so no rank can read it
            while not self._left.wait(_BEAT_S):
                n += 1
                self._store.set(f"here {self._rank}", str(n))
                if (awaited := self._awaited) is not None:
                    store, keys = awaited
                    for rank, key in keys.items():
                        if not store.check([key]) and (cause := self._why_gone(rank)):
                            store.set(key, f"{HAS_LEFT}{cause}\n")

    def _why_gone(self, rank: int) -> str | None:
        if self._store.check([f"left {rank}"]):
            return self._store.get(f"left {rank}").decode()
        word = self._store.get(f"here {rank}") if self._store.check([f"here {rank}"]) else b""
        now = time.monotonic()
        before, since = self._heard.get(rank, (word, now))
        self._heard[rank] = word, since if word == before else now
        silent_s = now - self._heard[rank][1]
        return f"its process or node was silent for {silent_s:.0f} s" if silent_s > _SILENCE_S else None


_present: dict[dist.ProcessGroup, Presence] = {}
"""This rank's presence by default group; empty before ``presence_of_this_rank`` is called."""


def presence_of_this_rank() -> Presence:
    """This rank's presence in the current default group."""
    group = dist.distributed_c10d._get_default_group()
    if group not in _present:
        leave("it has joined another process group")
        _present[group] = Presence()
    return _present[group]


def leave(cause: str) -> None:
    """Publish why this rank leaves the default group, if it has a presence there."""
    for presence in _present.values():
        presence.leave(cause)
    _present.clear()


class Agreement:
    """Compares what ranks are about to do, as one sentence per rank and turn.

    Args:
        replicas: the ranks with the same place in other shard groups, which are compared, too.
    """

    def __init__(self, process_group: dist.ProcessGroup, replicas: dist.ProcessGroup | None = None) -> None:
        fake = dist.get_backend(process_group) == "fake"
        self._ranks = dist.get_process_group_ranks(process_group)
        self._store: Any = process_group.get_group_store()
        if replicas is not None and not fake:
            groups: list[list[int]] = [[] for _ in range(replicas.size())]
            dist.all_gather_object(groups, self._ranks, group=replicas)
            self._ranks = sorted(rank for ranks in groups for rank in ranks)
            whose = f"ranks {' '.join(map(str, self._ranks))}"
            self._store = dist.PrefixStore(whose, dist.distributed_c10d._get_default_store())
        self._rank, self._world_size = self._ranks.index(dist.get_rank()), len(self._ranks)
        self._alone = self._world_size == 1 or fake
        if not self._alone:
            self._presence = presence_of_this_rank()
            self._second_store: Any = self._store.clone()
            self._name = f"FSDP {self._store.add(f'FSDP of rank {self._rank}', 1)}"  # ranks wrap in the same order
        self._n = 0

    def check(self, what: str, flag: bool = False) -> bool:
        """Compare what this rank and the others are about to do; ``what`` ends a sentence that begins with the rank.

        Returns whether the flag is set on any rank.

        Raises:
            RuntimeError: ranks are about to do different things; raised on every rank, before any has begun.
            DistError: a rank has left.
        """
        if self._alone:
            return flag
        keys = [f"{self._name}/{self._n}/{rank}" for rank in range(self._world_size)]
        self._store.set(keys[self._rank], f"{what}\n{flag}")
        with self._presence.waiting(self._second_store, dict(zip(self._ranks, keys, strict=True))):
            values = [value.decode().rsplit("\n", 1) for value in self._store.multi_get(keys)]
        said, flags = zip(*values, strict=True)
        if self._n:  # a rank in this turn has read the last turn's keys
            self._store.delete_key(f"{self._name}/{self._n - 1}/{self._rank}")
        self._n += 1
        other = next((rank for rank, theirs in enumerate(said) if theirs != said[0]), None)
        if gone := [f"rank {rank} {word}" for rank, word in zip(self._ranks, said, strict=True) if HAS_LEFT in word]:
            raise dist.DistError(gone[0])
        if other is not None:
            raise RuntimeError(
                f"ranks under FSDP must run the same units in the same order, an expert without tokens as well, and "
                f"backward together: rank 0 {said[0]}, where rank {other} {said[other]}"
            )
        return "True" in flags
