"""Options of ``export.py``. Imports no torch."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import tyro


@dataclass(frozen=True)
class ExportOptions:
    """A checkpoint to a Hugging Face folder."""

    checkpoint: Annotated[Path, tyro.conf.Positional]
    """Folder of a run, of which the newest whole checkpoint is taken, or one of its checkpoints."""
    out: Path | None = None
    """New folder; by default RUN/hf-STEP."""
    dtype: Literal["stored", "fp32", "bf16"] = "stored"
    """Dtype of the weights in the folder."""
    shard_gib: float = 5.0
    """Most GiB of weights per file."""
    replace: bool = False
    """Also replace another model's folder. An earlier export is replaced anyway, if no other files were added to it."""

    def check(self) -> None:
        """Raise ValueError for a number out of range."""
        if not self.shard_gib > 0:
            raise ValueError(f"--shard-gib must be positive, got {self.shard_gib:g}")
