"""What autocast would do on a GPU, read on any machine: fake tensors on a device that need not be there.

Autocast chooses dtypes by device type, and the CPU's choices differ from CUDA's (layer norm and softmax stay narrow).
Fake tensors carry device and dtype but no data, so forward on ``cuda`` runs through CUDA's rules without a GPU.
Backward does not: autograd's engine asks for the device. A gradient has the dtype of its parameter, which autograd
enforces.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch._subclasses.fake_tensor import FakeTensorMode


@contextmanager
def pretended_cuda() -> Iterator[None]:
    """Everything made inside is a fake tensor on ``cuda``."""
    with FakeTensorMode(), torch.device("cuda"):
        yield


@contextmanager
def cuda_autocast(dtype: torch.dtype) -> Iterator[None]:
    """CUDA's autocast, also where ``torch.autocast`` finds no CUDA device and disables itself."""
    before = torch.is_autocast_enabled("cuda"), torch.get_autocast_dtype("cuda"), torch.is_autocast_cache_enabled()
    torch.set_autocast_enabled("cuda", True)
    torch.set_autocast_dtype("cuda", dtype)
    torch.set_autocast_cache_enabled(False)
    try:
        yield
    finally:
        torch.set_autocast_enabled("cuda", before[0])
        torch.set_autocast_dtype("cuda", before[1])
        torch.set_autocast_cache_enabled(before[2])
