"""Files of a checkpoint written from where tensors lie: host memory for one tensor at a time, whatever their number.

``torch.distributed.checkpoint`` copies each tensor that is a view of something larger, or on a device, and lets go of
no copy before the file is complete: as much again as is saved. Here it is shown tensors that are all of their storage:
one in host memory as it lies there, one on a device in memory that the next one takes over.

A disk that is full makes torch complain of positions within its file; what the disk said is told instead.

    dcp.save(tensors, storage_writer=file_writer(folder), planner=InPlacePlanner(), process_group=group)
"""

from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.planner import WriteItem


def file_writer(folder: Path) -> dcp.FileSystemWriter:
    """Which writes one tensor before it asks for the next, as ``InPlacePlanner`` needs it."""
    return _FileWriter(folder, per_thread_copy_ahead=0)


class _FileWriter(dcp.FileSystemWriter):
    def write_data(self, plan: Any, planner: Any) -> Any:
        try:
            return super().write_data(plan, planner)
        except RuntimeError as error:  # of a file that torch closes after a write has failed
            before: BaseException | None = error
            while before is not None and not isinstance(before, OSError):
                before = before.__context__
            raise before or error from None


class InPlacePlanner(dcp.DefaultSavePlanner):
    """Resolves tensors without copies that stay; what it has resolved before is then of no more use."""

    def __init__(self) -> None:
        super().__init__()
        self._staging = torch.empty(0, dtype=torch.uint8, device="cpu")

    def resolve_data(self, write_item: WriteItem) -> Any:
        """A tensor in host memory that is all of its storage; anything else as it is."""
        value = super().resolve_data(write_item)
        if not isinstance(value, Tensor) or not value.numel() or not value.is_contiguous():
            return value
        memory = value.detach().reshape(-1).view(torch.uint8)
        if memory.device.type != "cpu":
            if self._staging.numel() < len(memory):
                self._staging = torch.empty(0, dtype=torch.uint8, device="cpu")  # gone before the next is there
                self._staging = torch.empty(len(memory), dtype=torch.uint8, pin_memory=memory.is_cuda, device="cpu")
            memory = self._staging[: len(memory)].copy_(memory)
        return torch.from_dlpack(memory).view(value.dtype).view(value.shape)  # of a storage that begins and ends there
