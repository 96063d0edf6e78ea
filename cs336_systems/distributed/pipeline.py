"""Pipeline parallelism: a stage's part of the model, the messages between stages, and the execution of a schedule.

    plan = make_schedule("zbv", stages=2, microbatches=8)
    keep_stage(model, plan, divide(plan, config), stage)     # a model on meta loses the blocks of other stages
    pipeline = Pipeline(plan, stage, GroupMessages(rank, stages))
    pipeline.run(work, like)                                 # work(operation, input) -> result

A stage runs its list of operations (``costs/parallelism/schedules.py``) and sends each result for another stage as soon
as its operation is enqueued. With process groups, the inputs of the next operation are received while this one runs;
with copies, they arrive in this stage's mailbox meanwhile and are copied out right before the next operation. Messages
between two stages have the sender's order, which the receiver knows from the same schedule.
"""

from collections.abc import Callable, Container, Sequence
from contextlib import AbstractContextManager
from functools import partial
from itertools import permutations

import torch
from torch import Tensor, nn

from cs336_systems.costs.parallelism.schedules import Operation, Schedule
from cs336_systems.distributed.messages import GroupMessages, Underway
from cs336_systems.distributed.process_group import peer_errors_as
from cs336_systems.model import TransformerLM

Work = Callable[[Operation, Tensor | None], Tensor | None]
"""Runs an operation of this stage, given the result of the part before (for F) or after (for B); returns its own."""


class ModuleElsewhere(nn.Module):
    """Replaces a module that another stage has, and draws that module's random numbers, so that every stage is
    initialised as a model in one process is."""

    place: Tensor

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self._away = (module,)  # a tuple, so that torch does not register the module
        for tensor in module.parameters():
            tensor.untyped_storage().resize_(0)  # a dry run counts storages on meta, too
        self.register_buffer("place", torch.empty(0, device="meta"), persistent=False)  # moves with the model

    def reset_parameters(self) -> None:
        """Advance torch's generator as the module's own would."""
        (module,) = self._away
        if self.place.is_meta:
            return
        for part in module.modules():
            if callable(reset := getattr(part, "reset_parameters", None)):
                part.to_empty(device=self.place.device)
                reset()
                part.to(device="meta")


def keep_stage(model: TransformerLM, plan: Schedule, blocks: Sequence[slice], stage: int) -> None:
    """Remove other stages' modules from a model on ``meta``, without changing the names of parameters.

    A tied embedding is on both the first and the last stage.

    Args:
        blocks: of each part of the model.
    """
    parts = [blocks[part] for part, (of, _) in enumerate(plan.places) if of == stage]
    own = {number for part in parts for number in range(part.start, part.stop)}
    first, last = (plan.places[part][0] == stage for part in (0, -1))
    tied = model.config.tie_embeddings and first != last
    model.on_two_stages = ("token_embeddings.weight",) if tied else ()  # type: ignore[assignment]
    keep_modules(model, own, token_embeddings=first or tied, ln_final=last, lm_head=last or tied)


def keep_modules(model: TransformerLM, layers: Container[int], **ends: bool) -> None:
    """Replace all blocks except ``layers``, and the ``ends`` that are not on this stage, by ``ModuleElsewhere``."""
    for number in range(len(model.layers)):
        if number not in layers:
            model.layers[number] = ModuleElsewhere(model.layers[number])
    for name, here in ends.items():
        if not here:
            setattr(model, name, ModuleElsewhere(getattr(model, name)))


def on_two_stages(model: nn.Module) -> tuple[str, ...]:
    """The names of parameters that this stage shares with another: a tied embedding at both ends."""
    shared: tuple[str, ...] = getattr(model, "on_two_stages", ())
    return shared


class Pipeline:
    """This rank's stage of a schedule.

    Args:
        messages: messages between the stages, numbered in order; connecting them is a collective.
    """

    def __init__(self, plan: Schedule, stage: int, messages: GroupMessages) -> None:
        self.plan, self.stage, self.messages = plan, stage, messages
        self._under_way: object = None
        """Messages of a run that failed: copies may still read and write their memory."""
        messages.connect(pair for pair in permutations(range(plan.stages), 2) if plan.channel(*pair))

    def run(self, work: Work, like: Tensor, plan: Schedule | None = None) -> None:
        """Run all operations of this stage.

        Args:
            like: a tensor of the shape, dtype and device of activations between parts.
            plan: the stages' lists of operations, if not this pipeline's; from its ``forwards``.

        Raises:
            RuntimeError: an earlier run has raised: this one would receive that one's messages.
            torch.distributed.DistError: another stage has gone, or sends nothing within the group's timeout. Under
                ``CopiedMessages`` the process ends instead.
        """
        if self._under_way is not None:
            raise RuntimeError(f"stage {self.stage} has failed in an earlier pass, whose messages are still under way")
        run = _Run(plan or self.plan, self.stage, self.messages, like, work)
        self._under_way = run.under_way
        run()
        self._under_way = None

    def exchange_ends(self, tensor: Tensor) -> Tensor:
        """Exchange tensors of equal shape and dtype with the stage at the other end of the model; returns the other's.

        Called on the stages of the model's first and last part, if these stages differ. Raises DistError as ``run``.
        """
        ends = [self.plan.places[part][0] for part in (0, -1)]
        (other,) = (end for end in ends if end != self.stage)
        theirs = torch.empty_like(tensor)
        with peer_errors_as(f"stage {self.stage} exchanged gradients with stage {other} in vain"):
            ways = [partial(self.messages.send, tensor), partial(self.messages.receive, theirs)]
            # Both stages enqueue the lower stage's message first: if both sent first, on streams that block each other,
            # each could fill a mailbox and wait for ever.
            for each in [begin(other) for begin in (ways if self.stage < other else ways[::-1])]:
                each.wait()
        return theirs


class _Run:
    """One execution of a stage's list."""

    def __init__(self, plan: Schedule, stage: int, messages: GroupMessages, like: Tensor, work: Work) -> None:
        self.plan, self.stage, self._messages, self._like, self._work = plan, stage, messages, like, work
        self._coming = {source: list(plan.channel(source, stage)) for source in range(plan.stages)}
        self._there: dict[tuple[int, Operation], tuple[Tensor, Underway | None]] = {}
        """Results received, being received, or computed by this stage, until they are used."""
        self._sent: dict[Operation, tuple[int, Tensor, Underway]] = {}
        """Results that are being sent to other stages."""
        self.under_way = self._there, self._sent

    def __call__(self) -> None:
        order, arrived = self.plan.orders[self.stage], self.plan.arrived(self.stage)
        for operation, following in zip(order, (*order[1:], None), strict=True):
            self._expect(operation)
            given = self._take(operation)
            for earlier in arrived[operation]:
                self._finish(earlier)
            if following is not None and not self._messages.copied:
                # Not for copies: the sender's reach the mailbox without the receiver. And a GPU may run streams in the
                # order in which work was enqueued: a copy that waits for the next operation's input would then block
                # this operation, perhaps for ever.
                self._expect(following)
            result = self._work(operation, given)
            self._hand_on(operation, result)
        for operation in tuple(self._sent):
            self._finish(operation)
        assert not self._there and not any(self._coming.values()), (self._there.keys(), self._coming)

    def _remote(self, operation: Operation) -> list[tuple[int, Operation]]:
        """The result that an operation takes from another stage, if there is one."""
        own = (self.stage, Operation("F", operation.microbatch, operation.chunk))
        return [each for each in self.plan.inputs(self.stage, operation) if each != own and operation.kind != "W"]

    def _expect(self, operation: Operation) -> None:
        """Begin to receive an operation's input, after all earlier messages of the same sender."""
        for source, result in self._remote(operation):
            while source != self.stage and (source, result) not in self._there:
                coming, into = self._coming[source].pop(0), torch.empty_like(self._like)
                with self._receiving(source, coming.result):
                    message = self._messages.receive(into, source)
                self._there[source, coming.result] = into, message

    def _take(self, operation: Operation) -> Tensor | None:
        for source, result in self._remote(operation):
            tensor, message = self._there.pop((source, result))
            if message is not None:
                with self._receiving(source, result):
                    message.wait()
            return tensor
        return None

    def _hand_on(self, operation: Operation, result: Tensor | None) -> None:
        to = self.plan.receiver(self.stage, operation)
        if to is None:
            return
        assert result is not None, operation
        target, _ = to
        if target == self.stage:
            self._there[self.stage, operation.result] = result, None
            return
        with self._sending(operation, target):
            message = self._messages.send(result, target)
        self._sent[operation] = target, result, message

    def _finish(self, operation: Operation) -> None:
        """Wait until the result of an operation has been sent."""
        target, _, message = self._sent.pop(operation)
        with self._sending(operation, target):
            message.wait()

    def _receiving(self, source: int, result: Operation) -> AbstractContextManager[None]:
        what = f"{result.kind} of micro-batch {result.microbatch} of stage {source}"
        return peer_errors_as(f"stage {self.stage} waited for {what} in vain")

    def _sending(self, operation: Operation, target: int) -> AbstractContextManager[None]:
        what = f"{operation.result.kind} of micro-batch {operation.microbatch} to stage {target}"
        return peer_errors_as(f"stage {self.stage} sent {what} in vain")
