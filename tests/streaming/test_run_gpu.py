"""Streams, events and pinned memory: random plans on a GPU give the bits of the uncapped step, and caps hold."""

from dataclasses import replace
from itertools import permutations
from typing import Any

import pytest
import torch
from torch import Tensor

from cs336_systems.blocks import block_ops, block_products
from cs336_systems.config import ModelConfig
from cs336_systems.distributed.messages import CopiedMessages, GroupMessages, Mailbox, ring_messages
from cs336_systems.streaming.build import build
from cs336_systems.streaming.fence import GIB, Fence
from cs336_systems.streaming.plan import Plan
from cs336_systems.streaming.run import LayerAdamW, StreamedStep
from cs336_systems.streaming.schedule import Schedule
from tests.distributed.checks import on_gpus, on_ranks
from tests.distributed.test_messages import check_values, check_who_waits_in_vain_ends
from tests.streaming.plans import CHUNK, random_plan, random_ring, resident, roomy

pytestmark = pytest.mark.gpu

SCALE = 64
"""Of a random plan's tokens: kernels and copies that last long enough to overlap, and keys in several tiles."""


def on_gpu(plan: Plan) -> Plan:
    """The plan of a model whose heads the kernels take, on sequences so many times as long."""
    config = ModelConfig(
        "gpu", 512, 1024, plan.work.config.n_layers, 8, vocab_size=1000, n_kv_heads=4, qkv_bias=True,
        context_length=plan.work.context_length * SCALE,
    )  # fmt: skip
    work = replace(plan.work, config=config, context_length=config.context_length, chunk=CHUNK * SCALE)
    return replace(plan, work=work)


def trained(
    plan: Plan, schedule: Schedule, attention: str, n: int = 5, messages: GroupMessages | None = None
) -> dict[str, Tensor]:
    ops = block_ops("fused", attention, deterministic=True)
    how: dict[str, Any] = {"optimizer": LayerAdamW(lr=0.01), "max_norm": 0.1, "messages": messages}
    how["products"] = block_products("fused", plan.work.recipe)
    step = StreamedStep(plan, schedule, ops, torch.device("cuda", torch.cuda.current_device()), **how)
    torch.manual_seed(0)
    step.reset_parameters()
    shape, generator = (2, plan.n_sequences, plan.work.context_length), torch.Generator().manual_seed(1)
    losses = [step(*torch.randint(1000, shape, generator=generator, device="cpu")) for _ in range(n)]
    weights = {name: weight.to("cpu", copy=True) for name, weight in step.model().state_dict().items()}
    return {"losses": torch.stack(losses).cpu(), **weights}


@pytest.mark.parametrize("attention", ["flash", "hopper"])
@pytest.mark.parametrize("seed", range(12))
def test_every_plan_gives_the_same_bits(seed, attention):
    plan = on_gpu(random_plan(seed)[0])
    plain = roomy(plan)
    expected = trained(plain, resident(plain), attention)
    got = trained(plan, build(plan), attention)
    assert expected["losses"].isfinite().all()
    assert [name for name, tensor in expected.items() if not torch.equal(got[name], tensor)] == []


@pytest.mark.parametrize("name", ["cuda", "cuda:0"])
def test_a_cap_on_the_device_holds(name, device_to_itself):
    device = torch.device(name)
    fence = Fence(device, 4 * GIB, 2**40)
    with pytest.raises(torch.cuda.OutOfMemoryError):
        torch.empty(4 * GIB, dtype=torch.uint8, device=device)
    held = torch.empty(2 * GIB, dtype=torch.uint8, device=device)
    assert 2 * GIB < fence.check().device <= 4 * GIB
    del held
    with pytest.raises(RuntimeError, match="GiB of the host were in use, the cap is 0.00 GiB"):
        Fence(device, 4 * GIB, 1).check()


def in_a_ring(rank, seeds):
    """Whether a ring has the bits of one rank, under random plans of each, by copies and by NCCL's messages."""
    by_copies = ring_messages(rank)
    assert isinstance(by_copies, CopiedMessages), by_copies.how
    in_pieces, by_nccl = CopiedMessages(rank, mailbox=Mailbox(100_000)), GroupMessages(rank)
    by_nccl.connect(permutations(range(rank.world_size), 2))
    for seed in seeds:
        plans = [on_gpu(plan) for plan, _ in random_ring(seed, rank.world_size)]
        plan = plans[rank.rank]
        expected = trained(plain := roomy(plan), resident(plain), "flash")
        for messages in (by_copies, in_pieces, by_nccl):
            got = trained(plan, build(plan), "flash", messages=messages)
            assert got.keys() - {"losses"}
            differing = [name for name, tensor in got.items() if not torch.equal(expected[name], tensor)]
            assert differing == [], (seed, messages.how)


@pytest.mark.parametrize(("world_size", "device"), [on_gpus(2, copies=True)])
def test_a_ring_has_the_bits_of_one_gpu(world_size, device):
    on_ranks(in_a_ring, world_size, range(4), device=device)


@pytest.mark.parametrize(("world_size", "device"), [on_gpus(2, copies=True)])
def test_messages_by_copies_arrive_whole_and_in_order(world_size, device):
    on_ranks(check_values, world_size, 60, device=device)


@pytest.mark.parametrize(("world_size", "device"), [on_gpus(2, copies=True)])
def test_who_waits_for_a_message_in_vain_ends(world_size, device, tmp_path):
    check_who_waits_in_vain_ends(tmp_path, device)
