"""Pipeline parallelism: a stage's part of the model, the messages between stages, and the execution of a schedule.

    plan = make_schedule("zbv", stages=2, microbatches=8)
    keep_stage(model, plan, divide(plan, config), stage)     # a model on meta loses the blocks of other stages
    pipeline = Pipeline(plan, stage, GroupMessages(rank, stages))
    pipeline.run(work, like)                                 # work(operation, input) -> result

A stage works through its list (``costs/parallelism/schedules.py``). Results for other stages are sent as soon as they
are queued. By process groups, the messages that the next operation needs are received while this one runs; by copies,
they reach this stage's mailbox meanwhile, and are taken out right before the next operation. The order of messages
between two stages is the sender's, which the receiver knows from the same schedule.
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
"""Does an operation of this stage, given the result of the part before (of F) or after (of B); returns its own."""


class ModuleElsewhere(nn.Module):
    """Stands for a module that another stage has, and draws what that would, so that every stage's numbers are those
    of a model in one process."""

    place: Tensor

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self._away = (module,)  # a tuple, in which torch finds no module
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
    """Take from a model on ``meta`` what other stages have; names of parameters stay as they are.

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
    """Put ``ModuleElsewhere`` in the place of all blocks but these ``layers``, and of those ``ends`` not here."""
    for number in range(len(model.layers)):
        if number not in layers:
            model.layers[number] = ModuleElsewhere(model.layers[number])
    for name, here in ends.items():
        if not here:
            setattr(model, name, ModuleElsewhere(getattr(model, name)))


def on_two_stages(model: nn.Module) -> tuple[str, ...]:
    """The names of this stage's parameters that another stage has, too: a tied embedding at both ends."""
    shared: tuple[str, ...] = getattr(model, "on_two_stages", ())
    return shared


class Pipeline:
    """This rank's stage of a schedule.

    Args:
        messages: between the stages, in their order; connecting them is a collective.
    """

    def __init__(self, plan: Schedule, stage: int, messages: GroupMessages) -> None:
        self.plan, self.stage, self.messages = plan, stage, messages
        self._under_way: object = None
        """Messages of a run that has not ended well: copies may still read and write their memory."""
        messages.connect(pair for pair in permutations(range(plan.stages), 2) if plan.channel(*pair))

    def run(self, work: Work, like: Tensor, plan: Schedule | None = None) -> None:
        """Do all operations of this stage.

        Args:
            like: a tensor of the shape, dtype and device of activations between parts.
            plan: the lists of the stages, if they are others than this pipeline's; from its ``forwards``.

        Raises:
            RuntimeError: an earlier run has raised here: the next one would take its messages for its own.
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
        """Return the tensor that the other end of the model gives, of the same shape and dtype.

        Called on the stages of the model's first and last part, if they differ. Raises DistError as ``run``.
        """
        ends = [self.plan.places[part][0] for part in (0, -1)]
        (other,) = (end for end in ends if end != self.stage)
        theirs = torch.empty_like(tensor)
        with peer_errors_as(f"stage {self.stage} exchanged gradients with stage {other} in vain"):
            ways = [partial(self.messages.send, tensor), partial(self.messages.receive, theirs)]
            # Both stages enqueue the lower one's message first: if both sent first, on streams that hold each other up,
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
        """Results that have been received, or are being so, or are this stage's own, until they are taken."""
        self._sent: dict[Operation, tuple[int, Tensor, Underway]] = {}
        """Results that are on their way to other stages."""
        self.under_way = self._there, self._sent

    def __call__(self) -> None:
        order, arrived = self.plan.orders[self.stage], self.plan.arrived(self.stage)
        for operation, following in zip(order, (*order[1:], None), strict=True):
            self._expect(operation)
            given = self._take(operation)
            for earlier in arrived[operation]:
                self._finish(earlier)
            if following is not None and not self._messages.copied:
                # Not for copies: the sender's reach the mailbox by themselves. And a GPU may run streams in the order
                # in which they were given work: a copy that waits for the next operation's input would then hold up
                # this operation, perhaps for ever.
                self._expect(following)
            result = self._work(operation, given)
            self._hand_on(operation, result)
        for operation in tuple(self._sent):
            self._finish(operation)
        assert not self._there and not any(self._coming.values()), (self._there.keys(), self._coming)

    def _remote(self, operation: Operation) -> list[tuple[int, Operation]]:
        """The result that an operation takes from another part of the model, if there is one."""
        own = (self.stage, Operation("F", operation.microbatch, operation.chunk))
        return [each for each in self.plan.inputs(self.stage, operation) if each != own and operation.kind != "W"]

    def _expect(self, operation: Operation) -> None:
        """Begin to receive what an operation needs, and before that what was sent before it."""
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
