"""Triton's interpreter for machines without a GPU; call before any kernel is imported."""

import os
from typing import Any

import torch


def interpret_without_gpu() -> None:
    """Where no CUDA device exists, run Triton kernels in NumPy. Only fp32 is right there: bf16 products are not.

    Triton 3.6 reads loop bounds with ``int(array)`` on arrays of one element, which NumPy 2.4 refuses; ``item()`` is
    what it means.
    """
    if torch.cuda.is_available():
        return
    os.environ.setdefault("TRITON_INTERPRET", "1")
    from triton.runtime import interpreter

    patch_tensor = interpreter._patch_lang_tensor

    def patch_tensor_and_index(tensor: Any, scope: Any) -> None:
        patch_tensor(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())

    if patch_tensor.__name__ == "_patch_lang_tensor":
        interpreter._patch_lang_tensor = patch_tensor_and_index
