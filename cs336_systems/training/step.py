"""One training step in phases (forward, backward, optimizer) that can be run, timed or profiled one by one.

``TrainStep`` fixes the order of work: forward and loss under autocast, backward, synchronising gradients with other
ranks, optimizer, clearing of gradients. It knows nothing of how it is measured.

With N micro-batches the loss is the mean over all of their targets except ``IGNORED`` ones: each backward adds the
gradient of its own loss times its fraction of the targets, 1/N if all count. With several ranks, gradients stay on
their rank until the last backward, which averages their sum over the ranks.

    step = assemble(TrainingCase(size="small"))
    loss = step(token_ids, targets)                                  # one whole step
    for name, phase in step.phases("backward", token_ids, targets).items():
        phase()                                                      # "forward", then "backward"
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext

import torch
import torch.distributed as dist
from torch import Tensor, nn

from cs336_systems.config import MODES, Precision, check_known
from cs336_systems.distributed.ddp import DDP
from cs336_systems.distributed.fsdp import FSDP
from cs336_systems.kernels.linear_cross_entropy import IGNORED
from cs336_systems.model.ops import widened
from cs336_systems.training.backward_update import BackwardUpdate
from cs336_systems.training.clipping import GradientGuard
from cs336_systems.training.precision import autocast, matmul_precision

Phase = Callable[[], None]


def cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    """Return the mean negative log-likelihood in nats, a scalar in fp32 or wider.

    Logits are (..., vocab), targets int64 of shape (...).

    The log-sum-exp subtracts each row's maximum before it exponentiates, so that no finite logit overflows. Half
    precision logits are first copied to fp32; ``costs/memory.py`` counts that copy.

    Raises:
        ValueError: the leading shapes of logits and targets differ.
    """
    if logits.shape[:-1] != targets.shape:
        raise ValueError(
            f"targets {tuple(targets.shape)} do not match logits {tuple(logits.shape)} without the vocabulary"
        )
    logits = widened(logits)
    target_logits = logits.gather(-1, targets.unsqueeze(-1)).squeeze(-1)
    return (torch.logsumexp(logits, dim=-1) - target_logits).mean()


def masked_cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    """``cross_entropy`` of the targets that are not ``IGNORED``; 0 if all are."""
    counts = targets != IGNORED
    logits = widened(logits)
    target_logits = logits.gather(-1, targets.where(counts, 0).unsqueeze(-1)).squeeze(-1)
    losses = (torch.logsumexp(logits, dim=-1) - target_logits).where(counts, 0.0)
    return losses.sum() / counts.sum().clamp(min=1)


def micro_batches(n: int, token_ids: Tensor, targets: Tensor) -> list[tuple[Tensor, Tensor]]:
    """Divide ids and targets (batch, seq) into ``n`` pairs (batch / n, seq) of views, in their order.

    Raises:
        ValueError: ``n`` does not divide the batch.
    """
    if token_ids.shape[0] % n:
        raise ValueError(f"{token_ids.shape[0]} sequences do not make {n} micro-batches of equally many")
    return list(zip(token_ids.chunk(n), targets.chunk(n), strict=True))


@contextmanager
def local_gradients(model: nn.Module, optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """Keep the wrapper and the optimizer from sending gradients to other ranks while the context is open."""
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
    """Runs forward, backward and optimizer step of one model on one device.

    Args:
        model: maps int64 token ids (batch, seq) to logits (batch, seq, vocab); without ``loss_function``, token ids and
            targets to a scalar loss.
        optimizer: the optimizer of the model's parameters.
        precision: determines autocast and TF32; the parameters already have its dtype.
        loss_function: maps logits and targets to a scalar, the mean over tokens; None if the model computes its loss.
        accumulate: the number of micro-batches into which the batch of an optimizer step is divided.
        guard: if given, clips the gradients and steps the optimizer, unless they are not finite.
        counted_over: the ranks over which gradients are averaged; they sum their numbers of targets in each step, so
            that all targets of all ranks have equal weight. Without it, each rank's batch has equal weight.
        update: if given, updates parameters during backward.

    Raises:
        ValueError: ``accumulate`` is not positive, or both ``guard`` and ``update`` are given.
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
        counted_over: dist.ProcessGroup | None = None,
    ) -> None:
        if accumulate < 1:
            raise ValueError(f"accumulate must be positive, got {accumulate}")
        if guard is not None and update is not None:
            raise ValueError("clipping needs all gradients before the first update, which comes under backward")
        self.model, self.optimizer, self.precision = model, optimizer, precision
        self.loss_function, self.accumulate = loss_function, accumulate
        self.guard, self.update, self.counted_over = guard, update, counted_over
        self._parameters = tuple(model.parameters())
        self._trained = tuple(parameter for parameter in self._parameters if parameter.requires_grad)
        self.device = self._parameters[0].device
        self.loss: Tensor | None = None
        """The loss of the last batch so far, detached. With ``counted_over``, the loss is its mean over these ranks."""
        self.before_update: Callable[[TrainStep], bool] | None = None
        """Called between reduction and clipping of gradients; may change them, and returns False to skip the step."""

    def __call__(self, token_ids: Tensor, targets: Tensor) -> Tensor:
        """Run one step on ids and targets (batch, seq); returns the loss before the update, a detached scalar.

        Targets may be on the CPU; a model that computes its own loss then has no logits where they are ignored.
        """
        for phase in self.phases("step", token_ids, targets).values():
            phase()
        assert self.loss is not None
        return self.loss

    def loss_of(self, token_ids: Tensor, targets: Tensor) -> Tensor:
        """Return the loss of one batch with its autograd graph, under the caller's autocast and precision."""
        if self.loss_function is None:
            loss: Tensor = self.model(token_ids, targets)
            return loss
        logits = self.model(token_ids)  # not the parameters' device, if FSDP2 keeps these on the host
        return self.loss_function(logits, targets.to(logits.device, non_blocking=True))

    def phases(self, mode: str, token_ids: Tensor, targets: Tensor) -> dict[str, Phase]:
        """Return the phases of one step on this batch by name, in the order in which they must run.

        Mode ``forward`` runs model and loss without gradients. Mode ``backward`` runs forward with gradients and
        backward, which then drops the gradients. Mode ``step`` runs forward, backward and optimizer; the last also
        clears the gradients. Further micro-batches add the phases ``forward 2``, ``backward 2``, and so on.

        Raises:
            ValueError: there is no such mode, the batch cannot be divided into equal micro-batches, or the mode is
                ``backward`` although backward would update parameters.
        """
        if mode == "backward" and self.update is not None:
            raise ValueError("mode backward takes no optimizer steps, but this step's are taken under backward")
        check_known("mode", mode, MODES)
        phases: dict[str, Phase] = {}
        share = self._shares(targets)
        for part, micro_batch in enumerate(micro_batches(self.accumulate, token_ids, targets), start=1):
            phases |= self._passes(mode, part, *micro_batch, share)
        if mode == "step":
            phases["optimizer"] = self._update
        return phases

    def _shares(self, targets: Tensor) -> Callable[[int, Tensor], Tensor]:
        """Return a function that maps a micro-batch's number and mean loss to its term in the loss that ranks average.

        Targets of ``IGNORED`` do not count. Targets are counted in the first micro-batch.
        """
        if self.accumulate == 1 and self.counted_over is None:
            return lambda part, loss: loss
        counts: list[Tensor] = []
        divisors: list[Tensor] = []

        def share(part: int, loss: Tensor) -> Tensor:
            if part == 1:
                own = torch.stack([(each != IGNORED).sum() for each in targets.chunk(self.accumulate)])
                own = own.to(loss.device, non_blocking=True)
                counts[:], total = own.unbind(), own.sum()
                if self.counted_over is not None:
                    dist.all_reduce(total, group=self.counted_over)
                    total = total / dist.get_world_size(self.counted_over)
                divisors[:] = [(total.double() / count).to(loss.dtype) for count in counts]
            return torch.where(counts[part - 1] > 0, loss, 0.0) / divisors[part - 1]  # the mean of none is NaN

        return share

    def _passes(
        self, mode: str, part: int, token_ids: Tensor, targets: Tensor, share: Callable[[int, Tensor], Tensor]
    ) -> dict[str, Phase]:
        """Return forward, and backward if the mode has it, of the micro-batch with this number, counted from 1."""
        graph_loss: list[Tensor] = []
        last = part == self.accumulate

        def forward() -> None:
            alone = nullcontext() if last else local_gradients(self.model, self.optimizer)
            grad = torch.set_grad_enabled(mode != "forward")
            with grad, alone, matmul_precision(self.precision), autocast(self.precision, token_ids.device):
                loss = share(part, self.loss_of(token_ids, targets))
            self.loss = loss.detach() if part == 1 or self.loss is None else self.loss + loss.detach()
            if mode != "forward":
                graph_loss.append(loss)

        def backward() -> None:
            alone = nullcontext() if last else local_gradients(self.model, self.optimizer)
            with alone, matmul_precision(self.precision):
                graph_loss.pop().backward()
            if not last:
                return
            # Other wrappers have averaged inside backward, or the optimizer averages.
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
        if self.before_update is not None and not self.before_update(self):
            return
        if self.guard is not None:
            self.guard(self.model, self.optimizer, self.loss)
        else:
            self.optimizer.step()
        self._weights_changed()

    def _weights_changed(self) -> None:
        """Raise the version counters of the weights, so that values computed from them are known to be stale."""
        torch.autograd.graph.increment_version(self._trained)
