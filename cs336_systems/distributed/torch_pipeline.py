"""Torch's own pipelines of this model: the peer of ``pipeline.py``.

    keep_stage(model, plan, blocks, stage)
    pipeline = TorchPipeline(model, plan, blocks, mesh.devices.get_group("pipeline"), cross_entropy, (batch, length))
    losses = pipeline.run(token_ids, targets)                  # the same batch on all stages

Parts of the model lie on stages as in the plan, and stages do the same operations in the same order, but under zbv,
where torch follows the paper and the plan runs whatever can begin. Torch queues all messages of a stage in one order.

Torch divides a backward of ``SPLIT_BY_TORCH`` in two: autograd runs from the outputs to the inputs, and later from
nodes in between to the weights. A compiled block is one node, from which torch 2.11 cannot run: with these schedules
blocks are not compiled. The loss, which has no weights, may be.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch._functorch.config
import torch.distributed as dist
from torch import Tensor, nn

from cs336_systems.costs.parallelism.schedules import Schedule
from cs336_systems.model import TransformerLM
from cs336_systems.ranks import SPLIT_BY_TORCH

_NAMES = {
    "gpipe": "GPipe",
    "1f1b": "1F1B",
    "interleaved": "Interleaved1F1B",
    "zb-h1": "InterleavedZeroBubble",  # of one chunk a stage
    "zbv": "ZBVZeroBubble",
    "dualpipev": "DualPipeV",
}
"""Torch's names of schedules."""


class _Part(nn.Module):
    """Some blocks of a model, with its embedding before the first or its head behind the last."""

    def __init__(self, model: TransformerLM, blocks: slice) -> None:
        super().__init__()
        self.first, last = blocks.start == 0, blocks.stop == len(model.layers)
        ends = [model.token_embeddings] * self.first + [model.ln_final, model.lm_head] * last
        self.own = nn.ModuleList([*model.layers[blocks], *ends])  # torch asks for the weights of this part alone
        self._whole, self._blocks = (model,), blocks  # a tuple, in which torch finds no module

    def forward(self, given: Tensor) -> Tensor:
        """Token ids (batch, seq), or the output of the part before, to the output of this part."""
        (model,) = self._whole
        ids, x = (given, None) if self.first else (given[..., 0], given)  # of ids the others need the length alone
        y: Tensor = model(ids, None, x, self._blocks)
        return y


def _torchs() -> tuple[Any, Any, Any]:
    """Torch's class of stages, its function from a schedule's name to its class, and the class of those of one chunk.

    Their import brings the compiler along, which sets an environment variable.
    """
    from torch.distributed.pipelining import PipelineStage
    from torch.distributed.pipelining.schedules import PipelineScheduleSingle, get_schedule_class

    class Stage(PipelineStage):
        """Opens connections with others alone: gloo sends nothing to itself, as the bottom of a V would."""

        def _get_init_p2p_neighbors_ops(self) -> list[dist.P2POp]:
            return [each for each in super()._get_init_p2p_neighbors_ops() if each.group_peer != self.group_rank]

    return Stage, get_schedule_class, PipelineScheduleSingle


class TorchPipeline:
    """This rank's stage of a schedule that torch runs, connected with the others by the first run.

    Args:
        model: has the blocks of this stage, and the ends of the model that are on it.
        blocks: those of each part of the model.
        group: the stages, in order.
        loss_function: maps logits and targets of a micro-batch to their mean loss.
        shape: sequences and tokens of a micro-batch.
    """

    def __init__(
        self,
        model: TransformerLM,
        plan: Schedule,
        blocks: Sequence[slice],
        group: dist.ProcessGroup,
        loss_function: Callable[[Tensor, Tensor], Tensor],
        shape: tuple[int, int],
    ) -> None:
        self.plan, self.stage = plan, group.rank()
        like = next(model.parameters())
        between = like.new_empty(*shape, model.config.d_model, device="meta")
        ids, logits = between.new_empty(shape, dtype=torch.int64), between.new_empty(*shape, model.config.vocab_size)
        last = len(plan.places) - 1
        stage_class, schedule_class, of_one_chunk = _torchs()
        stages = [
            stage_class(
                _Part(model, blocks[part]),
                part,
                len(plan.places),
                like.device,
                input_args=ids if part == 0 else between,
                output_args=logits if part == last else between,
                group=group,
            )
            for part, (stage, _) in enumerate(plan.places)
            if stage == self.stage
        ]
        kind = schedule_class(_NAMES[plan.name])
        self.schedule = kind(
            stages[0] if issubclass(kind, of_one_chunk) else stages,
            plan.microbatches,
            lambda logits, targets: loss_function(logits, targets) / plan.microbatches,
            scale_grads=False,
        )

    def run(self, token_ids: Tensor, targets: Tensor) -> list[Tensor]:
        """Add the gradients of a batch to the parameters.

        Returns:
            Each micro-batch's part of the loss on the stage that has the last part of the model, none on others.
        """
        losses: list[Tensor] = []
        # Torch keeps graphs for the weights, with which a compiled loss may not give its buffers away.
        with torch._functorch.config.patch(donated_buffer=self.plan.name not in SPLIT_BY_TORCH):
            given = (token_ids,) if self.plan.places[0][0] == self.stage else ()
            self.schedule.step(*given, target=targets, losses=losses, return_outputs=False)
        return [loss.detach() for loss in losses]
