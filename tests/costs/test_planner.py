"""The chosen policy, or the chosen level, fits, and no cheaper one would."""

from collections.abc import Callable
from dataclasses import replace

import pytest

from cs336_systems.case import TrainingCase
from cs336_systems.config import MODEL_SIZES
from cs336_systems.costs.checkpointing import is_selective, make_plan, recomputed_blocks, selective_policies
from cs336_systems.costs.flops import hardware_flops
from cs336_systems.costs.kept import bytes_kept, keep_of_blocks, kept_names, recomputed
from cs336_systems.costs.memory import PeakMemory
from cs336_systems.costs.planner import candidate_keeps, cheapest_keep, cheapest_policy
from cs336_systems.hardware import GIB, find_hardware

CASE = TrainingCase.of(MODEL_SIZES["xl"].at_context(1024), device="cuda")
POLICIES = ["none", *(f"first-{m}" for m in range(1, 48)), "full"]
POLICIES += ["keep-matmuls", *(f"keep-matmuls-{k}" for k in range(1, 48)), "keep-attention"]


class Asked:
    """A prediction that counts how often it is made."""

    def __init__(self, predict: Callable[[TrainingCase], PeakMemory]) -> None:
        self.predict, self.times = predict, 0

    def __call__(self, case: TrainingCase) -> PeakMemory:
        self.times += 1
        return self.predict(case)


def checkpointed(case: TrainingCase) -> PeakMemory:
    """A GiB for each block that is not recomputed, a third of it where results of matmuls are kept, and for all blocks
    that keep the result of attention alone one GiB.
    """
    if is_selective(case.checkpoint):
        n_matmuls = selective_policies(case.checkpoint, 48).count("keep-matmuls")
        left = (15 * n_matmuls + 48) // 48
    else:
        left = 48 - recomputed_blocks(make_plan(case.checkpoint, 48))[0]
    return PeakMemory((40 + left) * GIB, {}, {})


@pytest.mark.parametrize("attention", ["reference", "flash"])
@pytest.mark.parametrize("selective", [True, False])
def test_every_budget_gets_the_least_operations_that_fit(selective, attention):
    case = replace(CASE, attention=attention)
    every = {
        policy: (
            hardware_flops(*case.work, "step", attention=case.attention_kind, checkpoint=policy),
            checkpointed(replace(case, checkpoint=policy)).n_bytes,
        )
        for policy in POLICIES
        if selective or not is_selective(policy)
    }
    for gib in (88, 87.5, 60, 56, 55, 41.5, 41, 40):
        predict, budget = Asked(checkpointed), int(gib * GIB)
        found = cheapest_policy(case, "step", budget, predict, selective=selective)
        assert (found.extra_flops + found.step_flops, found.peak_bytes) == every[found.choice]
        assert found.peak_bytes <= budget
        cheaper = [peak for flops, peak in every.values() if flops < found.step_flops + found.extra_flops]
        assert all(peak > budget for peak in cheaper)
        assert predict.times <= 16
    assert found.choice == "full"
    with pytest.raises(ValueError, match="38 GiB for xl.* smallest predicted peak is 40 GiB, with --checkpoint full"):
        cheapest_policy(case, "step", 38 * GIB, checkpointed, selective=selective)


LLAMA = TrainingCase("cuda", "llama3-8b", 2, 8192, "bf16", "hopper", optimizer="fused", kernels="fused", keep="input")


def predict(case: TrainingCase) -> PeakMemory:
    """What blocks keep above 40 GiB."""
    kept = sum(bytes_kept(*case.work, case.precision, keep) for keep in keep_of_blocks(case.keep, 32))
    return PeakMemory(40 * GIB + kept, {}, {})


EVERY = {
    keep: (
        32 * recomputed(*LLAMA.work, LLAMA.precision, keep).seconds(find_hardware("NVIDIA H200"), "bf16"),
        predict(replace(LLAMA, keep=keep)).n_bytes,
    )
    for keep in candidate_keeps()
}
"""(seconds, peak bytes) of every choice."""
SMALLEST, LARGEST = EVERY["input"][1], EVERY["all"][1]


def test_candidates_are_every_choice_of_tensors_once():
    """Four switches are free; the feed-forward keeps nothing, gate | up, or SwiGLU's output too."""
    assert len({kept_names(keep) for keep in EVERY}) == len(EVERY) == 2**4 * 3


def test_every_budget_gets_what_takes_least_time_and_fits_in_few_predictions():
    for part in range(6):
        budget, asked = SMALLEST + (LARGEST - SMALLEST) * part // 5, Asked(predict)
        found = cheapest_keep(LLAMA, "step", budget, asked)
        assert found.peak_bytes == EVERY[found.choice][1] <= budget
        assert all(peak > budget for seconds, peak in EVERY.values() if seconds < EVERY[found.choice][0] * 0.999)
        assert asked.times <= 8
    assert (found.choice, found.extra_flops) == ("all", 0)
    with pytest.raises(ValueError, match=f"40 GiB for llama3-8b.* {SMALLEST / GIB:.4g} GiB, with --keep input"):
        cheapest_keep(LLAMA, "step", 40 * GIB, predict)
    assert cheapest_keep(LLAMA, "forward", 200 * GIB, predict).extra_flops == 0
