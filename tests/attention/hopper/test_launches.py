"""What the launchers hand to the kernels, without one: where each tensor lies and how, and what is made only once."""

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor

from cs336_systems.attention.hopper import backward, forward, host
from cs336_systems.attention.hopper.function import backward_op
from cs336_systems.training.dry_run import _attention_sums
from tests.attention.error_budget import make
from tests.attention.hopper.unlaunched import Kernel, hopper_unlaunched
from tests.attention.slices import heads_of

STATS_BYTES = 2 * 6 * 256 * 16 * 2
"""Six heads in two batches, padded to 256 queries: 16 columns in bf16."""


@pytest.fixture(autouse=True)
def nothing_is_launched(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    with hopper_unlaunched(monkeypatch):
        yield


def where(x: Tensor) -> tuple[int, tuple[int, ...], tuple[int, ...]]:
    return x.data_ptr(), tuple(x.shape), x.stride()


def inputs(layout: Callable[[Tensor], Tensor] = lambda x: x) -> list[Tensor]:
    made = make("cpu", torch.bfloat16, batch=2, heads=6, kv_heads=3, n_queries=200, d_head=64)
    return [layout(x) for x in made]


def heads_inside_rows(x: Tensor) -> Tensor:
    return x.transpose(1, 2).contiguous().transpose(1, 2)


def slices(x: Tensor) -> Tensor:
    return torch.cat((x, x), dim=-1)[..., x.shape[-1] :]


@pytest.mark.parametrize(("layout", "ordered"), [(lambda x: x, False), (heads_inside_rows, True), (slices, False)])
def test_tensors_are_read_and_written_where_they_lie(
    layout: Callable[[Tensor], Tensor], ordered: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    q, k, v, do = inputs(layout)
    o, lse = forward.launch_forward(q, k, v, True, 0.125)
    arguments, _ = Kernel.launched["hopper_forward_kernel"]
    assert arguments[:4] == tuple(map(where, (q, k, v, o)))
    assert arguments[4] == lse.data_ptr()
    assert o.stride() == host.empty_result(q).stride()
    assert (lse.shape, lse.dtype) == (q.shape[:3], torch.float32)
    zeros: list[Tensor] = []
    monkeypatch.setattr(torch, "zeros", lambda *a, zeros_=torch.zeros, **k: zeros.append(zeros_(*a, **k)) or zeros[-1])
    gradients = backward_op(q, k, v, o, lse, do, True, 0.125, ordered)
    before, _ = Kernel.launched["hopper_preprocess_kernel"]
    arguments, constants = Kernel.launched["hopper_backward_kernel"]
    after, _ = Kernel.launched["hopper_postprocess_kernel"]
    assert before[:3] == (o.data_ptr(), do.data_ptr(), lse.data_ptr())
    assert before[5:15] == (*o.stride()[:3], *do.stride()[:3], 6, 200, 256, 0.125)
    stats, sums = before[3:5]
    assert sums == stats + STATS_BYTES
    assert arguments[:4] == tuple(map(where, (q, k, v, do)))
    assert arguments[4] == (stats, (12 * 256, 16), (16, 1))
    assert arguments[5] == (sums, (12 * 256 * 64 // 32, 32), (32, 1))
    dq, dk, dv = gradients
    assert arguments[6:8] == (where(dk), where(dv))
    assert after[:16] == (sums, dq.data_ptr(), *[None] * 5, *(step for x in gradients for step in x.stride()[:3]))
    turns, counter = arguments[8:10]
    assert constants["ORDERED"] == constants["launch_cooperative_grid"] == ordered
    assert [x.numel() for x in zeros] == [2 * 12 * 256 // 64] * ordered
    assert turns == (zeros[0].data_ptr() if ordered else counter)
    assert [x.stride() for x in gradients] == [host.empty_result(x).stride() for x in (q, k, v)]


@pytest.mark.parametrize("d_head", [24, 64, 128])
def test_the_memory_between_kernels_is_what_a_dry_run_counts(d_head: int, monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v, do = make("cpu", torch.bfloat16, batch=2, heads=6, kv_heads=3, n_queries=200, d_head=d_head)
    o, lse = forward.launch_forward(q, k, v, True, 0.125)
    into = [torch.empty_like(x) for x in (q, k, v)]
    made: list[Tensor] = []
    monkeypatch.setattr(torch, "empty", lambda *a, empty=torch.empty, **k: made.append(empty(*a, **k)) or made[-1])
    backward.launch_backward(q, k, v, o, lse, do, *into, True, 0.125)
    assert sum(x.nbytes for x in made) == _attention_sums((q,), None)


def misaligned(x: Tensor) -> Tensor:
    return torch.zeros(x.numel() + 1, dtype=x.dtype)[1:].as_strided(x.shape, x.stride())


def columns_apart(x: Tensor) -> Tensor:
    return x.mT.contiguous().mT


def rows_of_odd_length(x: Tensor) -> Tensor:
    return torch.cat((x, x[..., :1]), dim=-1)[..., :-1]


@pytest.mark.parametrize("place", range(6))
@pytest.mark.parametrize("layout", [misaligned, columns_apart, rows_of_odd_length])
def test_what_cannot_be_read_where_it_lies_is_copied(layout: Callable[[Tensor], Tensor], place: int) -> None:
    q, k, v, do = (heads_inside_rows(x) for x in inputs())
    tensors = [q, k, v, torch.zeros_like(q), torch.zeros(q.shape[:3]), do]
    moved = tensors[place] = layout(tensors[place])
    expected = tensors[place].stride() if layout is misaligned else host.copyable(moved).stride()
    gradients = backward_op(*tensors, True, 0.125, False)
    before, _ = Kernel.launched["hopper_preprocess_kernel"]
    arguments, _ = Kernel.launched["hopper_backward_kernel"]
    at = [*(address for address, *_ in arguments[:3]), *before[:1], before[2], before[1]]
    assert [x.data_ptr() == address for x, address in zip(tensors, at, strict=True)] == [i != place for i in range(6)]
    assert all(address % 16 == 0 for address in at)
    if place < 3:
        assert arguments[place][2] == gradients[place].stride() == expected
        o, _ = forward.launch_forward(*tensors[:3], True, 0.125)
        described, _ = Kernel.launched["hopper_forward_kernel"]
        assert described[place][0] != moved.data_ptr()
        assert described[place][2] == expected
        assert o.stride() == gradients[0].stride()


def test_gradients_are_written_into_slices_where_they_lie() -> None:
    q, k, v = heads_of(torch.zeros(2, 200, 12 * 64, dtype=torch.bfloat16), 6, 3)
    slices = heads_of(torch.zeros(2, 200, 12 * 64, dtype=torch.bfloat16), 6, 3)
    o, lse = forward.launch_forward(q, k, v, True, 0.125)
    assert o.transpose(1, 2).is_contiguous()
    backward.launch_backward(q, k, v, o, lse, o, *slices, True, 0.125)
    arguments, _ = Kernel.launched["hopper_backward_kernel"]
    after, _ = Kernel.launched["hopper_postprocess_kernel"]
    dq, dk, dv = slices
    assert arguments[6:8] == (where(dk), where(dv))
    assert after[1:16] == (dq.data_ptr(), *[None] * 5, *(200 * 768, 64, 768) * 3)


@pytest.mark.parametrize("noted", [False, True])
def test_gradients_are_rotated_back_where_they_lie(noted: bool) -> None:
    q, k, v = heads_of(torch.zeros(2, 200, 12 * 64, dtype=torch.bfloat16), 6, 3)
    dq, dk, dv = heads_of(torch.zeros(2, 200, 12 * 64, dtype=torch.bfloat16), 6, 3)
    o, lse = forward.launch_forward(q, k, v, True, 0.125)
    cos, sin, maxima = torch.zeros(200, 32), torch.zeros(200, 32), torch.zeros(3)
    raised = {"absmax": maxima[1]} if noted else {}
    backward.launch_backward(q, k, v, o, lse, o, dq, dk, dv, True, 0.125, rotation=(cos, sin), **raised)
    after, _ = Kernel.launched["hopper_postprocess_kernel"]
    absmax = raised["absmax"].data_ptr() if noted else None
    assert after[1:7] == (*(x.data_ptr() for x in (dq, dk, dv, cos, sin)), absmax)
    assert after[16:19] == (6, 3, 12 if noted else 9)


@pytest.mark.parametrize("place", range(3))
@pytest.mark.parametrize("layout", [misaligned, columns_apart, rows_of_odd_length])
@pytest.mark.usefixtures("poisoned")
def test_what_cannot_be_written_where_it_lies_is_copied(layout: Callable[[Tensor], Tensor], place: int) -> None:
    """Into memory of its own, which nobody writes here: it stays NaN."""
    q, k, v, do = inputs()
    o, lse = torch.zeros_like(q), torch.zeros(q.shape[:3])
    into = [torch.zeros_like(x) for x in (q, k, v)]
    into[place] = layout(into[place])
    backward.launch_backward(q, k, v, o, lse, do, *into, True, 0.125)
    arguments, _ = Kernel.launched["hopper_backward_kernel"]
    after, _ = Kernel.launched["hopper_postprocess_kernel"]
    at = [after[1], *(address for address, *_ in arguments[6:8])]
    assert [x.data_ptr() == address for x, address in zip(into, at, strict=True)] == [i != place for i in range(3)]
    assert all(address % 16 == 0 for address in at)
    assert [x.isnan().all().item() for x in into] == [i == place for i in range(3)]
    assert [x.isnan().any().item() for x in into] == [i == place for i in range(3)]


def test_a_second_call_prepares_nothing_and_another_form_does() -> None:
    q, k, v, do = inputs()

    def call(*tensors: Tensor, scale: float = 0.125, causal: bool = True) -> int:
        before = Kernel.made
        q, k, v, do = tensors
        o, lse = forward.launch_forward(q, k, v, causal, scale)
        backward_op(q, k, v, o, lse, do, causal, scale, False)
        return Kernel.made - before

    assert call(q, k, v, do) == 4
    assert call(q, k, v, do) == call(*(x.clone() for x in (q, k, v, do))) == 0
    assert call(q, k, v, do, scale=0.5) == call(q, k, v, do, causal=False) == 4
    assert call(*(x.half() for x in (q, k, v, do))) == call(*(x[:, :, :100] for x in (q, k, v, do))) == 4
    assert call(q, heads_inside_rows(k), v, do) == call(q, k, v[:, :, :, :64].clone(), do) + 4
