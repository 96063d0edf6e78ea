"""Small token files and streams whose tokens can be told apart."""

from pathlib import Path

import numpy as np

from cs336_systems.pretraining.token_file import TokenFile, TokenFileWriter
from cs336_systems.pretraining.token_stream import TokenStream


def write(path: Path, tokens, vocab_size=50_000, **options) -> TokenFile:
    """A token file, written and opened."""
    with TokenFileWriter(path, vocab_size=vocab_size, **options) as file:
        file.append(np.asarray(tokens, np.int64))
    return TokenFile.open(path)


def counting(n_tokens: int, *shards: int) -> TokenStream:
    """The tokens 0, 1, 2, ... in memory, in files that end at ``shards``."""
    tokens = np.arange(n_tokens, dtype=np.uint32)
    parts = np.split(tokens, sorted(shards))
    return TokenStream([TokenFile(Path(f"{i}.bin"), None, None, part) for i, part in enumerate(parts)])
