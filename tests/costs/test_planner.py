"""The chosen policy, or the chosen level, fits, and no cheaper one would."""

from dataclasses import replace

import pytest

from cs336_systems.case import TrainingCase
from cs336_systems.config import MODEL_SIZES, PRECISIONS
from cs336_systems.costs.flops import hardware_flops
from cs336_systems.costs.kept import kept_names
from cs336_systems.costs.memory import peak_memory
from cs336_systems.costs.planner import (
    GIB,
    candidate_keeps,
    candidate_policies,
    cheapest_keep,
    cheapest_policy,
)
from cs336_systems.costs.recomputed import recomputed
from cs336_systems.costs.written_out import written_out_peak
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


# ---- what written-out blocks keep

LLAMA = TrainingCase(
    "cuda", "llama3-8b", batch_size=2, context_length=8192, dtype="bf16", attention="hopper", optimizer="fused"
)


def keep_costs(mode: str = "step") -> dict[str, tuple[float, int]]:
    """(seconds, peak bytes) of every choice."""
    hardware, costs = find_hardware("NVIDIA H200"), {}
    for keep in candidate_keeps():
        again = recomputed(*LLAMA.work, LLAMA.precision, keep)
        peak = written_out_peak(*LLAMA.work, LLAMA.precision, mode, keep=keep, chunk=2048, attention="hopper")
        costs[keep] = LLAMA.config.n_layers * again.seconds(hardware, "bf16"), peak.n_bytes
    return costs


def test_candidates_are_every_choice_of_tensors_once():
    names = [kept_names(keep) for keep in candidate_keeps()]
    # Four switches are free; the feed-forward keeps nothing, gate | up, or SwiGLU's output too.
    assert len(set(names)) == len(names) == 2**4 * 3
    assert {"input", "attention", "products", "all", "products-residual", "all-norm"} <= set(candidate_keeps())


def test_every_budget_gets_what_takes_least_time_and_fits():
    every = keep_costs()
    smallest, largest = min(peak for _, peak in every.values()), every["all"][1]
    for part in range(6):
        budget = smallest + (largest - smallest) * part // 5
        choice = cheapest_keep(LLAMA, "step", budget, chunk=2048)
        assert (choice.seconds, choice.peak_bytes) == every[choice.keep]
        assert choice.peak_bytes <= budget
        assert all(peak > budget for seconds, peak in every.values() if seconds < choice.seconds)
    assert choice.keep == "all"
    assert str(choice).endswith("; nothing is computed again")


def test_norms_go_before_products_and_products_before_attention():
    choices = [cheapest_keep(LLAMA, "step", gib * GIB, chunk=2048) for gib in (110, 95, 90)]
    assert [choice.keep for choice in choices] == ["all-swiglu", "products", "products-residual"]
    assert [choice.extra_flops for choice in choices] == [0, 0, 32 * 2 * 16_384 * 4096**2]
    assert "first norm, output projection, second norm, SwiGLU run again: 2.0 % more FLOPs, " in str(choices[-1])


def test_a_budget_that_nothing_fits_names_the_smallest_peak():
    smallest = min(peak for _, peak in keep_costs().values())
    with pytest.raises(
        ValueError, match="nothing that blocks may keep fits 40 GiB for llama3-8b, batch 2, context 8192, bf16, step"
    ) as error:
        cheapest_keep(LLAMA, "step", 40 * GIB, chunk=2048)
    assert f"the smallest predicted peak is {smallest / GIB:.4g} GiB (" in str(error.value)
    assert cheapest_keep(LLAMA, "forward", 40 * GIB, chunk=2048).again == ()


def test_mixes_keep_more_in_as_many_blocks_as_fit():
    every = keep_costs()
    smallest, largest = min(peak for _, peak in every.values()), every["all"][1]
    for part in range(1, 6):
        budget = smallest + (largest - smallest) * part // 5 - 1
        alike = cheapest_keep(LLAMA, "step", budget, chunk=2048)
        mixed = cheapest_keep(LLAMA, "step", budget, chunk=2048, mixed=True)
        assert mixed.peak_bytes <= budget
        assert mixed.seconds < alike.seconds
        more, less = mixed.keep.split("+")
        number, more = more.split("x", 1)
        assert every[more][1] > budget >= every[less][1]
        one_more = f"{int(number) + 1}x{more}+{less}" if int(number) + 1 < LLAMA.config.n_layers else more
        peak = written_out_peak(*LLAMA.work, LLAMA.precision, "step", keep=one_more, chunk=2048)
        assert peak.n_bytes > budget, "one block more does not fit"
        seconds = int(number) * every[more][0] + (LLAMA.config.n_layers - int(number)) * every[less][0]
        assert mixed.seconds == pytest.approx(seconds / LLAMA.config.n_layers)
    assert cheapest_keep(LLAMA, "step", largest, chunk=2048, mixed=True).keep == "all"


def test_masters_take_room_and_what_is_away_gives_it():
    """Of 8.03 billion parameters masters take 29.9 GiB, and 15 each moment that is in host memory leaves."""
    case = replace(LLAMA, optimizer="fused")
    plain, masters, away = (
        cheapest_keep(each, "step", 115 * GIB, chunk=2048)
        for each in (case, replace(case, master="fp32"), replace(case, offload="m-v"))
    )
    assert away.seconds <= plain.seconds < masters.seconds <= 115
    alike = (cheapest_keep(each, "step", 500 * GIB, chunk=2048) for each in (replace(case, master="fp32"), case))
    more, less = (choice.peak_bytes for choice in alike)
    assert more - less == pytest.approx(4 * case.config.n_parameters, rel=1e-3)


def test_shards_leave_room_to_keep_more():
    whole, sharded = (cheapest_keep(LLAMA, "step", 90 * GIB, chunk=2048, n_shards=n, mixed=True) for n in (1, 2))
    assert sharded.seconds < whole.seconds
