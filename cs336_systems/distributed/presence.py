"""Which ranks are there: each says so every second and says why it leaves, so that who waits for it need not time out.

    presence = presence_of_this_rank()          # begins to say it
    with presence.waiting(store, {1: "a key"}): # what rank 1 is to set; if it has left, this sets it to "has left: ..."
        store.get("a key")
    leave("ValueError: ...")

Ranks talk through the default group's store, over a connection of their own.
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
"""Seconds without a word after which a rank counts as gone: many times what Python's threads wait for each other."""
_BEAT_S = 1.0


class Presence:
    """This rank in the default group, from now until ``leave``, which the end of the process calls at the latest."""

    def __init__(self) -> None:
        store: Any = dist.distributed_c10d._get_default_store()
        self._store: Any = store.clone()
        self._rank = dist.get_rank()
        self._left = threading.Event()
        self._awaited: tuple[Any, Mapping[int, str]] | None = None
        self._heard: dict[int, tuple[bytes, float]] = {}
        """The last word of a rank, and since when it has been that."""
        threading.Thread(target=self._live, name="presence", daemon=True).start()
        atexit.register(self.leave, "its process has ended")

    @contextmanager
    def waiting(self, store: Any, keys: Mapping[int, str]) -> Iterator[None]:
        """In the body this rank waits for these ranks' keys; ``store`` is a connection for who watches meanwhile."""
        self._awaited = store, keys
        try:
            yield
        finally:
            self._awaited = None

    def leave(self, cause: str) -> None:
        """Say why this rank leaves, unless it has done so."""
        if not self._left.is_set():
            self._left.set()
            atexit.unregister(self.leave)
            with suppress(Exception):
                self._store.set(f"left {self._rank}", cause)

    def _live(self) -> None:
        n = 0
        with suppress(Exception):  # the store has gone, and with it whoever listens
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
"""This rank's presence in the default group, once someone has asked for it."""


def presence_of_this_rank() -> Presence:
    """The presence in today's default group."""
    group = dist.distributed_c10d._get_default_group()
    if group not in _present:
        leave("it has joined another process group")
        _present[group] = Presence()
    return _present[group]


def leave(cause: str) -> None:
    """Say why this rank leaves the default group, if it has said that it is there."""
    for presence in _present.values():
        presence.leave(cause)
    _present.clear()
