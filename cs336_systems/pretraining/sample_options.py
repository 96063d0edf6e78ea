"""Options of ``sample.py``. Imports no torch."""

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
    """Text to continue; without one, a new document."""
    prompt_file: Path | None = None
    """File with the text to continue."""
    samples: int = 1
    """Number of continuations."""
    max_tokens: int = 200
    """Most new tokens of each; a sample also ends with its document, or when the context is full."""
    temperature: float = 0.8
    """0 always takes the most likely token."""
    top_k: int | None = None
    """Draw from this many of the most likely tokens."""
    top_p: float | None = None
    """Draw from the fewest most likely tokens that together have this probability."""
    seed: int = 0
    device: Literal["cpu", "cuda"] = "cpu"
    dtype: Literal["fp32", "bf16"] = "fp32"
    """Dtype in which the model computes."""

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
