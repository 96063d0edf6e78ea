"""bf16 throughout, 8 bytes per parameter, follows fp32: by stochastic rounding, as to nearest it would not."""

from dataclasses import replace

import pytest
import torch

from cs336_systems.config import MODEL_SIZES
from cs336_systems.training import TrainingCase, assemble, random_batch

CONFIG = replace(MODEL_SIZES["tiny"], name="tinier", n_layers=1, d_model=64, d_ff=96, vocab_size=61, context_length=64)
STEPS = 20


@pytest.mark.slow
@pytest.mark.usefixtures("whole_chunks")
def test_twenty_steps_on_one_batch_lose_what_fp32_loses_within_half_a_percent() -> None:
    case = TrainingCase.of(CONFIG, batch_size=1, seed=3)
    narrow = replace(case, dtype="bf16", keep="products")
    steps = [assemble(case), *(assemble(replace(narrow, optimizer=name)) for name in ("fused", "reference"))]
    for step in steps[1:]:
        step.model.load_state_dict(steps[0].model.state_dict())
    batch = random_batch(case)
    losses = torch.tensor([[step(*batch).item() for step in steps] for _ in range(STEPS)])
    wide, stochastic, nearest = losses.T
    off, off_nearest = ((found / wide - 1).abs().max().item() for found in (stochastic, nearest))
    print(f"stochastic {100 * off:.2f} %, to nearest {100 * off_nearest:.2f} %, {wide[0]:.2f} -> {wide[-1]:.2f}")
    assert wide[-1] < 0.7 * wide[0], "it learns"
    assert off < 0.005 < off_nearest
