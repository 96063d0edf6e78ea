"""Items in slots and places: as large as the plan takes them to be, and refused where they do not fit."""

import re
from dataclasses import replace

import pytest
import torch

from cs336_systems.config import PRECISIONS, resolve_size
from cs336_systems.costs.streaming import StreamedWork
from cs336_systems.streaming.lanes import PretendedLink
from cs336_systems.streaming.memory import Memory, MemoryMap
from cs336_systems.streaming.schedule import Item, Kind, Operation, Place, Room, Schedule, Slot
from tests.blocks.cases import QWEN

LONG = StreamedWork(QWEN, 32, 8, PRECISIONS["fp32"], (("exp_avg", 4), ("exp_avg_sq", 4)))


@pytest.mark.parametrize("config", [QWEN, resolve_size("llama3-8b")], ids=lambda config: config.name)
@pytest.mark.parametrize(("length", "chunk"), [(8, 16), (16, 16), (32, 8)])
def test_bytes_are_those_of_the_plan(config, length, chunk):
    work = StreamedWork(config, length, chunk)
    tensors = MemoryMap.of(work)
    assert {what: tensors.n_bytes(what) for what in tensors.parts} == {
        what: work.item_bytes(what) for what in tensors.parts
    }


def memory(slot_bytes: int, place_bytes: int) -> Memory:
    tensors = MemoryMap.of(LONG)
    rings = {"context": Room(4, slot_bytes), "weights": Room(2, tensors.n_bytes("weights"))}
    return Memory(Schedule((), rings, {"input": Room(3, place_bytes)}, {}, {}), tensors, torch.device("cpu"))


def test_neighbouring_slots_are_one_tensor():
    found = memory(LONG.item_bytes("context"), LONG.item_bytes("input"))
    run = found.run_of("context", "context", 1, 3)
    assert run.shape == (24, 2, QWEN.kv_heads, QWEN.d_head)
    for i in range(3):
        found.tensors(Slot("context", 1 + i), "context")["keys_values"].fill_(i)
    assert run.flatten(1).unique(dim=1).squeeze(1).tolist() == [i for i in range(3) for _ in range(8)]
    assert found.tensors(Slot("weights", 1), "weights")["qkv_bias"].shape == (QWEN.d_model + 2 * QWEN.d_kv,)


def test_what_does_not_fit_is_refused():
    small = memory(LONG.item_bytes("context") - 8, LONG.item_bytes("input") - 8)
    with pytest.raises(ValueError, match=r"context has \d+ bytes, Slot\(ring='context', number=2\) \d+"):
        small.tensors(Slot("context", 2), "context")
    with pytest.raises(ValueError, match=r"input has \d+ bytes, Place\(region='input', number=0, where='host'\) \d+"):
        small.place_tensors(Place("input", 0), "input")
    with pytest.raises(ValueError, match="not one tensor"):
        small.run_of("context", "context", 0, 2)


def test_operations_that_wait_in_a_circle_are_named():
    item, slot, place = Item("input"), Slot("input", 0), Place("input", 0)
    fetch = Operation(Kind.FETCH, 0, 0, 0, (), (), (1,), place)
    embed = Operation(Kind.EMBED, 0, 0, 0, (), (), (0,))
    schedule = Schedule((fetch, embed), {}, {}, {item: slot}, {})
    with pytest.raises(RuntimeError, match=re.escape("[0, 1]")):
        PretendedLink().run(schedule, lambda _: None, lambda _: (torch.zeros(1), torch.zeros(1)))
    done = []
    ordered = replace(schedule, operations=(replace(fetch, waits=()), embed))
    PretendedLink().run(ordered, done.append, lambda _: (torch.ones(1), torch.zeros(1)))
    assert done == [embed]
