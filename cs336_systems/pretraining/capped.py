"""A run's step under memory caps (``--device-gib``, ``--host-gib``): a streamed step with the trainer's interface.

    step = CappedStep(options, case, rank)           # chooses a plan, reserves memory, makes or loads weights
    loss = step(token_ids, targets)                  # all micro-batches and the update
    step.model, step.optimizer                       # for checkpoints: views of the tensors that the step keeps

The options set a step's tokens, the plan its chunks (``streaming/choose.py``). Checkpoints have the usual format and
are written from and loaded into the tensors in place, so a run with caps and one without can resume each other. Several
ranks form a ring: layers are assigned to them round-robin, each rank has its own caps, all process the same tokens, and
each saves its own layers. On a GPU a fence enforces the caps on all memory of the process there. On a CPU, which is for
trials and tests, the "device" is host memory, the caps hold for the step's slabs only, and the plan is one for an H200.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from cs336_systems.blocks import block_ops, block_products
from cs336_systems.case import Unsupported
from cs336_systems.config import FP8_QUANTUM
from cs336_systems.costs.rates import Rates
from cs336_systems.distributed.checkpoint_folder import survey
from cs336_systems.distributed.messages import planned_as_copies, ring_messages
from cs336_systems.distributed.process_group import Rank, on_every_rank, on_rank_0
from cs336_systems.hardware import GIB, Hardware, find_hardware
from cs336_systems.harness.memory import cublas_workspace_bytes
from cs336_systems.model.hf_weights import load_hf_weights
from cs336_systems.pretraining.checkpoint import goes_on_from
from cs336_systems.pretraining.options import TrainOptions
from cs336_systems.pretraining.step_options import TrainerCase
from cs336_systems.streaming.build import build
from cs336_systems.streaming.choose import (
    EFFORT,
    HOST_OVERHEAD,
    Caps,
    CapsTooSmallError,
    ChosenPlan,
    chunk_sizes,
    staging_bytes,
)
from cs336_systems.streaming.explain import explanation
from cs336_systems.streaming.fence import Fence, check_cpu_caps, refusals
from cs336_systems.streaming.ring import choose_ring
from cs336_systems.streaming.run import FRAGMENTS, LayerAdamW, StreamedStep
from cs336_systems.training.assemble import check_supported

PLANS_FOR = "NVIDIA H200"
"""The GPU for which plans are made on a machine without one."""
HOST_LATER = GIB
"""Bytes by which the process may grow, besides its slab, while libraries are loaded and kernels compiled."""


def hardware_of(device: torch.device) -> Hardware:
    """Return the hardware to plan for; raises Unsupported if no peaks are on record for the GPU."""
    on_gpu = device.type == "cuda" and torch.cuda.is_available()
    name = torch.cuda.get_device_name(device) if on_gpu else PLANS_FOR
    if (hardware := find_hardware(name)) is None:
        raise Unsupported(f"no peaks are on record for {name}, by which a plan under memory caps is chosen")
    return hardware


def caps_within(
    device: torch.device, gib: tuple[float, float], fence: Fence | None, *, least_host: int = 0, staging: int = 0
) -> Caps:
    """Return caps on the device and the host, with the parts of them that slabs cannot use.

    Args:
        gib: the caps, (device, host) in GiB.
        fence: measures the memory that the process has in use on a GPU; without one it is assumed.
        least_host: lower bound of the process's host bytes besides its slab.
        staging: host bytes of staging buffers.
    """
    caps = int(gib[0] * GIB), int(gib[1] * GIB)
    if device.type == "cpu":
        return Caps(*caps, 0, 0, 0)
    if fence is None:
        return Caps(*caps, host_overhead=HOST_OVERHEAD + staging)
    on_host = max(least_host, fence.in_use().host + HOST_LATER)
    return Caps(*caps, fence.overhead + FRAGMENTS + 2 * cublas_workspace_bytes(device), on_host + staging)


def caps_of(options: TrainOptions, case: TrainerCase, device: torch.device, fence: Fence | None = None) -> Caps:
    """Return the caps of a run, whose checkpoints are staged in pinned memory."""
    assert options.device_gib is not None and options.host_gib is not None
    width = 4 if case.master == "fp32" else max(case.precision.parameter_bytes, case.moment_bytes)
    staging = staging_bytes(case.config, width, case.lora)
    gib = options.device_gib, options.host_gib
    return caps_within(device, gib, fence, least_host=HOST_OVERHEAD, staging=staging)


@dataclass(frozen=True)
class Chunking:
    """Tokens per chunk and chunks per round. They alone determine a step's rounding, so a resumed run keeps them if its
    caps allow."""

    chunk: int
    chunks: int

    @classmethod
    def of_run(cls, options: TrainOptions) -> "Chunking | None":
        """Return the chunking of the checkpoint that the run resumes, or None if it does not fit the options."""
        complete, _ = survey(goes_on_from(options.out, options.resume_from))
        if not complete or (found := complete[-1].extra.get("chunking")) is None:
            return None
        chunking, length = cls(**found), options.context_length
        short, long = sorted((chunking.chunk, length))
        tokens = chunking.chunk * chunking.chunks
        divides = not (long % short or tokens % length or options.tokens_per_step(1) % tokens)
        divides = divides and (options.matmul_dtype == "same" or chunking.chunk % FP8_QUANTUM == 0)
        return chunking if divides and options.chunk in (None, chunking.chunk) else None


def chooser(
    options: TrainOptions,
    case: TrainerCase,
    device: torch.device,
    preferred: Chunking | None = None,
    *,
    copied_messages: bool = True,
) -> Callable[[Sequence[Caps]], list[ChosenPlan]]:
    """Return a function that chooses the fastest plan of each rank within its caps (``choose_ring``).

    The plans have the preferred chunking if it fits the caps.

    Args:
        copied_messages: as for ``Rates.of``.

    Raises:
        Unsupported: no peaks are on record for the device.
    """
    tokens, width, chunk, length = options.tokens_per_step(1), case.moment_bytes, options.chunk, options.context_length
    sizes = chunk_sizes(length)
    if chunk is None and options.packing and min(sizes) < length:
        chunk = length  # attention over chunks of a sequence cannot mask documents
    elif chunk is None and all(tokens % size for size in sizes):
        chunk = options.batch_size * length
    moments = {"exp_avg": width, "exp_avg_sq": width} | ({"master": 4} if case.master == "fp32" else {})
    how: dict[str, Any] = {"precision": case.precision, "moments": moments, "tokens_per_step": tokens}
    how |= {"recipe": case.recipe, "lora": case.lora}
    how |= {"rates": Rates.of(hardware_of(device), copied_messages=copied_messages)}
    how |= {"effort": EFFORT if device.type == "cuda" else EFFORT // 20}

    def choose_plans(caps: Sequence[Caps]) -> list[ChosenPlan]:
        if preferred is not None:
            with suppress(CapsTooSmallError):
                return choose_ring(case.config, length, caps, chunk=preferred.chunk, chunks=preferred.chunks, **how)
        return choose_ring(case.config, length, caps, chunk=chunk, **how)

    return choose_plans


def planned_for(options: TrainOptions) -> str:
    """Return a sentence with the device and dtype for which memory is planned."""
    if options.device == "cpu":
        rates = f", with the rates of an {PLANS_FOR}" if options.capped else ""
        return f"This is for a CPU and {options.dtype}{rates}; --device cuda plans for a GPU."
    if torch.cuda.is_available():
        return f"This is for the {torch.cuda.get_device_name()} here and {options.dtype}."
    return f"This is for an {PLANS_FOR} and {options.dtype}, as no GPU is here."


def planned_segments(choice: ChosenPlan, *, copies: bool) -> dict[str, int]:
    """Return the bytes by segment of a plan under memory caps, on the device and on the host.

    Args:
        copies: whether checkpoints are copied before they are written.
    """
    found: dict[str, int] = {}
    beside = {"checkpoint's copy": copy_bytes(choice) if copies else 0}
    for parts, cap, where in (
        (choice.device_parts, choice.caps.device, ""),
        (choice.host_parts | beside, choice.caps.host, " on the host"),
    ):
        found |= {f"{name}{where}": n_bytes for name, n_bytes in parts.items() if n_bytes}
        used = sum(parts.values())
        found |= {f"in all{where}": used, f"free{where}": cap - used}
    return found


def copy_bytes(choice: ChosenPlan) -> int:
    """Return the bytes of a checkpoint's copy; 0 if the host's cap has no room for one, so that none is made."""
    work = choice.plan.work
    n_bytes = work.n_trained * (work.precision.parameter_bytes + sum(n for _, n in work.moments))
    return n_bytes if n_bytes <= choice.spare_host_bytes else 0


class CappedStep:
    """A streamed step with the part of ``TrainStep``'s interface that the trainer uses.

    Attributes:
        chunking: the chunking of its plan, which checkpoints save.
        evaluation_batch: the most sequences that ``loss_of`` takes.

    Raises:
        Unsupported: the device does not support the case, or is unknown (a ValueError).
        ValueError: the caps are too small or exceed the memory there is, host memory cannot be pinned, or the initial
            weights are unsuitable. From calls: torch could not allocate memory; weights may then be partly updated.
    """

    def __init__(self, options: TrainOptions, case: TrainerCase, rank: Rank) -> None:
        device = rank.device
        check_supported(case, device)
        messages = ring_messages(rank) if rank.world_size > 1 else None  # before the fence, which counts their memory
        self.precision, on_gpu = case.precision, device.type == "cuda"
        self._planned_for = "" if on_gpu else planned_for(options)
        self._handed_on = messages.how if messages else ""
        gib = [cap for cap in (options.device_gib, options.host_gib) if cap]
        self._fence = Fence(device, *(int(cap * GIB) for cap in gib)) if on_gpu else None
        caps, chunking = caps_of(options, case, device, self._fence), Chunking.of_run(options)
        if not on_gpu:
            check_cpu_caps(caps.device, caps.host)
        choose = chooser(options, case, device, chunking, copied_messages=planned_as_copies(messages))
        of_all = on_every_rank(lambda: caps)
        plan, times = on_rank_0(lambda: [(one.plan, one.times) for one in choose(of_all)])[rank.rank]
        self.choice = ChosenPlan(plan, build(plan), times, caps)
        self.chunking, self.evaluation_batch = Chunking(plan.work.chunk, plan.chunks), plan.round_sequences
        self._cut_anew = chunking not in (None, self.chunking)
        self._layers = LayerAdamW(**options.adamw, seed=options.seed)
        torch.manual_seed(options.seed)
        self._refusals = partial(refusals, device, caps.device)
        ops = block_ops(case.kernels, case.attention, deterministic=case.deterministic)
        how: dict[str, Any] = {"max_norm": options.max_norm, "optimizer": self._layers, "messages": messages}
        how["products"] = block_products(case.kernels, case.recipe)
        try:
            with self._refusals():
                self._step = StreamedStep(plan, self.choice.schedule, ops, device, **how)
        except RuntimeError as error:
            raise ValueError(str(error).partition("\n")[0]) from error
        self.guard, self.model = self._step.guard, self._step.model()
        self.optimizer = self._step.optimizer_state(self.model, **options.adamw)
        if options.init is None or options.lora:  # adapters are drawn after all weights, as in a step without streaming
            with self._refusals():
                self._step.reset_parameters()
        if options.init is not None:
            load_hf_weights(self.model, options.init)
            self._step.begin_training()

    def __call__(self, token_ids: Tensor, targets: Tensor) -> Tensor:
        """Run a step at the learning rate of the optimizer's first group; return the loss before the update."""
        self._layers.lr = self.optimizer.param_groups[0]["lr"]
        with self._refusals():
            return self._step(token_ids, targets)

    def loss_of(self, token_ids: Tensor, targets: Tensor) -> Tensor:
        """Return the mean loss of at most ``evaluation_batch`` sequences, without an update."""
        with self._refusals():
            return self._step.evaluate(token_ids, targets)

    def explanation(self) -> Iterator[str]:
        """Yield sentences about the plan, and about the effect of the caps on a resumed run."""
        yield from filter(None, (self._planned_for, self._handed_on))
        yield from explanation(self.choice)
        if self._cut_anew:
            yield "The caps do not hold the chunks of the steps before: from here on sums are rounded in another order."

    def in_use(self) -> dict[str, int]:
        """Return the peak bytes in use so far, as segments of a ``Memory`` record."""
        if self._fence is None:
            device, host = self._step.slab_bytes
            return {"in all": device, "in all on the host": host}
        used = self._fence.in_use()
        return {"context, libraries": used.context, "in all": used.device, "in all on the host": used.host}

    def passed(self) -> str | None:
        """Return a sentence about a cap that was exceeded, or None if both hold."""
        try:
            if self._fence is not None:
                self._fence.check()
        except RuntimeError as error:
            return str(error)
        return None
