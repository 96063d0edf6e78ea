"""Random plans of small models, and a plan without caps as the plainest schedule there is."""

import random
from dataclasses import dataclass, fields, replace
from functools import cached_property

from cs336_systems.config import Lora, ModelConfig, Recipe
from cs336_systems.costs.kept import STORED
from cs336_systems.costs.streaming import MASTER_MOMENTS, MOMENTS, Share, StreamedWork
from cs336_systems.streaming.build import build
from cs336_systems.streaming.memory import MemoryMap
from cs336_systems.streaming.order import compute_order
from cs336_systems.streaming.plan import ORDERS, Keep, Plan
from cs336_systems.streaming.schedule import Held, Item, Operation, Room, Schedule, Slot
from cs336_systems.streaming.slots import TooFewSlotsError

CHUNK = 16
LORA = Lora(8, 12.0, ("qkv", "gate_up", "down"))
"""Of a rank whose rows the kernels of a GPU read where they lie."""


def random_plan(seed: int) -> tuple[Plan, Schedule]:
    """A plan with rings as small as they can be, or up to six slots larger; every third one trains adapters, every
    fourth one quantizes."""
    rng, lora = random.Random(seed), LORA if seed % 3 == 2 else None
    n_layers, group = rng.randint(1, 5), rng.choice((1, 1, 2, 3))
    config = ModelConfig("random", 16, 32, n_layers, 2, vocab_size=32, context_length=64, n_kv_heads=1)
    context_length = group * CHUNK if group > 1 else CHUNK // rng.choice((1, 2))
    moments = tuple(rng.choice((MOMENTS, MASTER_MOMENTS)).items())
    recipe = Recipe("e4m3") if seed % 4 == 3 else STORED
    work = StreamedWork(config, context_length, CHUNK, moments=moments, recipe=recipe, lora=lora)
    chunks, every = group * rng.randint(1, 4 // group), rng.choice((1, 1, 2, 3))
    every = every if work.restores else 1
    sources = chunks * sum(layer % every > 0 for layer in range(1, n_layers))  # x of these layers is restored

    def keep() -> Keep:
        attention = rng.choice((sources, chunks * n_layers, rng.randint(sources, chunks * n_layers)))
        return Keep(attention, rng.choice((0, attention, rng.randint(0, attention))) if every == 1 else 0)

    residents = {what: rng.randint(0, n_layers) for what in ("weights", "gradients", "moments") if rng.random() < 0.5}
    residents = {what: n for what, n in residents.items() if what in work.states}
    rings = ("weights", "gradients", "input", "attention", "products", *(("context",) if group > 1 else ()))
    slots = dict.fromkeys(rings, 1)
    slots |= {rng.choice(rings): rng.randint(1, 6) for _ in range(3)}
    order = rng.choice(ORDERS)
    how = {"keep_context": rng.random() < 0.6, "clipping": rng.random() < 0.5, "input_every": every, **residents}
    return fitted(Plan(work, chunks, rng.randint(1, 4), order, keep(), **how), slots)


def random_ring(seed: int, n_ranks: int, config: ModelConfig | None = None) -> list[tuple[Plan, Schedule]]:
    """A step that is cut as that of ``random_plan``, for ranks that keep and copy each what it likes."""
    like, _ = random_plan(seed)
    config = config or replace(like.work.config, n_layers=max(n_ranks, like.n_layers))
    common, found = random.Random(f"{seed} of all"), []
    first = common.randint(0, config.n_layers - n_ranks)
    lead = common.randrange(config.n_layers) if like.order == "interleaved" else 0
    for rank in range(n_ranks):
        rng = random.Random(f"{seed} of {rank}")
        work = replace(like.work, config=config, share=Share.dealt(config, rank, n_ranks, first))
        attention = rng.randint(0, like.chunks * len(work.layers))
        residents = {what: rng.randint(0, len(work.layers)) for what in work.states}
        how = {"keep_context": like.keep_context, "clipping": like.clipping, "lead": lead, **residents}
        keep = Keep(attention, rng.randint(0, attention))
        rings = ("weights", "gradients", "input", "attention", "products", *(("context",) if work.is_long else ()))
        slots = dict.fromkeys(rings, 1) | {rng.choice(rings): rng.randint(1, 6) for _ in range(3)}
        found.append(fitted(Plan(work, like.chunks, like.rounds, like.order, keep, **how), slots))
    return found


def fitted(plan: Plan, slots: dict[str, int]) -> tuple[Plan, Schedule]:
    """The plan with so many slots, and as many more as it needs."""
    plan = with_slots(plan, slots)
    while True:
        try:
            return plan, build(plan)
        except TooFewSlotsError as error:
            slots[str(error).partition(" ")[0]] += 1
            plan = with_slots(plan, slots)


@dataclass(frozen=True)
class SlottedPlan(Plan):
    """A plan some of whose rings have so many slots, and no room for what waits for backward."""

    own_slots: tuple[tuple[str, int], ...] = ()

    @cached_property
    def least_slots(self) -> dict[str, int]:
        least = Plan.least_slots.func(self)  # type: ignore[attr-defined]
        most = {"weights": self.n_layers - self.weights, "gradients": self.n_layers - self.gradients}
        return least | {ring: min(n, most.get(ring, n)) for ring, n in self.own_slots if ring in least}


def with_slots(plan: Plan, slots: dict[str, int]) -> Plan:
    """The plan with so many slots, as far as a ring can use them."""
    said = {field.name: getattr(plan, field.name) for field in fields(Plan)}
    return SlottedPlan(**said | {"ring_bytes": 0}, own_slots=tuple(slots.items()))


def roomy(plan: Plan) -> Plan:
    """A plan of the same chunks with all the memory it takes: nothing is copied and nothing recomputed."""
    pairs = plan.chunks * plan.work.config.n_layers
    return Plan(
        replace(plan.work, share=None),
        plan.chunks,
        plan.rounds,
        "sequential",
        Keep(pairs, pairs),
        clipping=plan.clipping,
    )


def resident(plan: Plan) -> Schedule:
    """The plan's tasks in their order, with every item in a slot of its own."""
    tasks, tensors = list(compute_order(plan)), MemoryMap.of(plan.work)
    items = sorted(
        {use.item for task in tasks for use in task.uses},
        key=lambda item: (item.what, item.layer, item.round, item.chunk),
    )
    slots: dict[Item, Slot] = {}
    counts: dict[str, int] = {}
    for item in items:
        slots[item] = Slot(item.what, counts.setdefault(item.what, 0))
        counts[item.what] += 1
    operations = tuple(
        Operation(
            task.kind,
            task.layer,
            task.round,
            task.chunk,
            tuple(Held(use.item, slots[use.item]) for use in task.uses if use.reads),
            tuple(Held(use.item, slots[use.item]) for use in task.uses if use.writes),
            (),
            level=task.level,
            accumulate=task.accumulate,
        )
        for task in tasks
    )
    rings = {what: Room(n, tensors.n_bytes(what)) for what, n in counts.items()}
    state = ("weights", *tensors.states)
    return Schedule(operations, rings, {}, {item: slot for item, slot in slots.items() if item.what in state}, {})
