"""Packed documents on Hopper: against the oracle, and what lies wholly outside a document is not looked at.

Each check runs in a process of its own for a limited time: producer and consumers that disagree on a tile wait for each
other for ever.
"""

import os
import random
import sys
from collections.abc import Callable
from multiprocessing import get_context

import pytest
import torch
from torch import Tensor

from cs336_systems.attention.hopper.backward import launch_backward
from cs336_systems.attention.hopper.forward import launch_forward
from cs336_systems.attention.hopper.function import HopperFlashAttention
from cs336_systems.attention.hopper.schedules import BackwardSchedule, ForwardSchedule
from tests.attention.error_budget import Results, compare, make, results_of
from tests.attention.test_kernels_gpu import ON_HOPPER
from tests.attention.test_packed import starts_of

pytestmark = [pytest.mark.gpu, ON_HOPPER]
SCHEDULES = [
    (None, None),
    (ForwardSchedule(64, 2, 3, take_turns=True), BackwardSchedule(2)),
    (ForwardSchedule(128, 3, 2, take_turns=True), BackwardSchedule(3, late_dq=True)),
]
LIMIT_S = 180


def checked(check: Callable[..., None], *arguments: object) -> None:
    """Check, and end at once: one process aborted in a C++ thread after its last check, as Python ended."""
    check(*arguments)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def in_time(check: Callable[..., None], *arguments: object) -> None:
    process = get_context("spawn").Process(target=checked, args=(check, *arguments))
    process.start()
    process.join(LIMIT_S)
    if process.is_alive():
        process.kill()
        process.join()
        pytest.fail(f"{check.__name__} {arguments} still runs after {LIMIT_S} s")
    assert process.exitcode == 0, f"{check.__name__} {arguments} failed: see above"


def documents(choose: random.Random, length: int) -> list[int]:
    found: list[int] = []
    while (left := length - sum(found)) > 0:
        found.append(min(left, choose.choice([1, 3, 37, 64, 100, 128, 192, 300, 700])))
    return found


def random_documents(part: int, d_head: int) -> None:
    choose = random.Random(part)
    for _ in range(12):
        length, kv_heads, group = choose.randint(1, 1100), choose.choice([1, 2, 8]), choose.choice([1, 2, 7])
        forward, backward = choose.choice(SCHEDULES if d_head == 64 else SCHEDULES[:1])
        ordered, batch = choose.random() < 0.5, choose.randint(1, 3)
        lengths = [documents(choose, length) for _ in range(batch)]
        n_queries = choose.choice([length, choose.randint(1, length)])  # the last ones
        print(part, d_head, kv_heads, group, ordered, n_queries, lengths, forward, backward, file=sys.stderr)
        shape = {"batch": batch, "heads": kv_heads * group, "kv_heads": kv_heads}
        q, k, v, do = make("cuda", torch.bfloat16, **shape, n_queries=n_queries, n_keys=length, d_head=d_head)
        starts = torch.stack([starts_of(one) for one in lengths])[:, -n_queries:].contiguous().cuda()
        o, lse = launch_forward(q, k, v, True, 0.125, forward, starts)
        gradients = [torch.full_like(x, torch.nan) for x in (q, k, v)]
        launch_backward(q, k, v, o, lse, do, *gradients, True, 0.125, ordered, backward, starts)
        torch.cuda.synchronize()
        compare(Results(o, lse, *gradients), q, k, v, do, True, 0.125, starts)


@pytest.mark.parametrize("d_head", [64, 128])
@pytest.mark.parametrize("part", range(4))
def test_random_documents(part: int, d_head: int) -> None:
    in_time(random_documents, part, d_head)


def one_document(d_head: int) -> None:
    """A sequence of one document has the bits of a sequence that is not packed, in order."""
    q, k, v, do = make("cuda", torch.bfloat16, batch=2, heads=16, n_queries=1500, d_head=d_head)
    starts = torch.zeros(2, 1500, dtype=torch.int32, device="cuda")
    alone = results_of(HopperFlashAttention, q, k, v, do, True, None, True)
    for ours, plain in zip(with_starts(q, k, v, do, starts), alone, strict=True):
        assert torch.equal(ours, plain)


def with_starts(q: Tensor, k: Tensor, v: Tensor, do: Tensor, starts: Tensor) -> Results:
    return results_of(HopperFlashAttention, q, k, v, do, True, None, True, starts)  # type: ignore[arg-type]


def what_is_skipped(d_head: int) -> None:
    """NaN in a document of 512 reaches none from 768 on: no tile of these holds any of it, forward or backward."""
    q, k, v, do = make("cuda", torch.bfloat16, heads=8, n_queries=2048, d_head=d_head)
    starts = starts_of([512] * 4)[None].cuda()
    expected = with_starts(q, k, v, do, starts)
    for x in (q, k, v, do):
        x[:, :, :512] = torch.nan
    got = with_starts(q, k, v, do, starts)
    for ours, theirs in zip(got, expected, strict=True):
        assert ours[:, :, :384].isnan().any()
        assert torch.equal(ours[:, :, 768:], theirs[:, :, 768:])


@pytest.mark.parametrize("check", [one_document, what_is_skipped])
@pytest.mark.parametrize("d_head", [64, 128])
def test_one_document_is_a_sequence_and_others_are_skipped(check: Callable[[int], None], d_head: int) -> None:
    in_time(check, d_head)
