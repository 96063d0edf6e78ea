"""One cell under memory caps: its plan, the simulated step, and the measured step.

Tokens and weights are random. On a GPU a fence enforces the caps: torch cannot allocate more, and the memory in use is
measured at the end and compared. On a CPU, which has no link, the same schedule runs a tiny model with simulated
copies; plan and simulation are then for an H200, as the table says.

Peers use bf16 weights, gradients and moments, as a streamed step does, and micro-batches with at least as many tokens
as its chunks. Their use of device and host memory is measured without caps; what caps would cost them is not measured.
``compiled`` is plain PyTorch, with each block and the loss under torch.compile. ``fsdp2-offload`` is FSDP2 on one rank,
with shards, gradients and optimizer on the host (``CPUOffloadPolicy``): weights are copied for each block of each pass,
AdamW runs on the CPU, and blocks are compiled and recomputed in backward.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import mean
from typing import Any

import torch
from torch import Tensor

from cs336_systems.blocks import block_ops, block_products
from cs336_systems.case import TrainingCase, Unsupported
from cs336_systems.costs.flops import model_flops
from cs336_systems.costs.lanes import LaneTimes
from cs336_systems.costs.rates import Rates
from cs336_systems.distributed.messages import GroupMessages, planned_as_copies, ring_messages
from cs336_systems.distributed.process_group import Rank, joined, on_every_rank, on_rank_0
from cs336_systems.experiments.fp8 import RECIPES
from cs336_systems.experiments.ranked import largest
from cs336_systems.experiments.streaming import CPU_PLANS_FOR, StreamingCell
from cs336_systems.hardware import GIB, Hardware, find_hardware, hardware_named
from cs336_systems.harness.clock import (
    WHOLE,
    check_loss,
    in_gib,
    phase_metrics,
    rate,
    step_rates,
    time_phases,
    time_phases_of_ranks,
)
from cs336_systems.harness.isolation import PredictedOutOfMemory
from cs336_systems.harness.record import Metric
from cs336_systems.pretraining.capped import caps_within, hardware_of
from cs336_systems.ranks import Parallel
from cs336_systems.report.figures import save
from cs336_systems.report.timeline import streaming_figure, timeline_rows
from cs336_systems.streaming.build import build
from cs336_systems.streaming.choose import LEAST_CHUNK, Caps, CapsTooSmallError, ChosenPlan
from cs336_systems.streaming.explain import explanation
from cs336_systems.streaming.fence import Fence
from cs336_systems.streaming.lanes import Streams
from cs336_systems.streaming.ring import choose_ring
from cs336_systems.streaming.run import StreamedStep
from cs336_systems.streaming.schedule import RECOMPUTES
from cs336_systems.training import assemble, random_batch
from cs336_systems.training.precision import recipe_unsupported_reason

MOST_CPU_PARAMETERS = 2_000_000
"""The most parameters of a model on a CPU: larger ones take minutes per step."""
PEER_TOKENS = 65_536
"""Default tokens of a peer's step: many, as AdamW of 8 billion parameters on a CPU takes seconds."""


def measure(
    cell: StreamingCell, rank: Rank | None = None, pictures: Path | None = None, explain: bool = False
) -> list[Metric]:
    """The plan's simulation, and unless it is all that is asked for, the step's times, rates and memory.

    Args:
        rank: this process in a ring; None for a step on one rank, and for a simulation.
        pictures: folder in which the step's timeline is drawn, as measured on a GPU, else as simulated.
        explain: print the plan in sentences, and what one more GiB on either side would bring.

    Raises:
        PredictedOutOfMemory: the caps hold no plan; the message says what is short.
        Unsupported: no peaks are known of the device, or the model is too large for a CPU.
        FloatingPointError: the loss is not finite.
        RuntimeError: a cap was passed.
    """
    device, gib = rank.device if rank else torch.device(cell.device), (cell.device_gib, cell.host_gib)
    runs, on_gpu = not cell.simulated_device, device.type == "cuda"
    if runs and not on_gpu and cell.config.n_parameters > MOST_CPU_PARAMETERS:
        raise Unsupported(f"{cell.size} runs on a GPU alone: --gpu {CPU_PLANS_FOR} simulates it here")
    if not on_gpu:
        torch.set_num_threads(1)  # for tiny tensors several threads mostly wait for each other
    messages = ring_messages(rank) if rank else None  # before the fence, which counts their memory
    fence = Fence(device, *(int(cap * GIB) for cap in gib)) if runs and on_gpu else None
    hardware = hardware_of(device) if runs else hardware_named(cell.simulated_device)
    rates = Rates.of(hardware, copied_messages=planned_as_copies(messages))
    caps = caps_within(device if runs else torch.device("cuda"), gib, fence)
    try:
        choices = _choose(cell, rates, [caps] * cell.ranks) if rank is None else _agree(cell, rates, caps)
    except CapsTooSmallError as error:
        raise PredictedOutOfMemory(str(error).partition(": ")[2]) from error  # model and caps are the cell's
    metrics, how = simulated(choices, hardware), f"simulated for {hardware.name}"
    shown = dict(enumerate(choices)) if rank is None else {rank.rank: choices[rank.rank]}
    if runs:
        found, lanes = _run(cell, choices, hardware, fence, rank, messages)
        metrics += found
        if messages:
            metrics.append(Metric("copied_messages", "1 if copies, 0 if kernels", [float(messages.copied)]))
        if lanes:
            shown = {number: replace(choice, times=lanes) for number, choice in shown.items()}
            how = f"measured on {hardware.name}"
    for number, choice in shown.items() if pictures is not None else ():
        assert pictures is not None
        rows = timeline_rows(choice.schedule.operations, choice.times)
        where = f"{cell.size}_{cell.context_length}_{cell.device_gib:g}_{cell.host_gib:g}"
        where += f"_{cell.recipe}" if cell.recipe != "stored" else ""
        where += f"_rank{number}" if cell.ranks > 1 else ""
        pictures.mkdir(parents=True, exist_ok=True)
        rows.to_csv(pictures / f"timeline_{where}.csv", index=False)
        title = f"{cell}: {choice.plan.tokens:,} tokens in {choice.times.span:.1f} s, {how}"
        save(streaming_figure(rows, title), pictures / f"benchmark_streaming_timeline_{where}.png")
    if explain and (rank is None or rank.rank == 0):  # after the steps: two more searches would count as host memory
        for choice in choices:
            again = (lambda caps: _choose(cell, rates, [caps])[0]) if cell.ranks == 1 else None
            handed_on = [messages.how] if messages else []
            print(f"\n{cell}:", *handed_on, *explanation(choice, again), sep="\n  ", end="\n\n", flush=True)
    return metrics


def _run(
    cell: StreamingCell,
    choices: Sequence[ChosenPlan],
    hardware: Hardware,
    fence: Fence | None,
    rank: Rank | None,
    messages: GroupMessages | None,
) -> tuple[list[Metric], LaneTimes | None]:
    """Times, rates and memory of the step; on a GPU, within its fence, also the times of this rank's operations."""
    choice = choices[rank.rank if rank else 0]
    plan, device = choice.plan, rank.device if rank else torch.device(cell.device)
    streams = Streams(device, timed=True) if fence else None
    torch.manual_seed(cell.seed)
    kernels, attention = ("fused", "hopper") if fence else ("reference", "reference")
    ops, recipe = block_ops(kernels, attention), plan.work.recipe
    if reason := recipe_unsupported_reason(recipe, plan.work.precision, device):
        raise Unsupported(reason)
    how: dict[str, Any] = {"max_norm": 1.0, "lanes": streams, "messages": messages}
    how["products"] = block_products(kernels, recipe)
    step = StreamedStep(plan, choice.schedule, ops, device, **how)
    step.reset_parameters()
    generator = torch.Generator().manual_seed(cell.seed + 1)
    shape = (2, plan.n_sequences, plan.work.context_length)
    ids, targets = torch.randint(cell.config.vocab_size, shape, generator=generator)
    loss: list[Tensor] = []

    def whole() -> None:
        loss[:] = [step(ids, targets)]

    if fence is not None:
        step.rehearse(ids, targets)
        fence.check()  # before steps that may take minutes
    repeats: dict[str, Any] = {"warmup": cell.warmup, "steps": cell.steps}
    if rank is None:
        times = time_phases({WHOLE: whole}, device=device, **repeats)
    else:
        times = time_phases_of_ranks({WHOLE: whole}, rank, **repeats)
    samples_ms = times.samples_ms[WHOLE]
    check_loss(loss[0])
    peak = cell.ranks * _peak(hardware) if fence else None
    metrics = phase_metrics(times)
    metrics += step_rates(plan.tokens, plan.tokens * plan.work.model_flops_per_token(), peak, samples_ms)
    if fence is None or streams is None or peak is None:
        device_bytes, host_bytes = (_most(n_bytes, rank) for n_bytes in step.slab_bytes)
        return metrics + in_gib(device_in_use=device_bytes, host_in_use=host_bytes), None
    span = max(each.times.span for each in choices)
    executed = sum(each.hardware_flops for each in choices)
    metrics.append(rate("hfu", "% of datasheet peak, executed", 100 * executed / peak, samples_ms))
    metrics.append(Metric("simulated_over_measured", "", [1e3 * span / ms for ms in samples_ms], derived=True))
    lanes = streams.times(choice.schedule)
    found = shares(choice, lanes)
    metrics += [Metric(name, "% of the step", [_mean(share, rank)]) for name, share in found.items()]
    try:
        used = fence.check()
    except RuntimeError as error:
        taken = ", ".join(f"{ms:,.0f}" for ms in samples_ms)
        raise RuntimeError(f"{error}; steps took {taken} ms") from error
    in_use = {"device_in_use": used.device, "host_in_use": used.host, "context": used.context}
    return metrics + in_gib(**{name: _most(n_bytes, rank) for name, n_bytes in in_use.items()}), lanes


def _most(value: float, rank: Rank | None) -> float:
    return value if rank is None else largest(value, rank)


def _mean(value: float, rank: Rank | None) -> float:
    return value if rank is None else sum(on_every_rank(lambda: value)) / rank.world_size


def _choose(cell: StreamingCell, rates: Rates, caps: Sequence[Caps]) -> list[ChosenPlan]:
    """The plan of each rank, within its caps; raises CapsTooSmallError."""
    given = cell.config, cell.context_length, caps, rates
    how: dict[str, Any] = {"tokens_per_step": cell.tokens_per_step or None, "recipe": RECIPES[cell.recipe]}
    return choose_ring(*given, chunk=cell.chunk or None, **how)


def _agree(cell: StreamingCell, rates: Rates, caps: Caps) -> list[ChosenPlan]:
    """``_choose`` by rank 0 for all ranks, each within its own caps; a collective."""
    of_all = on_every_rank(lambda: caps)
    found = on_rank_0(lambda: [(each.plan, each.times) for each in _choose(cell, rates, of_all)])
    return [ChosenPlan(plan, build(plan), times, own) for (plan, times), own in zip(found, of_all, strict=True)]


def simulated(choices: Sequence[ChosenPlan], hardware: Hardware) -> list[Metric]:
    """The plans of all ranks as metrics, and what they should cost; memory is that of the fullest rank."""
    plan, peak = choices[0].plan, len(choices) * _peak(hardware)
    span = max(choice.times.span for choice in choices)
    model_flops, executed = plan.tokens * plan.work.model_flops_per_token(), sum(one.hardware_flops for one in choices)
    found = [shares(choice, choice.times) for choice in choices]
    rows = [
        ("simulated_step", "ms", 1e3 * span),
        ("simulated_tokens_per_s", "1/s", plan.tokens / span),
        ("simulated_mfu", "% of datasheet peak, causal", 100 * model_flops / span / peak),
        ("simulated_hfu", "% of datasheet peak, executed", 100 * executed / span / peak),
        *((f"simulated_{name}", "% of the step", mean(each[name] for each in found)) for name in found[0]),
        ("planned_device", "GiB", max(sum(choice.device_parts.values()) for choice in choices) / GIB),
        ("planned_host", "GiB", max(sum(choice.host_parts.values()) for choice in choices) / GIB),
        ("planned_tokens_per_step", "tokens", plan.tokens),
        ("planned_chunk", "tokens", plan.work.chunk),
        ("planned_rounds", "rounds", plan.rounds),
    ]
    return [Metric(name, unit, [float(value)]) for name, unit, value in rows]


def _peak(hardware: Hardware) -> float:
    """The published FLOP/s of one device in bf16."""
    peak = hardware.peak("bf16")
    assert peak is not None
    return peak


def shares(choice: ChosenPlan, times: LaneTimes) -> dict[str, float]:
    """Shares of a step's time, in percent: H2D and D2H busy, no kernel running, and recomputation."""
    busy = {lane: 100 * seconds / times.span for lane, seconds in times.busy.items()}
    ran = zip(choice.schedule.operations, times.starts, times.ends, strict=True)
    again = sum(end - start for operation, start, end in ran if operation.kind in RECOMPUTES)
    found = {"link_in": busy["in"], "link_out": busy["out"], "compute_idle": 100 - busy["compute"]}
    return found | {"recompute": 100 * again / times.span}


@dataclass(frozen=True)
class PeerCase(TrainingCase):
    peer: str = "compiled"

    @property
    def parallel(self) -> Parallel:
        return Parallel("fsdp2", on_host=True) if self.peer == "fsdp2-offload" else Parallel()


def case_of(cell: StreamingCell) -> PeerCase:
    """The case that a peer's cell runs; on a CPU without torch.compile and with plain attention."""
    on_gpu, tokens = cell.device == "cuda", cell.tokens_per_step or PEER_TOKENS
    sequences = max(1, min(cell.chunk or LEAST_CHUNK, tokens) // cell.context_length)
    return PeerCase.of(
        cell.config,
        peer=cell.peer,
        device=cell.device,
        batch_size=sequences,
        accumulate=max(1, tokens // (sequences * cell.context_length)),
        dtype="bf16",
        attention="sdpa-cudnn" if on_gpu else "reference",
        compile="on" if on_gpu else "off",
        checkpoint="full" if cell.peer == "fsdp2-offload" else "none",
        optimizer="torch-fused",
        seed=cell.seed,
    )


def measure_peer(cell: StreamingCell) -> list[Metric]:
    """Times, rates, and the memory in use.

    Raises:
        Unsupported: the device cannot do what the case asks for.
        FloatingPointError: the loss is not finite.
    """
    case, device = case_of(cell), torch.device(cell.device)
    on_gpu = device.type == "cuda"
    fence = Fence(device, *([torch.cuda.mem_get_info(device)[1] if on_gpu else 0] * 2))
    with joined(cell.device) as rank:
        step = assemble(case, rank)
        phases = step.phases("step", *random_batch(case, rank))
        times = time_phases(phases, device=rank.device, warmup=max(1, cell.warmup), steps=cell.steps)
        check_loss(step.loss)
    hardware = find_hardware(torch.cuda.get_device_name(device)) if on_gpu else None
    tokens, flops = case.tokens_per_step, case.accumulate * model_flops(*case.work, "step")
    metrics = step_rates(tokens, flops, hardware.peak("bf16") if hardware else None, times.samples_ms[WHOLE])
    used = fence.in_use()
    in_use = in_gib(device_in_use=used.device, host_in_use=used.host, context=used.context)
    return [*phase_metrics(times), *metrics, *in_use, Metric("planned_tokens_per_step", "tokens", [float(tokens)])]
