"""Plans by hand, their properties for any depth, and the limits that papers give."""

import math
from itertools import chain

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cs336_systems.config import MODEL_SIZES, PRECISIONS
from cs336_systems.costs.activations import block_saved_tensors, total_bytes
from cs336_systems.costs.checkpointing import Kept, Plan, canonical_policy, kept_in_backward, make_plan, runs_again

POLICIES = st.one_of(
    st.sampled_from(["none", "full", "recursive", "keep-matmuls", "keep-attention"]),
    st.builds("{}-{}".format, st.sampled_from(["every", "first"]), st.integers(1, 40)),
)


def flat(plan: Plan) -> list[int]:
    return list(chain.from_iterable([part] if isinstance(part, int) else flat(part) for part in plan))


@pytest.mark.parametrize(
    ("policy", "plan", "again"),
    [
        ("none", (0, 1, 2, 3), (0, 0)),
        ("full", ((0,), (1,), (2,), (3,)), (4, 4)),
        ("every-1", ((0,), (1,), (2,), (3,)), (4, 4)),
        ("keep-matmuls", ((0,), (1,), (2,), (3,)), (4, 4)),
        ("every-3", ((0, 1, 2), (3,)), (4, 2)),
        ("every-4", ((0, 1, 2, 3),), (4, 1)),
        ("every-99", ((0, 1, 2, 3),), (4, 1)),
        ("first-2", ((0,), (1,), 2, 3), (2, 2)),
        ("first-99", ((0,), (1,), (2,), (3,)), (4, 4)),
        ("recursive", (((0,), 1), (2,), 3), (4, 3)),
    ],
)
def test_plans_by_hand(policy, plan, again):
    assert make_plan(policy, 4) == plan
    assert runs_again(plan) == again


def test_what_is_kept_by_hand():
    """Halves of halves: the second half's blocks go first, then the first half is run again and keeps the same way."""
    assert list(kept_in_backward(make_plan("recursive", 4))) == [
        Kept(None, frozenset({3}), frozenset({0, 2})),
        Kept(3, frozenset({3}), frozenset({0, 2})),
        Kept(2, frozenset({2}), frozenset({0, 2})),
        Kept(1, frozenset({1}), frozenset({0})),
        Kept(0, frozenset({0}), frozenset({0})),
    ]
    assert list(kept_in_backward(make_plan("every-2", 3)))[1:] == [
        Kept(2, frozenset({2}), frozenset({0, 2})),
        Kept(1, frozenset({0, 1}), frozenset({0})),
        Kept(0, frozenset({0}), frozenset({0})),
    ]


@settings(max_examples=200, deadline=None, database=None, derandomize=True)
@given(POLICIES, st.integers(1, 50))
def test_every_plan_runs_all_blocks_in_order_and_backward_meets_each_once(policy, n_layers):
    plan = make_plan(policy, n_layers)
    assert flat(plan) == list(range(n_layers))
    moments = list(kept_in_backward(plan))
    assert [kept.block for kept in moments] == [None, *reversed(range(n_layers))]
    assert all(kept.block in kept.blocks for kept in moments[1:])
    blocks, segments = runs_again(plan)
    assert segments <= blocks


@pytest.mark.parametrize("n_layers", [1, 2, 3, 5, 8, 31, 32, 50])
def test_halves_of_halves_keep_one_block_and_a_logarithm_of_inputs(n_layers):
    """And run half of the blocks again for each level, as Griewank & Walther's bisection does."""
    moments = list(kept_in_backward(make_plan("recursive", n_layers)))
    levels = math.ceil(math.log2(n_layers))
    assert max(len(kept.blocks) for kept in moments) == 1
    assert max(len(kept.inputs) for kept in moments) <= levels
    assert runs_again(make_plan("recursive", n_layers))[0] <= n_layers * levels / 2
    if n_layers == 32:
        assert runs_again(make_plan("recursive", 32)) == (80, 31)


@pytest.mark.parametrize("size", MODEL_SIZES)
@pytest.mark.parametrize("context_length", [128, 2048])
def test_a_block_keeps_twenty_times_its_input(size, context_length):
    config = MODEL_SIZES[size].at_context(context_length)
    kept = total_bytes(block_saved_tensors(config, 4, context_length, PRECISIONS["fp32"]))
    block_input = 4 * context_length * config.d_model * 4
    assert kept > 20 * block_input
    assert math.sqrt(config.n_layers * block_input / kept) < 1.6


@pytest.mark.parametrize("policy", ["half", "every-0", "every-01", "first", "first-1 ", "EVERY-2", "every-9999999999"])
def test_an_unknown_policy_is_refused_with_what_is_allowed(policy):
    for call in (lambda: canonical_policy(policy), lambda: make_plan(policy, 4)):
        with pytest.raises(
            ValueError, match="known are none, full, recursive, keep-matmuls, keep-attention"
        ) as refusal:
            call()
        assert repr(policy) in str(refusal.value)
