"""Launches prepared once for tensors of one form, so that a call costs the host little beyond the driver's part.

    run = Prepared(kernel, n_programs, *arguments, **constants_and_options)
    run(stream, *addresses)

``launching.launch`` looks at every argument of every call. Here the caller knows that only addresses have changed: it
keeps one ``Prepared`` for each shape, layout and dtype, and sees to it that tensors are as aligned as the first ones.

For a descriptor the driver makes a *tensor map*: 128 bytes that say address, shape, strides, dtype, box and swizzle,
and nothing of who owns that memory. A map stays right for whatever tensor of the same form lies at the address later,
so maps are kept by address, as allocators give the same addresses out again and again.
"""

from types import SimpleNamespace
from typing import Any

from torch import Tensor
from triton.backends.nvidia.driver import make_tensordesc_arg
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from cs336_systems.operators.launching import Form

MAX_KEPT_MAPS = 1024
"""Of one parameter: who meets more addresses starts over."""


class TensorMaps(dict[int, list[Any]]):
    """By address, what Triton's launcher takes in place of a descriptor: the tensor map, the shape and the strides."""

    def __init__(self, descriptor: TensorDescriptor, metadata: Any) -> None:
        """Of tensors like that of ``descriptor``; ``metadata`` is what the compiled kernel says of the parameter."""
        super().__init__()
        self._like, self._metadata = descriptor, metadata

    def __missing__(self, address: int) -> list[Any]:
        like = self._like
        there = SimpleNamespace(data_ptr=lambda: address)
        moved = SimpleNamespace(base=there, shape=like.shape, strides=like.strides, padding=like.padding)
        if len(self) >= MAX_KEPT_MAPS:
            self.clear()
        self[address] = made = make_tensordesc_arg(moved, self._metadata)
        return made


class Prepared:
    """A kernel with all its arguments but the addresses of tensors."""

    def __init__(self, kernel: Any, n_programs: int, *arguments: Any, **constants_and_options: Any) -> None:
        """
        Args:
            kernel: of ``triton.jit`` or ``gluon.jit``, not interpreted.
            arguments: for the first parameters in order: descriptors, then tensors, then ints and floats. Tensors and
                those of descriptors are examples: only their dtype and whether 16 divides their address count.
            constants_and_options: by name, the other parameters, all ``constexpr``, and what the compiler takes.
        """
        form = Form(kernel, *arguments, **constants_and_options)
        described = [argument for argument in arguments if isinstance(argument, TensorDescriptor)]
        n_tensors = len(described) + sum(isinstance(argument, Tensor) for argument in arguments)
        metadata = form.compiled.metadata.tensordesc_meta if described else ()
        self._maps = [TensorMaps(*pair) for pair in zip(described, metadata, strict=True)]
        self._form, self._grid, self._values = form, (n_programs, 1, 1), arguments[n_tensors:]

    def __call__(self, stream: int, *addresses: int) -> None:
        """Run on the current device, which must be the one that this was made on; addresses in the arguments' order."""
        flat: list[Any] = []
        for maps, address in zip(self._maps, addresses, strict=False):
            flat += maps[address]
        self._form(self._grid, stream, *flat, *addresses[len(self._maps) :], *self._values)
