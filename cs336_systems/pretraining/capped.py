"""A run's step under caps on memory (``--device-gib``, ``--host-gib``): a streamed one, as the trainer knows steps.

    step = CappedStep(options, case, device)         # chooses a plan, sets memory aside, makes or loads weights
    loss = step(token_ids, targets)                  # all micro-batches and the update
    step.model, step.optimizer                       # for checkpoints: views of what the step keeps, on either side

A step's tokens are those of the options, its chunks the plan's (``streaming/choose.py``). What a checkpoint holds is as
of any other run, written from where it lies and read into there; a run with caps and one without take each other up.

On a GPU the caps are of all that the process has there, on the device a fence. On a CPU, whose "device" is its own
memory, they are of the step's slabs alone, and the plan is the one for an H200: for trying a run out, and for tests.
"""

import math
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from cs336_systems.blocks import block_ops
from cs336_systems.costs.streaming import Rates
from cs336_systems.distributed.checkpoint_folder import survey
from cs336_systems.hardware import GIB, find_hardware
from cs336_systems.harness.memory import cublas_workspace_bytes
from cs336_systems.model.hf_weights import load_hf_weights
from cs336_systems.pretraining.options import TrainerCase, TrainOptions
from cs336_systems.streaming.build import build_forward
from cs336_systems.streaming.choice import HOST_OVERHEAD, Caps, CapsTooSmallError, Choice
from cs336_systems.streaming.choose import EFFORT, choose, chunk_sizes
from cs336_systems.streaming.explain import Elsewhere, next_gib, reasons, with_next_gib
from cs336_systems.streaming.fence import Fence, check_cpu_caps, refusals
from cs336_systems.streaming.layout import Chunks
from cs336_systems.streaming.optimizer import LayerAdamW
from cs336_systems.streaming.run import StreamedStep
from cs336_systems.training.assemble import check_supported
from cs336_systems.training.precision import parameter_dtype

PLANS_FOR = "NVIDIA H200"
"""Where there is no GPU."""
FRAGMENTS = 2**28
"""Bytes of the device that torch may reserve and not use."""
HOST_LATER = GIB
"""Bytes by which the process may grow beside its slab, as libraries are loaded and kernels compiled."""


def caps_of(options: TrainOptions, case: TrainerCase, device: torch.device, fence: Fence | None = None) -> Caps:
    """Those asked for, and what of them is for other things than slabs; an assumption without a fence."""
    assert options.device_gib is not None and options.host_gib is not None
    caps = int(options.device_gib * GIB), int(options.host_gib * GIB)
    if device.type == "cpu":
        return Caps(*caps, 0, 0, 0)
    width = 4 if case.master == "fp32" else max(case.precision.parameter_bytes, case.moment_bytes)
    staging = 2 ** math.ceil(math.log2(case.config.vocab_size * case.config.d_model * width))  # of saves, pinned
    if fence is None:
        return Caps(*caps, host_overhead=HOST_OVERHEAD + staging)
    beside_device, beside_host = beside_slabs(fence, device)
    return Caps(*caps, beside_device, max(HOST_OVERHEAD, beside_host) + staging)


def beside_slabs(fence: Fence, device: torch.device) -> tuple[int, int]:
    """Bytes of a GPU and of its host that the process takes, now and as it works, for other things than slabs."""
    on_device = fence.overhead + FRAGMENTS + 2 * cublas_workspace_bytes(device)
    return on_device, fence.in_use().host + HOST_LATER


@dataclass(frozen=True)
class Chunking:
    """How a step's tokens are cut, on which alone its bits depend: a run that resumes keeps it, if its caps allow."""

    chunk: int
    """Tokens."""
    chunks: int
    """Of a round."""

    @classmethod
    def of_run(cls, options: TrainOptions) -> "Chunking | None":
        """That of the newest checkpoint in the run's folder, where that cuts what the options ask for, too."""
        complete, _ = survey(options.out)
        if not complete or (found := complete[-1].extra.get("chunking")) is None:
            return None
        chunking, length = cls(**found), options.context_length
        short, long = sorted((chunking.chunk, length))
        tokens = chunking.chunk * chunking.chunks
        divides = not (long % short or tokens % length or options.tokens_per_step(1) % tokens)
        return chunking if divides and options.chunk in (None, chunking.chunk) else None


def chooser(
    options: TrainOptions, case: TrainerCase, device: torch.device, chunking: Chunking | None = None
) -> Callable[[Caps], Choice]:
    """Chooses the fastest plan that caps hold, of this chunking, if one is given; raises CapsTooSmallError.

    Raises:
        ValueError: no peaks are on record for the device.
    """
    name = torch.cuda.get_device_name(device) if device.type == "cuda" and torch.cuda.is_available() else PLANS_FOR
    if (hardware := find_hardware(name)) is None:
        raise ValueError(f"no peaks are on record for {name}, by which a plan under memory caps is chosen")
    tokens, width = options.tokens_per_step(1), case.moment_bytes
    chunk = options.chunk if chunking is None else chunking.chunk
    if chunk is None and all(tokens % size for size in chunk_sizes(options.context_length)):
        chunk = options.batch_size * options.context_length
    return partial(
        choose,
        case.config,
        options.context_length,
        rates=Rates.of(hardware),
        tokens_per_step=tokens,
        chunk=chunk,
        chunks=None if chunking is None else chunking.chunks,
        precision=case.precision,
        moments={"exp_avg": width, "exp_avg_sq": width} | ({"master": 4} if case.master == "fp32" else {}),
        effort=EFFORT if device.type == "cuda" else EFFORT // 20,
    )


def explanation(choice: Choice, again: Callable[[Caps], Choice]) -> Iterator[str]:
    """The plan in sentences: what lives where, what binds, what more memory would bring; ``again`` has other caps."""
    slots = ", ".join(f"{ring.slots} of {name}" for name, ring in choice.schedule.rings.items())
    places = ", ".join(f"{region.places} of {name}" for name, region in choice.schedule.regions.items())
    yield f"The device has slots, {slots}; the host has places, {places or 'none'}."
    yield from reasons(choice)
    yield from next_gib(choice, again)


class CappedStep:
    """What the trainer uses of a ``TrainStep``, with a plan in place of a graph.

    Attributes:
        chunking: to be saved with a checkpoint, as a mapping.
        evaluation_batch: sequences of which ``loss_of`` takes at most so many.

    Raises:
        Unsupported: the device cannot do what the case asks for (a ValueError).
        ValueError: the caps are too small or more than there is, the device is unknown, host memory cannot be pinned,
            or the weights to begin with do not serve.
    """

    def __init__(self, options: TrainOptions, case: TrainerCase, device: torch.device) -> None:
        check_supported(case, device)
        self.precision = case.precision
        self._saves = options.save_every is not None
        self._fence: Fence | None = None
        if device.type == "cuda":
            self._fence = Fence(device, *(int(cap * GIB) for cap in (options.device_gib, options.host_gib) if cap))
        caps, chunking = caps_of(options, case, device, self._fence), Chunking.of_run(options)
        if device.type == "cpu":
            check_cpu_caps(caps.device, caps.host)
        self._again = choose_plan = chooser(options, case, device, chunking)
        with ExitStack() as unless_chosen:
            if device.type == "cuda":
                self._again = elsewhere = Elsewhere(choose_plan, *with_next_gib(caps).values())
                unless_chosen.callback(elsewhere.end)
            try:
                self.choice = choose_plan(caps)
            except CapsTooSmallError:
                if chunking is None:
                    raise
                self.choice = chooser(options, case, device)(caps)
            unless_chosen.pop_all()
        plan = self.choice.plan
        self.chunking = Chunking(plan.work.chunk, plan.chunks)
        self._cut_anew = chunking not in (None, self.chunking)
        self._forward, self.evaluation_batch = build_forward(plan), plan.sequences
        adamw: dict[str, Any] = {"lr": options.learning_rate, "betas": options.betas, "eps": options.eps}
        adamw |= {"weight_decay": options.weight_decay}
        self._layers = LayerAdamW(**adamw, decay="matrices", seed=options.seed)
        torch.manual_seed(options.seed)
        self._refusals = partial(refusals, device, caps.device)
        try:
            with self._refusals():
                self._step = StreamedStep(
                    case.config,
                    self.choice.schedule,
                    Chunks(plan.work.chunk, plan.work.context_length, plan.chunks, plan.rounds),
                    block_ops(case.kernels, case.attention, deterministic=case.deterministic),
                    device,
                    parameter_dtype(case.precision),
                    moments=dict(plan.work.moments),
                    optimizer=self._layers,
                    max_norm=options.clip or math.inf,
                    halts=not options.skip_nonfinite,
                    temporary_bytes=plan.work.temporary_bytes + FRAGMENTS if device.type == "cuda" else 0,
                )
        except RuntimeError as error:
            raise ValueError(str(error).partition("\n")[0]) from error
        self.guard, self.model = self._step.guard, self._step.model()
        self.optimizer = self._step.optimizer_state(self.model, **adamw)
        if options.init is None:
            with self._refusals():
                self._step.reset_parameters()
        else:
            load_hf_weights(self.model, options.init)
            self._step.begin_training()

    def __call__(self, token_ids: Tensor, targets: Tensor) -> Tensor:
        """One whole step at the learning rate of the optimizer's first group; the loss before the update.

        Raises:
            ValueError: torch was refused memory; the weights are of no step then.
        """
        self._layers.lr = self.optimizer.param_groups[0]["lr"]
        with self._refusals():
            return self._step(token_ids, targets)

    def loss_of(self, token_ids: Tensor, targets: Tensor) -> Tensor:
        """Of at most ``evaluation_batch`` sequences, nothing being learned; raises as a step."""
        with self._refusals():
            return self._step.evaluate(self._forward, token_ids, targets)

    def find_nonfinite(self, token_ids: Tensor, targets: Tensor) -> str | None:
        """As ``StreamedStep.find_nonfinite``; raises as a step."""
        with self._refusals():
            return self._step.find_nonfinite(token_ids, targets)

    def explanation(self) -> Iterator[str]:
        """As the function of that name; and what the caps change for a run that resumes."""
        yield from explanation(self.choice, self._again)
        if self._saves and (n_bytes := copy_bytes(self.choice)):
            yield f"A checkpoint's copy takes another {n_bytes / GIB:.1f} GiB of the host."
        if self._cut_anew:
            yield "The caps do not hold the chunks of the steps before: from here on sums are rounded in another order."

    @property
    def spare_host_bytes(self) -> int:
        """Of the cap, what the plan leaves for copies."""
        return _spare(self.choice)

    def in_use(self) -> dict[str, int]:
        """Bytes at their highest so far, as segments of a ``Memory`` record."""
        if self._fence is not None:
            used = self._fence.in_use()
            return {"context, libraries": used.context, "in all": used.device, "in all on the host": used.host}
        memory, fixed = self._step.memory, self._step.fixed
        return {
            "in all": memory.device_slab.n_bytes + fixed.slab.n_bytes,
            "in all on the host": memory.host_slab.n_bytes,
        }

    def passed(self) -> str | None:
        """Which cap has been passed, in one sentence; None if both hold."""
        try:
            if self._fence is not None:
                self._fence.check()
        except RuntimeError as error:
            return str(error)
        return None


def _spare(choice: Choice) -> int:
    return choice.caps.host - sum(choice.host_parts.values())


def copy_bytes(choice: Choice) -> int:
    """Of weights and moments, which a checkpoint copies before it is written; 0 where the host's cap has no room."""
    work = choice.plan.work
    n_bytes = work.config.n_parameters * (work.precision.parameter_bytes + sum(n for _, n in work.moments))
    return n_bytes if n_bytes <= _spare(choice) else 0


def planned_segments(choice: Choice, *, copies: bool) -> dict[str, int]:
    """Bytes on the device and on the host, as segments of a ``Memory`` record.

    Args:
        copies: whether checkpoints are copied.
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
