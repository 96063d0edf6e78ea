"""Gradients under FSDP on their way from a rank's backward to averages over the ranks, on the shards.

Each group is reduced as soon as backward needs it no more, while backward goes on; what is replicated is averaged when
it ends. Without synchronization whole gradients are kept instead, in the dtype in which they will travel.
"""

import torch

from cs336_systems.distributed.fsdp_parameters import Reduction, ShardedGroup, ShardedParameter
from cs336_systems.distributed.fsdp_replicated import ReplicatedParameters


class Gradients:
    """The gradients of all groups, and of the replicated parameters.

    Args:
        device: of the parameters.
    """

    def __init__(self, groups: list[ShardedGroup], replicated: ReplicatedParameters, device: torch.device) -> None:
        self.groups = groups
        self.replicated = replicated
        self.device = device
        self.synchronize = True
        """Whether backward reduces gradients or accumulates them."""
        self.unfinished = False
        """Whether a backward has left some that are not averaged; the same on every rank."""
        self._accumulated: dict[ShardedGroup, None] = {}
        """Groups with gradients of backward passes that were not synchronized."""
        self._reduction: Reduction | None = None
        """The one that is under way."""
        self._missing: list[ShardedParameter] = []
        """Parameters whose gradient is zeros unless another rank has one."""

    def take(self, group: ShardedGroup) -> None:
        """Take the group's gradients for a reduction, or accumulate them if this pass is not to be synchronized."""
        if not group.trainable:
            return
        if not self.synchronize:
            group.accumulate()
            self._accumulated[group] = None
            return
        # Only one is under way: with the group that backward fills, no more than two have whole gradients in memory.
        self._finish_reduction()
        self._accumulated.pop(group, None)
        self._reduction = group.reduction()

    def send(self) -> None:
        """Start the reduction of what was taken last."""
        if self._reduction is not None:
            self._reduction.start()

    def _finish_reduction(self) -> None:
        if self._reduction is not None:
            self._reduction.start()
            self._reduction.finish()
            self._missing += self._reduction.missing
            self._reduction = None

    def end_backward(self) -> None:
        """After the groups that backward has come to: gradients elsewhere, and the averages if they are due."""
        for group in self.groups:
            if group.has_gradients:  # it came after its group was reduced: a reduction adds to what is there
                self.take(group)
        self.send()
        self.replicated.collect()
        self.unfinished = True
        if self.synchronize:
            self.average()

    @torch.no_grad()
    def average(self) -> None:
        """Wait for the reductions, and average the gradients of the replicated parameters.

        A parameter that no rank has used keeps no gradient, as on one device.
        """
        for group in list(self._accumulated):
            self.take(group)
        self._finish_reduction()
        sharded = [parameter for group in self.groups for parameter in group.trainable]
        # The last message of a step, and sent even where nothing is replicated: it also counts who has a gradient.
        counts = self.replicated.all_reduce(self.device, sharded)
        if self._missing:  # only then does the host look at the counts, and so wait for the device
            used = {parameter for parameter, count in zip(sharded, counts.tolist(), strict=True) if count}
            for parameter in self._missing:
                if parameter in used:
                    parameter.run_hooks()
                else:
                    parameter.sharded_param.grad = None
        for parameter in sharded:
            parameter.has_gradient = False
        self._missing.clear()
        self.unfinished = False

    def drop(self) -> None:
        """Give up all that is not in a parameter's ``grad`` yet, accumulated gradients too."""
        if self._reduction is not None:
            self._reduction.abandon()
            self._reduction = None
        for group in self.groups:
            group.drop_gradients()
        self.replicated.drop_gradients()
        self._accumulated.clear()
        self._missing.clear()
        self.unfinished = False
