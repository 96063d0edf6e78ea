"""A folder of random tokens: data for runs of which only the speed is measured.

    write_random_tokens(folder, n_tokens=2**22, vocab_size=151_936)

It is as a folder of ``tokenize_data.py``, with the tokenizer of bytes, and says of itself that it is random.
"""

import json
from pathlib import Path

import numpy as np

from cs336_systems.pretraining.token_file import TokenFileWriter
from cs336_systems.pretraining.token_stream import LAYOUT, MANIFEST
from cs336_systems.pretraining.tokenizer import TOKENIZER, ByteTokenizer

CORPUS = "random tokens"


def write_random_tokens(folder: Path, n_tokens: int, vocab_size: int, seed: int = 0) -> Path:
    """Ids below ``vocab_size``, each as likely as another, to train on; returns the folder, which is made.

    Raises:
        ValueError: the vocabulary is smaller than that of bytes.
        OSError: it cannot be written, or is there.
    """
    if vocab_size < ByteTokenizer.vocab_size:
        raise ValueError(f"random tokens need a vocabulary of {ByteTokenizer.vocab_size} or more, got {vocab_size}")
    folder.mkdir(parents=True)
    name, eos_id = "train-00000.bin", ByteTokenizer.eos_id
    with TokenFileWriter(folder / name, vocab_size=vocab_size, eos_id=eos_id) as file:
        file.append(np.random.default_rng(seed).integers(vocab_size, size=n_tokens))
    (folder / TOKENIZER).write_text(ByteTokenizer().json(), encoding="utf-8")
    split = {"files": [name], "documents": 1, "bytes": 4 * n_tokens, "tokens": n_tokens}
    tokenizer = {"name": "none", "vocab_size": vocab_size, "eos_id": eos_id}
    manifest = {"layout": LAYOUT, "corpus": CORPUS, "files": 1, "tokenizer": tokenizer, "splits": {"train": split}}
    (folder / MANIFEST).write_text(json.dumps(manifest))
    return folder
