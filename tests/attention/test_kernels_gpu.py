"""What the Triton and the Hopper kernels both do on a GPU: awkward shapes against fp64, strides, torch.compile."""

from typing import Any

import pytest
import torch
from torch import Tensor

from cs336_systems.attention.flash import FlashAttention
from cs336_systems.attention.flash import function as flash
from cs336_systems.attention.hopper import HopperFlashAttention
from cs336_systems.attention.hopper import function as hopper
from tests.attention.error_budget import check, make, results_of, strided
from tests.attention.slices import check_slices

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("poisoned", "ieee_products")]
ON_HOPPER = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0), reason="needs a Hopper GPU"
)
DTYPES = {
    FlashAttention: [torch.float32, torch.bfloat16, torch.float16],
    HopperFlashAttention: [torch.bfloat16, torch.float16],
}
HEAD_DIMS = {FlashAttention: [16, 32, 64, 80, 96, 128, 256], HopperFlashAttention: [16, 32, 64, 80, 96, 120, 128]}
SLICED = {
    FlashAttention: (flash.forward_op, lambda *of: flash.backward_op(*of, True, True), flash.backward_into_op),
    HopperFlashAttention: (
        hopper.forward_op,
        lambda *of: hopper.backward_op(*of, True),
        lambda *of: hopper.backward_into_op(*of, True),
    ),
}
LENGTHS = [(1, 1), (17, 17), (127, 127), (128, 128), (129, 129), (300, 300), (129, 300), (300, 129), (1, 300)]


def case(attend: type, *values: object) -> object:
    """One set of parameters, of which the first is an autograd Function."""
    marks = [ON_HOPPER] if attend is HopperFlashAttention else []
    return pytest.param(attend, *values, marks=marks, id="-".join([attend.__name__, *map(str, values)]))


each_kernel = pytest.mark.parametrize("attend", [case(attend) for attend in DTYPES])
each_dtype = pytest.mark.parametrize(
    ("attend", "dtype"), [case(attend, dtype) for attend, dtypes in DTYPES.items() for dtype in dtypes]
)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(
    ("attend", "dtype", "d_head"),
    [
        case(attend, dtype, d_head)
        for attend, dtypes in DTYPES.items()
        for dtype in dtypes
        for d_head in HEAD_DIMS[attend]
    ],
)
def test_head_dims(attend: type, dtype: torch.dtype, d_head: int, causal: bool) -> None:
    check(*make("cuda", dtype, batch=2, heads=2, n_queries=300, d_head=d_head), causal, attend=attend)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("d_head", [64, 128])
@pytest.mark.parametrize(("n_queries", "n_keys"), LENGTHS)
@each_dtype
def test_lengths(attend: type, dtype: torch.dtype, n_queries: int, n_keys: int, d_head: int, causal: bool) -> None:
    tensors = make("cuda", dtype, heads=2, n_queries=n_queries, n_keys=n_keys, d_head=d_head)
    check(*tensors, causal, attend=attend)


@pytest.mark.parametrize("kv_heads", [1, 2, 4])
@each_kernel
def test_grouped_heads(attend: type, kv_heads: int) -> None:
    tensors = make("cuda", torch.bfloat16, batch=2, heads=8, kv_heads=kv_heads, n_queries=200, d_head=64)
    check(*tensors, True, attend=attend)


@each_dtype
def test_large_scores(attend: type, dtype: torch.dtype) -> None:
    q, k, v, do = make("cuda", dtype, n_queries=200, d_head=64)
    check(30 * q, 30 * k, v, do, True, scale=1.0, attend=attend)


@each_kernel
def test_rows_that_see_no_key(attend: type) -> None:
    tensors = make("cuda", torch.bfloat16, n_queries=300, n_keys=70, d_head=64)
    o, lse, dq, *_ = check(*tensors, True, attend=attend)
    assert (o[:, :, :230] == 0).all()
    assert (lse[:, :, :230] == float("-inf")).all()
    assert (dq[:, :, :230] == 0).all()


@pytest.mark.parametrize("d_head", [64, 128])
@pytest.mark.parametrize(
    ("attend", "options"), [case(FlashAttention, ()), case(HopperFlashAttention, (True,))]
)  # of Hopper's, many programs add to each dq, so that an order left to chance would show
def test_the_same_bits_every_run(attend: type, options: tuple[bool, ...], d_head: int) -> None:
    tensors = make("cuda", torch.bfloat16, batch=2, heads=8, kv_heads=2, n_queries=3000, d_head=d_head)
    first = results_of(attend, *tensors, True, None, *options)
    for _ in range(3):
        for a, b in zip(first, results_of(attend, *tensors, True, None, *options), strict=True):
            assert torch.equal(a, b)


@pytest.mark.parametrize("kv_heads", [1, 2, 4])
@pytest.mark.parametrize(
    ("attend", "d_head"), [case(attend, d_head) for attend in DTYPES for d_head in HEAD_DIMS[attend]]
)
def test_gradients_are_written_into_slices(attend: type, d_head: int, kv_heads: int) -> None:
    """Of a length that no tile divides, at head dims that fill a tile and that do not."""
    for dtype in DTYPES[attend]:
        check_slices(*SLICED[attend], "cuda", dtype, kv_heads=kv_heads, seq_len=333, d_head=d_head)


@each_kernel
def test_the_current_device_need_not_be_the_tensors(attend: type) -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two devices")
    check(*make("cuda:1", torch.bfloat16, n_queries=100, d_head=64), True, attend=attend)


@each_dtype
def test_strides(attend: type, dtype: torch.dtype) -> None:
    layouts = [strided(x) for x in make("cuda", dtype, batch=2, heads=3, n_queries=150, d_head=64)]
    for turn in range(4):
        check(*(layout[(turn + i) % 4] for i, layout in enumerate(layouts)), True, attend=attend)


@each_kernel
def test_operators_pass_opcheck(attend: type, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    module, options = (flash, (True, False)) if attend is FlashAttention else (hopper, (True,))
    tensors = make("cuda", torch.bfloat16, heads=2, n_queries=70, d_head=64)
    q, k, v, do = (strided(x)[i % 4] for i, x in enumerate(tensors))
    torch.library.opcheck(module.forward_op, (q, k, v, True, 0.25))
    o, lse = module.forward_op(q, k, v, True, 0.25)
    torch.library.opcheck(module.backward_op, (q, k, v, o, lse, do, True, 0.25, *options))
    into = [torch.empty_like(x) for x in (q, k, v)]
    last = options if module is hopper else ()
    torch.library.opcheck(module.backward_into_op, (q, k, v, o, lse, do, *into, True, 0.25, *last))


@pytest.mark.parametrize("how", [{"dynamic": True}, {"mode": "reduce-overhead"}], ids=str)
@pytest.mark.parametrize(("attend", "options"), [case(FlashAttention, ()), case(HopperFlashAttention, (None, True))])
def test_compiles_without_graph_breaks(
    attend: type, options: tuple[object, ...], how: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last mode replays CUDA graphs from the third call of a shape on."""
    monkeypatch.undo()  # the compiler makes tensors, too
    torch.compiler.reset()

    def plain(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attend.apply(2 * q, k, v, True, *options) + 1

    compiled = torch.compile(plain, fullgraph=True, **how)
    for n_queries in (70, 130):
        q, k, v, do = make("cuda", torch.bfloat16, heads=4, kv_heads=2, n_queries=n_queries, d_head=64)
        for inputs, gradient in (((q, k, v), do), ((q[:, 0], k[:, 0], v[:, 0]), do[:, 0])):
            leaves = [x.detach().requires_grad_() for x in inputs]
            expected = plain(*leaves)
            expected_gradients = torch.autograd.grad(expected, leaves, gradient)
            for _ in range(4):
                torch.compiler.cudagraph_mark_step_begin()
                o = compiled(*leaves)
                assert torch.equal(o, expected)
                for a, b in zip(torch.autograd.grad(o, leaves, gradient), expected_gradients, strict=True):
                    assert torch.equal(a, b)
