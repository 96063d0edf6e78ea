"""What a written-out block is told to keep, and what that comes to for real models."""

from itertools import pairwise

import pytest

from cs336_systems.config import PRECISIONS, resolve_size
from cs336_systems.costs.kept import KEPT, LEVELS, SWITCHES, bytes_kept, keep_of_blocks, kept_names

GIB = 1024**3


def test_each_level_holds_the_one_before():
    names = [set(kept_names(level)) for level in LEVELS]
    assert all(less < more for less, more in pairwise(names))
    assert names[0] == {"x", "rstd1", "rstd2"}
    assert names[-1] == {row.name for row in KEPT}


def test_every_switch_drops_something_and_all_of_them_leave_the_input():
    for switch in SWITCHES:
        assert set(kept_names(f"all-{switch}")) < set(kept_names("all"))
    assert kept_names("all-" + "-".join(SWITCHES)) == kept_names("input")
    assert kept_names("all-norm-swiglu") == kept_names("products")
    assert kept_names("products-qkv-residual-ffn") == kept_names("attention")


@pytest.mark.parametrize(
    ("keep", "message"),
    [
        ("product", "unknown level 'product' in what to keep, 'product': did you mean 'products'? known are input"),
        (
            "all-norms",
            "unknown switch 'norms' in what to keep, 'all-norms': did you mean 'norm'? known are norm",
        ),
        ("", "unknown level '' in what to keep, '': known are"),
        ("norm", "unknown level 'norm'"),
        ("all-", "unknown switch ''"),
    ],
)
def test_unknown_names_are_told_the_nearest(keep, message):
    with pytest.raises(ValueError) as error:
        kept_names(keep)
    assert message in str(error.value)


def test_blocks_may_keep_different_things():
    assert keep_of_blocks("products", 3) == ("products",) * 3
    assert keep_of_blocks("2xall+1xproducts-ffn+input", 5) == ("all", "all", "products-ffn", "input", "input")


@pytest.mark.parametrize(
    ("keep", "message"),
    [
        ("all+products", "'all' in what to keep, 'all+products', must say of how many blocks: 8xall+products"),
        ("0xall+products", "'0xall' in what to keep"),
        ("2xall+3xproducts", "unknown level '3xproducts'"),
        ("2xnone+products", "unknown level 'none'"),
        ("2xall+2xinput+products", "what to keep, '2xall+2xinput+products', leaves none of 4 blocks for products"),
    ],
)
def test_a_mix_that_says_no_number_or_leaves_no_blocks_is_refused(keep, message):
    with pytest.raises(ValueError) as error:
        keep_of_blocks(keep, 4)
    assert message in str(error.value)


def test_autocast_is_refused():
    with pytest.raises(ValueError, match="autocast-bf16 is not served"):
        bytes_kept(resolve_size("tiny"), 1, 8, PRECISIONS["autocast-bf16"], "all")


@pytest.mark.parametrize(("keep", "gib"), [("input", 8.5), ("attention", 8.5 * 2), ("products", 96.7), ("all", 136.5)])
def test_leaderboard_by_hand(keep, gib):
    """34 layers of one sequence: 8.5 GiB for each stream as wide as the model, 22.8 as wide as the feed-forward."""
    config, tokens = resolve_size("leaderboard-8b"), 32_768
    per_token = {"input": 1, "attention": 2, "products": 2 + 3 + 1, "all": 2 + 3 + 1 + 2}[keep] * config.d_model
    per_token += {"products": 2, "all": 3}.get(keep, 0) * config.d_ff
    statistics = 2 + (config.n_heads if keep != "input" else 0)
    exact = tokens * (2 * per_token + 4 * statistics)
    assert bytes_kept(config, 1, tokens, PRECISIONS["bf16"], keep) == exact
    assert config.n_layers * exact / GIB == pytest.approx(gib, rel=0.01)
