"""Block inputs in host memory between forward and backward: at most two blocks' inputs are on the device.

    inputs = HostInputs(n_blocks)
    away = inputs.send(x)                # in forward: the copy overlaps with the block
    x = away.fetch()                     # in backward: unchanged; also starts to fetch the previous block's input

With ``keep="input"``, activation memory is then independent of depth, apart from the statistics of norms. It costs no
time if a block's forward takes at least as long as the copy of its input: 2 P operations a token against 2 d_model
bytes, at 700 TFLOP/s and 55 GB/s a block of P > 12,700 d_model parameters (Qwen2.5-1.5B has 30,000 d_model, 7B 65,000).
One slab of host memory for all blocks is pinned at the first input and reused; concurrent passes, or inputs of another
size, take another slab.
"""

import weakref
from collections import defaultdict

import torch
from torch import Tensor

from cs336_systems.kernels.host_memory import Coming, HostLink, aligned, host_slab


class Away:
    """One input; when it is garbage-collected, its host memory is reused."""

    def __init__(self, link: HostLink, host: Tensor, before: "Away | None") -> None:
        self._link, self._host = link, host
        self._before = None if before is None else weakref.ref(before)
        self._coming: Coming | None = None

    def fetch(self) -> Tensor:
        """The input on its device; may be called repeatedly."""
        self.start()
        assert self._coming is not None
        (x,) = self._coming.wait()
        self._coming = None
        if self._before is not None and (before := self._before()) is not None:
            before.start()
        return x

    def start(self) -> None:
        """Start copying the input back."""
        if self._coming is None:
            self._coming = self._link.fetch([self._host])


class HostInputs:
    """Host memory for the inputs of a model's blocks, and the copies to and from it.

    Args:
        n_blocks: the number of blocks whose inputs are offloaded at the same time.
    """

    def __init__(self, n_blocks: int) -> None:
        self.n_blocks = n_blocks
        self._free: defaultdict[tuple[torch.Size, torch.dtype], list[Tensor]] = defaultdict(list)
        self._links: dict[torch.device, HostLink] = {}
        self._last: weakref.ref[Away] | None = None

    def send(self, x: Tensor) -> Away:
        """Start copying; afterwards x may be read but not changed.

        Raises:
            RuntimeError: there is too little host memory.
        """
        if x.device not in self._links:
            self._links[x.device] = HostLink(x.device)
        link = self._links[x.device]
        free = self._free[x.shape, x.dtype]
        if not free:
            slab = host_slab(self.n_blocks * aligned(x.nbytes), x.device)
            free += [slab.take(x.shape, x.dtype) for _ in range(self.n_blocks)]
        host = free.pop()
        link.send([x], [host])
        away = Away(link, host, None if self._last is None else self._last())
        weakref.finalize(away, free.append, host).atexit = False
        self._last = weakref.ref(away)
        return away

    def __reduce__(self) -> tuple[type["HostInputs"], tuple[int]]:
        """Copy and pickle without the memory."""
        return HostInputs, (self.n_blocks,)
