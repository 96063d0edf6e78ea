"""What ``test_kernels_gpu.py`` does not ask of the Hopper kernels: random shapes, schedules, streams."""

import random
from functools import partial

import pytest
import torch

from cs336_systems.attention.hopper.backward import launch_backward
from cs336_systems.attention.hopper.forward import launch_forward
from cs336_systems.attention.hopper.function import (
    HopperFlashAttention,
    backward_into_op,
    backward_op,
    forward_op,
)
from cs336_systems.attention.hopper.schedules import FORWARD, SHORT_FORWARD, BackwardSchedule, ForwardSchedule
from cs336_systems.kernels.rotary import rotate_
from tests.attention import error_budget
from tests.attention.error_budget import Results, compare, make, results_of
from tests.attention.slices import heads_of
from tests.attention.test_kernels_gpu import ON_HOPPER

pytestmark = [pytest.mark.gpu, ON_HOPPER, pytest.mark.usefixtures("poisoned")]
DTYPES = [torch.bfloat16, torch.float16]
FORWARD_SCHEDULES = [
    *FORWARD.values(),
    *SHORT_FORWARD.values(),
    ForwardSchedule(64, 3, 2),
    ForwardSchedule(128, 3, 3),
    ForwardSchedule(64, 2, 3, take_turns=True),
    ForwardSchedule(128, 3, 2, take_turns=True),
]
BACKWARD_SCHEDULES = [
    BackwardSchedule(2),
    BackwardSchedule(3, late_dq=True),
    BackwardSchedule(3, left_in_registers=True),
    BackwardSchedule(3, late_dq=True, left_in_registers=True, key_stages=2, statistics_last=True),
]


hopper = partial(results_of, HopperFlashAttention)
check = partial(error_budget.check, attend=HopperFlashAttention)


@pytest.mark.parametrize("part", range(8))
def test_random_shapes(part: int) -> None:
    """200 in all: enough heads for several rounds of the persistent grid among them."""
    choose = random.Random(part)
    for _ in range(25):
        kv_heads, group = choose.choice([1, 2, 3, 8]), choose.choice([1, 1, 2, 4])
        n_queries = choose.randint(1, 700)
        n_keys = n_queries if choose.random() < 0.5 else choose.randint(1, 700)
        causal, dtype, d_head = choose.random() < 0.7, choose.choice(DTYPES), choose.choice([64, 128, 128, 72])
        sizes = {"batch": choose.randint(1, 4), "heads": kv_heads * group, "kv_heads": kv_heads}
        print(sizes, n_queries, n_keys, d_head, causal, dtype)
        check(*make("cuda", dtype, **sizes, n_queries=n_queries, n_keys=n_keys, d_head=d_head), causal)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("schedule", FORWARD_SCHEDULES, ids=str)
def test_forward_schedules(schedule: ForwardSchedule, causal: bool) -> None:
    q, k, v, do = make("cuda", torch.bfloat16, batch=3, heads=48, kv_heads=24, n_queries=500, n_keys=650, d_head=64)
    o, lse = launch_forward(q, k, v, causal, 0.125, schedule)
    gradients = backward_op(q, k, v, o, lse, do, causal, 0.125, False)
    compare(Results(o, lse, *gradients), q, k, v, do, causal, 0.125)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("schedule", BACKWARD_SCHEDULES, ids=str)
def test_backward_schedules(schedule: BackwardSchedule, causal: bool) -> None:
    q, k, v, do = make("cuda", torch.bfloat16, batch=3, heads=48, kv_heads=24, n_queries=500, n_keys=650, d_head=64)
    o, lse = launch_forward(q, k, v, causal, 0.125)
    gradients = [torch.empty_like(x) for x in (q, k, v)]
    launch_backward(q, k, v, o, lse, do, *gradients, causal, 0.125, schedule=schedule)
    compare(Results(o, lse, *gradients), q, k, v, do, causal, 0.125)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("rise", [3.0, 20.0])
@pytest.mark.parametrize(("d_head", "length"), [(64, 1000), (64, 1100), (128, 1000)])
def test_scores_that_rise_from_one_key_tile_to_the_next(d_head: int, length: int, rise: float, causal: bool) -> None:
    """Forward takes tiles from the last to the first, and moves its maximum only if scores are far above it."""
    q, k, v, do = make("cuda", torch.bfloat16, heads=4, n_queries=length, d_head=d_head)
    q[..., 0] = d_head**0.5
    k[..., 0] = rise * torch.arange(9, 0, -1, device="cuda").repeat_interleave(128)[:length]
    check(q, k, v, do, causal)


@pytest.mark.parametrize("d_head", [64, 128])
def test_what_is_not_a_number_stays_in_its_head(d_head: int) -> None:
    """A program works on many heads, one after another."""
    q, k, v, do = make("cuda", torch.bfloat16, batch=2, heads=80, n_queries=300, d_head=d_head)
    v[:, 1::2] = float("nan")
    k[:, 3::4, 7] = float("inf")
    expected = hopper(q[:, ::2], k[:, ::2], v[:, ::2], do[:, ::2], True, None, True)
    for a, b in zip(expected, hopper(q, k, v, do, True, None, True), strict=True):
        assert torch.equal(a, b[:, ::2])
        assert not a.isnan().any()


def test_the_same_bits_on_two_streams_at_once() -> None:
    """Programs wait for each other there: were some of each kernel left without an SM, both would wait forever.

    All launches are queued before the first may run, so that kernels of both streams are ready at the same time. That
    makes the wait possible but does not force it: launched without the cooperative grid that rules it out, it passed.
    """
    tensors = make("cuda", torch.bfloat16, batch=2, heads=16, n_queries=1500, d_head=64)
    expected = hopper(*tensors, True, None, True)
    streams = [torch.cuda.Stream() for _ in range(2)]
    torch.cuda._sleep(200_000_000)  # clocks: a tenth of a second
    for stream in streams:
        stream.wait_stream(torch.cuda.current_stream())
    results = []
    for _ in range(20):
        for stream in streams:
            with torch.cuda.stream(stream):
                results.append(hopper(*tensors, True, None, True))
    torch.cuda.synchronize()
    for result in results:
        for a, b in zip(expected, result, strict=True):
            assert torch.equal(a, b)


def test_torch_can_ask_for_determinism() -> None:
    q, k, v, _ = make("cuda", torch.bfloat16, heads=2, n_queries=300, d_head=64)
    for asked in (True, False):
        torch.use_deterministic_algorithms(asked)
        assert HopperFlashAttention.apply(q.requires_grad_(), k, v).grad_fn.ordered == asked


def test_a_captured_graph_beside_other_launches() -> None:
    """The counter from which programs draw their work must not be one for both."""
    tensors = make("cuda", torch.bfloat16, batch=2, heads=80, n_queries=300, d_head=64)
    expected = hopper(*tensors, True, None, True)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = hopper(*tensors, True, None, True)
    beside = torch.cuda.Stream()
    for _ in range(5):
        for x in captured:
            x.fill_(float("nan"))
        beside.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(beside):
            graph.replay()
        eager = hopper(*tensors, True, None, True)
        torch.cuda.current_stream().wait_stream(beside)
        for a, b, c in zip(expected, captured, eager, strict=True):
            assert torch.equal(a, b)
            assert torch.equal(a, c)


@pytest.mark.parametrize("kv_heads", [1, 4])
@pytest.mark.parametrize("d_head", [80, 128])
def test_gradients_before_rotation_have_the_bits_of_two_kernels(d_head: int, kv_heads: int) -> None:
    heads, n = 4, 333
    qkv, into, expected = (
        torch.randn(2, n, (heads + 2 * kv_heads) * d_head, device="cuda", dtype=torch.bfloat16) for _ in range(3)
    )
    tensors = heads_of(qkv, heads, kv_heads)
    o, lse = forward_op(*tensors, True, 0.125)
    do = torch.randn_like(o)
    cos, sin = torch.rand(2, n, d_head // 2, device="cuda")
    maxima = torch.zeros(3, device="cuda")
    how = True, 0.125, True
    backward_into_op(*tensors, o, lse, do, *heads_of(expected, heads, kv_heads), *how)
    rotate_(expected, cos, sin, heads, kv_heads, inverse=True, absmax=maxima[0])
    backward_into_op(*tensors, o, lse, do, *heads_of(into, heads, kv_heads), *how, None, cos, sin, maxima[1])
    assert torch.equal(into, expected)
    assert maxima[0] == maxima[1] > 0
