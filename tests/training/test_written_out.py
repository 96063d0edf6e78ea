"""Steps with a written-out backward train as the reference does, held against fp64 on a GPU."""

import sys
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from cs336_systems.case import TrainingCase, Unsupported
from cs336_systems.ranks import Parallel
from cs336_systems.training import TrainStep, assemble, check_supported, random_batch

from .shared import CONFIG, Shared
from .test_parallel import LLAMA, QWEN

assembly = sys.modules["cs336_systems.training.assemble"]  # the package has a function of that name


def trained(step: TrainStep, batches: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """Losses of the steps, and how far all parameters went, in fp64."""
    start = [parameter.detach().double().clone() for parameter in step.model.parameters()]
    losses = torch.stack([step(*batch).double() for batch in batches])
    pairs = zip(step.model.parameters(), start, strict=True)
    return losses, torch.cat([(parameter.detach().double() - before).flatten() for parameter, before in pairs])


@pytest.mark.parametrize("compute", ["same", "bf16"])
def test_attention_is_asked_for_the_dtype_in_which_weights_are_gathered(compute, monkeypatch):
    asked = []
    monkeypatch.setattr(assembly, "attention_reason", lambda name, q, k, v, **_: asked.append(q.dtype))
    check_supported(Shared.of(CONFIG, how=Parallel("fsdp", compute_dtype=compute)), torch.device("cpu"))
    assert asked == [torch.bfloat16 if compute == "bf16" else torch.float32]


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("attention", ["flash", "hopper"])
@pytest.mark.parametrize("config", [LLAMA, QWEN], ids=lambda config: config.name)
def test_ten_steps_of_fused_kernels_agree_with_the_reference(config, attention, dtype):
    """The reference in fp64 is the truth; ours may be three times as far from it as the reference.

    Adam divides by the root of the second moment, so that where gradients nearly vanish roundings become steps: both
    are as far apart as chance has it, which the factor allows for. A loss may round once more.
    """
    config = replace(config, d_model=256, d_ff=512, context_length=200, vocab_size=1003)
    case = TrainingCase.of(config, batch_size=2, seed=5, device="cuda", dtype=dtype)
    ours = replace(case, kernels="fused", keep="products", attention=attention)
    try:
        steps = [assemble(each) for each in (replace(case, dtype="fp32"), ours, case)]
    except Unsupported as reason:
        pytest.skip(str(reason))
    steps[0].model.double().load_state_dict(steps[2].model.state_dict())
    eps = max(torch.finfo(p.dtype).eps for p in steps[1].model.parameters())
    truth, *found = (trained(step, [random_batch(case)] * 10) for step in steps)
    for what, true, *others in zip(("losses", "movement"), truth, *found, strict=True):
        mine, reference = ((each - true).norm() / true.norm() for each in others)
        print(f"{what}: ours {mine:.1e}, reference {reference:.1e}")
        assert mine <= 3 * reference + eps, what
    assert truth[0][-1] < truth[0][0], "it learns"
