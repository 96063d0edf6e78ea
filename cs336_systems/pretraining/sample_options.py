"""What ``sample.py`` is asked. Imports no torch."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, Self

import tyro


@dataclass(frozen=True)
class SampleOptions:
    """Text from a trained model."""

    model: Annotated[Path, tyro.conf.Positional]
    """Folder of a run, of which the newest whole checkpoint is taken; one of its checkpoints; a Hugging Face folder."""
    prompt: str = ""
    """Text to be continued; without one, a document is begun."""
    prompt_file: Path | None = None
    """Text to be continued, from a file."""
    samples: int = 1
    """Continuations, side by side."""
    max_tokens: int = 200
    """New tokens of each, at most; a sample ends earlier with its document, and where the context is full."""
    temperature: float = 0.8
    """0 takes the likeliest token each time."""
    top_k: int | None = None
    """Draw from so many of the likeliest tokens."""
    top_p: float | None = None
    """Draw from the fewest likeliest tokens that have this probability together."""
    seed: int = 0
    device: Literal["cpu", "cuda"] = "cpu"
    dtype: Literal["fp32", "bf16"] = "fp32"
    """In which the model computes."""

    @classmethod
    def default(cls, device: str) -> Self:
        """By device: bf16 on a GPU, fp32 on a CPU."""
        missing: Any = tyro.MISSING
        return cls(missing, device="cuda", dtype="bf16") if device == "cuda" else cls(missing)

    def check(self) -> None:
        """Raise ValueError for what cannot be."""
        if self.prompt and self.prompt_file is not None:
            raise ValueError("--prompt and --prompt-file exclude each other")
        if self.samples < 1 or self.max_tokens < 1:
            raise ValueError(f"--samples and --max-tokens must be positive, got {self.samples} and {self.max_tokens}")
        if not 0 <= self.seed < 2**63:
            raise ValueError(f"--seed must lie in 0..2^63 - 1, got {self.seed}")
