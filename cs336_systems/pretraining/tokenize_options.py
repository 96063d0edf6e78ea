"""Options of ``tokenize_data.py``. Imports no torch, and no library of tokenizers."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from cs336_systems.pretraining.corpus import SUFFIXES

MOST_SHARD_TOKENS = 2**31 - 1


@dataclass(frozen=True)
class TokenizeOptions:
    """Text to token files, divided for training and evaluation."""

    input: tuple[Path, ...] = ()
    """Text, .jsonl and .parquet files, and folders of such; by default the standard library of the running Python."""
    suffix: tuple[str, ...] = SUFFIXES
    """Suffixes of the files that are taken from folders."""
    field: str = "text"
    """Field of a JSON line or Parquet row that holds the text."""
    separator: str | None = None
    """Separator between the documents of a text file, such as <|endoftext|>; by default each file is a document."""
    tokenizer: str = "bpe"
    """bpe: byte-level BPE, trained on this text; bytes; or a tokenizer.json, or a Hugging Face folder with one."""
    vocab_size: int = 4096
    """Vocabulary of a BPE that is trained here."""
    sample_mb: float = 16.0
    """Megabytes of text on which the BPE is trained, from the first training documents."""
    eos_token: str | None = None
    """Token that ends each document; by default that of the tokenizer_config.json next to tokenizer.json, else
    <|endoftext|>."""
    evaluation_fraction: float = 0.05
    """Share of the documents that is held out, by the hash of their text: equal documents stay together, on every
    machine."""
    shard_tokens: int = 100_000_000
    """Tokens per file."""
    bytes_per_token: Literal[2, 4] = 4
    """4 can be read by llm.q; 2 halve the space, for vocabularies up to 65,536."""
    processes: int | None = None
    """Number of processes, by default one per core; it does not change the files."""
    out: Path | None = None
    """New folder; by default data/CORPUS-TOKENIZER."""
    replace: bool = False
    """Replace an earlier dataset in that folder."""

    def check(self) -> None:
        """Raise ValueError for a number out of range."""
        if not 0 <= self.evaluation_fraction <= 1:
            raise ValueError(f"--evaluation-fraction must lie in 0..1, got {self.evaluation_fraction:g}")
        if self.tokenizer == "bpe" and self.evaluation_fraction == 1:
            raise ValueError("--evaluation-fraction 1 leaves nothing to train a BPE on: name a --tokenizer")
        if self.tokenizer in ("bpe", "bytes") and self.eos_token is not None:
            asked = f"--eos-token {self.eos_token}"
            raise ValueError(f"{asked} is for a tokenizer.json, and --tokenizer is {self.tokenizer}")
        if not 0 < self.shard_tokens <= MOST_SHARD_TOKENS:
            raise ValueError(f"--shard-tokens must lie in 1..{MOST_SHARD_TOKENS}, got {self.shard_tokens}")
        if not self.sample_mb > 0:
            raise ValueError(f"--sample-mb must be positive, got {self.sample_mb:g}")
        if self.processes is not None and self.processes < 1:
            raise ValueError(f"--processes must be positive, got {self.processes}")
