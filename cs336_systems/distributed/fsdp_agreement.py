"""Whether all ranks are about to do the same, asked before their collectives would meet others than they were made for.

An all-gather of one expert's weights on rank 0 and of another's on rank 1 hangs, aborts, or mixes the two. Ranks
therefore tell each other where a forward and a backward begin and end, and which units they call if these are not the
ones of the last forward. They do so through the process group's store, from host to host: no device waits, and no
collective is added. One comparison takes about 0.2 ms of the host (2 ranks of one machine); a step has three.

The same message has flags, of which each rank learns those that are up on any: what one rank has to make anew, with
collectives, all must.
"""

from collections.abc import Sequence

import torch.distributed as dist


class Agreement:
    """Compares what ranks say, one sentence each, in turns."""

    def __init__(self, process_group: dist.ProcessGroup) -> None:
        self._rank, self._world_size = process_group.rank(), process_group.size()
        self._alone = self._world_size == 1 or dist.get_backend(process_group) == "fake"
        if not self._alone:
            self._store = process_group.get_group_store()
            self._name = f"FSDP {self._store.add(f'FSDP of rank {self._rank}', 1)}"  # wrapped in one order everywhere
        self._n = 0

    def check(self, what: str, flags: Sequence[bool] = ()) -> list[bool]:
        """Wait for what the other ranks are about to do.

        Args:
            what: this rank does, as the end of a sentence that begins with its number.
            flags: equally many on all ranks, each with values of its own.

        Returns:
            Which flags are up on any rank.

        Raises:
            RuntimeError: they are about to do something else; on every rank, and before any has done it.
        """
        if self._alone:
            return list(flags)
        keys = [f"{self._name}/{self._n}/{rank}" for rank in range(self._world_size)]
        self._store.set(keys[self._rank], what + "\n" + "".join("01"[flag] for flag in flags))
        said, flagged = zip(*(value.decode().rsplit("\n", 1) for value in self._store.multi_get(keys)), strict=True)
        if self._n:  # whoever has come to this turn has read the last one
            self._store.delete_key(f"{self._name}/{self._n - 1}/{self._rank}")
        self._n += 1
        other = next((rank for rank, theirs in enumerate(said) if theirs != said[0]), None)
        if other is not None:
            raise RuntimeError(
                f"ranks under FSDP must run the same units in the same order, an expert without tokens as well, and "
                f"backward together: rank 0 {said[0]}, where rank {other} {said[other]}"
            )
        return ["1" in column for column in zip(*flagged, strict=True)]
