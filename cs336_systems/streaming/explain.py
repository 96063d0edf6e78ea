"""Explains a plan in sentences: which lane is the bottleneck, what is recomputed, the gain from more memory.

for sentence in explanation(choice, lambda caps: choose(config, length, caps, rates)): print(sentence)
"""

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace

from cs336_systems.costs.streaming import LEVELS
from cs336_systems.hardware import GIB
from cs336_systems.streaming.choose import Caps, CapsTooSmallError, ChosenPlan
from cs336_systems.streaming.schedule import BACKWARDS, RECOMPUTES

_WAITED_FOR = {
    "in": "copies to the device",
    "out": "copies to the host",
    "receive": "messages of other ranks",
    "send": "other ranks to take messages",
    "compute": "other ranks to end the step",
}


def end_seconds(choice: ChosenPlan) -> float:
    """Seconds from the last kernel of backward to the end of the step, which the optimizer takes."""
    ends = zip(choice.schedule.operations, choice.times.ends, strict=True)
    return choice.times.span - max(end for operation, end in ends if operation.kind in BACKWARDS)


def recomputed_share(choice: ChosenPlan) -> float:
    """The share of the step's time in which kernels recompute."""
    timed = zip(choice.schedule.operations, choice.times.starts, choice.times.ends, strict=True)
    return sum(end - start for operation, start, end in timed if operation.kind in RECOMPUTES) / choice.times.span


def binds(choice: ChosenPlan) -> str:
    """The largest part of the time: ``kernels``, ``recomputation``, or the copies that kernels wait for the longest."""
    times = choice.times
    waited = max(times.waited_for, key=times.waited_for.__getitem__)
    if times.waited_for[waited] > 0.05 * times.span:
        return _WAITED_FOR[waited]
    return "recomputation" if recomputed_share(choice) > 0.05 else "kernels"


def explanation(choice: ChosenPlan, again: Callable[[Caps], ChosenPlan] | None = None) -> Iterator[str]:
    """The plan in sentences: what is stored where, the bottleneck, and with ``again`` the gain from more memory."""
    slots = ", ".join(f"{ring.n_items} of {name}" for name, ring in choice.schedule.rings.items())
    places = ", ".join(f"{region.n_items} of {name}" for name, region in choice.schedule.regions.items())
    yield f"The device has slots, {slots}; the host has places, {places or 'none'}."
    yield from reasons(choice)
    if again is not None:
        yield from next_gib(choice, again)


def reasons(choice: ChosenPlan) -> Iterator[str]:
    """One sentence for each decision and each bound."""
    plan, times, caps = choice.plan, choice.times, choice.caps
    work, n_layers = plan.work, plan.n_layers
    share = {lane: 100 * seconds / times.span for lane, seconds in times.busy.items()}
    yield (
        f"A step is {plan.rounds} {plan.order} rounds of {plan.chunks} chunks of {work.chunk:,} tokens: kernels run "
        f"{share['compute']:.0f} % of it, copies in {share['in']:.0f} %, copies out {share['out']:.0f} %; "
        f"it is bound by {binds(choice)}."
    )
    counts = Counter(level for levels in plan.levels for level in levels)
    levels = ", ".join(f"{counts[level]} at {level}" for level in LEVELS if counts[level])
    kept = f"Of {plan.pairs} pairs of layer and chunk {levels} are kept"
    if (every := plan.input_every) > 1:
        kept += f", but x itself of every {every}{'rd' if every == 3 else 'th' if every > 3 else 'nd'} layer alone"
    yield f"{kept}; {100 * recomputed_share(choice):.1f} % of the time recomputes."
    streamed = [f"{what} of {n_layers - n}" for what in work.states if (n := getattr(plan, what)) < n_layers]
    whose = "" if work.share is None else f" of rank {work.rank}"
    yield f"Of {n_layers} layers{whose}, {', '.join(streamed) or 'none'} stream; the others' stay on the device."
    if waits := [
        f"{_time(s)} for {_WAITED_FOR[lane]}" for lane, s in times.waited_for.items() if s > 0.005 * times.span
    ]:
        yield f"Kernels wait {' and '.join(waits)}; the step ends {_time(end_seconds(choice))} after backward."
    if plan.clipping and end_seconds(choice) > 0.001 * times.span:
        rest = 100 * end_seconds(choice) / times.span
        yield f"Clipping by the global norm puts the optimizer behind backward: {rest:.1f} % of the step."
    for what, parts, cap in (("device", choice.device_parts, caps.device), ("host", choice.host_parts, caps.host)):
        used = sum(parts.values())
        most = f", {max(parts, key=parts.__getitem__)} most of all" if used else ""
        yield f"The {what} holds {_size(used)} of {_size(cap)}{most}."


def _size(n_bytes: int) -> str:
    return f"{n_bytes / GIB:,.1f} GiB" if n_bytes >= GIB else f"{n_bytes / 2**20:,.1f} MiB"


def _time(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds >= 0.1 else f"{1000 * seconds:.3g} ms"


def next_gib(choice: ChosenPlan, again: Callable[[Caps], ChosenPlan]) -> Iterator[str]:
    """The gain of one more GiB on either side; ``again`` chooses for other caps."""
    for what in ("device", "host"):
        try:
            more = again(replace(choice.caps, **{what: getattr(choice.caps, what) + GIB}))
        except CapsTooSmallError:
            continue
        gain = more.tokens_per_s / choice.tokens_per_s - 1
        brings = f"{100 * gain:.1f} % more tokens per second" if gain > 0.0005 else "nothing"
        yield f"One more GiB of {what} memory would bring {brings}."
