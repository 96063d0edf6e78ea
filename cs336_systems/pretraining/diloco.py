"""DiLoCo: replicas train independently and average the changes of their weights every few steps."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torchft.local_sgd import DiLoCo

from cs336_systems.pretraining.agreement import OUTER_MOMENTUM
from cs336_systems.pretraining.replica_agreement import ReplicaAgreement, said_of
from cs336_systems.pretraining.run_records import Dropped
from cs336_systems.training.step import TrainStep

_MIX = 0.5
"""The weight of a replica's own weights when a delayed average is mixed into them, as in Streaming DiLoCo (arXiv
2501.18512). Without it the steps made during the delay would be lost."""
_MEAN = {"lr": 1.0, "momentum": 0.0, "nesterov": False}
"""Settings of the outer optimizer that set weights to the mean of the replicas'."""
_MOST_FAILED = 10
"""Failed averages in a row after which a replica that has not begun to train gives up; each death causes one."""


class OuterSteps(ReplicaAgreement):
    """DiLoCo: each replica makes its own steps, and an outer optimizer applies the mean change of their weights.

    Unlike in the papers, the last average of a run is the plain mean of the replicas' weights: a step with momentum
    overshoots the mean, which pays off only if more steps follow.

    A replica begins with a round of steps without gradients. At the round's end it either loads the state of the
    others, outer optimizer included, or meets those that begin with it. In this one average it counts with the weights
    of the peer whose state it loaded. Until then its outer optimizer changes neither weights nor momenta, which may
    have been loaded from a checkpoint.
    """

    _others_train = False

    def _come(self) -> None:
        options, optimizer = self._options, self._step.optimizer
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        fragments = _fragments(parameters, options.agree_fragments)
        how: dict[str, Any] = {"lr": options.outer_learning_rate, "momentum": options.outer_momentum}
        how |= {"nesterov": options.outer_momentum > 0}
        still = float(options.outer_momentum > 0)  # for unchanged weights: m <- 1 m + 0, w <- w - 0 m
        self._outer = [torch.optim.SGD(fragment.parameters(), lr=0.0, momentum=still) for fragment in fragments]
        for outer in self._outer:
            for parameter in outer.param_groups[0]["params"]:
                if (momentum := optimizer.state.get(parameter, {}).pop(OUTER_MOMENTUM, None)) is not None:
                    outer.state[parameter]["momentum_buffer"] = momentum
        self._diloco = DiLoCo(
            self.manager,
            fragments,
            optimizer,
            self._outer,
            options.agree_every,
            backup_device=self._rank.device,
            should_quantize=options.agree_dtype == "fp8",
            fragment_sync_delay=options.agree_delay,
            fragment_update_alpha=_MIX if options.agree_delay else 0.0,
        )
        self._asked = torch.zeros_like(self.reasons)
        self._diloco.__enter__()
        optimizer.register_step_post_hook(self._after_step)
        self._coming, self._averaged_at = True, self._prepared.loader.taken
        apart, n_failed = options.agree_every // options.agree_fragments, 0
        while True:
            self.at_average = False
            for _ in range(apart - options.agree_delay):
                optimizer.step()
            if self._others_train:  # they are in the middle of a delay
                break
            for _ in range(options.agree_delay):
                optimizer.step()
            if self._all_there and self.at_average:
                break
            n_failed = 0 if self.at_average else n_failed + 1
            if n_failed == _MOST_FAILED:
                error = self.manager.errored()
                why = said_of(error.original_exception if error else None)
                raise RuntimeError(f"{n_failed} averages in a row have failed before the first step, the last: {why}")
            time.sleep(0.05)
        n_steps = self._prepared.n_steps
        if not self._others_train and (n_steps - self._made) % apart:
            steps = f"the {n_steps - self._made:,} steps from step {self._made:,} to {n_steps:,}"
            raise ValueError(
                f"{steps} are no multiple of the {apart:,} between two averages: replicas end on an average"
            )
        self._coming = False
        self._step_outer_by(how)

    def begin(self, made: int) -> int:
        self._made, self.at_average = made, False
        if made >= self._prepared.n_steps - self._options.agree_every:  # each fragment is averaged once more
            self._step_outer_by(_MEAN)
        return made

    def _step_outer_by(self, how: dict[str, Any]) -> None:
        for outer in self._outer:
            for group in outer.param_groups:
                group |= how

    def before_update(self, step: TrainStep) -> bool:
        self._gradients(step)
        self._asked = self.reasons.clone()
        self.reasons = torch.zeros_like(self.reasons)
        return True

    def end(self, made: int) -> int:
        return self._made if self._healed and self._made != made else made + 1

    def _load(self, state: dict[str, Any]) -> None:
        super()._load(state)
        self._others_train = state["trains"]

    def _made_by_peer(self) -> int:
        return self._made + (not self._coming)

    def _apart_for(self) -> tuple[int, int]:
        taken = self._prepared.loader.taken
        return (taken if self._healed else self._averaged_at), taken

    def _after_step(self, *_: Any) -> None:
        """Record the result of an average, if the inner step ended with one; runs after every inner step."""
        verdict, self.manager.verdict = self.manager.verdict, None
        if verdict is None:
            return
        self.at_average = verdict
        first, self._averaged_at = self._averaged_at, self._prepared.loader.taken
        if verdict:
            asked = self._asked.float()
            self.manager.allreduce(asked).wait()
            if self.manager.errored() is None:
                self.reasons = asked
        elif not self._coming:
            error = self.manager.errored()
            reason = said_of(error.original_exception if error else None)
            sequences = first, self._averaged_at
            self._records.append(Dropped(self._made, reason, sequences, False, 0.0))

    @contextmanager
    def common_weights(self) -> Iterator[None]:
        """Give the model the weights of each fragment's last average inside the context.

        The replica's own weights have changed since, except in the fragment averaged last; with a delay, in that one,
        too.
        """
        if self._options.agree_fragments == 1 and self._options.agree_delay == 0:
            yield
            return
        self.manager.disallow_state_dict_read()
        self._swap_weights()
        try:
            yield
        finally:
            self._swap_weights()
            self.manager.allow_state_dict_read()

    @torch.no_grad()
    def _swap_weights(self) -> None:
        """Swap the model's weights with those of the last averages."""
        for fragment in self._diloco._fragments:
            for name, parameter in fragment._model_fragment.named_parameters():
                average, own = fragment.original_parameters[name], parameter.detach().clone()
                parameter.copy_(average)
                average.copy_(own)

    @contextmanager
    def saving(self) -> Iterator[None]:
        states = self._step.optimizer.state
        held = [
            (states[parameter], state["momentum_buffer"])
            for outer in self._outer
            for parameter, state in outer.state.items()
            if state.get("momentum_buffer") is not None
        ]
        for state, momentum in held:
            state[OUTER_MOMENTUM] = momentum
        try:
            with self.common_weights():
                yield
        finally:
            for state, _ in held:
                del state[OUTER_MOMENTUM]

    def leave(self) -> None:
        if hasattr(self, "_diloco"):
            self._diloco.__exit__(None, None, None)
        super().leave()


def _fragments(parameters: list[nn.Parameter], n: int) -> list[nn.Module]:
    """Divide the parameters, in order, into ``n`` modules with about equal numbers of elements.

    Raises:
        ValueError: there are fewer than ``n`` parameters.
    """
    if n > len(parameters):
        raise ValueError(f"--agree-fragments {n} of {len(parameters)} parameters")
    total, before, place = sum(parameter.numel() for parameter in parameters), 0, -1
    fragments = [nn.Module() for _ in range(n)]
    for number, parameter in enumerate(parameters):
        place = max(min(before * n // total, place + 1), n - len(parameters) + number)  # none is empty
        fragments[place].register_parameter(str(number), parameter)
        before += parameter.numel()
    return fragments
