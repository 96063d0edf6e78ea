"""How a replica heals, that is, loads a peer's state: all at once, or in pieces while training continues.

All at once (``diloco``): torchft's HTTP server serves a copy of the whole state.

In pieces (``every-step``): between the quorum and the update of each step the peer's weights and moments do not change,
and threads of its server serve pieces of them. The healing replica fetches as many as it can during forward, backward
and the averaging of gradients, and writes each in place at once; its own gradients count as zero. It then makes the
same update as the others, so that received pieces stay current. All moments are fetched before any weights, because
incomplete moments would make a wrong update of received weights; moments must not depend on weights, as is true of
AdamW and Muon. With the last piece the replica is bit-identical to the others and begins to contribute gradients. No
replica waits for the whole state or holds a second copy of it. If only one of the two makes a step, the pieces are
stale and the replica begins again. Before a session's first step no replica trains, and a replica whose step count
differs from its peer's waits for all pieces.

Only tensors and plain values are unpickled; pieces are bytes.
"""

import os
import threading
import time
import urllib.request
import warnings
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from datetime import timedelta
from http.client import HTTPException
from queue import SimpleQueue
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed._serialization import _streaming_load
from torch.utils._pytree import tree_map_only
from torchft.checkpointing import HTTPTransport

from cs336_systems.distributed.copy_stream import unshared_stream
from cs336_systems.processes import n_cores

_PIECE_BYTES = 16 * 2**20
"""The most bytes of one response: small, because the update waits for pieces in flight."""
_AT_ONCE = 4
"""The most pieces in flight."""
_GONE = 410
"""HTTP status of a piece that is no longer served."""


class Piece(NamedTuple):
    """Bytes ``first`` to ``last`` (exclusive) of the tensor called ``name``."""

    name: str
    first: int
    last: int


def pieces_of(tensors: Mapping[str, Tensor]) -> list[Piece]:
    """Split the bytes of all tensors into pieces of at most 16 MiB; a non-contiguous tensor is one piece."""
    found = []
    for name, tensor in tensors.items():
        apart = _PIECE_BYTES if tensor.is_contiguous() else max(1, tensor.nbytes)
        found += [Piece(name, at, min(at + apart, tensor.nbytes)) for at in range(0, tensor.nbytes, apart)]
    return found


def _bytes_of(tensor: Tensor, piece: Piece) -> Tensor:
    flat = tensor.data.contiguous().reshape(-1).view(torch.uint8)
    return flat[piece.first : piece.last]


def put(tensor: Tensor, piece: Piece, received: Tensor) -> None:
    """Copy the bytes of a piece, (n,) uint8 on the host, into the tensor, unseen by autograd."""
    if tensor.is_contiguous():
        _bytes_of(tensor, piece).copy_(received, non_blocking=True)
    else:
        tensor.data.copy_(received.view(tensor.dtype).view(tensor.shape), non_blocking=True)


def _n_at_once() -> int:
    """Return how many pieces may be in flight. Each takes a core on loopback, and one of this rank's cores must train.

    With two replicas of 1.4 GB on two cores, the others' longest step was 5.9 s with four in flight and 3.8 s with one.
    """
    cores = n_cores() // int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    return max(1, min(_AT_ONCE, cores - 1))


class _Buffer:
    """A host buffer for one piece, pinned if there is a stream for its copies.

    It is allocated before training: CUDA may delay pinning until running kernels end, and a collective's kernels may be
    waiting for the very replica that waits for its pieces. Pinning a buffer for a whole state takes seconds.
    """

    def __init__(self, stream: torch.cuda.Stream | None) -> None:
        self._stream = stream
        self._bytes = torch.empty(_PIECE_BYTES, dtype=torch.uint8, pin_memory=stream is not None, device="cpu")

    def first(self, n_bytes: int) -> Tensor:
        """Return (n_bytes,) uint8 on the host: part of this buffer, or new pageable memory if that is too small."""
        if n_bytes <= len(self._bytes):
            return self._bytes[:n_bytes]
        return torch.empty(n_bytes, dtype=torch.uint8, device="cpu")

    @contextmanager
    def copying(self, ready: Any) -> Iterator[None]:
        """Run the body's GPU copies on the copy stream, after the event ``ready``; they are complete at exit."""
        if self._stream is None:
            yield
            return
        torch.cuda.set_device(self._stream.device)  # a thread begins on device 0, and would create a context there
        with torch.cuda.stream(self._stream):
            self._stream.wait_event(ready)
            yield
        self._stream.synchronize()


class Transport(HTTPTransport[Any]):
    """Serves this replica's state, and fetches a peer's.

    Attributes:
        seconds: how long the last fetch of a state took.
    """

    seconds = 0.0

    def __init__(self, timeout: timedelta, device: torch.device) -> None:
        self._offering = threading.Lock()
        self._offered: tuple[str, Mapping[str, Tensor], Sequence[Piece], Any] | None = None
        super().__init__(timeout, num_chunks=0)
        self._stream = unshared_stream() if device.type == "cuda" else None  # not behind waiting collectives
        self._room, n_at_once = SimpleQueue[_Buffer](), _n_at_once()
        for _ in range(n_at_once):
            self._room.put(_Buffer(self._stream))
        self._buffers = [_Buffer(self._stream) for _ in range(n_at_once)]  # the server's may be held by slow clients
        transport, answer = self, self._server.RequestHandlerClass

        class Handler(answer):  # type: ignore[misc, valid-type]
            def log_message(self, *_: Any) -> None:
                pass

            def do_GET(self) -> None:
                if self.path.startswith("/piece/"):
                    transport._answer(self)
                else:
                    super().do_GET()

        self._server.RequestHandlerClass = Handler
        self._threads = ThreadPoolExecutor(n_at_once, "pieces")
        self._base = ""

    def offer(self, when: str, tensors: Mapping[str, Tensor], pieces: Sequence[Piece]) -> None:
        """Serve these pieces until ``disallow_checkpoint``; until then the tensors must not change.

        Args:
            when: the step; requests that name another step are refused.
        """
        ready = self._event()
        with self._offering:
            self._offered = when, tensors, pieces, ready

    def disallow_checkpoint(self) -> None:
        with self._offering:  # so that no piece is overwritten while it is copied
            self._offered = None
        super().disallow_checkpoint()

    def _answer(self, request: Any) -> None:
        """Answer a request for /piece/WHEN/NUMBER; a slow client delays other clients, but not the step."""
        _, _, when, number = request.path.split("/")
        buffer = self._room.get()
        try:
            with self._offering:
                if self._offered is None or self._offered[0] != when:
                    request.send_error(_GONE)
                    return
                _, tensors, pieces, ready = self._offered
                piece = pieces[int(number)]
                sent = buffer.first(piece.last - piece.first)
                with buffer.copying(ready):
                    sent.copy_(_bytes_of(tensors[piece.name], piece), non_blocking=True)
            request.send_response(200)
            request.send_header("Content-Length", str(len(sent)))
            request.end_headers()
            request.wfile.write(sent.numpy().data)
        finally:
            self._room.put(buffer)

    def _event(self) -> Any:
        """Record an event after all work queued on the device so far; None on a CPU, which queues none."""
        return None if self._stream is None else torch.cuda.current_stream().record_event()

    @classmethod
    def _load_from_address(cls, address: str, timeout: timedelta) -> object:
        with warnings.catch_warnings(), urllib.request.urlopen(address, timeout=timeout.total_seconds()) as response:
            warnings.filterwarnings("ignore", "The given buffer is not writable")  # so tensors are cloned
            return tree_map_only(Tensor, torch.clone, _streaming_load(response, weights_only=True))

    def recv_checkpoint(self, src_rank: int, metadata: str, step: int, timeout: timedelta) -> Any:
        began = time.perf_counter()
        self._base = metadata.removesuffix("checkpoint/")
        try:
            return super().recv_checkpoint(src_rank, metadata, step, timeout)
        finally:
            self.seconds = time.perf_counter() - began

    def shutdown(self, wait: bool = True) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)
        super().shutdown(wait)

    def close(self) -> None:
        """Shut down and close the server's socket; takes up to half a second."""
        self.shutdown()
        self._server.socket.close()

    def fetch(
        self, when: str, pieces: Sequence[Piece], left: Sequence[int], tensors: Mapping[str, Tensor]
    ) -> "Fetching":
        """Start to fetch the pieces numbered in ``left`` from the peer whose description was received last.

        Args:
            tensors: destinations by name; they change while pieces arrive, so results computed from them are invalid.
        """
        address, timeout_s = f"{self._base}piece/{when}", self._timeout.total_seconds()
        fetching = Fetching(address, pieces, left, tensors, self._event(), timeout_s)
        fetching.begin(self._threads, self._buffers)
        return fetching


class Fetching:
    """The fetching of pieces during one step, from its quorum until its gradients are averaged.

    Attributes:
        came: numbers of the pieces that were received and copied into their tensors.
        began: when fetching began (``time.perf_counter``).
    """

    def __init__(
        self,
        address: str,
        pieces: Sequence[Piece],
        left: Sequence[int],
        tensors: Mapping[str, Tensor],
        ready: Any,
        timeout_s: float,
    ) -> None:
        self._address, self.pieces, self._tensors = address, pieces, tensors
        self._ready, self._timeout_s = ready, timeout_s
        self._left, self._lock, self._paused = list(reversed(left)), threading.Lock(), False
        self.came: set[int] = set()
        self.began = time.perf_counter()

    def begin(self, threads: ThreadPoolExecutor, buffers: Sequence[_Buffer]) -> None:
        """Start one worker thread per buffer."""
        self._workers = [threads.submit(self._work, buffer) for buffer in buffers]

    def pause(self) -> None:
        """Request no more pieces, and wait for those in flight."""
        self._paused = True
        self.finish()

    def finish(self) -> None:
        """Wait until all workers have ended: all pieces have been received, or a request failed."""
        for worker in self._workers:
            worker.result()

    def _next(self) -> int | None:
        with self._lock:
            return None if self._paused or not self._left else self._left.pop()

    def _work(self, buffer: _Buffer) -> None:
        while (number := self._next()) is not None:
            piece = self.pieces[number]
            received = buffer.first(piece.last - piece.first)
            try:
                with urllib.request.urlopen(f"{self._address}/{number}", timeout=self._timeout_s) as response:
                    whole = _read_into(response, received)
            except (OSError, HTTPException):
                return  # the peer's step is over, or the peer is gone: the next quorum shows which
            if whole:
                with buffer.copying(self._ready):
                    put(self._tensors[piece.name], piece, received)
                self.came.add(number)


def _read_into(response: Any, received: Tensor) -> bool:
    """Fill the tensor, uint8, from the response; return False if that ends early."""
    view = received.numpy().data
    while len(view):
        n = response.readinto(view)
        if not n:
            return False
        view = view[n:]
    return True
