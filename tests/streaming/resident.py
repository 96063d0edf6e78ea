"""A plan without caps as the plainest schedule there is: every item in a slot of its own, nothing copied."""

from cs336_systems.streaming.layout import Layout
from cs336_systems.streaming.order import compute_order
from cs336_systems.streaming.plan import Plan
from cs336_systems.streaming.schedule import Held, Item, Operation, Ring, Schedule, Slot


def resident(plan: Plan, layout: Layout) -> Schedule:
    """A ring for each kind of item, in the order of layers, rounds and chunks."""
    steps = list(compute_order(plan))
    items = sorted(
        {use.item for step in steps for use in step.uses},
        key=lambda item: (item.what, item.layer, item.round, item.chunk),
    )
    slots: dict[Item, Slot] = {}
    counts: dict[str, int] = {}
    for item in items:
        slots[item] = Slot(item.what, counts.setdefault(item.what, 0))
        counts[item.what] += 1
    operations = tuple(
        Operation(
            step.kind,
            step.layer,
            step.round,
            step.chunk,
            tuple(Held(use.item, slots[use.item]) for use in step.uses if use.reads),
            tuple(Held(use.item, slots[use.item]) for use in step.uses if use.writes),
            (),
            level=step.level,
            accumulate=step.accumulate,
        )
        for step in steps
    )
    rings = {what: Ring(n, layout.n_bytes(what)) for what, n in counts.items()}
    state = ("weights", *layout.states)
    return Schedule(operations, rings, {}, {item: slot for item, slot in slots.items() if item.what in state}, {})
