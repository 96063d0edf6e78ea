"""Every FlexAttention variant against its dense form, the dense forms against rules spelt out, and the errors."""

import itertools
import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from cs336_systems.attention import AttentionShape
from cs336_systems.attention.variants import (
    Variant,
    alibi,
    alibi_slopes,
    block_sparsity,
    causal,
    dense_attention,
    dense_mask,
    dense_scores,
    document,
    full,
    prefix_lm,
    relative_bias,
    sliding_window,
    softcap,
    variant_attention,
)

pytestmark = pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")

SHAPE = AttentionShape(batch=2, heads=4, kv_heads=2, n_queries=23, n_keys=23, d_head=16)
DECODE = AttentionShape(batch=2, heads=4, kv_heads=2, n_queries=9, n_keys=23, d_head=16)
FEW_KEYS = AttentionShape(batch=2, heads=4, kv_heads=2, n_queries=29, n_keys=23, d_head=16)
IDS = torch.tensor([[7] * 5 + [2] * 11 + [7] * 7, [0] * 22 + [1]])
PREFIXES = torch.tensor([6, 0])
SLOPES = alibi_slopes(4)
TABLE = torch.linspace(-2, 2, 4 * 9).reshape(4, 9)
BY_BATCH = torch.tensor([[256], [1024]])


def make_variants(ids: Tensor, prefixes: Tensor, slopes: Tensor, table: Tensor) -> dict[str, Variant]:
    """Every variant and ways to combine them, by name."""
    made = [
        full(),
        causal(),
        sliding_window(1),
        sliding_window(5),
        document(ids),
        prefix_lm(prefixes),
        alibi(slopes),
        relative_bias(table),
        softcap(1.5),
        document(ids) & causal(),
        full() & causal(),
        causal() & alibi(slopes),
        causal() & softcap(1.5),
        relative_bias(table) & softcap(1.5),
        softcap(1.5) & relative_bias(table),
        sliding_window(7) & alibi(slopes) & softcap(2.0) & document(ids),
    ]
    return {variant.name: variant for variant in made}


VARIANTS = make_variants(IDS, PREFIXES, SLOPES.double(), TABLE.double())


def inputs(shape: AttentionShape, dtype: torch.dtype = torch.float64, device: str = "cpu") -> list[Tensor]:
    """q, k, v and the gradient of o; scores of a few units, so that caps and biases matter."""
    generator = torch.Generator().manual_seed(0)
    sizes = [(shape.heads, shape.n_queries), *[(shape.kv_heads, shape.n_keys)] * 2, (shape.heads, shape.n_queries)]
    made = [torch.randn(shape.batch, *size, shape.d_head, dtype=torch.float64, generator=generator) for size in sizes]
    made[0] = 2 * made[0]
    return [x.to(device, dtype) for x in made]


@pytest.mark.slow
@pytest.mark.parametrize("variant", VARIANTS.values(), ids=VARIANTS.keys())
@pytest.mark.parametrize("shape", [SHAPE, FEW_KEYS], ids=["square", "few keys"])
def test_output_matches_the_dense_oracle(variant, shape):
    """The last query stands at the last key, and one that sees no key gives zero."""
    q, k, v, _ = inputs(shape)
    expected, lse = dense_attention(q, k, v, variant, scale=0.3)
    actual = variant_attention(q, k, v, variant, scale=0.3)
    # 23 products of values below 10 and of 16 terms each, rounded 2^-53: 4e-13; a soft cap's slope is at most 1.
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-12)
    assert (actual[lse.isneginf()] == 0).all()


RULES = {
    "full": lambda b, q, k: True,
    "causal": lambda b, q, k: k <= q,
    "window 1": lambda b, q, k: k == q,
    "window 5": lambda b, q, k: k in range(q - 4, q + 1),
    "document": lambda b, q, k: q >= 0 and int(IDS[b, q]) == int(IDS[b, k]),
    "prefix-LM": lambda b, q, k: k <= q or k < (6, 0)[b],
}
RULES["document & causal"] = lambda b, q, k: RULES["document"](b, q, k) and RULES["causal"](b, q, k)


@pytest.mark.parametrize("shape", [SHAPE, DECODE, FEW_KEYS], ids=["square", "decode", "few keys"])
@pytest.mark.parametrize("name", RULES)
def test_masks_are_the_rules_spelt_out(name, shape):
    variant = VARIANTS[name]
    expected = torch.tensor(
        [
            [[RULES[name](b, q + shape.offset, k) for k in range(shape.n_keys)] for q in range(shape.n_queries)]
            for b in range(shape.batch)
        ]
    )
    mask = dense_mask(variant, shape)
    assert mask.shape == shape.scores
    for head in range(shape.heads):
        assert torch.equal(mask[:, head], expected)


def test_alibi_slopes_are_those_of_the_paper():
    assert torch.equal(alibi_slopes(8), torch.tensor([2.0**-i for i in range(1, 9)]))
    assert torch.equal(alibi_slopes(1), torch.tensor([2.0**-8]))
    first_of_sixteen = [2**-0.5, 2**-1.5, 2**-2.5, 2**-3.5]  # the authors' answer to 12 heads: 8 and every second of 16
    torch.testing.assert_close(alibi_slopes(12), torch.tensor([2.0**-i for i in range(1, 9)] + first_of_sixteen))


SCORE_RULES = {
    "ALiBi": lambda score, h, q, k: score - float(SLOPES[h]) * abs(q - k),
    "relative bias 4": lambda score, h, q, k: score + float(TABLE[h, min(max(k - q, -4), 4) + 4]),
    "softcap 1.5": lambda score, h, q, k: 1.5 * math.tanh(score / 1.5),
}
SCORE_RULES["softcap 1.5 & relative bias 4"] = lambda score, *at: SCORE_RULES["relative bias 4"](
    SCORE_RULES["softcap 1.5"](score, *at), *at
)


@pytest.mark.parametrize("name", SCORE_RULES)
def test_score_modifications_are_the_rules_spelt_out(name):
    shape, rule = FEW_KEYS, SCORE_RULES[name]
    scores = torch.randn(shape.scores, dtype=torch.float64)
    expected = torch.empty_like(scores)
    for b, h, q, k in itertools.product(*map(range, shape.scores)):
        expected[b, h, q, k] = rule(float(scores[b, h, q, k]), h, q + shape.offset, k)
    torch.testing.assert_close(dense_scores(VARIANTS[name], scores), expected, rtol=0, atol=1e-14)


def long(n_queries: int, n_keys: int, batch: int = 1) -> AttentionShape:
    return AttentionShape(batch, 2, 2, n_queries, n_keys, 64)


@pytest.mark.parametrize(
    ("variant", "shape", "visited", "blocks"),
    [
        (full(), long(1024, 1024), 64, 64),
        (causal(), long(300, 300), 6, 9),  # blocks stick out of the matrix
        (sliding_window(130), long(1024, 1024), 21, 64),
        (prefix_lm(torch.tensor([0, 256])), long(1024, 1024, batch=2), 36 + 37, 128),
        (causal() & document(torch.arange(1024) // BY_BATCH), long(1024, 1024, batch=2), 12 + 36, 128),
    ],
    ids=lambda value: value.name if isinstance(value, Variant) else None,
)
def test_skipped_blocks_are_counted(variant, shape, visited, blocks):
    assert block_sparsity(variant, shape) == pytest.approx(100 * (1 - visited / blocks))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: sliding_window(0), "at least the query itself: 0"),
        (lambda: softcap(0.0), "finite and positive: 0.0"),
        (lambda: relative_bias(torch.zeros(4, 8)), r"2 max_distance \+ 1\): \(4, 8\)"),
        (
            lambda: dense_mask(causal() & prefix_lm(PREFIXES[:1]), SHAPE),
            r"prefix lengths must have shape \(2,\).*\(1,\)",
        ),
        (
            lambda: variant_attention(*inputs(SHAPE)[:3], alibi(alibi_slopes(2))),
            r"slopes must have shape \(4,\).*\(2,\)",
        ),
        (lambda: variant_attention(*inputs(SHAPE)[:3], alibi(SLOPES.to("meta"))), "'ALiBi' are on meta, not on cpu"),
        (lambda: variant_attention(*(x.requires_grad_() for x in inputs(SHAPE)[:3]), causal()), "no backward on a CPU"),
    ],
)
def test_what_does_not_fit_is_named(make, message):
    with pytest.raises(ValueError, match=message):
        make()


@pytest.mark.gpu
@pytest.mark.parametrize("name", VARIANTS)
@pytest.mark.parametrize("offset", [0, 70])
def test_compiled_kernels_are_within_the_budget_of_bf16(name, offset):
    """Forward and every gradient against fp64 on the same bf16 inputs, at most twice the error of the dense form."""
    shape = AttentionShape(batch=2, heads=4, kv_heads=2, n_queries=333 - offset, n_keys=333, d_head=64)
    rounded = inputs(shape, torch.bfloat16, "cuda")
    ids = torch.stack([torch.arange(333, device="cuda") // size for size in (50, 111)])

    def results(attention: Callable[..., Tensor], dtype: torch.dtype) -> dict[str, Tensor]:
        slopes, table = (x.to("cuda", torch.promote_types(dtype, torch.float32)) for x in (SLOPES, TABLE))
        variant = make_variants(ids, 20 * PREFIXES.cuda(), slopes, table.requires_grad_())[name]
        leaves = {key: x.to(dtype).requires_grad_() for key, x in zip(("q", "k", "v"), rounded, strict=False)}
        o = attention(*leaves.values(), variant)
        if "relative" in name:
            leaves["table"] = table
        gradients = torch.autograd.grad(o, list(leaves.values()), rounded[3].to(dtype))
        return {"o": o} | {f"d{key}": gradient for key, gradient in zip(leaves, gradients, strict=True)}

    oracle = results(lambda *args: dense_attention(*args)[0], torch.float64)
    eager = results(lambda *args: dense_attention(*args)[0], torch.bfloat16)
    ours = results(variant_attention, torch.bfloat16)
    for key, exact in oracle.items():
        budget, error = (torch.linalg.vector_norm(x[key].double() - exact) for x in (eager, ours))
        norm = torch.linalg.vector_norm(exact)
        print(f"{name} {key}: error {error / norm:.2e}, eager {budget / norm:.2e}")
        assert error <= 2 * budget + torch.finfo(torch.bfloat16).eps * max(norm, 1.0)  # dq of window 1 is zero
