"""Chooses --batch-size, --keep and --offload of a run whose command gives none of the three (``--choose-fastest``).

They are the fastest that ``card_plan.py`` predicts to fit the GPU that is here, with all other options as given. The
tokens of a step stay as the options say. A checkpoint holds the choice, and a run that resumes keeps it.

    choice = choose_fastest(options, config, device, world_size, origin)
    options = choice.of(options)
"""

from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from cs336_systems.config import ModelConfig
from cs336_systems.distributed.checkpoint_folder import survey
from cs336_systems.hardware import GIB, find_hardware
from cs336_systems.harness.memory import free_bytes
from cs336_systems.pretraining.card_plan import USABLE, Asked, CardPlan
from cs336_systems.pretraining.options import TrainOptions


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
        """The options with this choice."""
        chosen: dict[str, Any] = asdict(self)
        del chosen["said"]
        return replace(options, accumulate=1, **chosen | {"offload": tuple(self.offload)})

    @property
    def saved(self) -> dict[str, Any]:
        """The choice as a checkpoint holds it."""
        return {name: value for name, value in asdict(self).items() if name != "said"}

    def __str__(self) -> str:
        offload = f" --offload {' '.join(self.offload)}" if self.offload else ""
        return f"--batch-size {self.batch_size} --keep {self.keep}{offload}"


def choose_fastest(
    options: TrainOptions, config: ModelConfig, device: torch.device, world_size: int, origin: Path | None
) -> Choice | str:
    """The choice that the run began with, else the fastest that is predicted to fit; or a sentence on why not.

    Args:
        origin: the folder or checkpoint from which the run goes on, if there is one.

    Raises:
        ValueError: nothing fits the device, or a step's tokens are no whole number of sequences.
    """
    tokens = options.tokens_per_step(world_size)
    complete = survey(origin)[0] if origin is not None else []
    if complete:
        saved = complete[-1].extra.get("chosen")
        if saved is None:
            return "the run did not begin with a choice"
        before = Choice(**saved | {"total_batch_tokens": tokens, "said": "as the run began"})
        rows = tokens // options.context_length // options.data_ranks(world_size)
        if rows % before.batch_size == 0:
            return before
    name = torch.cuda.get_device_name(device)
    if (hardware := find_hardware(name)) is None:
        return f"no peaks are on record for {name}"
    free = free_bytes(device)
    asked = Asked(hardware.name, world_size, free_bytes(torch.device("cpu")) / GIB)
    try:
        plan = CardPlan.of(replace(options, total_batch_tokens=tokens, accumulate=1), asked)
    except ValueError as error:
        return str(error)
    plan = replace(plan, hardware=replace(hardware, memory_bytes=free), config=config)
    if (way := plan.chosen) is None:
        return "only steps whose blocks have a hand-written backward, on ranks with batches of their own, are planned"
    said = f"predicted to be the fastest in {USABLE * free / GIB:.1f} GiB of this {hardware.name}, "
    said += f"{way.tokens_per_s:,.0f} tokens/s"
    return Choice(way.layout.micro_batch, way.layout.keep, tuple(sorted(way.offload)), tokens, said)
