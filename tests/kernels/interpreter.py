"""Triton's interpreter for machines without a GPU; call before any kernel is imported."""

import os
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp8e4nv": torch.float8_e4m3fn, "fp8e5": torch.float8_e5m2}
INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32}


def interpret_without_gpu() -> None:
    """Where no CUDA device exists, run Triton kernels in NumPy. Only fp32 is right there: bf16 products are not.

    Triton 3.6 reads loop bounds with ``int(array)`` on arrays of one element, which NumPy 2.4 refuses; ``item()`` is
    what it means. Its conversions cut bf16 off, and those to fp8 lose the carry into the exponent, NaN and infinity;
    PyTorch's take their place, cut off at the largest number of fp8 as Hopper's are. It takes the language's place anew
    at every call of a device function, in a quarter of its time; here only as a kernel starts.
    """
    if torch.cuda.is_available():
        return
    os.environ.setdefault("TRITON_INTERPRET", "1")
    from triton import language
    from triton.runtime import interpreter

    patch_tensor = interpreter._patch_lang_tensor

    def patch_tensor_and_index(tensor: Any, scope: Any) -> None:
        patch_tensor(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())

    convert_float = interpreter._convert_float

    def convert(array: Any, source: Any, target: Any, rounding_mode: Any) -> Any:
        dtypes = [DTYPES.get(str(dtype)) for dtype in (source, target)]
        if None in dtypes:
            return convert_float(array, source, target, rounding_mode)
        values = torch.from_numpy(np.ascontiguousarray(array).view(f"i{array.itemsize}")).view(dtypes[0])
        if dtypes[1].itemsize == 1:
            values = values.clamp(-torch.finfo(dtypes[1]).max, torch.finfo(dtypes[1]).max)
        return values.to(dtypes[1]).view(INTEGERS[dtypes[1].itemsize]).numpy()

    patch_language = interpreter._patch_lang
    whole = SimpleNamespace(__globals__={"tl": language, "core": language.core})

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            return self.rewrite()(*args, **kwargs)
        except Exception as error:
            raise interpreter.InterpreterError(repr(error)) from error

    if patch_tensor.__name__ == "_patch_lang_tensor":
        interpreter._patch_lang_tensor = patch_tensor_and_index
        interpreter._convert_float = convert
        interpreter._patch_lang = lambda kernel: patch_language(whole)
        interpreter.InterpretedFunction.__call__ = call
