"""Plans by hand, and their properties for any depth."""

import math
from itertools import chain

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cs336_systems.costs.checkpointing import (
    Segments,
    canonical_policy,
    is_selective,
    make_plan,
    recomputed_blocks,
    selective_policies,
)

POLICIES = st.one_of(
    st.sampled_from(["none", "full", "recursive", "keep-matmuls", "keep-attention"]),
    st.builds("{}-{}".format, st.sampled_from(["every", "first", "keep-matmuls"]), st.integers(1, 40)),
)


def flat(plan: Segments) -> list[int]:
    return list(chain.from_iterable([part] if isinstance(part, int) else flat(part) for part in plan))


@pytest.mark.parametrize(
    ("policy", "plan", "again"),
    [
        ("none", (0, 1, 2, 3), (0, 0)),
        ("full", ((0,), (1,), (2,), (3,)), (4, 4)),
        ("every-1", ((0,), (1,), (2,), (3,)), (4, 4)),
        ("keep-matmuls", ((0,), (1,), (2,), (3,)), (4, 4)),
        ("keep-matmuls-3", ((0,), (1,), (2,), (3,)), (4, 4)),
        ("every-3", ((0, 1, 2), (3,)), (4, 2)),
        ("every-99", ((0, 1, 2, 3),), (4, 1)),
        ("first-2", ((0,), (1,), 2, 3), (2, 2)),
        ("first-99", ((0,), (1,), (2,), (3,)), (4, 4)),
        ("recursive", (((0,), 1), (2,), 3), (4, 3)),
    ],
)
def test_plans_by_hand(policy, plan, again):
    assert make_plan(policy, 4) == plan
    assert recomputed_blocks(plan) == again


@pytest.mark.slow
@settings(max_examples=100, deadline=None, database=None, derandomize=True)
@given(POLICIES, st.integers(1, 50))
def test_every_plan_runs_all_blocks_in_order(policy, n_layers):
    plan = make_plan(policy, n_layers)
    assert flat(plan) == list(range(n_layers))
    blocks, segments = recomputed_blocks(plan)
    assert segments <= blocks
    if policy == "recursive":  # each level recomputes half of the blocks, as Griewank & Walther's bisection does
        assert blocks <= n_layers * math.ceil(math.log2(n_layers)) / 2


def test_the_last_blocks_keep_the_results_of_matmuls():
    matmuls, attention = "keep-matmuls", "keep-attention"
    found = [selective_policies(policy, 3) for policy in (attention, "keep-matmuls-1", "keep-matmuls-9", matmuls)]
    assert found == [(attention,) * 3, (attention, attention, matmuls), (matmuls,) * 3, (matmuls,) * 3]
    for policy in ("none", "full", "every-2", "first-1"):
        assert not is_selective(policy)
        with pytest.raises(ValueError, match=f"'{policy}' keeps"):
            selective_policies(policy, 3)


UNKNOWN = ["half", "every-0", "every-01", "first", "first-1 ", "EVERY-2", "every-9999999999"]
UNKNOWN += ["keep-matmuls-0", "keep-matmuls-", "keep-attention-2", "keep-all"]


@pytest.mark.parametrize("policy", UNKNOWN)
def test_an_unknown_policy_is_refused(policy):
    for call in (lambda: canonical_policy(policy), lambda: make_plan(policy, 4)):
        with pytest.raises(ValueError) as refusal:
            call()
        assert repr(policy) in str(refusal.value)
