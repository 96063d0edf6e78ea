"""The chosen policy, or the chosen level, fits, and no cheaper one would."""

from dataclasses import replace

import pytest

from cs336_systems.case import TrainingCase
from cs336_systems.config import MODEL_SIZES, PRECISIONS
from cs336_systems.costs.flops import hardware_flops
from cs336_systems.costs.kept import bytes_kept, keep_of_blocks, kept_names
from cs336_systems.costs.memory import PeakMemory, peak_memory
from cs336_systems.costs.planner import (
    GIB,
    candidate_keeps,
    candidate_policies,
    cheapest_keep,
    cheapest_policy,
)
from cs336_systems.costs.recomputed import recomputed
from cs336_systems.hardware import find_hardware

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


# ---- what blocks with a hand-written backward keep

LLAMA = TrainingCase("cuda", "llama3-8b", 2, 8192, "bf16", "hopper", optimizer="fused", kernels="fused", keep="input")


def predict(case: TrainingCase) -> PeakMemory:
    """What blocks keep above 40 GiB."""
    kept = sum(bytes_kept(*case.work, case.precision, keep) for keep in keep_of_blocks(case.keep, 32))
    return PeakMemory("loss", 40 * GIB + kept, {}, {})


def every_keep() -> dict[str, tuple[float, int]]:
    """(seconds, peak bytes) of every choice."""
    hardware, costs = find_hardware("NVIDIA H200"), {}
    for keep in candidate_keeps():
        again = recomputed(*LLAMA.work, LLAMA.precision, keep)
        costs[keep] = 32 * again.seconds(hardware, "bf16"), predict(replace(LLAMA, keep=keep)).n_bytes
    return costs


def test_candidates_are_every_choice_of_tensors_once():
    names = [kept_names(keep) for keep in candidate_keeps()]
    # Four switches are free; the feed-forward keeps nothing, gate | up, or SwiGLU's output too.
    assert len(set(names)) == len(names) == 2**4 * 3
    assert {"input", "attention", "products", "all", "products-residual", "all-norm"} <= set(candidate_keeps())


def test_every_budget_gets_what_takes_least_time_and_fits_in_few_predictions():
    every, asked = every_keep(), []
    smallest, largest = every["input"][1], every["all"][1]
    for part in range(6):
        budget = smallest + (largest - smallest) * part // 5
        asked.clear()
        choice = cheapest_keep(LLAMA, "step", budget, lambda case: (asked.append(case.keep), predict(case))[1])
        assert choice.seconds == pytest.approx(every[choice.keep][0])
        assert choice.peak_bytes == every[choice.keep][1] <= budget
        assert all(peak > budget for seconds, peak in every.values() if seconds < choice.seconds * 0.999)
        assert len(asked) <= 8
    assert choice.keep == "all" and not choice.again


def test_a_budget_that_nothing_fits_names_the_smallest_peak():
    with pytest.raises(ValueError, match="nothing that blocks may keep fits 40 GiB for llama3-8b") as error:
        cheapest_keep(LLAMA, "step", 40 * GIB, predict)
    assert f"{every_keep()['input'][1] / GIB:.4g} GiB (loss), with keep input" in str(error.value)
    assert cheapest_keep(LLAMA, "forward", 200 * GIB, predict).again == ()


def test_mixes_keep_more_in_as_many_blocks_as_fit():
    every = every_keep()
    smallest, largest = every["input"][1], every["all"][1]
    for part in range(1, 6):
        budget = smallest + (largest - smallest) * part // 5 - 1
        alike = cheapest_keep(LLAMA, "step", budget, predict)
        mixed = cheapest_keep(LLAMA, "step", budget, predict, mixed=True)
        assert mixed.peak_bytes <= budget
        assert mixed.seconds < alike.seconds
        more, less = mixed.keep.split("+")
        number, more = more.split("x", 1)
        one_more = f"{int(number) + 1}x{more}+{less}" if int(number) < 31 else more
        assert predict(replace(LLAMA, keep=one_more)).n_bytes > budget, "one block more does not fit"
        seconds = (int(number) * every[more][0] + (32 - int(number)) * every[less][0]) / 32
        assert mixed.seconds == pytest.approx(seconds)
    assert cheapest_keep(LLAMA, "step", largest, predict, mixed=True).keep == "all"
