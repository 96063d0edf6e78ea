"""Products that are measured before training."""

from dataclasses import replace

import pytest
import torch

from cs336_systems.case import TrainingCase
from cs336_systems.config import resolve_size
from cs336_systems.kernels import matmul
from cs336_systems.kernels.cublaslt import Spec, spec
from cs336_systems.training.dry_run import dry_run
from cs336_systems.training.product_choice import products_of

META = torch.device("meta")


class _Chosen(dict[Spec, matmul.Multiply]):
    """Remembers for what kernels were asked; each does nothing."""

    def __init__(self) -> None:
        super().__init__({})
        self.asked = set[Spec]()

    def get(self, key: Spec, default: object = None) -> matmul.Multiply:  # type: ignore[override]
        self.asked.add(replace(key, device=META))
        return lambda *tensors: None

    def __bool__(self) -> bool:
        return True


@pytest.mark.parametrize(("matmul_dtype", "vocab_size"), [("same", 256), ("e4m3", 256), ("e4m3", 131072)])
def test_what_is_measured_is_what_a_step_multiplies(
    matmul_dtype: str, vocab_size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In shapes, strides, dtypes, addends and accumulation, where no kernel of ours takes gate | up and SwiGLU."""
    case = TrainingCase.of(
        replace(resolve_size("tiny"), context_length=2048, vocab_size=vocab_size),
        device="cuda",
        batch_size=2,
        accumulate=2,
        dtype="bf16",
        attention="hopper",
        kernels="fused",
        optimizer="fused",
        keep="all",
        matmul_dtype=matmul_dtype,
    )
    chosen = _Chosen()
    monkeypatch.setattr(matmul, "_chosen", chosen)
    monkeypatch.setattr(matmul, "serves", lambda asked: True)  # as on a GPU
    dry_run(case, "step")
    measured = {spec(asked.out, asked.a, asked.b, asked.addend, fast=asked.fast) for asked in products_of(case, META)}
    assert chosen.asked == measured
