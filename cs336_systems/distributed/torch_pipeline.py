"""Torch's own pipeline parallelism for this model: the peer of ``pipeline.py``.

    keep_stage(model, plan, blocks, stage)
    pipeline = TorchPipeline(model, plan, blocks, mesh.devices.get_group("pipeline"), cross_entropy, (batch, length))
    losses = pipeline.run(token_ids, targets)                  # the same batch on all stages

Stages hold the same parts of the model as in the plan and run the same operations in the same order, except under zbv:
torch follows the paper's order, the plan runs whatever can begin. Torch queues all messages of a stage in one order.

In the schedules of ``SPLIT_BY_TORCH`` torch splits backward in two: autograd first computes gradients of inputs, and
later, from intermediate nodes, those of weights. A compiled block is a single node, which torch 2.11 cannot split, so
these schedules run without compiled blocks. The loss, which has no weights, may be compiled.
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
    "zb-h1": "InterleavedZeroBubble",  # with one chunk per stage
    "zbv": "ZBVZeroBubble",
    "dualpipev": "DualPipeV",
}
"""Torch's names of schedules."""


class _Part(nn.Module):
    """Consecutive blocks of a model, with the embedding before the first block or the head after the last."""

    def __init__(self, model: TransformerLM, blocks: slice) -> None:
        super().__init__()
        self.first, last = blocks.start == 0, blocks.stop == len(model.layers)
        ends = [model.token_embeddings] * self.first + [model.ln_final, model.lm_head] * last
        self.own = nn.ModuleList([*model.layers[blocks], *ends])  # so that torch finds the weights of this part only
        self._whole, self._blocks = (model,), blocks  # a tuple hides the whole model from torch

    def forward(self, given: Tensor) -> Tensor:
        """Map token ids (batch, seq), or the output of the previous part, to the output of this part."""
        (model,) = self._whole
        ids, x = (given, None) if self.first else (given[..., 0], given)  # other parts need only the shape of ids
        y: Tensor = model(ids, None, x, self._blocks)
        return y


def _torchs() -> tuple[Any, Any, Any]:
    """Return torch's stage class, its function from schedule names to classes, and the base of one-chunk schedules.

    They are imported here because the import loads the compiler, which sets an environment variable.
    """
    from torch.distributed.pipelining import PipelineStage
    from torch.distributed.pipelining.schedules import PipelineScheduleSingle, get_schedule_class

    class Stage(PipelineStage):
        """Connects only to other ranks: gloo cannot send to itself, as the rank at the bottom of a V would."""

        def _get_init_p2p_neighbors_ops(self) -> list[dist.P2POp]:
            return [each for each in super()._get_init_p2p_neighbors_ops() if each.group_peer != self.group_rank]

    return Stage, get_schedule_class, PipelineScheduleSingle


class TorchPipeline:
    """This rank's stage of a schedule that torch runs; the first run connects it to the others.

    Args:
        model: holds the blocks of this stage, and the embedding or head if they are on it.
        blocks: the blocks of each part of the model.
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
        """Run forward and backward of a batch, and add its gradients to the parameters.

        Returns:
            Each micro-batch's part of the loss, on the stage with the last part of the model; empty on others.
        """
        losses: list[Tensor] = []
        # A split backward uses the graph twice, so a compiled loss must not donate its buffers.
        with torch._functorch.config.patch(donated_buffer=self.plan.name not in SPLIT_BY_TORCH):
            given = (token_ids,) if self.plan.places[0][0] == self.stage else ()
            self.schedule.step(*given, target=targets, losses=losses, return_outputs=False)
        return [loss.detach() for loss in losses]
