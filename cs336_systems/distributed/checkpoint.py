"""Checkpoints of a model and its optimizer: every rank writes its shards, any number of ranks reads them.

    save_checkpoint(folder, model, optimizer, step, keep_last=2)
    step = load_checkpoint(folder, model, optimizer)          # None if there is none to resume from

``torch.distributed.checkpoint`` stores tensors by name with the rows that each file holds, so that ranks of another
number find theirs; FSDP's shards are shown to it as ``DTensor``s without copying. What is replicated, as without FSDP,
is written once. A ``ShardedOptimizer``'s state is gathered in the first rank's host memory, which alone writes it, and
read whole by every rank. The names are the same in each case, so a run may go on under another wrapper. On the disk:

    step-00000200/  .metadata, __0_0.distcp, __1_0.distcp   what torch writes
                    complete.json                           step, optimizer settings, size and CRC-32 of every file

What keeps a folder of them safe is in ``checkpoint_folder.py``. Sizes are checked whenever a folder is looked at, and
digests before a checkpoint is loaded: every rank reads its part of the files once more for that, and once when saving.
"""

import io
import os
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.tensor import DTensor

from cs336_systems.distributed import checkpoint_folder
from cs336_systems.distributed.checkpoint_folder import MARKER, StoredCheckpoint
from cs336_systems.distributed.ddp import DDP
from cs336_systems.distributed.fsdp import FSDP
from cs336_systems.distributed.fsdp_parameters import ManagedParameter, ShardedParameter
from cs336_systems.distributed.fsdp_state_dict import WholeTensors
from cs336_systems.distributed.process_group import on_every_rank, on_rank_0
from cs336_systems.distributed.sharded_optimizer import ShardedOptimizer

__all__ = [
    "MARKER",
    "MODEL",
    "check_tensors",
    "complete_checkpoints",
    "load_checkpoint",
    "resume_checkpoint",
    "save_checkpoint",
    "stored_tensors",
]

MODEL = "model/"
"""Before the names of parameters in a checkpoint."""
_OPTIMIZER = "optimizer/"


def save_checkpoint(
    folder: str | os.PathLike[str],
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None,
    step: int,
    *,
    keep_last: int = 2,
    keep_every: int | None = None,
    extra: Mapping[str, Any] | None = None,
) -> Path:
    """Write ``folder/step-<step>``, then remove all but the ``keep_last`` that were written last; a collective.

    A complete checkpoint of the same step is replaced. What is damaged or of another program is neither removed nor
    counted, and warned of.

    Args:
        model: under FSDP, under this suite's DDP, or whole and equal on every rank of the default group.
        keep_every: steps that are multiples of it are neither removed nor counted.
        extra: what else is to be read back, as JSON can hold it; the first rank's counts.

    Raises:
        ValueError: ``step`` is negative, ``keep_last`` or ``keep_every`` is not positive, or the optimizer holds other
            parameters, or a state of a sharded parameter that is neither shaped like its shard nor a single number.
        OSError: a rank cannot write; the checkpoints that were there are untouched.
    """
    if step < 0 or keep_last < 1:
        raise ValueError(f"step must not be negative and keep_last be positive, got {step} and {keep_last}")
    if keep_every is not None and keep_every < 1:
        raise ValueError(f"keep_every must be positive, got {keep_every}")
    root = Path(folder)
    view, group = _View(model), _group(model)
    tensors: dict[str, Tensor] = {}
    marker: dict[str, Any] = {"step": step, "saved_at": 0, "optimizer": None, "scalars": {}, "extra": dict(extra or {})}

    def collect() -> None:
        tensors.update(view.model())
        if optimizer is not None:
            tensors.update(view.optimizer(optimizer, marker))
        extra = {name: _packed(module.get_extra_state()) for name, module in view.with_extra_state().items()}
        if group.rank() == 0:  # its value counts, as a buffer's does
            tensors.update(extra)

    on_every_rank(collect, group)
    temporary, marker["saved_at"] = on_rank_0(lambda: checkpoint_folder.begin(root, step), group)
    try:
        dcp.save(tensors, storage_writer=dcp.FileSystemWriter(temporary), process_group=group)
    except CheckpointException as error:  # which ``except Exception`` would not catch
        reasons = "; ".join(f"rank {rank}: {reason}" for rank, (reason, _) in error.failures.items())
        raise OSError(f"{temporary} could not be written: {reasons}") from error

    def describe_files() -> dict[str, dict[str, int]]:
        return {
            path.name: {"bytes": path.stat().st_size, "crc32": checkpoint_folder.crc32(path)}
            for path in sorted(temporary.iterdir())
            if _reads(group, path.name)
        }

    of_ranks = on_every_rank(describe_files, group)
    marker["files"] = {name: described for files in of_ranks for name, described in files.items()}
    final = on_rank_0(lambda: checkpoint_folder.publish(temporary, marker), group)
    on_rank_0(lambda: checkpoint_folder.retire(root, final, keep_last, keep_every), group)
    return final


def load_checkpoint(
    folder: str | os.PathLike[str], model: nn.Module, optimizer: torch.optim.Optimizer | None
) -> int | None:
    """The step of ``resume_checkpoint``, which see; None if there is no checkpoint."""
    found = resume_checkpoint(folder, model, optimizer)
    return None if found is None else found.step


def resume_checkpoint(
    folder: str | os.PathLike[str], model: nn.Module, optimizer: torch.optim.Optimizer | None
) -> StoredCheckpoint | None:
    """Read the checkpoint of ``folder`` that was written last into the model and the optimizer; a collective.

    One that is damaged is warned of, and the one before it read in its place.

    Returns:
        The one that was read, or None if the folder holds no checkpoint, and nothing was changed.

    Raises:
        ValueError: it is of another model or optimizer; nothing was changed.
        NoneWhole: the folder holds checkpoints of which none is whole; nothing was changed.
    """
    group = _group(model)
    found = _newest_sound(group, Path(folder))
    if found is None:
        return None
    path, marker = found.path, found.marker
    view = _View(model)
    reader = dcp.FileSystemReader(path)
    stored = stored_tensors(reader)
    tensors, modules = view.model(), view.with_extra_state()
    extra = {name: torch.empty(stored[name].size if name in stored else 0, dtype=torch.uint8) for name in modules}
    of_model = {name: entry for name, entry in stored.items() if not name.startswith(_OPTIMIZER)}
    check_tensors(path, tensors | extra, of_model)
    state = view.empty_optimizer_state(path, optimizer, marker, stored) if optimizer is not None else {}
    with torch.no_grad():
        dcp.load(tensors | state | extra, storage_reader=reader, process_group=group)
    for name, module in modules.items():
        module.set_extra_state(_unpacked(extra[name], view.device))
    if optimizer is not None:
        view.restore_optimizer(optimizer, marker, state)
    return found


def complete_checkpoints(folder: str | os.PathLike[str]) -> list[Path]:
    """The checkpoints of ``folder`` that are whole, in the order in which they were written; digests unchecked."""
    return [stored.path for stored in checkpoint_folder.survey(Path(folder))[0]]


def _group(model: nn.Module) -> dist.ProcessGroup:
    return model.process_group if isinstance(model, FSDP) else dist.distributed_c10d._get_default_group()


def _newest_sound(group: dist.ProcessGroup, folder: Path) -> StoredCheckpoint | None:
    """The checkpoint to load, its digests checked by all ranks together; or None if there are none at all."""
    complete, unreadable = on_rank_0(lambda: checkpoint_folder.survey(folder), group)
    found = checkpoint_folder.newest_sound(folder, complete, unreadable, lambda stored: _damage(group, stored))
    if group.rank() == 0:
        checkpoint_folder.warn_of(unreadable)
    return found


def _damage(group: dist.ProcessGroup, stored: StoredCheckpoint) -> str | None:
    """What is wrong with the contents of a checkpoint's files; it is noted beside them."""

    own = [name for name in stored.files if _reads(group, name)]
    of_ranks = on_every_rank(lambda: checkpoint_folder.find_damage(stored, own), group)
    damage = next(filter(None, of_ranks), None)
    if damage and group.rank() == 0:
        checkpoint_folder.note_damage(stored.path, damage)
    return damage


def _reads(group: dist.ProcessGroup, name: str) -> bool:
    """Whether this rank reads a file for its digest: ``__<rank>_<number>.distcp`` is that rank's, others rank 0's."""
    owner = int(name.split("_")[2]) if name.startswith("__") else 0
    return owner % group.size() == group.rank()


def stored_tensors(reader: dcp.FileSystemReader) -> dict[str, TensorStorageMetadata]:
    """Sizes and dtypes of the tensors of a checkpoint, by ``model/NAME``, ``buffer/NAME``, ``optimizer/NAME/KEY``."""
    metadata = reader.read_metadata().state_dict_metadata
    return {name: entry for name, entry in metadata.items() if isinstance(entry, TensorStorageMetadata)}


def check_tensors(path: Path, expected: Mapping[str, Tensor], stored: Mapping[str, TensorStorageMetadata]) -> None:
    """Raise ValueError unless the checkpoint holds exactly these tensors, in these shapes and dtypes."""

    def shorten(names: list[str]) -> str:
        return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")

    differences = []
    if missing := sorted(expected.keys() - stored.keys()):
        differences.append(f"it lacks {shorten(missing)}")
    if foreign := sorted(stored.keys() - expected.keys()):
        differences.append(f"it holds {shorten(foreign)} besides")
    for name in sorted(expected.keys() & stored.keys()):
        ours = (tuple(expected[name].shape), expected[name].dtype)
        theirs = (tuple(stored[name].size), stored[name].properties.dtype)
        if ours != theirs:
            differences.append(f"{name} is {theirs[0]} {theirs[1]} there and {ours[0]} {ours[1]} here")
    if differences:
        more = f"; and {len(differences) - 3} more differences" if len(differences) > 3 else ""
        raise ValueError(f"{path} is a checkpoint of another model: {'; '.join(differences[:3])}{more}")


class _View:
    """The model and its optimizer as named tensors for ``torch.distributed.checkpoint``, sharing their memory."""

    def __init__(self, model: nn.Module) -> None:
        self._module = model.module if isinstance(model, (FSDP, DDP)) else model
        self._whole: Callable[[ManagedParameter, Tensor], Tensor] = lambda _, value: value
        if isinstance(model, FSDP):
            self._whole = WholeTensors(model.process_group, model.device).of
            managed = model.managed_parameters()
        else:
            managed = [ManagedParameter((name,), p, p, p.shape) for name, p in self._module.named_parameters()]
        self._parameters = {parameter.names[0]: parameter for parameter in managed}
        self.device = managed[0].sharded_param.device
        self._name_of: dict[Tensor, str] = {p.sharded_param: name for name, p in self._parameters.items()}

    def model(self) -> dict[str, Tensor]:
        """Parameters, and the buffers that the module's own state dict would hold, by kind and name."""
        tensors = {
            f"{MODEL}{name}": self._whole(parameter, parameter.sharded_param.detach())
            for name, parameter in self._parameters.items()
        }
        buffers = {
            f"buffer/{prefix}{'.' * bool(prefix)}{name}": buffer
            for prefix, module in self._module.named_modules()
            for name, buffer in module._buffers.items()
            if buffer is not None and name not in module._non_persistent_buffers_set
        }
        return tensors | buffers

    def with_extra_state(self) -> dict[str, nn.Module]:
        """The modules that keep more than tensors in their state dict, by name after ``extra``."""
        return {
            f"extra/{name}": module
            for name, module in self._module.named_modules()
            if type(module).get_extra_state is not nn.Module.get_extra_state
        }

    def _groups(self, optimizer: torch.optim.Optimizer) -> list[list[str]]:
        """The names of the parameters of each of the optimizer's groups."""
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if parameter not in self._name_of:
                    raise ValueError(
                        f"the optimizer has a parameter of shape {tuple(parameter.shape)} that the model lacks: "
                        "make it from the model's parameters() after wrapping"
                    )
        return [[self._name_of[parameter] for parameter in group["params"]] for group in optimizer.param_groups]

    def optimizer(self, optimizer: torch.optim.Optimizer, settings: dict[str, Any]) -> dict[str, Tensor]:
        """The optimizer's tensors; its numbers and its groups go into ``settings``.

        Raises:
            ValueError: a parameter is not the model's, or a state cannot be resharded.
        """
        tensors: dict[str, Tensor] = {}
        settings["optimizer"] = [
            {key: _plain(value) for key, value in group.items() if key != "params"} | {"params": names}
            for group, names in zip(optimizer.param_groups, self._groups(optimizer), strict=True)
        ]
        for sharded_param, state in _states(optimizer):
            name = self._name_of[sharded_param]
            parameter = self._parameters[name]
            for key, value in state.items():
                if "/" in key:
                    raise ValueError(f"optimizer state {key} of {name} has a slash in its name")
                entry = f"{_OPTIMIZER}{name}/{key}"
                if not isinstance(value, Tensor):
                    settings["scalars"][entry] = value
                elif value.shape == sharded_param.shape:
                    tensors[entry] = self._whole(parameter, value)
                elif value.dim() == 0 or not isinstance(parameter, ShardedParameter):
                    tensors[entry] = value
                else:
                    raise ValueError(
                        f"optimizer state {key} of {name} has shape {tuple(value.shape)}, its shard "
                        f"{tuple(sharded_param.shape)}: only states like the shard can be read by other "
                        "numbers of ranks"
                    )
        return tensors

    def empty_optimizer_state(
        self,
        path: Path,
        optimizer: torch.optim.Optimizer,
        settings: dict[str, Any],
        stored: dict[str, TensorStorageMetadata],
    ) -> dict[str, Tensor]:
        """Tensors for what the checkpoint holds of the optimizer, to be filled.

        Raises:
            ValueError: the checkpoint has no optimizer, or one over other parameters.
        """
        ours = self._groups(optimizer)
        theirs = [group["params"] for group in settings["optimizer"] or []]
        if ours != theirs:
            raise ValueError(
                f"{path} is a checkpoint of another optimizer: it holds parameter groups of "
                f"{[len(group) for group in theirs]} parameters, here are {[len(group) for group in ours]}, "
                "or their names differ"
            )
        tensors: dict[str, Tensor] = {}
        for entry, metadata in stored.items():
            if not entry.startswith(_OPTIMIZER):
                continue
            parameter, dtype = self._parameters[_split(entry)[0]], metadata.properties.dtype
            if metadata.size == parameter.shape:
                place = (
                    "cpu" if isinstance(optimizer, ShardedOptimizer) else self.device
                )  # it takes a share of the whole
                shard = torch.zeros_like(parameter.sharded_param, dtype=dtype, device=place).detach()
                tensors[entry] = self._whole(parameter, shard)
            else:
                tensors[entry] = torch.zeros(metadata.size, dtype=dtype)
        return tensors

    def restore_optimizer(
        self, optimizer: torch.optim.Optimizer, settings: dict[str, Any], tensors: dict[str, Tensor]
    ) -> None:
        """Hand the optimizer the filled tensors, the numbers and the settings of its groups."""
        names = [name for group in settings["optimizer"] for name in group["params"]]
        number_of = {name: number for number, name in enumerate(names)}
        state: dict[int, dict[str, Any]] = {}
        for entry, value in (tensors | settings["scalars"]).items():
            name, key = _split(entry)
            local = value.to_local() if isinstance(value, DTensor) else value
            state.setdefault(number_of[name], {})[key] = local
        groups = [
            {key: tuple(value) if isinstance(value, list) else value for key, value in group.items()}
            | {"params": [number_of[name] for name in group["params"]]}
            for group in settings["optimizer"]
        ]
        optimizer.load_state_dict({"state": state, "param_groups": groups})


def _states(optimizer: torch.optim.Optimizer) -> Iterable[tuple[Tensor, dict[str, Any]]]:
    """What an optimizer holds of each parameter; a collective if its state is divided, and then the first rank's."""
    if not isinstance(optimizer, ShardedOptimizer):
        return optimizer.state.items()
    whole = optimizer.state_dict(to=0).get("state", {})
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    return [(parameters[number], state) for number, state in whole.items()]


def _split(entry: str) -> tuple[str, str]:
    """The parameter and the key of an entry of optimizer state; the names of modules may hold slashes."""
    name, _, key = entry.removeprefix(_OPTIMIZER).rpartition("/")
    return name, key


def _packed(value: Any) -> Tensor:
    """Any object as bytes, (n,) uint8."""
    file = io.BytesIO()
    torch.save(value, file)
    return torch.frombuffer(bytearray(file.getvalue()), dtype=torch.uint8)


def _unpacked(packed: Tensor, device: torch.device) -> Any:
    return torch.load(io.BytesIO(packed.numpy().tobytes()), map_location=device, weights_only=False)


def _plain(value: Any) -> Any:
    """A setting as JSON can hold it."""
    return value.item() if isinstance(value, Tensor) else value
