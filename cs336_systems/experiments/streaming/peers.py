"""The same model trained in other ways in the same run: without caps, or with state on the host by torch's own means.

    compiled          all on the device: plain PyTorch, each block and the loss under torch.compile
    fsdp2-offload     FSDP2 on one rank, whose shards, gradients and optimizer are on the host (``CPUOffloadPolicy``):
                      weights come for each block of each pass, and AdamW runs on the CPU; blocks are compiled and
                      computed again in backward

Both take bf16 weights, gradients and moments, as a streamed step does, and micro-batches of at least as many tokens as
its chunks have. What they had in use of device and host is measured, and no cap: what a cap would cost is the question
that they leave open.
"""

import math
from dataclasses import dataclass

import torch

from cs336_systems.case import Parallel, TrainingCase
from cs336_systems.costs.flops import model_flops
from cs336_systems.distributed.process_group import joined
from cs336_systems.experiments.streaming.cells import StreamingCell
from cs336_systems.hardware import GIB, find_hardware
from cs336_systems.harness.clock import WHOLE, time_phases
from cs336_systems.harness.record import Metric
from cs336_systems.streaming.choose import LEAST_CHUNK
from cs336_systems.streaming.fence import Fence
from cs336_systems.training import assemble, random_batch

TOKENS = 65_536
"""Of a step, unless it is said: AdamW of 8 billion parameters on a CPU takes seconds."""


@dataclass(frozen=True)
class PeerCase(TrainingCase):
    """A step of a peer."""

    peer: str = "compiled"

    @property
    def parallel(self) -> Parallel:
        return Parallel("fsdp2", on_host=True) if self.peer == "fsdp2-offload" else Parallel()


def case_of(cell: StreamingCell) -> PeerCase:
    """What a peer's cell runs; on a CPU without torch.compile and with plain attention."""
    on_gpu, offloads = cell.device == "cuda", cell.peer == "fsdp2-offload"
    tokens = cell.tokens_per_step or TOKENS
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
        checkpoint="full" if offloads else "none",
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
    fence = Fence(device, *([torch.cuda.mem_get_info(device)[1] if device.type == "cuda" else 0] * 2))
    with joined(cell.device) as rank:
        step = assemble(case, rank)
        ids, targets = random_batch(case, rank)
        times = time_phases(
            step.phases("step", ids, targets), device=rank.device, warmup=max(1, cell.warmup), steps=cell.steps
        )
        assert step.loss is not None
        if not math.isfinite(loss := step.loss.item()):
            raise FloatingPointError(f"loss is {loss}")
    tokens = case.accumulate * case.batch_size * case.context_length
    flops = case.accumulate * model_flops(case.config, case.batch_size, case.context_length, "step")

    def rate(name: str, unit: str, amount: float) -> Metric:
        return Metric(name, unit, [amount / (ms / 1e3) for ms in times.samples_ms[WHOLE]], derived=True)

    metrics = [Metric(phase, "ms", samples) for phase, samples in times.samples_ms.items()]
    metrics += [rate("tokens_per_s", "1/s", tokens), rate("model_tflops", "TFLOP/s", flops / 1e12)]
    hardware = find_hardware(torch.cuda.get_device_name(device)) if device.type == "cuda" else None
    if hardware is not None and (peak := hardware.peak("bf16")) is not None:
        metrics.append(rate("mfu", "% of datasheet peak, causal", 100 * flops / peak))
    used = fence.in_use()
    in_use = {"device_in_use": used.device, "host_in_use": used.host, "context": used.context}
    metrics += [Metric(name, "GiB", [n_bytes / GIB]) for name, n_bytes in in_use.items()]
    return [*metrics, Metric("planned_tokens_per_step", "tokens", [float(tokens)])]
