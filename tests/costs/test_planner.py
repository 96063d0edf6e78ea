"""The chosen policy fits, and no cheaper one would."""

import pytest

from cs336_systems.case import TrainingCase
from cs336_systems.config import MODEL_SIZES, PRECISIONS
from cs336_systems.costs.flops import hardware_flops
from cs336_systems.costs.memory import peak_memory
from cs336_systems.costs.planner import GIB, candidate_policies, cheapest_policy

CONFIG = MODEL_SIZES["xl"].at_context(1024)
FP32 = PRECISIONS["fp32"]
CASE = TrainingCase.of(CONFIG, device="cuda")


def predicted(policy: str, mode: str = "step", **kwargs) -> tuple[int, int]:
    """(operations, peak bytes) of a policy."""
    flops = hardware_flops(CONFIG, 4, 1024, mode, checkpoint=policy)
    return flops, peak_memory(CONFIG, 4, 1024, FP32, mode, checkpoint=policy, **kwargs).n_bytes


def peaks() -> dict[str, tuple[int, int]]:
    return {policy: predicted(policy) for policy in candidate_policies(CONFIG.n_layers)}


def test_every_budget_gets_the_least_operations_that_fit():
    every = peaks()
    smallest, largest = min(peak for _, peak in every.values()), every["none"][1]
    for part in range(11):
        budget = smallest + (largest - smallest) * part // 10
        choice = cheapest_policy(CASE, "step", budget)
        assert (choice.extra_flops + choice.step_flops, choice.peak_bytes) == every[choice.policy]
        assert choice.peak_bytes <= budget
        cheaper = [name for name, (flops, _) in every.items() if flops < choice.step_flops + choice.extra_flops]
        assert all(every[name][1] > budget for name in cheaper)


def test_no_recomputation_where_none_is_needed():
    choice = cheapest_policy(CASE, "step", predicted("none")[1])
    assert (choice.policy, choice.extra_flops) == ("none", 0)
    assert str(choice).startswith("none: predicted peak ")
    assert str(choice).endswith(" GiB, 0.0 % more FLOPs")


def test_one_byte_less_than_none_needs_costs_something():
    choice = cheapest_policy(CASE, "step", predicted("none")[1] - 1)
    assert choice.policy == "keep-matmuls"
    unseen = cheapest_policy(CASE, "step", predicted("none")[1] - 1, selective=False)
    assert unseen.policy == "first-1", "where an attention hides its operators"
    below = cheapest_policy(CASE, "step", choice.peak_bytes - 1)
    assert below.policy.startswith("first-")
    assert below.extra_flops > 0


def test_too_small_a_budget_names_the_smallest_peak():
    smallest = min(peak for _, peak in peaks().values())
    with pytest.raises(
        ValueError, match="no checkpoint policy fits 3 GiB for xl, batch 4, context 1024, fp32, step"
    ) as error:
        cheapest_policy(CASE, "step", 3 * GIB)
    assert f"the smallest predicted peak is {smallest / GIB:.4g} GiB, with" in str(error.value)


def test_forward_alone_recomputes_nothing():
    assert cheapest_policy(CASE, "forward", predicted("none", "forward")[1]).policy == "none"


@pytest.mark.parametrize("n_layers", [1, 2, 3, 8])
def test_candidates_are_every_policy_once(n_layers):
    candidates = candidate_policies(n_layers)
    assert len(set(candidates)) == len(candidates)
    assert {"none", "full", "recursive", "keep-matmuls", "keep-attention"} <= set(candidates)
