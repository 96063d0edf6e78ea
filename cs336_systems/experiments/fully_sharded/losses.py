"""How far a cell's losses drift from those of the reference step in fp32: steps on one batch, from the same weights.

The reference is the handout's model by plain PyTorch in IEEE fp32, under the same sharding: states of 16 bytes a
parameter. It begins with the cell's own weights, widened, which loses nothing. Neither step is timed.
"""

import gc
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist

from cs336_systems.case import RECIPE
from cs336_systems.distributed.process_group import Rank
from cs336_systems.experiments.fully_sharded.cells import FullyShardedCell
from cs336_systems.harness.record import Metric
from cs336_systems.training import TrainStep, random_batch
from cs336_systems.training.assemble import build_model, finish

STEP = 0.004
"""Learning rate times d_model: one step of AdamW moves what a product returns by about as much at every width. With
more the loss of 20 steps on one batch comes near zero, where shares of it mean nothing."""

_EXACT: dict[str, Any] = {
    **{name: getattr(FullyShardedCell, name) for name in ("kernels", "keep", "master", "offload", "update", *RECIPE)},
    **{"dtype": "fp32", "attention": "reference", "compile": "off", "checkpoint": "none", "optimizer": "reference"},
}


def loss_metrics(cell: FullyShardedCell, rank: Rank) -> list[Metric]:
    """The mean loss of all ranks before each of ``cell.losses`` steps, the reference's, and the largest difference.

    Both models are gone afterwards. In the reference's time its states are held alone, but for the first weights.
    """
    step = _step(cell, rank)
    start = {name: parameter.detach().clone() for name, parameter in step.model.named_parameters()}
    own = _losses(step, cell, rank)
    del step
    _release()
    exact = _step(replace(cell, **_EXACT), rank)
    with torch.no_grad():
        for name, parameter in exact.model.named_parameters():
            parameter.copy_(start.pop(name))
    reference = _losses(exact, cell, rank)
    del exact
    _release()
    off = [100 * abs(loss / right - 1) for loss, right in zip(own, reference, strict=True)]
    unit = "nats, before each step on one batch"
    return [
        Metric("loss", unit, own),
        Metric("reference_loss", f"{unit}, plain PyTorch in fp32", reference),
        Metric("loss_error", "% of the reference's, the most of any step", [max(off)]),
    ]


def _step(cell: FullyShardedCell, rank: Rank) -> TrainStep:
    return finish(build_model(cell, rank), cell, rank, lr=STEP / cell.config.d_model)


def _losses(step: TrainStep, cell: FullyShardedCell, rank: Rank) -> list[float]:
    """The mean over ranks, of each step."""
    batch = random_batch(cell, rank)
    losses = torch.stack([step(*batch) for _ in range(cell.losses)]).double()
    dist.all_reduce(losses)
    return (losses / rank.world_size).tolist()


def _release() -> None:
    """Of what nobody holds any more, give the memory back: what comes next takes other sizes."""
    gc.collect()
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()
