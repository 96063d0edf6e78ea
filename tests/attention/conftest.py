"""What the tests of kernels share."""

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor


@pytest.fixture
def poisoned(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory that is not written stays NaN."""
    for name in ("empty", "empty_like"):
        original = getattr(torch, name)

        def poison(*args: object, original: object = original, **kwargs: object) -> Tensor:
            tensor = original(*args, **kwargs)
            return tensor.fill_(float("nan")) if tensor.is_floating_point() else tensor

        monkeypatch.setattr(torch, name, poison)


@pytest.fixture
def ieee_products() -> Iterator[None]:
    """fp32 is multiplied in fp32."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    yield
    torch.set_float32_matmul_precision(before)
