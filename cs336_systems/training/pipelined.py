"""A training step whose blocks are divided over the stages of a pipeline.

    step = assemble(case, rank)                        # of a case whose ``parallel.pipeline`` is 2 or more
    loss = step(*random_batch(case, rank))             # the same batch on all stages; the loss on all of them

Each stage runs its list of a schedule (``costs/parallelism/schedules.py``): forward and backward of its blocks through
autograd, and gradients of weights at the schedule's positions, by ``blocks.put_off``. Under every schedule losses and
gradients are bit-identical to one process with the same micro-batches, as each part accumulates in their order. The
exception is the gradient of a tied embedding, whose two parts are summed in another order.

Gradients of ranks with the same weights are averaged when all micro-batches are done; until then each rank keeps whole
gradients, also under FSDP. Under FSDP each pass of a part gathers that part's blocks, the first of them during the
previous operation.
"""

from collections.abc import Sequence
from contextlib import nullcontext
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from cs336_systems.blocks.autograd import Works, put_off
from cs336_systems.config import MODES, check_known
from cs336_systems.costs.parallelism.schedules import Operation, Schedule
from cs336_systems.distributed.ddp import DDP
from cs336_systems.distributed.fsdp import FSDP
from cs336_systems.distributed.pipeline import Pipeline, Work, on_two_stages
from cs336_systems.distributed.process_group import peer_errors_as
from cs336_systems.model.tensor_ranks import ALONE
from cs336_systems.training.precision import matmul_precision
from cs336_systems.training.step import Phase, TrainStep, local_gradients, micro_batches


class _StageStep(TrainStep):
    """The step of a rank that is one of a pipeline's stages.

    Args:
        pipeline: this rank's stage.
        stages: the group of the ranks that are stages of one pipeline.
    """

    def __init__(self, *args: Any, pipeline: Any, stages: dist.ProcessGroup, **options: Any) -> None:
        super().__init__(*args, **options)
        self.pipeline, self.stages = pipeline, stages

    def phases(self, mode: str, token_ids: Tensor, targets: Tensor) -> dict[str, Phase]:
        """As ``TrainStep.phases``, but forward and backward are one phase, ``passes``."""
        check_known("mode", mode, MODES)
        micro_batches(self.accumulate, token_ids, targets)
        phases: dict[str, Phase] = {"passes": lambda: self._run(mode, token_ids, targets)}
        if mode == "step":
            phases["optimizer"] = self._update
        return phases

    def _run(self, mode: str, token_ids: Tensor, targets: Tensor) -> None:
        raise NotImplementedError

    def _everywhere(self, losses: list[Tensor]) -> Tensor:
        """Broadcast the sum of losses from the stage with the last part to every stage."""
        wide = torch.promote_types(self._parameters[0].dtype, torch.float32)
        loss = torch.stack(losses).sum() if losses else torch.zeros((), dtype=wide, device=self.device)
        last = self.pipeline.plan.places[-1][0]
        with peer_errors_as(f"stage {self.pipeline.stage} waited for the loss of stage {last} in vain"):
            dist.broadcast(loss, group=self.stages, group_src=last)
        return loss


class PipelinedByTorch(_StageStep):
    """Runs forward and backward of one stage by torch's schedule, and the optimizer's step; all targets must count."""

    def _run(self, mode: str, token_ids: Tensor, targets: Tensor) -> None:
        if mode == "forward":
            raise ValueError("mode forward: torch's V-shaped schedules run forward and backward alone")
        with matmul_precision(self.precision):
            self.loss = self._everywhere(self.pipeline.run(token_ids, targets))
        if mode == "backward":
            self.optimizer.zero_grad(set_to_none=True)


class PipelinedStep(_StageStep):
    """Runs forward and backward of one stage in its schedule's order, and the optimizer's step.

    Args:
        blocks: those of each part of the model.
    """

    pipeline: Pipeline

    def __init__(self, *args: Any, blocks: Sequence[slice], **options: Any) -> None:
        super().__init__(*args, **options)
        self.blocks = blocks
        model: Any = self.model.module if isinstance(self.model, (DDP, FSDP)) else self.model
        self._loaded: set[tuple[torch.Size, bool]] = set()
        self._tied = [p for name, p in model.named_parameters() if name in on_two_stages(model)]
        self._width, self._n_tensor = model.config.d_model, getattr(model, "tensor_ranks", ALONE).n_ranks

    def loss_of(self, token_ids: Tensor, targets: Tensor) -> Tensor:
        """The mean loss of one micro-batch, without gradients, on every stage; a collective of the stages."""
        found: list[Tensor] = []

        def work(operation: Operation, x: Tensor | None) -> Tensor | None:
            y = self._forward(operation, x, token_ids, targets)
            if self._is_last(operation):
                found.append(y)
            return y

        with torch.no_grad():
            self._load_kernels(token_ids, targets, trains=False)
            plan = self.pipeline.plan.forwards(1)
            self.pipeline.run(self._gathering(work, plan), self._like(token_ids), plan)
        return self._everywhere(found)

    def _run(self, mode: str, token_ids: Tensor, targets: Tensor) -> None:
        batches, share = micro_batches(self.accumulate, token_ids, targets), self._shares(targets)
        alive: dict[tuple[int, int], tuple[Tensor | None, GradientEdge]] = {}  # without the output, which is sent on
        later: dict[tuple[int, int], Works] = {}
        losses: list[Tensor] = []
        trains = mode != "forward"

        def work(operation: Operation, given: Tensor | None) -> Tensor | None:
            i, place = operation.microbatch, (operation.microbatch, operation.chunk)
            if operation.kind == "W":
                for gradients in later.pop(place):
                    gradients()
                return None
            if operation.kind == "F":
                x = None if given is None else given.requires_grad_(trains)
                y = self._forward(operation, x, *batches[i])
                if self._is_last(operation):
                    y = share(i + 1, y)
                    losses.append(y.detach())
                if trains:
                    alive[place] = x, get_gradient_edge(y)
                return y.detach()
            x, end = alive.pop(place)
            with put_off(later.setdefault(place, [])) if operation.kind == "B" else nullcontext():
                torch.autograd.backward(end, given)
            return None if x is None else x.grad

        with (
            torch.set_grad_enabled(trains),
            local_gradients(self.model, self.optimizer),
            matmul_precision(self.precision),
        ):
            self._load_kernels(*batches[0], trains=trains)
            plan = self.pipeline.plan
            plan = plan if trains else plan.forwards(plan.microbatches)
            self.pipeline.run(self._gathering(work, plan), self._like(batches[0][0]), plan)
        self.loss = self._everywhere(losses)
        if not trains:
            return
        if isinstance(self.model, (DDP, FSDP)):
            self.model.finish_gradient_synchronization()
        for parameter in self._tied:  # after averages, so that both ends have the same bits
            assert parameter.grad is not None
            parameter.grad += self.pipeline.exchange_ends(parameter.grad.detach())
        if mode == "backward":
            self.optimizer.zero_grad(set_to_none=True)

    def _gathering(self, work: Work, plan: Schedule) -> Work:
        """The same work; under FSDP the first weights of each operation are gathered during the previous one."""
        model, order, stage = self.model, plan.orders[self.pipeline.stage], self.pipeline.stage
        if not isinstance(model, FSDP):
            return work
        after = dict(pairwise(order))

        def gathering(operation: Operation, given: Tensor | None) -> Tensor | None:
            following = after.get(operation)
            part = None
            if following is not None and following.kind != "W":
                part = plan.part(stage, following.chunk), following.kind != "F"
            with model.task(part, runs_units=operation.kind != "W"):
                return work(operation, given)

        return gathering

    def _load_kernels(self, token_ids: Tensor, targets: Tensor, *, trains: bool) -> None:
        """Run this stage's work once on zeros, before the first messages of this shape.

        A GPU loads a kernel when it is first launched, and may first wait for all running work, even for a message that
        arrives only after this launch.
        """
        key = (token_ids.shape, trains)
        if self.device.type != "cuda" or key in self._loaded:
            return
        self._loaded.add(key)
        gradients = [parameter.grad for parameter in self._parameters]
        for parameter in self._parameters:
            parameter.grad = None
        for chunk in range(self.pipeline.plan.chunks):
            operation, later = Operation("F", 0, chunk), Works()
            first = self.pipeline.plan.part(self.pipeline.stage, chunk) == 0
            x = None if first else self._like(token_ids).zero_().requires_grad_(trains)
            y = self._forward(operation, x, token_ids, targets)
            if trains:
                with put_off(later):
                    torch.autograd.backward(y, None if self._is_last(operation) else torch.zeros_like(y))
                for product in later:
                    product()
        if isinstance(self.model, FSDP):
            self.model.zero_grad()  # accumulated gradients, too
        for parameter, gradient in zip(self._parameters, gradients, strict=True):
            parameter.grad = gradient
        torch.cuda.synchronize(self.device)

    def _forward(self, operation: Operation, x: Tensor | None, token_ids: Tensor, targets: Tensor) -> Tensor:
        part = self.pipeline.plan.part(self.pipeline.stage, operation.chunk)
        if isinstance(self.model, FSDP):
            self.model.part = part
        y: Tensor = self.model(token_ids, targets, x, self.blocks[part])
        return y

    def _like(self, token_ids: Tensor) -> Tensor:
        """The activations of these tokens between two parts: of all of them, or of this tensor rank's."""
        n, length = token_ids.shape[:2]
        shape = (n, length) if self._n_tensor == 1 else (1, n * length // self._n_tensor)
        return self._parameters[0].new_empty(*shape, self._width)

    def _is_last(self, operation: Operation) -> bool:
        return self.pipeline.plan.receiver(self.pipeline.stage, Operation("F", 0, operation.chunk)) is None
