"""Kernels launched, and registered as torch operators, at little cost to the host, which limits short sequences.

Triton compiles a variant of a kernel for each set of constants, dtypes, alignments and divisors of its arguments, and
examines all of them at each launch to find the variant. ``launch`` caches variants by a finer key that is cheaper to
compute. It replaces ``kernel[grid](*arguments, **constants_and_options)``:

    launch(kernel, grid, *arguments, **constants_and_options)

It does less than Triton: Triton's own settings (``triton.knobs``) and the globals that a kernel reads must not change
after its first launch, its hooks are not called, and kernels that need scratch memory are refused.

``Prepared`` is cheaper still, for a caller that launches a kernel repeatedly on tensors of one form:

    run = Prepared(kernel, n_programs, *arguments, **constants_and_options)
    run(stream, *addresses)

``launch`` examines every argument of every call. A caller of ``Prepared`` guarantees that only addresses change: it
keeps one ``Prepared`` for each set of shapes, strides and dtypes, and ensures that tensors are aligned like the first
ones. For a descriptor the driver makes a *tensor map*: 128 bytes that hold address, shape, strides, dtype, box and
swizzle, but not the owner of the memory. A map stays valid for any later tensor of the same form at the address, so
maps are cached by address, as allocators reuse addresses.

``operator`` makes a function a torch operator: opaque to ``torch.compile``, visible to dispatch modes, and cheap to
call.

    @operator("flash_attention_forward", _results)
    def forward_op(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> tuple[Tensor, Tensor]: ...

registers ``cs336_systems::flash_attention_forward`` for every device, and callers call the operator from then on. It
does not use ``torch.library.custom_op``, whose calls pass through Python once more: on a CPU they take 28 us of host
time, these 12. An operator has no autograd formula; the ``torch.autograd.Function`` that calls it provides one. Only
attention's kernels are operators: the others are called by hand-written backwards, which are not compiled.
"""

import inspect
from collections.abc import Callable, Hashable, Iterable
from functools import cache
from types import SimpleNamespace
from typing import Any

import torch
import triton
from torch import Tensor
from torch._ops import OpOverload
from triton.backends.nvidia.driver import make_tensordesc_arg
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from cs336_systems.kernels.allocating import FUNCTIONS, computes

MAX_REMEMBERED = 4096
"""The most cached variants; at one more all are dropped. Keys contain sequence lengths, so there may be very many."""

MAX_KEPT_MAPS = 1024
"""The most maps cached per parameter; at one more all are dropped, as so many addresses will not be the last."""
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
"""Dtypes that kernels support, unless their docstrings say otherwise."""
_LIBRARY = torch.library.Library("cs336_systems", "FRAGMENT")

_ALIGNMENT_BYTES = 16

H200_MULTIPROCESSORS = 132
"""Streaming multiprocessors of an H200 and of an H100 SXM, for which predictions are made."""


def ceil_div(n: int, d: int) -> int:
    """n / d rounded up; ``triton.cdiv`` is meant for compile time and takes microseconds."""
    return -(-n // d)


def next_power_of_2(n: int) -> int:
    """The least power of two that is not less than n > 0; ``triton.next_power_of_2`` is as slow as ``triton.cdiv``."""
    return 1 << (n - 1).bit_length()


def n_multiprocessors(device: torch.device) -> int:
    """Streaming multiprocessors of a CUDA device; 1 where kernels are interpreted, an H200's where they do not run."""
    if not computes():
        return H200_MULTIPROCESSORS
    return _n_multiprocessors(device) if device.type == "cuda" else 1


@cache
def _n_multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


def needs_other_device(kernel: Any, device: torch.device) -> bool:
    """Whether ``kernel`` cannot run there: off CUDA devices Triton can only interpret, as tests do."""
    return computes() and device.type != "cuda" and isinstance(kernel, triton.JITFunction)


def overlaps(kernel: Any) -> bool:
    """Whether ``launch_pdl`` lets ``kernel`` begin before the previous kernel has ended: from Hopper on.

    The kernel must then call ``gdc_wait`` before it reads that kernel's results.
    """
    return computes() and _overlaps(kernel)


@cache
def _overlaps(kernel: Any) -> bool:
    if not isinstance(kernel, triton.JITFunction):
        return False
    target = triton.runtime.driver.active.get_current_target()
    return target.backend == "cuda" and target.arch >= 90


class Form:
    """A kernel compiled for one form of its arguments, launched without Triton's Python code.

    Raises:
        RuntimeError: the kernel needs scratch memory, which is allocated in that Python.
    """

    def __init__(self, kernel: Any, *arguments: Any, **constants_and_options: Any) -> None:
        compiled = kernel.run(*arguments, grid=None, warmup=True, **constants_and_options)
        launcher = compiled.run
        if launcher.global_scratch_size or launcher.profile_scratch_size:
            raise RuntimeError(f"{compiled.name} needs scratch memory: launch it with kernel[grid]")
        self.compiled = compiled
        self._launch = _in_c(launcher.launch)
        self._constants = tuple(constants_and_options[name] for name in kernel.arg_names[len(arguments) :])
        options = launcher.launch_cooperative_grid, launcher.launch_pdl, None, None
        self._same = compiled.function, *options, compiled.packed_metadata, None, None, None  # no hooks

    def __call__(self, grid: tuple[int, int, int], stream: int, *arguments: Any) -> None:
        """Run on the current device, which must be the one on which this was made.

        Args:
            arguments: tensors or their addresses, ints and floats; for a descriptor, the tensor map, shape and strides.
        """
        self._launch(*grid, stream, *self._same, *arguments, *self._constants)


def _in_c(launcher: Callable[..., None]) -> Callable[..., None]:
    """Triton's launcher in C, without the Python function, if any, that makes tensor maps of descriptors."""
    return inspect.getclosurevars(launcher).nonlocals["launcher"] if inspect.isfunction(launcher) else launcher


_remembered: dict[Hashable, Form] = {}


def launch(kernel: Any, grid: tuple[int], *arguments: Any, **constants_and_options: Any) -> None:
    """Run ``kernel`` on the first argument's device and its current stream; an empty grid runs nothing.

    Args:
        kernel: a function of ``triton.jit`` or ``gluon.jit``; where Triton interprets kernels, nothing is remembered.
        grid: the number of programs.
        arguments: a tensor, and further tensors, ints and floats (no bools), for the first parameters in order.
        constants_and_options: by name, the other parameters, all ``constexpr``, and the compiler's options.
    """
    if not (grid[0] and computes()):
        return
    with torch.cuda.device_of(arguments[0]):  # Triton launches on the current device, which may be another
        if not isinstance(kernel, triton.JITFunction):
            kernel[grid](*arguments, **constants_and_options)
            return
        driver = triton.runtime.driver.active
        device = driver.get_current_device()
        key = (kernel, device, tuple(map(_what_matters, arguments)), tuple(constants_and_options.items()))
        form = _remembered.get(key)
        if form is None:
            form = Form(kernel, *arguments, **constants_and_options)
            if len(_remembered) >= MAX_REMEMBERED:
                _remembered.clear()
            _remembered[key] = form
        form((*grid, 1, 1), driver.get_current_stream(device), *arguments)


def _what_matters(argument: Any) -> Hashable:
    """The properties of an argument by which Triton chooses a variant."""
    if type(argument) is int:
        return argument
    if isinstance(argument, float):
        return float
    return argument.dtype, argument.data_ptr() % _ALIGNMENT_BYTES == 0


class TensorMaps(dict[int, list[Any]]):
    """The tensor map, shape and strides that Triton's launcher takes instead of a descriptor, cached by address."""

    def __init__(self, descriptor: TensorDescriptor, metadata: Any) -> None:
        """Maps are of tensors like that of ``descriptor``; ``metadata`` is the compiled kernel's, of this parameter."""
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


def operator(
    name: str, results: Callable[..., Any], mutates: Iterable[str] = ()
) -> Callable[[Callable[..., Any]], OpOverload]:
    """Register a function with annotated parameters as a torch operator, which replaces it.

    Args:
        name: after ``cs336_systems::``.
        results: takes the same arguments and returns empty tensors of the shapes, dtypes and strides of the results.
        mutates: arguments that it writes into; results must not share memory with arguments.
    """

    def register(function: Callable[..., Any]) -> OpOverload:
        schema = torch.library.infer_schema(function, mutates_args=tuple(mutates), op_name=name)
        _LIBRARY.define(schema, tags=(torch.Tag.pt2_compliant_tag,))
        _LIBRARY.impl(name, function, "CompositeExplicitAutograd")
        torch.library.register_fake(f"cs336_systems::{name}", results, lib=_LIBRARY)
        registered: OpOverload = getattr(torch.ops.cs336_systems, name).default
        FUNCTIONS[registered] = function
        return registered

    return register


def check_runnable(kernel: Any, x: Tensor) -> None:
    """Raises ValueError unless ``x`` is fp32, bf16 or fp16, and a CUDA tensor where kernels are compiled."""
    if x.dtype not in DTYPES:
        raise ValueError(f"the kernel takes float32, bfloat16 and float16, got {x.dtype}")
    check_device(kernel, x)


def check_device(kernel: Any, x: Tensor) -> None:
    """Raises ValueError unless ``x`` is a CUDA tensor, where kernels are compiled."""
    if needs_other_device(kernel, x.device):
        raise ValueError(f"the kernel needs a CUDA device, got a tensor on {x.device}")


def check_alike(**tensors: Tensor) -> None:
    """Raises ValueError unless all tensors, given by name, share one dtype and one device."""
    if len({(x.dtype, x.device) for x in tensors.values()}) > 1:
        got = ", ".join(f"{name} {x.dtype} on {x.device}" for name, x in tensors.items())
        raise ValueError(f"dtype and device must be shared, got {got}")
