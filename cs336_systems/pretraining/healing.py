"""How a replica heals, that is, takes over a peer's state: all at once, or in pieces while training goes on.

All at once (``diloco``, and the first quorum of a session): torchft's HTTP server serves a copy of the whole state.

In pieces (``every-step``): between the quorum and the update of each step the peer's weights and moments do not change,
and threads of its server serve pieces of them. The healing replica fetches as many as it can while it runs forward and
backward; its gradients count as zero. It then makes the same update as the others, from the averaged gradients, so what
has come stays up to date: first the moments, then the weights, which come after all moments (these must not depend on
weights; those of AdamW and Muon do not). With the last piece the replica has the bits of the others and trains with
them. Nobody waits for the whole state or holds a second copy of it. If only one of the two makes a step, the pieces are
stale and the replica begins again.

Only tensors and plain values are unpickled; pieces are bytes.
"""

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

_PIECE_BYTES = 16 * 2**20
"""The most bytes of one answer: small, as averaging gradients waits for the pieces under way."""
_MOST_BYTES = 4 * 2**30
"""Bytes of host memory for the pieces of one step; no more are asked for beyond it."""
_AT_ONCE = 4
"""Pieces under way at the same time: one connection on loopback takes a core."""
_GONE = 410
"""HTTP status of a piece that is no longer served."""


class Piece(NamedTuple):
    """The bytes from ``first`` up to ``last``, exclusive, of a tensor by name."""

    name: str
    first: int
    last: int


def pieces_of(tensors: Mapping[str, Tensor]) -> list[Piece]:
    """All bytes of the tensors, in pieces of at most 16 MiB; a tensor that is not contiguous is one piece."""
    found = []
    for name, tensor in tensors.items():
        apart = _PIECE_BYTES if tensor.is_contiguous() else max(1, tensor.nbytes)
        found += [Piece(name, at, min(at + apart, tensor.nbytes)) for at in range(0, tensor.nbytes, apart)]
    return found


def _bytes_of(tensor: Tensor, piece: Piece) -> Tensor:
    flat = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    return flat[piece.first : piece.last]


@torch.no_grad()
def put(tensor: Tensor, piece: Piece, received: Tensor) -> None:
    """Copy the bytes of a piece, (n,) uint8 on the host, to their place."""
    if tensor.is_contiguous():
        _bytes_of(tensor, piece).copy_(received)
    else:
        tensor.copy_(received.view(tensor.dtype).view(tensor.shape))


class Transport(HTTPTransport[Any]):
    """Serves this replica's state, and fetches a peer's.

    Attributes:
        seconds: how long the last fetch of a state took.
    """

    seconds = 0.0
    _room: SimpleQueue[Tensor] | None = None
    """Pinned memory for the pieces of GPUs that are answered with, as much as there is in one life."""

    def __init__(self, timeout: timedelta) -> None:
        self._offering = threading.Lock()
        self._offered: tuple[str, Mapping[str, Tensor], Sequence[Piece], Any] | None = None
        super().__init__(timeout, num_chunks=0)
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
        self._threads = ThreadPoolExecutor(_AT_ONCE, "pieces")
        self._base = ""

    def offer(self, when: str, tensors: Mapping[str, Tensor], pieces: Sequence[Piece]) -> None:
        """Serve these pieces until ``disallow_checkpoint``; until then the tensors must not change.

        Args:
            when: the step, which requests name; a request for another is refused.
        """
        cuda = any(tensor.is_cuda for tensor in tensors.values())
        ready = torch.cuda.current_stream().record_event() if cuda else None
        # No memory is pinned later: CUDA may hold that back until kernels end, and those of a collective wait for the
        # replica that waits for its pieces.
        if cuda and self._room is None:
            self._room, self._stream = SimpleQueue(), unshared_stream()  # copies run beside collectives that wait
            for _ in range(_AT_ONCE):
                self._room.put(torch.empty(_PIECE_BYTES, dtype=torch.uint8, pin_memory=True, device="cpu"))
        with self._offering:
            self._offered = when, tensors, pieces, ready

    def disallow_checkpoint(self) -> None:
        with self._offering:  # so that no piece is overwritten while it is copied
            self._offered = None
        super().disallow_checkpoint()

    def _answer(self, request: Any) -> None:
        """Answer a request for /piece/WHEN/NUMBER; a client that reads slowly holds up others, but not the step."""
        _, _, when, number = request.path.split("/")
        with self._place() as place:
            with self._offering:
                if self._offered is None or self._offered[0] != when:
                    request.send_error(_GONE)
                    return
                _, tensors, pieces, ready = self._offered
                piece = pieces[int(number)]
                sent = self._on_host(tensors[piece.name], piece, place, ready)
            request.send_response(200)
            request.send_header("Content-Length", str(len(sent)))
            request.end_headers()
            request.wfile.write(sent.numpy().data)

    @contextmanager
    def _place(self) -> Iterator[Tensor | None]:
        """One of the pinned places, once it is free; None for tensors of a CPU."""
        if self._room is None:
            yield None
            return
        place = self._room.get()
        try:
            yield place
        finally:
            self._room.put(place)

    def _on_host(self, tensor: Tensor, piece: Piece, place: Tensor | None, ready: Any) -> Tensor:
        """The bytes of a piece, in ``place`` if they fit."""
        if not tensor.is_cuda:
            return _bytes_of(tensor, piece).clone()
        n_bytes = piece.last - piece.first
        if place is None or n_bytes > len(place):
            place = torch.empty(n_bytes, dtype=torch.uint8, device="cpu")
        host = place[:n_bytes]
        with torch.cuda.stream(self._stream):
            self._stream.wait_event(ready)
            host.copy_(_bytes_of(tensor, piece), non_blocking=True)
        self._stream.synchronize()
        return host

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

    def fetch(self, when: str, pieces: Sequence[Piece], left: Sequence[int]) -> "Fetching":
        """Begin to fetch the pieces with the numbers in ``left`` from the peer whose description came last."""
        return Fetching(self._threads, f"{self._base}piece/{when}", pieces, left, self._timeout.total_seconds())


class Fetching:
    """Pieces that are on their way, from the quorum of a step to its gradients.

    Attributes:
        came: the bytes of each piece that has come, (n,) uint8 on the host, by the piece's number.
    """

    def __init__(
        self, threads: ThreadPoolExecutor, address: str, pieces: Sequence[Piece], left: Sequence[int], timeout_s: float
    ) -> None:
        self._address, self.pieces, self._timeout_s = address, pieces, timeout_s
        self._left, self._lock, self._paused = list(reversed(left)), threading.Lock(), False
        self.came: dict[int, Tensor] = {}
        self._n_bytes = 0
        self._workers = [threads.submit(self._work) for _ in range(min(_AT_ONCE, len(left)))]

    def pause(self) -> None:
        """Ask for no more pieces, and wait for those under way."""
        self._paused = True
        for worker in self._workers:
            worker.result()

    def _next(self) -> int | None:
        with self._lock:
            if self._paused or not self._left or self._n_bytes > _MOST_BYTES:
                return None
            number = self._left.pop()
            self._n_bytes += self.pieces[number].last - self.pieces[number].first
            return number

    def _work(self) -> None:
        while (number := self._next()) is not None:
            piece = self.pieces[number]
            pinned = torch.cuda.is_initialized()  # so that the copy to the GPU is short
            received = torch.empty(piece.last - piece.first, dtype=torch.uint8, pin_memory=pinned, device="cpu")
            try:
                with urllib.request.urlopen(f"{self._address}/{number}", timeout=self._timeout_s) as response:
                    whole = _read_into(response, received)
            except (OSError, HTTPException):
                return  # the peer's step is over, or the peer is gone: the next quorum tells
            if whole:
                self.came[number] = received


def _read_into(response: Any, received: Tensor) -> bool:
    """Fill the tensor's bytes from the response; False if it ends early."""
    view = received.numpy().data
    while len(view):
        n = response.readinto(view)
        if not n:
            return False
        view = view[n:]
    return True
