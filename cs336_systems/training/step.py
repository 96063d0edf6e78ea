"""One training step, as three phases that can be run, timed or profiled one by one; of micro-batches, part by part.

``TrainStep`` owns the order of work (forward and loss under autocast, backward, synchronising gradients with other
ranks, optimizer and clearing of gradients) and nothing of how it is measured.

The loss of N micro-batches is the mean over all of their tokens. Each has as many as any other, so that is the mean of
their losses, and each backward adds the gradient of its loss over N to what is there, in place. With several ranks the
gradients stay on their rank until the last backward, which averages their sum over the ranks.

    step = assemble(TrainingCase(size="small"))
    loss = step(token_ids, targets)                                  # one whole step
    for name, phase in step.phases("backward", token_ids, targets).items():
        phase()                                                      # "forward", then "backward"
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext

import torch
from torch import Tensor, nn

from cs336_systems.config import MODES, Precision
from cs336_systems.distributed.ddp import DDP
from cs336_systems.distributed.fsdp import FSDP
from cs336_systems.training.backward_update import BackwardUpdate
from cs336_systems.training.clipping import GradientGuard
from cs336_systems.training.precision import autocast, matmul_precision

Phase = Callable[[], None]


def cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    """Mean negative log-likelihood, in nats: logits (..., vocab), int64 targets (...) -> scalar, at least fp32.

    The log-sum-exp subtracts the row's maximum before it exponentiates, so that no logit, however large, overflows;
    half precision logits are widened to fp32 first, at the price of one fp32 copy, which ``costs/memory.py`` counts.

    Raises:
        ValueError: the leading shapes of logits and targets differ.
    """
    if logits.shape[:-1] != targets.shape:
        raise ValueError(
            f"targets {tuple(targets.shape)} do not match logits {tuple(logits.shape)} without the vocabulary"
        )
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    target_logits = logits.gather(-1, targets.unsqueeze(-1)).squeeze(-1)
    return (torch.logsumexp(logits, dim=-1) - target_logits).mean()


def micro_batches(n: int, token_ids: Tensor, targets: Tensor) -> list[tuple[Tensor, Tensor]]:
    """(batch, seq) ids and targets as ``n`` pairs of equally many sequences each, in their order; views.

    Raises:
        ValueError: they cannot be dealt out equally.
    """
    if token_ids.shape[0] % n:
        raise ValueError(f"{token_ids.shape[0]} sequences do not make {n} micro-batches of equally many")
    return list(zip(token_ids.chunk(n), targets.chunk(n), strict=True))


@contextmanager
def local_gradients(model: nn.Module, optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """Keep wrapper and optimizer from sending gradients to other ranks in forward and backward inside."""
    with ExitStack() as stack:
        for owner in (model, optimizer):
            no_sync = getattr(owner, "no_sync", None)
            if callable(no_sync):
                stack.enter_context(no_sync())
        if callable(set_sync := getattr(model, "set_requires_gradient_sync", None)):  # torch's FSDP2
            set_sync(False)
            stack.callback(set_sync, True)
        yield


class TrainStep:
    """Forward, backward and optimizer step of one model on one device.

    Args:
        model: token ids (batch, seq) -> logits (batch, seq, vocab); without ``loss_function``, token ids and targets
            -> scalar.
        optimizer: over the model's parameters.
        precision: autocast and TF32 follow from it; the parameters already have its dtype.
        loss_function: (logits, targets) -> scalar, a mean over tokens; None if the model computes its loss.
        accumulate: micro-batches per optimizer step, into which a batch is dealt out.
        guard: steps the optimizer, if that is to clip, or to pass over gradients that are not finite.
        update: steps the optimizer under backward.

    Raises:
        ValueError: ``accumulate`` is not positive, or a guard and an update under backward meet.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        precision: Precision,
        loss_function: Callable[[Tensor, Tensor], Tensor] | None = cross_entropy,
        accumulate: int = 1,
        guard: GradientGuard | None = None,
        update: BackwardUpdate | None = None,
    ) -> None:
        if accumulate < 1:
            raise ValueError(f"accumulate must be positive, got {accumulate}")
        if guard is not None and update is not None:
            raise ValueError("clipping needs all gradients before the first update, which comes under backward")
        self.model, self.optimizer, self.precision = model, optimizer, precision
        self.loss_function, self.accumulate = loss_function, accumulate
        self.guard, self.update = guard, update
        self._parameters = tuple(model.parameters())
        self.device = self._parameters[0].device
        self.loss: Tensor | None = None
        """Loss of the last batch, detached, on the device; while it runs, the sum over its micro-batches so far."""

    def __call__(self, token_ids: Tensor, targets: Tensor) -> Tensor:
        """One whole step on (batch, seq) ids; returns the loss before the update, a detached scalar on the device."""
        for phase in self.phases("step", token_ids, targets).values():
            phase()
        assert self.loss is not None
        return self.loss

    def loss_of(self, token_ids: Tensor, targets: Tensor) -> Tensor:
        """The loss of one batch, with its graph; precision and autocast are those that are on outside."""
        if self.loss_function is None:
            loss: Tensor = self.model(token_ids, targets)
            return loss
        return self.loss_function(self.model(token_ids), targets)

    def phases(self, mode: str, token_ids: Tensor, targets: Tensor) -> dict[str, Phase]:
        """The phases of one step on this batch, in the order in which they must run.

        ``forward``: model and loss without gradients. ``backward``: forward with gradients, then backward, after which
        the gradients are dropped. ``step``: forward, backward, optimizer; clearing the gradients belongs to the last.
        Forward and backward of further micro-batches follow the first ones: ``forward 2``, ``backward 2``, and so on.

        Raises:
            ValueError: no such mode, or the batch cannot be dealt out to micro-batches; or the mode ends with a
                backward that would update parameters.
        """
        if mode == "backward" and self.update is not None:
            raise ValueError("mode backward takes no optimizer steps, but this step's are taken under backward")
        if mode not in MODES:
            raise ValueError(f"unknown mode {mode!r}: known are {', '.join(MODES)}")
        phases: dict[str, Phase] = {}
        for part, micro_batch in enumerate(micro_batches(self.accumulate, token_ids, targets), start=1):
            phases |= self._passes(mode, part, *micro_batch)
        if mode == "step":
            phases["optimizer"] = self._update
        return phases

    def _passes(self, mode: str, part: int, token_ids: Tensor, targets: Tensor) -> dict[str, Phase]:
        """Forward of the micro-batch with this number, from 1, and backward unless the mode does without."""
        graph_loss: list[Tensor] = []
        last = part == self.accumulate

        def forward() -> None:
            alone = nullcontext() if last else local_gradients(self.model, self.optimizer)
            grad = torch.set_grad_enabled(mode != "forward")
            with grad, alone, matmul_precision(self.precision), autocast(self.precision, self.device):
                loss = self.loss_of(token_ids, targets)
            if self.accumulate > 1:
                loss = loss / self.accumulate
            self.loss = loss.detach() if part == 1 or self.loss is None else self.loss + loss.detach()
            if mode != "forward":
                graph_loss.append(loss)

        def backward() -> None:
            alone = nullcontext() if last else local_gradients(self.model, self.optimizer)
            with alone, matmul_precision(self.precision):
                graph_loss.pop().backward()
            if not last:
                return
            # Others have averaged inside backward, or leave it to the optimizer.
            if isinstance(self.model, (DDP, FSDP)):
                self.model.finish_gradient_synchronization()
            if mode == "backward":
                self.optimizer.zero_grad(set_to_none=True)

        passes: dict[str, Phase] = {"forward": forward}
        if mode != "forward":
            passes["backward"] = backward
        # ``config.phase_of`` finds the phase in these names.
        return {name if part == 1 else f"{name} {part}": phase for name, phase in passes.items()}

    def _update(self) -> None:
        self._optimize()
        self.optimizer.zero_grad(set_to_none=True)

    def _optimize(self) -> None:
        if self.update is not None:
            self.update.finish()
            return
        if self.guard is not None:
            self.guard(self.model, self.optimizer, self.loss)
        else:
            self.optimizer.step()
        self._weights_changed()

    def _weights_changed(self) -> None:
        """Raise the weights' versions, by which what was made of them is known to be old."""
        torch.autograd.graph.increment_version(self._parameters)
