"""One cell under memory caps: its plan, the step that the plan simulates, and the step as it runs, side by side.

Tokens are random, weights a new model's. On a GPU the caps are a fence: torch is refused more, and what was in use is
measured at the end and compared. On a CPU, which has no link, the same schedule runs a tiny model with pretended
copies; the plan is then made for an H200, and its simulation is of that, as the table says.

Peers take bf16 weights, gradients and moments, as a streamed step does, and micro-batches of at least as many tokens as
its chunks have. What they have in use of device and host is measured, and no cap holds: what a cap would cost them is
the question that they leave open. ``compiled`` is plain PyTorch, each block and the loss under torch.compile.
``fsdp2-offload`` is FSDP2 on one rank, whose shards, gradients and optimizer are on the host (``CPUOffloadPolicy``):
weights come for each block of each pass, AdamW runs on the CPU, blocks are compiled and recomputed in backward.
"""

from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from cs336_systems.blocks import block_ops
from cs336_systems.case import Parallel, TrainingCase, Unsupported
from cs336_systems.costs.flops import model_flops
from cs336_systems.costs.rates import Rates
from cs336_systems.costs.streaming import LaneTimes
from cs336_systems.distributed.process_group import joined
from cs336_systems.experiments.streaming import CPU_PLANS_FOR, StreamingCell
from cs336_systems.hardware import GIB, Hardware, find_hardware, hardware_named
from cs336_systems.harness.clock import WHOLE, check_loss, in_gib, phase_metrics, rate, step_rates, time_phases
from cs336_systems.harness.isolation import PredictedOutOfMemory
from cs336_systems.harness.record import Metric
from cs336_systems.pretraining.capped import caps_within, hardware_of
from cs336_systems.report.figures import save
from cs336_systems.report.timeline import streaming_figure, timeline_rows
from cs336_systems.streaming.choose import LEAST_CHUNK, Caps, CapsTooSmallError, ChosenPlan, choose
from cs336_systems.streaming.explain import explanation
from cs336_systems.streaming.fence import Fence
from cs336_systems.streaming.lanes import Streams
from cs336_systems.streaming.run import StreamedStep
from cs336_systems.streaming.schedule import RECOMPUTES
from cs336_systems.training import assemble, random_batch

MOST_CPU_PARAMETERS = 2_000_000
"""Parameters of a model that is run on a CPU: larger ones take minutes a step."""
PEER_TOKENS = 65_536
"""Tokens of a peer's step, unless they are given: AdamW of 8 billion parameters on a CPU takes seconds."""


def measure(cell: StreamingCell, pictures: Path | None = None, explain: bool = False) -> list[Metric]:
    """The plan's simulation, and unless it is all that is asked for, the step's times, rates and memory.

    Args:
        pictures: folder in which the step's timeline is drawn, as measured on a GPU, else as simulated.
        explain: print the plan in sentences, and what one more GiB on either side would bring.

    Raises:
        PredictedOutOfMemory: the caps hold no plan; the message says what is short.
        Unsupported: no peaks are known of the device, or the model is too large for a CPU.
        FloatingPointError: the loss is not finite.
        RuntimeError: a cap was passed.
    """
    device, gib = torch.device(cell.device), (cell.device_gib, cell.host_gib)
    runs, on_gpu = not cell.simulated_device, device.type == "cuda"
    if runs and not on_gpu and cell.config.n_parameters > MOST_CPU_PARAMETERS:
        raise Unsupported(f"{cell.size} runs on a GPU alone: --gpu {CPU_PLANS_FOR} simulates it here")
    if not on_gpu:
        torch.set_num_threads(1)  # of tiny tensors several would wait for each other
    fence = Fence(device, *(int(cap * GIB) for cap in gib)) if runs and on_gpu else None
    hardware = hardware_of(device) if runs else hardware_named(cell.simulated_device)
    caps = caps_within(device if runs else torch.device("cuda"), gib, fence)
    try:
        choice = _choose(cell, hardware, caps)
    except CapsTooSmallError as error:
        raise PredictedOutOfMemory(str(error).partition(": ")[2]) from error  # model and caps are the cell's
    metrics, times, how = simulated(choice, hardware), choice.times, f"simulated for {hardware.name}"
    if runs:
        found, lanes = _run(cell, choice, hardware, fence)
        metrics += found
        times, how = (lanes, f"measured on {hardware.name}") if lanes else (times, how)
    if pictures is not None:
        rows = timeline_rows(choice.schedule.operations, times)
        where = f"{cell.size}_{cell.context_length}_{cell.device_gib:g}_{cell.host_gib:g}"
        pictures.mkdir(parents=True, exist_ok=True)
        rows.to_csv(pictures / f"timeline_{where}.csv", index=False)
        title = f"{cell}: {choice.plan.tokens:,} tokens in {times.span:.1f} s, {how}"
        save(streaming_figure(rows, title), pictures / f"benchmark_streaming_timeline_{where}.png")
    if explain:  # after the steps: two more searches would count as the host's memory
        sentences = explanation(choice, partial(_choose, cell, hardware))
        print(f"\n{cell}:", *sentences, sep="\n  ", end="\n\n", flush=True)
    return metrics


def _run(
    cell: StreamingCell, choice: ChosenPlan, hardware: Hardware, fence: Fence | None
) -> tuple[list[Metric], LaneTimes | None]:
    """Times, rates and memory of the step as it runs; on a GPU, within its fence, also when its operations ran."""
    plan, device = choice.plan, torch.device(cell.device)
    streams = Streams(device, timed=True) if fence else None
    torch.manual_seed(cell.seed)
    ops = block_ops(*(("fused", "hopper") if fence else ("reference", "reference")))
    step = StreamedStep(plan, choice.schedule, ops, device, max_norm=1.0, lanes=streams)
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
    times = time_phases({WHOLE: whole}, device=device, warmup=cell.warmup, steps=cell.steps)
    samples_ms = times.samples_ms[WHOLE]
    check_loss(loss[0])
    peak, flops = hardware.peak("bf16") if fence else None, plan.tokens * plan.work.model_flops_per_token()
    metrics = phase_metrics(times) + step_rates(plan.tokens, flops, peak, samples_ms)
    if fence is None or streams is None or peak is None:
        device_bytes, host_bytes = step.slab_bytes
        return metrics + in_gib(device_in_use=device_bytes, host_in_use=host_bytes), None
    executed = choice.hardware_flops_per_s * choice.times.span
    metrics.append(rate("hfu", "% of datasheet peak, executed", 100 * executed / peak, samples_ms))
    ratios = [1e3 * choice.times.span / ms for ms in samples_ms]
    metrics.append(Metric("simulated_over_measured", "", ratios, derived=True))
    lanes = streams.times(choice.schedule)
    metrics += [Metric(name, "% of the step", [share]) for name, share in shares(choice, lanes).items()]
    try:
        used = fence.check()
    except RuntimeError as error:
        taken = ", ".join(f"{ms:,.0f}" for ms in samples_ms)
        raise RuntimeError(f"{error}; steps took {taken} ms") from error
    return metrics + in_gib(device_in_use=used.device, host_in_use=used.host, context=used.context), lanes


def _choose(cell: StreamingCell, hardware: Hardware, caps: Caps) -> ChosenPlan:
    """The plan that the cell asks for, within these caps; raises CapsTooSmallError."""
    given = cell.config, cell.context_length, caps, Rates.of(hardware)
    return choose(*given, tokens_per_step=cell.tokens_per_step or None, chunk=cell.chunk or None)


def simulated(choice: ChosenPlan, hardware: Hardware) -> list[Metric]:
    """The plan as metrics, and what it should cost."""
    plan, times, peak = choice.plan, choice.times, hardware.peak("bf16")
    assert peak is not None
    rows = [
        ("simulated_step", "ms", 1e3 * times.span),
        ("simulated_tokens_per_s", "1/s", choice.tokens_per_s),
        ("simulated_mfu", "% of datasheet peak, causal", 100 * choice.model_flops_per_s / peak),
        ("simulated_hfu", "% of datasheet peak, executed", 100 * choice.hardware_flops_per_s / peak),
        *((f"simulated_{name}", "% of the step", share) for name, share in shares(choice, times).items()),
        ("planned_device", "GiB", sum(choice.device_parts.values()) / GIB),
        ("planned_host", "GiB", sum(choice.host_parts.values()) / GIB),
        ("planned_tokens_per_step", "tokens", plan.tokens),
        ("planned_chunk", "tokens", plan.work.chunk),
        ("planned_rounds", "rounds", plan.rounds),
    ]
    return [Metric(name, unit, [float(value)]) for name, unit, value in rows]


def shares(choice: ChosenPlan, times: LaneTimes) -> dict[str, float]:
    """Shares of a step's time, in percent: H2D and D2H busy, no kernel running, and recomputation."""
    busy = {lane: 100 * seconds / times.span for lane, seconds in times.busy.items()}
    ran = zip(choice.schedule.operations, times.starts, times.ends, strict=True)
    again = sum(end - start for operation, start, end in ran if operation.kind in RECOMPUTES)
    found = {"link_in": busy["in"], "link_out": busy["out"], "compute_idle": 100 - busy["compute"]}
    return found | {"recompute": 100 * again / times.span}


@dataclass(frozen=True)
class PeerCase(TrainingCase):
    """A step of a peer."""

    peer: str = "compiled"

    @property
    def parallel(self) -> Parallel:
        return Parallel("fsdp2", on_host=True) if self.peer == "fsdp2-offload" else Parallel()


def case_of(cell: StreamingCell) -> PeerCase:
    """The case that a peer's cell runs; on a CPU without torch.compile and with plain attention."""
    on_gpu, tokens = cell.device == "cuda", cell.tokens_per_step or PEER_TOKENS
    sequences = max(1, min(LEAST_CHUNK, tokens) // cell.context_length)
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
