"""Parameter groups of ``torch.optim``, and optimizer state between one rank's share and the whole.

State that has a value per element of a parameter (moments, momentum) is as long as the piece that a rank updates. It is
joined for saving and cut for loading in memory order, so that either layout reads what the other wrote, in any world.
Everything else (step counters, factors, numbers) is the same for all pieces of a parameter, or the parameter is a
single piece; it travels as an object.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from copy import deepcopy
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from cs336_systems.distributed.shards import Piece, Runs, in_memory_order

Group = dict[str, Any]

_NOT_OPTIONS = ("params", "param_names")
_MUTABLE = (Tensor, list, dict, set)


def parameters_of(groups: Sequence[Group]) -> list[Tensor]:
    """The parameters of all the groups, each once."""
    return list(dict.fromkeys(parameter for group in groups for parameter in group["params"]))


def options_of(group: Group) -> dict[str, Any]:
    """The options of a group: all that it holds besides its parameters."""
    return {key: value for key, value in group.items() if key not in _NOT_OPTIONS}


def copied(options: dict[str, Any]) -> dict[str, Any]:
    """Options that may be changed without changing these."""
    return {key: deepcopy(value) if isinstance(value, _MUTABLE) else value for key, value in options.items()}


def layout_descriptions(groups: Sequence[Group], runs: Runs) -> list[str]:
    """What decides the layout of each parameter, which must be the same on every rank."""
    numbered = {parameter: i for i, parameter in enumerate(parameters_of(groups))}
    run_of = {parameter: [numbered[each] for each in run] for run in runs for parameter in run}
    return [
        f"group {i}: {tuple(p.shape)} {p.dtype}{' frozen' * (not p.requires_grad)}"
        + f", in one memory with parameters {run_of[p]}" * (len(run_of[p]) > 1)
        for i, group in enumerate(groups)
        for p in group["params"]
    ]


State = Mapping[Tensor, dict[str, Any]]


def whole_state(
    pieces: Mapping[Tensor, list[Piece]], state: State, world_size: int, *, keep: bool
) -> defaultdict[Tensor, Any]:
    """The state of every parameter, as copies on the CPU; every rank must call it, those that ``keep`` it get it.

    Args:
        pieces: by parameter, in the same order on every rank.
        state: this rank's, by ``Piece.tensor``.
    """
    described: dict[tuple[int, int], tuple[dict[str, torch.dtype], dict[str, Any]]] = {}
    for i, parts in enumerate(pieces.values()):
        for j, piece in enumerate(parts):
            if piece.tensor is not None and (values := state.get(piece.tensor)):
                per_element = {k: v.dtype for k, v in values.items() if is_per_element(k, v, piece.tensor)}
                rest = {k: _on_cpu(v) for k, v in values.items() if k not in per_element}
                described[i, j] = (per_element, rest)
    if world_size > 1:
        of_all: list[Any] = [None] * world_size
        dist.all_gather_object(of_all, described)
        for theirs in of_all:
            described |= theirs
    whole: defaultdict[Tensor, Any] = defaultdict(dict)
    for i, (parameter, parts) in enumerate(pieces.items()):
        if (i, 0) not in described:
            continue
        per_element, rest = described[i, 0]
        for key, dtype in per_element.items():
            flat = torch.empty(parameter.numel(), dtype=dtype, device=parameter.device)
            for piece in parts:
                target = flat[piece.start : piece.stop]
                if piece.tensor is not None:
                    in_memory_order(target, piece.tensor).copy_(state[piece.tensor][key])
                if world_size > 1:
                    dist.broadcast(target, src=piece.rank)
            if keep:
                whole[parameter][key] = _on_cpu(in_memory_order(flat, parameter))
        if keep:
            whole[parameter].update(rest)
    return whole


def check_state_fits(state: Mapping[str, Any], parameter: Tensor) -> None:
    """Raise ValueError if a tensor of ``state`` has neither the parameter's shape nor one that broadcasts to it."""
    for key, value in state.items():
        if isinstance(value, Tensor) and not _broadcasts(tuple(value.shape), tuple(parameter.shape)):
            raise ValueError(
                f"{key} has shape {tuple(value.shape)}, so it is not of this parameter of {tuple(parameter.shape)}"
            )


def _broadcasts(shape: tuple[int, ...], to: tuple[int, ...]) -> bool:
    if len(shape) != len(to):
        return len(shape) < len(to)
    return all(have in (1, want) for have, want in zip(shape, to, strict=True))


def state_of_piece(state: Mapping[str, Any], parameter: Tensor, piece: Piece) -> dict[str, Any]:
    """What belongs to one piece of the state of a whole parameter, as copies."""
    assert piece.tensor is not None
    cut: dict[str, Any] = {}
    for key, value in state.items():
        if not is_per_element(key, value, parameter):
            cut[key] = value.clone() if isinstance(value, Tensor) else value
            continue
        flat = torch.empty(parameter.numel(), dtype=value.dtype)
        in_memory_order(flat, parameter).copy_(value)
        cut[key] = in_memory_order(flat[piece.start : piece.stop], piece.tensor).clone()
    return cut


def is_per_element(key: str, value: Any, tensor: Tensor) -> bool:
    """Whether state has a value for each element; torch, too, knows a step counter by its name."""
    return isinstance(value, Tensor) and key != "step" and value.shape == tensor.shape


def _on_cpu(value: Any) -> Any:
    return value.detach().cpu().clone() if isinstance(value, Tensor) else value
