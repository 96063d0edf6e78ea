"""What needs no GPU: refusals with a pointer to what takes the request, layouts, shapes, the plan's arithmetic."""

import pytest
import torch
from torch import Tensor

from cs336_systems.attention.hopper import HopperFlashAttention, hopper_attention
from cs336_systems.attention.hopper.function import backward_op, forward_op
from cs336_systems.attention.hopper.launch import (
    L2_BUDGET_BYTES,
    copyable,
    descriptor,
    empty_result,
    has_copyable_strides,
    section_heads,
)
from cs336_systems.attention.hopper.schedules import BACKWARD, FORWARD, MAX_REGISTERS_WITH, padded_head_dim
from cs336_systems.attention.shapes import hopper_limits
from tests.attention.flash.oracle import make


def qkv(dtype: torch.dtype = torch.bfloat16, d_head: int = 64, device: str = "cpu") -> tuple[Tensor, Tensor, Tensor]:
    return tuple(torch.zeros(2, 4, 6, d_head, dtype=dtype, device=device) for _ in range(3))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_other_dtypes_are_refused(dtype: torch.dtype) -> None:
    with pytest.raises(ValueError, match=rf'inputs are {dtype}; impl="flash" takes them'):
        hopper_attention(*qkv(dtype), causal=True)


@pytest.mark.parametrize("d_head", [8, 20, 100, 136, 256])
def test_other_head_dims_are_refused(d_head: int) -> None:
    with pytest.raises(ValueError, match=rf'16 to 128 in steps of 8, got {d_head}; impl="flash"'):
        hopper_attention(*qkv(d_head=d_head), causal=True)


def test_cpu_tensors_are_refused() -> None:
    with pytest.raises(ValueError, match=r"compute capability 9\.0, the inputs are on cpu"):
        HopperFlashAttention.apply(*qkv())


@pytest.mark.parametrize("capability", [(8, 0), (9, 0), (10, 0)])
def test_other_gpus_are_refused(capability: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    class OnAGpu:
        dtype, shape, device = torch.bfloat16, (1, 1, 1, 64), torch.device("cuda", 0)

    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    reason = hopper_limits(OnAGpu())
    if capability == (9, 0):
        assert reason is None
    else:
        assert reason is not None
        assert f"this one has {capability[0]}.{capability[1]}" in reason
        assert 'impl="flash"' in reason


def test_shapes_that_do_not_fit_together_are_refused() -> None:
    q, k, v = qkv()
    with pytest.raises(ValueError, match="k and v must have the same length"):
        hopper_attention(q, k, v[:, :, :3], causal=True)


@pytest.mark.parametrize("scale", [0.0, -1.0, float("inf"), float("nan")])
def test_scales_that_are_refused(scale: float) -> None:
    with pytest.raises(ValueError, match="scale must be finite and positive"):
        hopper_attention(*qkv(), causal=False, scale=scale)


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


def test_results_are_laid_out_like_inputs_that_the_copy_engine_can_read() -> None:
    q = torch.zeros(2, 5, 3, 64, dtype=torch.bfloat16).transpose(1, 2)
    assert empty_result(q).stride() == q.stride()
    assert empty_result(q.mT.contiguous().mT).is_contiguous()


def test_descriptors_give_dimensions_of_one_an_aligned_stride() -> None:
    x = torch.zeros(320, dtype=torch.bfloat16).as_strided((1, 1, 5, 64), (3, 7, 64, 1))
    assert descriptor(x, (1, 1, 64, 64)).strides == [16, 16, 64, 1]


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


def test_a_section_is_at_least_one_head_and_at_most_all() -> None:
    assert section_heads(2 * L2_BUDGET_BYTES, 16) == 1
    assert section_heads(L2_BUDGET_BYTES // 4, 16) == 4
    assert section_heads(1, 16) == 16


def test_registers_fit_the_multiprocessor() -> None:
    for block_d, schedule in FORWARD.items():
        assert padded_head_dim(block_d) == block_d
        warps = 4 * (schedule.consumers + 1)
        assert warps * 32 * MAX_REGISTERS_WITH[schedule.consumers] <= 65_536
        producer = 24 if schedule.consumers == 2 else 32
        moved = 128 * (schedule.consumers * schedule.worker_registers + producer)
        assert moved <= warps * 32 * MAX_REGISTERS_WITH[schedule.consumers]
    assert set(BACKWARD) == set(FORWARD)
