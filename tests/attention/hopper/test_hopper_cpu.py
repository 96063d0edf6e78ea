"""What needs no GPU: refusals with a pointer to what takes the request, layouts, shapes, the plan's arithmetic."""

from collections import defaultdict
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor
from triton.runtime.jit import JITFunction

from cs336_systems.attention.hopper import HopperFlashAttention, host, plans
from cs336_systems.attention.hopper.function import backward_into_op, backward_op, forward_op
from cs336_systems.attention.hopper.host import (
    copyable,
    empty_result,
    has_copyable_strides,
)
from cs336_systems.attention.shapes import ends_of, hopper_limits
from tests.attention.error_budget import make
from tests.attention.test_packed import starts_of


def qkv(device: str = "cpu") -> tuple[Tensor, Tensor, Tensor]:
    return tuple(torch.zeros(2, 4, 6, 64, dtype=torch.bfloat16, device=device) for _ in range(3))


@pytest.mark.parametrize(
    ("dtype", "d_head", "capability", "said"),
    [
        (torch.float32, 64, (9, 0), 'inputs are torch.float32; impl="flash" takes them'),
        (torch.float64, 64, (9, 0), 'inputs are torch.float64; impl="reference" takes them'),
        (torch.bfloat16, 8, (9, 0), 'got 8; impl="reference" takes them'),
        (torch.bfloat16, 20, (9, 0), 'got 20; impl="flash" takes them'),
        (torch.bfloat16, 64, None, 'the inputs are on cpu; impl="tiled" takes them'),
        (torch.bfloat16, 64, (10, 0), 'this one has 10.0; impl="flash" takes them'),
        (torch.bfloat16, 128, (9, 0), None),
    ],
)
def test_what_is_refused(
    dtype: torch.dtype,
    d_head: int,
    capability: tuple[int, int] | None,
    said: str | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    device = torch.device("cuda" if capability else "cpu")
    reason = hopper_limits(SimpleNamespace(dtype=dtype, shape=(1, 1, 1, d_head), device=device))
    assert reason is None if said is None else reason.endswith(said)
    if not capability:
        with pytest.raises(ValueError, match="compute capability 9.0"):
            HopperFlashAttention.apply(*qkv())


def test_what_the_copy_engine_can_read() -> None:
    x = torch.zeros(2, 3, 5, 64, dtype=torch.bfloat16)
    wide = torch.zeros(2, 3, 5, 72, dtype=torch.bfloat16)
    readable = [x, x.transpose(1, 2), wide[..., 8:], x[:, :, ::2], x[:1].as_strided((1, 3, 5, 64), (7, 320, 64, 1))]
    refused = [x.mT, torch.zeros(2, 3, 5, 68, dtype=torch.bfloat16)[..., :64], x[:, :1].expand(2, 3, 5, 64)]
    assert all(has_copyable_strides(y) and copyable(y) is y for y in readable)
    assert not any(has_copyable_strides(y) for y in refused)
    for y in (*refused, wide[..., 1:65]):
        assert copyable(y) is not y
        assert copyable(y).is_contiguous()
    q = x.transpose(1, 2)
    assert empty_result(q).stride() == q.stride()
    assert empty_result(q.mT.contiguous().mT).is_contiguous()


def test_fake_operators_say_shapes_and_layouts() -> None:
    q, k, v = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in qkv(device="meta"))
    o, lse = forward_op(q, k[:, :2], v[:, :2], True, 1.0)
    assert (o.shape, o.stride(), o.dtype) == (q.shape, q.stride(), q.dtype)
    assert (lse.shape, lse.dtype) == (q.shape[:3], torch.float32)
    gradients = backward_op(q, k[:, :2], v[:, :2], o, lse, o, True, 1.0, False)
    assert [x.shape for x in gradients] == [q.shape, (2, 2, 6, 64), (2, 2, 6, 64)]


def test_an_empty_batch_launches_nothing() -> None:
    q, k, v, do = make("cpu", torch.bfloat16, batch=0, heads=2, n_queries=5, d_head=64)
    o, lse = forward_op(q, k, v, True, 1.0)
    assert (o.shape, lse.shape) == (q.shape, q.shape[:3])
    assert [x.shape for x in backward_op(q, k, v, o, lse, do, True, 1.0, False)] == [q.shape] * 3
    assert backward_into_op(q, k, v, o, lse, do, q, k, v, True, 1.0, False) is None


@pytest.fixture
def on_host(monkeypatch: pytest.MonkeyPatch) -> Callable[..., SimpleNamespace]:
    """Makes a plan of Python numbers, whose device functions run as they are written."""
    language = SimpleNamespace(
        minimum=min, maximum=max, cdiv=lambda n, d: -(-n // d), where=lambda c, a, b: a if c else b
    )
    language.load = lambda address: address()
    monkeypatch.setattr(plans, "gl", language)
    monkeypatch.setattr(plans, "item_in_section", plans.item_in_section.fn)
    names = ("batch", "kv_head", "first_key", "first_tile", "end_tile")
    monkeypatch.setattr(plans, "KeyTile", lambda *values: SimpleNamespace(**dict(zip(names, values, strict=True))))

    def make_plan(kind: type, **fields: int) -> SimpleNamespace:
        plan = SimpleNamespace(**fields)
        for name, member in vars(kind).items():
            if isinstance(member, JITFunction):
                setattr(plan, name, partial(member.fn, plan))
        return plan

    return make_plan


PLANS = pytest.mark.parametrize(
    ("n_queries", "n_keys"),
    [(1, 1), (128, 128), (500, 650), (300, 70), (198, 260), (260, 198)],
)


def visible_keys(n_queries: int, n_keys: int, causal: bool) -> Tensor:
    seen = torch.ones(n_queries, n_keys, dtype=torch.bool)
    return seen.tril(n_keys - n_queries) if causal else seen


@PLANS
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("block_q", "block_k"), [(192, 128), (128, 64)])
def test_the_plan_of_queries(
    n_queries: int, n_keys: int, causal: bool, block_q: int, block_k: int, on_host: Callable[..., SimpleNamespace]
) -> None:
    plan = on_host(
        plans.QueryPlan, n_queries=n_queries, n_keys=n_keys, n_heads=6, n_batch_heads=12, group=2, section_heads=8,
        CAUSAL=causal, BLOCK_Q=block_q, BLOCK_K=block_k,
    )  # fmt: skip
    seen = visible_keys(n_queries, n_keys, causal)
    order, taken = [], set()
    for position in range(plan.n_items()):
        batch, head, first_query, n_loaded = plan.item(position)
        taken.add((batch, head, first_query))
        order.append(((6 * batch + head) // 8, -n_loaded))
        for first in range(first_query, first_query + block_q, 64):
            rows = seen[first : first + 64]
            n_tiles = plan.n_key_tiles(first, 64)
            assert 1 <= n_tiles <= n_loaded <= -(-n_keys // block_k)
            assert not rows[:, n_tiles * block_k :].any()
            if rows.numel():
                assert plan.n_clear(first) * block_k <= n_keys
                assert rows[:, : plan.n_clear(first) * block_k].all()
    assert taken == {(b, h, first) for b in range(2) for h in range(6) for first in range(0, n_queries, block_q)}
    assert len(order) == len(taken)
    assert order == sorted(order)


@PLANS
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("block_q", [64, 128])
@pytest.mark.parametrize("ordered", [False, True])
def test_the_plan_of_keys(
    n_queries: int, n_keys: int, causal: bool, block_q: int, ordered: bool, on_host: Callable[..., SimpleNamespace]
) -> None:
    padded = -(-n_queries // 128) * 128
    plan = on_host(
        plans.KeyPlan, n_queries=n_queries, n_keys=n_keys, n_heads=6, n_batch_heads=6, group=2, section_heads=4,
        padded=padded, ORDERED=ordered, PACKED=False, CAUSAL=causal, BLOCK_Q=block_q, BLOCK_K=128,
    )  # fmt: skip
    adds: dict[tuple[int, int, int], int] = defaultdict(int)
    seen = visible_keys(n_queries, n_keys, causal)
    keys_of = {(batch, kv_head): [] for batch in range(2) for kv_head in range(3)}
    for position in range(plan.n_items()):
        work = plan.key_tile(position, None)
        keys_of[work.batch, work.kv_head].append(work.first_key)
        head, tile, visited = 2 * work.kv_head, work.first_tile, []
        for _ in range(plan.n_steps(work)):
            visited.append((head, tile))
            head, tile = plan.after(work, head, tile, 1)
        tiles = range(work.first_tile, -(-n_queries // block_q))
        assert visited == [(2 * work.kv_head + i, tile) for i in range(2) for tile in tiles]
        if ordered:  # so that no add waits for one of a later position
            for head, tile in visited:
                assert plan.adds_before(work.first_key // 128, tile * block_q) == adds[work.batch, head, tile]
                adds[work.batch, head, tile] += 1
        assert len(tiles) > 0
        assert not seen[: work.first_tile * block_q, work.first_key : work.first_key + 128].any()
        assert plan.first_row(work) == (6 * work.batch + 2 * work.kv_head) * padded
        for first in (work.first_key, work.first_key + 64):
            clear = seen[plan.first_clear(first, 64) * block_q :, first : first + 64]
            assert clear.all()
            assert clear.shape[0] == 0 or first + 64 <= n_keys
    assert all(firsts[:: -1 if ordered else 1] == list(range(0, n_keys, 128)) for firsts in keys_of.values())


def test_sections_are_as_long_as_it_takes_that_programs_end_together() -> None:
    """Eight key/value heads of Llama 3 8B, 8,192 tokens: one at a time has 64 tiles for 132 programs."""
    steps = [128 - 2 * tile for tile in range(64)]
    alone, pairs = (host.end_of_work(steps, 8, section, 132) for section in (1, 2))
    assert alone > 1.2 * pairs and pairs * 132 < 1.02 * 8 * sum(steps)
    assert host.balanced_section(steps, 8, 1, 132) == 2
    assert host.balanced_section(steps, 8, 3, 132) == 8  # of six the last two would run alone
    assert host.balanced_section(steps, 1, 1, 132) == 1


class Numbers:
    """Numbers in memory: a place is added to them, as to a pointer."""

    def __init__(self, numbers: Tensor) -> None:
        self._numbers = numbers.flatten().tolist()

    def __add__(self, place: int) -> Callable[[], int]:
        return lambda: self._numbers[place]


DOCUMENTS = pytest.mark.parametrize(
    "lengths", [[500], [1, 499], [100, 1, 27, 128, 60, 184], [64, 64, 128, 192, 52], [400, 100], [1] * 500]
)


N_QUERIES = pytest.mark.parametrize("n_queries", [500, 250, 70])
"""Of 500 keys, the last so many are queries', too."""


def visible_in_documents(lengths: list[int], n_queries: int) -> tuple[Tensor, Tensor]:
    """(starts (2, n_queries) of two sequences, of which the second is one document; what the first's queries see)."""
    starts = torch.stack([starts_of(lengths), starts_of([500])])[:, -n_queries:].contiguous()
    return starts, visible_keys(n_queries, 500, True) & (torch.arange(500) >= starts[0][:, None])


@N_QUERIES
@DOCUMENTS
@pytest.mark.parametrize(("block_q", "block_k"), [(192, 128), (128, 64)])
def test_tiles_of_keys_of_packed_queries(
    lengths: list[int], n_queries: int, block_q: int, block_k: int, on_host: Callable[..., SimpleNamespace]
) -> None:
    plan = on_host(
        plans.QueryPlan, n_queries=n_queries, n_keys=500, n_heads=1, n_batch_heads=2, group=1, section_heads=2,
        CAUSAL=True, BLOCK_Q=block_q, BLOCK_K=block_k,
    )  # fmt: skip
    starts, seen = visible_in_documents(lengths, n_queries)
    for first_query in range(0, n_queries, block_q):
        n_loaded = plan.n_key_tiles(first_query, block_q)
        first_loaded = plan.document_tile(Numbers(starts), 0, first_query)
        for first in range(first_query, first_query + block_q, 64):
            rows = seen[first : first + 64]
            end, n_own, last_document = plan.document_tiles(Numbers(starts), 0, first, 64, first_loaded)
            begin = end - n_own
            assert first_loaded <= begin < end <= n_loaded
            assert not rows[:, : begin * block_k].any() and not rows[:, end * block_k :].any()
            if rows.numel():  # the fewest
                assert rows[:, begin * block_k : (begin + 1) * block_k].any()
            for tile in range(begin, end - 1):  # the last one has a mask
                if last_document < tile < plan.n_clear(first):
                    assert rows[:, tile * block_k : (tile + 1) * block_k].all()
            assert plan.document_tiles(Numbers(starts), 1, first, 64, 0)[1] == plan.n_key_tiles(first, 64)


@N_QUERIES
@DOCUMENTS
@pytest.mark.parametrize("block_q", [64, 128])
def test_tiles_of_queries_of_packed_keys(
    lengths: list[int], n_queries: int, block_q: int, on_host: Callable[..., SimpleNamespace]
) -> None:
    plan = on_host(
        plans.KeyPlan, n_queries=n_queries, n_keys=500, n_heads=2, n_batch_heads=2, group=2, section_heads=2,
        padded=-(-n_queries // 128) * 128, ORDERED=True, PACKED=True, CAUSAL=True, BLOCK_Q=block_q, BLOCK_K=128,
    )  # fmt: skip
    starts, seen = visible_in_documents(lengths, n_queries)
    ends = Numbers(ends_of(starts, 500))
    adds: dict[tuple[int, int], int] = defaultdict(int)
    for position in range(plan.n_items()):
        work = plan.key_tile(position, ends)
        tiles = range(work.first_tile, plan.end_tile(work))
        assert plan.n_steps(work) == 2 * len(tiles) > 0
        for tile in tiles:
            assert plan.adds_before(work.first_key // 128, tile * block_q) == adds[work.batch, tile]
            adds[work.batch, tile] += 1
        if work.batch:
            assert plan.end_tile(work) == plan.n_tiles()
            continue
        own = seen[:, work.first_key : work.first_key + 128]
        assert not own[: tiles.start * block_q].any() and not own[tiles.stop * block_q :].any()
        if own.any():
            assert own[(tiles.stop - 1) * block_q :].any()  # the fewest
        else:  # before the documents of all queries: one tile, with a mask
            assert len(tiles) == 1 and plan.document_end(ends, 0, work.first_key + 64) == 0
        for first in (work.first_key, work.first_key + 64):
            masked_from = plan.document_end(ends, 0, first) // block_q
            for tile in range(plan.first_clear(first, 64), min(masked_from, tiles.stop)):
                rows = seen[tile * block_q : (tile + 1) * block_q, first : first + 64]
                assert rows.all() and rows.shape == (block_q, 64)
