"""The ranks of a command under a launcher such as torchrun: their number, their places, and what they agree on.

Importing this module imports no torch.
"""

import itertools
import json
import os
from datetime import timedelta
from typing import Any

from cs336_systems.harness.record import Metric

_AGREEMENT_GRACE_S = 60.0
"""Seconds by which a launcher's processes may end a cell after each other: they import at different speeds."""

_sweeps = itertools.count()
"""Numbers of sweeps of this process: a later one must not read what an earlier one has left in the launcher's store."""


def resolve_world_sizes(requested: tuple[int, ...] | None, default: tuple[int, ...]) -> tuple[int, ...]:
    """The launcher's world size; without a launcher those of ``--world-size``, else the default ones.

    Raises:
        ValueError: the launcher has started another number of ranks than requested, or described none properly; or the
            request is empty or not positive.
    """
    from cs336_systems.distributed.process_group import launched_world_size

    present = launched_world_size()
    asked = " ".join(map(str, requested or ()))
    if requested is not None and (not requested or min(requested) < 1):
        raise ValueError(f"--world-size needs positive numbers of ranks, got {asked or 'none'}")
    if present is None:
        return default if requested is None else requested
    if requested not in (None, (present,)):
        raise ValueError(f"--world-size {asked}: the launcher has started {present} ranks")
    return (present,)


def one_rank_per_gpu(device: str) -> tuple[int]:
    """The usual world on this machine: all its GPUs, or two ranks on a CPU."""
    import torch

    return (torch.cuda.device_count() if device == "cuda" else 2,)


class Launcher:
    """The processes of a launcher, this one among them: each starts one rank, and they talk through the store."""

    def __init__(self, timeout_s: float) -> None:
        """Find the launcher's store, which rank 0 hosts if the launcher does not.

        Raises:
            ValueError: the launcher has described its ranks badly.
        """
        from torch.distributed import PrefixStore

        from cs336_systems.distributed.process_group import launched_world_size, launcher_store

        self.world_size = launched_world_size() or 1
        self.rank = int(os.environ["RANK"])
        self._patience = timedelta(seconds=timeout_s + _AGREEMENT_GRACE_S)
        self._store = PrefixStore(f"sweep {next(_sweeps)}", launcher_store(self._patience))
        self._store.set_timeout(self._patience)
        self._n_ended = 0
        self._n_teams = 0

    def place_of_a_new_rank(self) -> dict[str, str]:
        """The variables of this process's rank in a new group, which meets at a store of its own on rank 0's host."""
        from torch.distributed import TCPStore

        key, address = f"port of team {self._n_teams}", os.environ["MASTER_ADDR"]
        self._n_teams += 1
        if self.rank == 0:
            self._meeting = TCPStore(address, 0, self.world_size, is_master=True, wait_for_workers=False)
            self._store.set(key, str(self._meeting.port))
        port = self._store.get(key).decode()
        names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "OMP_NUM_THREADS")
        own = {name: os.environ[name] for name in names if name in os.environ}
        return own | {"MASTER_PORT": port, "TORCHELASTIC_USE_AGENT_STORE": "True"}

    def has_failed(self) -> bool:
        """Whether another process has ended the present cell without success."""
        return self._store.check([f"cell {self._n_ended} failed"])

    def agree(self, report: dict[str, Any]) -> None:
        """End the cell on all processes: ``report`` takes rank 0's metrics, or how the cell has failed.

        Of several failures the lowest rank's is reported, but the loss of a peer only if there is no other failure.

        Raises:
            RuntimeError: a process of the launcher does not end the cell in time.
        """
        from torch.distributed import DistStoreError

        cell, failed = f"cell {self._n_ended}", report["status"] != "ok"
        metrics = [(each.name, each.unit, [*map(float, each.samples)], each.derived) for each in report["metrics"]]
        lost = report.pop("peer_lost", False)
        if failed:
            self._store.set(f"{cell} failed", "")
        self._store.set(
            f"{cell} on {self.rank}", json.dumps([failed, lost, report["status"], report["message"], metrics])
        )
        keys = [f"{cell} on {number}" for number in range(self.world_size)]
        try:
            self._store.wait(keys, self._patience)
        except DistStoreError as error:
            missing = ", ".join(key for key in keys if not self._store.check([key]))
            raise RuntimeError(f"a process of the launcher has gone: nothing was heard of {missing}") from error
        said = [json.loads(self._store.get(key)) for key in keys]
        failures = [(lost, number) for number, (failed, lost, *_) in enumerate(said) if failed]
        _, _, status, message, metrics = said[min(failures)[1] if failures else 0]
        if lost:
            report.pop("traceback", None)  # the peer says more
        report |= {"status": status, "message": message, "metrics": [Metric(*metric) for metric in metrics]}
        self._n_ended += 1
