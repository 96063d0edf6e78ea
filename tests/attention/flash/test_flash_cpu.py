"""The kernels in Triton's interpreter, in fp32, and everything of the Function that needs no kernel."""

from functools import partial

import pytest
import torch
from torch import Tensor

from cs336_systems.attention.flash import FlashAttention
from cs336_systems.attention.flash import forward as forward_module
from cs336_systems.attention.flash.function import backward_into_op, backward_op, forward_op
from cs336_systems.attention.flash.tiles import Tile
from tests.attention.error_budget import check, make, results_of, strided
from tests.attention.slices import check_slices

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="kernels are compiled here: see test_flash_gpu.py")


flash = partial(results_of, FlashAttention)


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Unequal 16 x 32 tiles: short sequences then have whole, diagonal and partial tiles."""
    monkeypatch.setattr(forward_module, "tile_for", lambda *key: Tile(32, 16, 4, 1))
    monkeypatch.setattr("cs336_systems.attention.flash.backward.tile_for", lambda *key: Tile(16, 32, 4, 1))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("sizes", "causal", "scale"),
    [
        ({"n_queries": 1}, False, None),
        ({"n_queries": 64}, True, None),
        ({"n_queries": 45, "d_head": 20}, True, 0.2),
        ({"n_queries": 33, "n_keys": 70, "heads": 4, "kv_heads": 2}, True, None),
        ({"n_queries": 70, "n_keys": 33}, False, None),
        ({"n_queries": 1, "n_keys": 50, "batch": 2}, True, None),
        ({"n_queries": 35, "d_head": 80}, True, None),
    ],
    ids=str,
)
@pytest.mark.usefixtures("poisoned")
def test_values_and_gradients(sizes: dict[str, int], causal: bool, scale: float | None) -> None:
    q, k, v, do = make("cpu", **sizes)
    large = 30 if scale else 1
    check(large * q, large * k, v, do, causal, scale)


def test_rows_that_see_no_key() -> None:
    o, lse, dq, *_ = check(*make("cpu", n_queries=40, n_keys=7), True)
    assert (o[:, :, :33] == 0).all()
    assert (lse[:, :, :33] == float("-inf")).all()
    assert (dq[:, :, :33] == 0).all()


def test_strides_and_one_head_without_its_dimension() -> None:
    tensors = make("cpu", batch=2, n_queries=20)
    expected = flash(*tensors, True, None)
    layouts = [strided(x) for x in tensors]
    views = [layout[i % 4] for i, layout in enumerate(layouts)]
    for a, b, c in zip(expected, flash(*views, True, None), flash(*(x[:, 0] for x in views), True, None), strict=True):
        assert torch.equal(a, b)
        assert torch.equal(a[:, 0], c)


@pytest.mark.slow
@pytest.mark.usefixtures("poisoned")
def test_gradients_are_written_into_slices() -> None:
    how = {"kv_heads": 2, "seq_len": 19, "d_head": 20}
    allocating = lambda *arguments: backward_op(*arguments, True, True)  # noqa: E731
    check_slices(forward_op, allocating, backward_into_op, "cpu", torch.float32, **how)


@pytest.mark.slow
def test_gradients_whose_columns_lie_apart_are_copied() -> None:
    q, k, v, do = make("cpu", batch=2, heads=2, n_queries=20)
    o, lse = forward_op(q, k, v, True, 0.25)
    into = [torch.zeros_like(x.mT.contiguous().mT) for x in (q, k, v)]
    backward_into_op(q, k, v, o, lse, do, *into, True, 0.25)
    for written, wanted in zip(into, backward_op(q, k, v, o, lse, do, True, 0.25, True, True), strict=True):
        assert torch.equal(written, wanted)


def test_an_empty_batch() -> None:
    results = flash(*make("cpu", batch=0, heads=2, n_queries=5), True, None)
    assert [tuple(result.shape) for result in results] == [(0, 2, 5, 16), (0, 2, 5), *[(0, 2, 5, 16)] * 3]


@pytest.mark.parametrize("wanted", [(True, False, False), (False, True, False), (False, False, True)])
def test_gradients_that_nobody_wants(wanted: tuple[bool, bool, bool]) -> None:
    q, k, v, do = make("cpu")
    expected = flash(q, k, v, do, True, None)[2:]
    inputs = [x.detach().requires_grad_(want) for x, want in zip((q, k, v), wanted, strict=True)]
    FlashAttention.apply(*inputs, True).backward(do)
    for x, want, gradient in zip(inputs, wanted, expected, strict=True):
        assert torch.equal(x.grad, gradient) if want else x.grad is None


@pytest.mark.slow
def test_compiles_without_graph_breaks() -> None:
    torch.compiler.reset()
    inputs = make("cpu", batch=2, n_queries=10)
    q, k, v, do = (x.squeeze(1) for x in inputs)
    expected = flash(q, k, v, do, True, None)

    @torch.compile(fullgraph=True, backend="aot_eager")
    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return FlashAttention.apply(q, k, v, True) * 1.0

    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    o = attend(*leaves)
    assert torch.equal(o, expected.o)
    for a, b in zip(torch.autograd.grad(o, leaves, do), expected[2:], strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize(
    ("d_head", "dtype", "message"),
    [
        (8, torch.float32, "16 to 256 are supported, got 8"),
        (16, torch.float64, "torch.float64"),
    ],
)
def test_refusals(d_head: int, dtype: torch.dtype, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        FlashAttention.apply(*make("cpu", dtype, d_head=d_head)[:3], False)
