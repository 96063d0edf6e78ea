"""Options of ``benchmark_ddp.py``, and its grid; the rungs of one model follow each other. Imports no torch."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

from cs336_systems.case import Parallel
from cs336_systems.experiments.options import RankedCase, RankedOptions, RankedRun, training_cells

Rung = Literal["naive", "flat", "overlapped", "bucketed", "torch"]

SIZED = ("bucketed", "torch")
"""Rungs that take a bucket size."""


@dataclass(frozen=True)
class Options(RankedOptions):
    """What does each form of data parallelism gain?"""

    CPU_DEFAULTS = RankedRun.CPU_DEFAULTS | {"warmup": 1, "steps": 6}
    dtype: tuple[Literal["fp32", "tf32", "bf16", "autocast-bf16"], ...] = ("fp32",)
    steps: int = 10
    """Timed steps with communication."""
    local_steps: int | None = None
    """Timed steps without communication, in the first turn; by default as many as with it."""
    ddp: tuple[Rung, ...] = get_args(Rung)
    """naive, flat: after backward, a collective per gradient or one for all; overlapped, bucketed: during backward, a
    collective per gradient or per bucket; torch: DistributedDataParallel."""
    bucket_size_mb: tuple[float, ...] = (25.0,)
    """MiB per bucket, for bucketed and torch."""
    communication_dtype: tuple[Literal["same", "bf16"], ...] = ("same",)
    """Dtype in which gradients are sent and reduced: their own, or bf16."""
    max_ctas: tuple[int, ...] = (0,)
    """Most thread blocks of each NCCL kernel that sends gradients, each of which takes a multiprocessor from backward;
    0 for as many as NCCL chooses."""
    trace: Path | None = None
    """Folder for recordings (torch.profiler) and a picture of rank 0 per cell, with and without communication, in the
    first turn."""
    recorded: tuple[Rung, ...] = ()
    """Forms that --trace records; by default all."""


@dataclass(frozen=True)
class DataParallelCell(RankedCase):
    """One rung on one model; the fields are columns, sizes are per rank."""

    ddp: str = "naive"
    bucket_size_mb: float | None = None
    """Of the rungs that take one, else None."""
    communication_dtype: str = "same"
    max_ctas: int = 0

    @property
    def variant(self) -> str:
        return self.ddp

    @property
    def parallel(self) -> Parallel:
        return Parallel(
            "torch-ddp" if self.ddp == "torch" else self.ddp,
            bucket_size_mb=self.bucket_size_mb or 0.0,
            communication_dtype=self.communication_dtype,
            max_ctas=self.max_ctas,
        )

    @property
    def name(self) -> str:
        """In file names."""
        bucket = "" if self.bucket_size_mb is None else f"-{self.bucket_size_mb:g}mb"
        sent = "" if self.communication_dtype == "same" else f"-sent-{self.communication_dtype}"
        limit = f"-{self.max_ctas}ctas" if self.max_ctas else ""
        compiled = "-compiled" if self.compiled else f"-{self.kernels}-keep-{self.keep}" if self.written_out else ""
        several = f"-{self.accumulate}x" if self.accumulate != 1 else ""
        turn = f"-{self.repeat}" if self.repeat else ""
        sending = f"{self.ddp}{bucket}{sent}{limit}"
        return f"{self.size}-{self.dtype}{compiled}{several}-{sending}-{self.world_size}ranks{turn}"

    def __str__(self) -> str:
        bucket = "" if self.bucket_size_mb is None else f" {self.bucket_size_mb:g} MiB"
        sent = "" if self.communication_dtype == "same" else f" sent as {self.communication_dtype}"
        limit = f" by {self.max_ctas} thread blocks" if self.max_ctas else ""
        return f"{self.ddp}{bucket}{sent}{limit} on {self.world_size} ranks: {super().__str__()}"


def make_cells(options: Options) -> list[DataParallelCell]:
    """The grid; raises ValueError for a value that no cell can have."""
    if options.device == "cpu" and (limits := [limit for limit in options.max_ctas if limit]):
        raise ValueError(f"--max-ctas {limits[0]} needs --device cuda: thread blocks are NCCL's, and a CPU has gloo")
    rungs = [
        {"communication_dtype": sent, "max_ctas": limit, "ddp": rung, "bucket_size_mb": size}
        for sent in options.communication_dtype
        for limit in options.max_ctas
        for rung in options.ddp
        for size in (options.bucket_size_mb if rung in SIZED else (None,))
    ]
    return training_cells(DataParallelCell, options, inner=rungs)
