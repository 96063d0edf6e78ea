"""Groups as ``torch.optim`` has them: their parameters, their options, and how the parameters are laid out."""

from collections.abc import Sequence
from copy import deepcopy
from typing import Any, NamedTuple

from torch import Tensor

from cs336_systems.distributed.shards import runs_of

Group = dict[str, Any]

_NOT_OPTIONS = ("params", "param_names")
_MUTABLE = (Tensor, list, dict, set)


def parameters_of(groups: Sequence[Group]) -> list[Tensor]:
    """Those of all the groups, each once."""
    return list(dict.fromkeys(parameter for group in groups for parameter in group["params"]))


def options_of(group: Group) -> dict[str, Any]:
    """What a group says besides its parameters."""
    return {key: value for key, value in group.items() if key not in _NOT_OPTIONS}


def copied(options: dict[str, Any]) -> dict[str, Any]:
    """Options that may be changed without changing these."""
    return {key: deepcopy(value) if isinstance(value, _MUTABLE) else value for key, value in options.items()}


class Batch(NamedTuple):
    """Groups that were laid out together: a copy, whose parameters may lie elsewhere, must lay out the same."""

    n_groups: int
    runs: list[list[int]]
    """Numbers of the groups' parameters, as ``shards.runs_of`` found them."""

    @classmethod
    def of(cls, groups: Sequence[Group]) -> "Batch":
        parameters = parameters_of(groups)
        number_of = {parameter: i for i, parameter in enumerate(parameters)}
        return cls(len(groups), [[number_of[parameter] for parameter in run] for run in runs_of(parameters)])

    def described(self, groups: Sequence[Group]) -> list[str]:
        """What of each parameter decides the layout, which must be the same on every rank."""
        numbered = parameters_of(groups)
        run_of = {numbered[i]: run for run in self.runs for i in run}
        return [
            f"group {i}: {tuple(p.shape)} {p.dtype}{' frozen' * (not p.requires_grad)}"
            + f", in one memory with parameters {run_of[p]}" * (len(run_of[p]) > 1)
            for i, group in enumerate(groups)
            for p in group["params"]
        ]
