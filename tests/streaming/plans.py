"""Random plans of small models."""

import random
from dataclasses import replace

from cs336_systems.config import ModelConfig
from cs336_systems.costs.streaming import LEVELS, MASTER_MOMENTS, MOMENTS, StreamedWork
from cs336_systems.streaming.build import build
from cs336_systems.streaming.plan import ORDERS, Plan
from cs336_systems.streaming.schedule import Schedule
from cs336_systems.streaming.slots import TooFewSlotsError

CHUNK = 16


def random_plan(seed: int) -> tuple[Plan, Schedule]:
    """With rings as small as they can be, or up to four slots larger."""
    rng = random.Random(seed)
    n_layers, group = rng.randint(1, 5), rng.choice((1, 1, 2, 3))
    config = ModelConfig("random", 16, 32, n_layers, 2, vocab_size=32, context_length=64, n_kv_heads=1)
    context_length = group * CHUNK if group > 1 else CHUNK // rng.choice((1, 2))
    work = StreamedWork(config, context_length, CHUNK, moments=tuple(rng.choice((MOMENTS, MASTER_MOMENTS)).items()))
    chunks = group * rng.randint(1, 4 // group)

    every = rng.choice((1, 1, 2, 3))
    known = LEVELS if every == 1 else LEVELS[:2]

    def levels() -> tuple[tuple[str, ...], ...]:
        level = rng.choice((*known, None))
        found = [[level or rng.choice(known) for _ in range(chunks)] for _ in range(n_layers)]
        for layer in range(n_layers - 1):
            if every > 1 and layer % every != every - 1:  # x of the next one is restored from it
                found[layer] = ["attention"] * chunks
        return tuple(map(tuple, found))

    state = [what for what in ("weights", "gradients", "moments") if rng.random() < 0.5]
    resident = tuple((what, rng.randint(0, n_layers)) for what in state)
    rings = ("weights", "gradients", "input", "attention", "products", *(("context",) if group > 1 else ()))
    slots = dict.fromkeys(rings, 1)
    slots |= {rng.choice(rings): rng.randint(1, 6) for _ in range(3)}
    order, edges = rng.choice(ORDERS), levels() if rng.random() < 0.3 else None
    keep_context, clipping = rng.random() < 0.6, rng.random() < 0.5
    rounds = rng.randint(1, 4)
    options = resident, edges, keep_context, every, clipping
    plan = Plan(work, chunks, rounds, order, levels(), tuple(slots.items()), *options)
    while True:
        try:
            return plan, build(plan)
        except TooFewSlotsError as error:
            slots[str(error).partition(" ")[0]] += 1
            plan = replace(plan, slots=tuple(slots.items()))
