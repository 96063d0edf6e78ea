"""Options of ``profile_model.py``, and its grid, the modes of one workload next to each other. Imports no torch."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from cs336_systems.experiments.options import Dtype, Mode, TimedCase, TrainingOptions, training_cells

MEMORY = "memory"
"""The profiler that is no recorder of time."""


@dataclass(frozen=True)
class Options(TrainingOptions):
    """Where does a step of this model spend its time, or its memory?"""

    CPU_DEFAULTS = TrainingOptions.CPU_DEFAULTS | {"warmup": 1, "steps": 3, "recorded_steps": 2}
    dtype: tuple[Dtype, ...] = ("fp32",)
    warmup: int = 5
    """Steps before each round of timed or recorded ones."""
    steps: int = 5
    """Timed steps, plain and annotated, in each of two rounds."""
    profiler: Literal["nsys", "kineto", "memory"] = "kineto"
    """Time: nsys (NVIDIA Nsight Systems, must be installed) or kineto (torch.profiler). Memory: the allocator's log."""
    mode: tuple[Mode, ...] = ("forward", "step")
    """forward: inference, without gradients; backward: forward and backward; step: the whole training step."""
    recorded_steps: int = 3
    """Steps in the trace."""
    raw: Path = Path("profiles/raw")
    """Folder for the recorded files; digests go there too, unless --out names a folder."""
    read: Path | None = None
    """Run nothing; digest an nsys export (.sqlite) or a Chrome trace (.json, .json.gz) of annotated steps, or draw a
    memory snapshot (.pickle, .pickle.gz) beside it or to --out."""


@dataclass(frozen=True)
class ProfileCell(TimedCase):
    """One mode of one workload under one profiler; the fields are columns."""

    profiler: str = "kineto"
    mode: str = "step"
    recorded_steps: int = 3

    @property
    def variant(self) -> str:
        return self.profiler

    @property
    def name(self) -> str:
        """Of the workload, whatever its mode, in file names."""
        parts = [str(self.size), f"b{self.batch_size}", f"c{self.context_length}", self.dtype]
        short = {"torch-fused": "fused", "fused": "fused-adamw"}
        extras = [short.get(extra, extra.replace(" ", "-")) for extra in self.extras]
        return "-".join([*parts, *extras, self.profiler])

    def __str__(self) -> str:
        return f"{self.name} {self.mode}"


def make_cells(options: Options) -> list[ProfileCell]:
    """The grid; raises ValueError for a value that no cell can have."""
    if options.accumulate != (1,):
        given = " ".join(map(str, options.accumulate))
        raise ValueError(f"a profile is that of one micro-batch, got --accumulate {given}")
    if "on" in options.cuda_graph:
        raise ValueError("--cuda-graph on: a captured step has no phases or modules that a profile could show")
    own = [{"profiler": options.profiler, "mode": mode} for mode in dict.fromkeys(options.mode)]
    return training_cells(ProfileCell, options, inner=own)
