"""Launching Triton kernels at little cost to the host, which for short sequences is what limits attention.

Triton compiles a kernel for each set of constants, dtypes, alignments and divisors of its arguments, and goes through
all of them at each launch to find the form that fits. ``launch`` remembers the form by a finer key that is quicker to
make. It stands for ``kernel[grid](*arguments, **constants_and_options)``:

    launch(kernel, grid, *arguments, **constants_and_options)

Not for all of it: Triton's own settings (``triton.knobs``) and the globals that a kernel reads must not change after
its first launch, its hooks before a run are not called, and kernels that need scratch memory are refused. Who launches
a kernel again and again for tensors of one form has it cheaper still with ``prepared.Prepared``.
"""

import inspect
from collections.abc import Callable, Hashable
from functools import cache
from typing import Any

import torch
import triton

MAX_REMEMBERED = 4096
"""Keys hold sequence lengths: who meets more of them starts over."""

_ALIGNMENT_BYTES = 16


def ceil_div(n: int, d: int) -> int:
    """n / d rounded up; ``triton.cdiv`` is made for compilers and takes microseconds."""
    return -(-n // d)


def next_power_of_2(n: int) -> int:
    """The least power of two that is not less than n > 0; ``triton.next_power_of_2`` is as slow as ``triton.cdiv``."""
    return 1 << (n - 1).bit_length()


@cache
def n_multiprocessors(device: torch.device) -> int:
    """Streaming multiprocessors of a CUDA device."""
    return torch.cuda.get_device_properties(device).multi_processor_count


def needs_other_device(kernel: Any, device: torch.device) -> bool:
    """Whether ``kernel`` cannot run there: off CUDA devices Triton can only interpret, if told so in time."""
    return device.type != "cuda" and isinstance(kernel, triton.JITFunction)


@cache
def overlaps(kernel: Any) -> bool:
    """Whether ``launch_pdl`` lets ``kernel`` begin before the one in front of it has ended: from Hopper on.

    It must call ``gdc_wait`` then before it reads what that one writes.
    """
    if not isinstance(kernel, triton.JITFunction):
        return False
    target = triton.runtime.driver.active.get_current_target()
    return target.backend == "cuda" and target.arch >= 90


class Form:
    """A kernel compiled for one form of its arguments, and called without the Python that Triton has around that.

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
        self._same = compiled.function, *options, compiled.packed_metadata

    def __call__(self, grid: tuple[int, int, int], stream: int, *arguments: Any) -> None:
        """Run on the current device, which must be the one that this was made on.

        Args:
            arguments: tensors or their addresses, ints and floats; for a descriptor, the tensor map, shape and strides.
        """
        runtime = triton.knobs.runtime
        enter, leave = runtime.launch_enter_hook, runtime.launch_exit_hook
        hooks: tuple[Any, ...] = (None, None, None)
        if enter.calls or leave.calls:
            hooks = (self.compiled.launch_metadata(grid, stream), enter, leave)
        self._launch(*grid, stream, *self._same, *hooks, *arguments, *self._constants)


def _in_c(launcher: Callable[..., None]) -> Callable[..., None]:
    """Triton's launcher without the function around it, if there is one, which makes tensor maps of descriptors."""
    return inspect.getclosurevars(launcher).nonlocals["launcher"] if inspect.isfunction(launcher) else launcher


_remembered: dict[Hashable, Form] = {}


def launch(kernel: Any, grid: tuple[int], *arguments: Any, **constants_and_options: Any) -> None:
    """Run ``kernel`` on the current device and stream.

    Args:
        kernel: of ``triton.jit`` or ``gluon.jit``; where Triton interprets kernels, nothing is remembered.
        grid: how many programs.
        arguments: tensors, ints and floats (no bools), for the first parameters in order.
        constants_and_options: by name, the other parameters, all ``constexpr``, and what the compiler takes.
    """
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
    """Of an argument, no less than Triton looks at."""
    if type(argument) is int:
        return argument
    if isinstance(argument, float):
        return float
    return argument.dtype, argument.data_ptr() % _ALIGNMENT_BYTES == 0
