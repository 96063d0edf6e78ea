"""What the tests of kernels share."""

from collections.abc import Iterator

import pytest
import torch


@pytest.fixture
def ieee_products() -> Iterator[None]:
    """fp32 is multiplied in fp32."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    yield
    torch.set_float32_matmul_precision(before)
