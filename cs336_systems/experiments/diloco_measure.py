"""A run of replicas, one per rank: held-out loss and bytes sent at each evaluation."""

import statistics
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from functools import partial
from pathlib import Path

from cs336_systems.distributed.process_group import Rank, alone, on_rank_0
from cs336_systems.experiments.diloco import STDLIB, DilocoCell
from cs336_systems.hardware import MIB
from cs336_systems.harness.record import Metric
from cs336_systems.pretraining.agreement import agreement_of
from cs336_systems.pretraining.preparation import default_data
from cs336_systems.pretraining.replica_options import require_torchft
from cs336_systems.pretraining.run_log import Kind
from cs336_systems.pretraining.run_records import Dropped, Evaluation, LoggedStep, Membership, Model, Record, Session
from cs336_systems.pretraining.trainer import train

_PATIENCE = timedelta(seconds=600)
"""How long live replicas are waited for; none dies here."""
_TOLERANCE = 0.01
"""Relative tolerance of bytes: the prediction does not count losses, reasons to stop and padding."""


class Watch:
    """A sink that keeps all records, and the bytes that had been sent by each evaluation."""

    def __init__(self) -> None:
        self.sent_bytes = lambda: 0.0
        self._before = self._earlier = 0.0
        self.records: list[Record] = []
        self.sent: list[float] = []

    def all(self, kind: type[Kind]) -> list[Kind]:
        return [record for record in self.records if isinstance(record, kind)]

    def write(self, record: Record) -> None:
        self.records.append(record)
        if isinstance(record, Session):
            self._before = self.sent_bytes() - self._earlier  # what replicas sent as they met
        elif isinstance(record, Evaluation):
            self.sent.append(self.sent_bytes() - self._before)

    def close(self) -> None:
        self._earlier = self.sent_bytes() - self._before  # in runs before the next


@contextmanager
def lighthouse(rank: Rank) -> Iterator[str]:
    """The address of a lighthouse on the first rank; a collective."""
    from torchft.coordination import LighthouseServer

    servers = []

    def begin() -> str:
        patience = round(1000 * _PATIENCE.total_seconds())
        servers.append(LighthouseServer("[::]:0", rank.world_size, join_timeout_ms=patience, quorum_tick_ms=20))
        return f"http://127.0.0.1:{servers[0].address().rsplit(':', 1)[1]}"

    try:
        yield on_rank_0(begin)
    finally:
        for server in servers:
            server.shutdown()


def measure(cell: DilocoCell, rank: Rank) -> list[Metric]:
    """Held-out loss, tokens and bytes at each evaluation, and the last; seconds of a step.

    Returns:
        No metrics on ranks but the first.

    Raises:
        Unsupported: torchft is not installed.
        RuntimeError: a replica was missing, an average failed, or bytes are not those of arithmetic.
    """
    require_torchft()
    watch = Watch()
    with tempfile.TemporaryDirectory() as name, lighthouse(rank) as address:
        data = on_rank_0(default_data) if cell.data == STDLIB else Path(cell.data)
        folder = Path(on_rank_0(lambda: name))
        with alone(rank) as own:
            for run in cell.runs:
                options = replace(run, data=data, out=folder)
                agreement = agreement_of(options, own, address, str(rank.rank))
                watch.sent_bytes = partial(getattr, agreement, "sent_bytes")
                train(options, own, watch, agreement=agreement)
    there, dropped = {len(record.there) for record in watch.all(Membership)}, watch.all(Dropped)
    if dropped or there != {rank.world_size}:
        raise RuntimeError(f"{there} replicas of {rank.world_size} were there; dropped: {dropped}")
    if rank.rank:
        return []  # the first replica has the evaluations
    steps, evaluations, sent = watch.all(LoggedStep), watch.all(Evaluation), watch.sent
    tokens, losses = [step.tokens for step in steps], [evaluation.loss for evaluation in evaluations]
    predicted = cell.predicted_bytes(watch.all(Model)[-1].n_parameters)
    if abs(sent[-1] - predicted) > _TOLERANCE * predicted:
        raise RuntimeError(f"a replica has sent {sent[-1]:,.0f} bytes, and arithmetic says {predicted:,.0f}")
    return [
        Metric("held_out_loss", "nats", losses[-1:]),
        Metric("sent", "MiB", [sent[-1] / MIB]),
        Metric("sent_per_token", "bytes", [rank.world_size * sent[-1] / sum(tokens)]),
        Metric("step", "ms", [1000 * statistics.median(step.seconds for step in steps)]),
        Metric("loss_at", "nats", losses),
        Metric("tokens_at", "tokens", [sum(tokens[: evaluation.step]) for evaluation in evaluations]),
        Metric("sent_at", "MiB", [n_bytes / MIB for n_bytes in sent]),
    ]
