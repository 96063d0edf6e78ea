"""Chooses --batch-size, --keep and --offload of a run whose command gives none of the three (``--choose-fastest``).

They are the fastest that ``card_plan.py`` predicts to fit this machine's GPU, with all other options as given. The
tokens of a step stay as given. A checkpoint holds the choice, and a run that resumes keeps it if it fits.

    options = replace(options, attention=attention_on(device, options, config))
    choice = choose_fastest(options, config, device, world_size, origin)
    options = choice.of(options)
"""

import os
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from cs336_systems.attention.shapes import hopper_limits
from cs336_systems.config import PRECISIONS, ModelConfig
from cs336_systems.distributed.checkpoint_folder import survey
from cs336_systems.hardware import GIB, find_hardware
from cs336_systems.harness.memory import free_bytes
from cs336_systems.pretraining.card_plan import USABLE, CardPlan
from cs336_systems.pretraining.options import TrainOptions
from cs336_systems.pretraining.plan_options import Asked
from cs336_systems.streaming.choose import HOST_OVERHEAD
from cs336_systems.training.precision import matmul_dtype


@dataclass(frozen=True)
class Choice:
    """The chosen options, for steps of ``total_batch_tokens`` over all ranks."""

    batch_size: int
    keep: str
    offload: tuple[str, ...]
    total_batch_tokens: int
    said: str = ""
    """Why, in a sentence."""

    def of(self, options: TrainOptions) -> TrainOptions:
        return replace(options, accumulate=1, **self.saved | {"offload": tuple(self.offload)})

    @property
    def saved(self) -> dict[str, Any]:
        """The choice as a checkpoint holds it."""
        return {name: value for name, value in asdict(self).items() if name != "said"}

    def __str__(self) -> str:
        offload = f" --offload {' '.join(self.offload)}" if self.offload else ""
        return f"--batch-size {self.batch_size} --keep {self.keep}{offload}"


def attention_on(device: torch.device, options: TrainOptions, config: ModelConfig) -> str:
    """Return the name of the attention that a run of this model uses on a device of this machine."""
    head = torch.empty(1, 1, 1, config.d_head, dtype=matmul_dtype(PRECISIONS[options.dtype]), device=device)
    return options.attention_on(device.type, hopper=hopper_limits(head) is None)


def choose_fastest(
    options: TrainOptions, config: ModelConfig, device: torch.device, world_size: int, origin: Path | None
) -> Choice | str:
    """The choice with which the run began if it fits, else the fastest that is predicted to fit; or why there is none.

    Args:
        origin: the folder or checkpoint from which the run goes on, if there is one.

    Raises:
        ValueError: nothing fits the device, or a step's tokens are no whole number of sequences.
    """
    tokens = options.tokens_per_step(world_size)
    complete = survey(origin)[0] if origin is not None else []
    before: Choice | None = None
    if complete:
        saved = complete[-1].extra.get("chosen")
        if saved is None:
            return "the run did not begin with a choice"
        before = Choice(**saved | {"total_batch_tokens": tokens, "said": "as the run began"})
        rows = tokens // options.context_length // options.data_ranks(world_size)
        before = before if rows % before.batch_size == 0 else None
    name = torch.cuda.get_device_name(device)
    if (hardware := find_hardware(name)) is None:
        return before or f"no peaks are on record for {name}"
    free, asked = free_bytes(device), Asked(hardware.name, world_size, host_gib=_host_gib(world_size))
    try:
        plan = CardPlan.of(replace(options, total_batch_tokens=tokens, accumulate=1), asked, config=config)
    except ValueError as error:
        return before or str(error)
    plan = replace(plan, hardware=replace(hardware, memory_bytes=free))
    too_large = "" if before is None else _too_large(before, plan, free)
    if before is not None and not too_large:
        return before
    if (way := plan.chosen) is None:
        return "only steps whose blocks have a hand-written backward, on ranks with batches of their own, are planned"
    said = f"predicted to be the fastest in {USABLE * free / GIB:.1f} GiB of this {hardware.name}, "
    said += f"{way.tokens_per_s:,.0f} tokens/s{too_large}"
    return Choice(way.layout.micro_batch, way.layout.keep, tuple(sorted(way.offload)), tokens, said)


def _host_gib(world_size: int) -> float:
    """Return GiB of all hosts for these ranks, from which a plan subtracts a process's own memory once per rank.

    The running ranks have taken most of that already, so it is added to the free memory, except for one rank per host.
    """
    n_hosts = world_size / int(os.environ.get("LOCAL_WORLD_SIZE", world_size))
    return (n_hosts * free_bytes(torch.device("cpu")) + (world_size - n_hosts) * HOST_OVERHEAD) / GIB


def _too_large(before: Choice, plan: CardPlan, free: int) -> str:
    """Why the choice with which the run began does not fit here, to follow another sentence; empty if it does."""
    way = replace(plan, own=before.of(plan.own)).as_asked
    if way is None:
        return ""
    needs = (("", way.device_bytes, free), (" of the host", way.host_bytes, plan.host_bytes))
    short = [f"{n / GIB:.1f} GiB{whose} for {there / GIB:.1f} free" for whose, n, there in needs if n > there]
    return f"; that of the run's beginning, {before}, needs {' and '.join(short)}" if short else ""
