"""How the rows of all ranks come together: in a collective, or by copies from memory that ranks have mapped.

A collective is under way when it has been made, copies when they have been begun; ``wait`` makes the current stream (on
a CPU: the caller) wait for either.
"""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor


class PackedGather:
    """An all-gather of several tensors as one message; ``wait`` waits for it and unpacks it.

    Each of ``inputs`` is (n,), and the one of ``outputs`` that it goes to (world_size * n,), of the same dtype.
    """

    def __init__(self, process_group: dist.ProcessGroup, outputs: Sequence[Tensor], inputs: Sequence[Tensor]) -> None:
        world_size, sizes = process_group.size(), [shard.numel() for shard in inputs]
        self._outputs = [output.view(world_size, size) for output, size in zip(outputs, sizes, strict=True)]
        packed = torch.cat(tuple(inputs))
        received = packed.new_empty(world_size, sum(sizes))
        self._parts = received.split(sizes, dim=1)
        self._work = dist.all_gather_into_tensor(received.view(-1), packed, group=process_group, async_op=True)

    def wait(self) -> None:
        self._work.wait()
        torch._foreach_copy_(self._outputs, self._parts)


def all_gather(
    process_group: dist.ProcessGroup, outputs: list[Tensor], inputs: list[Tensor]
) -> "dist.Work | PackedGather":
    """Start to gather each of the flat ``inputs`` into the one of ``outputs``, in one collective for all of them.

    On CPUs the message is packed here. gloo would do the same in its coalesced all-gather, but that one corrupts the
    heap (torch 2.11): gloo's two workers note which operation they have finished in one ``std::string`` without a lock,
    and "ALLGATHER_COALESCED", unlike the names of the other collectives used here, is too long to be stored in place.
    """
    if dist.get_backend(process_group) != "gloo":
        return process_group.allgather_into_tensor_coalesced(outputs, inputs)
    return PackedGather(process_group, outputs, inputs)


class Copies:
    """An all-gather by this rank alone; the others must leave what is read as it is.

    Each of ``outputs`` is (world_size * n,), and those of ``inputs`` that go to it, one of each rank, (n,).
    """

    def __init__(self, outputs: Sequence[Tensor], inputs: Sequence[Sequence[Tensor]]) -> None:
        self._pairs = [
            pair
            for output, shards in zip(outputs, inputs, strict=True)
            for pair in zip(output.chunk(len(shards)), shards, strict=True)
        ]
        self._device = outputs[0].device
        self._done: torch.cuda.Event | None = None

    def begin(self) -> "Copies":
        """Copy on the current stream; none of the same must be under way."""
        for place, shard in self._pairs:
            place.copy_(shard)  # of contiguous memory, which CUDA leaves to a copy engine
        if self._device.type == "cuda":
            self._done = torch.cuda.current_stream(self._device).record_event()
        return self

    def wait(self) -> None:
        if self._done is not None:
            torch.cuda.current_stream(self._device).wait_event(self._done)
