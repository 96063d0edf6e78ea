"""Tokenizers: from a ``tokenizer.json``, bytes, or a byte-level BPE trained on text; all can be written as the former.

    tokenizer = train_bpe(texts, vocab_size=4096)
    tokenizer = load_tokenizer(Path("Qwen2.5-0.5B"))        # the file, or a Hugging Face folder that has it
    tokenizer = ByteTokenizer()                             # 256 bytes and the end of text
    tokenizer.encode(texts)                                 # (n,) ids of each text, the end of text last; before it
                                                            # what the template puts there, as <|begin_of_text|>
    path.write_text(tokenizer.json())                       # for tokenizers.Tokenizer.from_file, to decode samples

Byte-level BPE (Radford et al. 2019) merges bytes within words, so every text is encoded and decoded losslessly. Text
that spells a special token is encoded as text. Truncation and padding in a ``tokenizer.json`` are ignored. Ids are
below ``vocab_size``, and ``eos_id`` ends each document.
"""

import json
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer as Definition
from tokenizers import decoders, models, pre_tokenizers, trainers

from cs336_systems.config import how_to_download

END_OF_TEXT = "<|endoftext|>"
TOKENIZER = "tokenizer.json"
BESIDE_TOKENIZER = ("tokenizer_config.json", "chat_template.jinja")
"""Files that transformers reads with a ``tokenizer.json``."""

LONGEST_WORD = 1000
"""Bytes of the longest word that a BPE is trained on. Longer ones are cut there, as the time of a word grows with its
square: 200,000 letters without a blank took 30 s."""


class ByteTokenizer:
    """UTF-8: an id is a byte, and 256 is the end of text."""

    vocab_size = 257
    eos_id = 256

    def encode(self, texts: Sequence[str]) -> list[NDArray[np.uint32]]:
        return [np.append(np.frombuffer(text.encode(), np.uint8), [self.eos_id]).astype(np.uint32) for text in texts]

    def json(self) -> str:
        definition = Definition(models.BPE(vocab={sign: byte for byte, sign in enumerate(_byte_signs())}, merges=[]))
        definition.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        definition.decoder = decoders.ByteLevel()
        definition.add_special_tokens([END_OF_TEXT])
        return definition.to_str()


def _byte_signs() -> list[str]:
    """The sign of each byte in byte-level vocabularies: its own character if visible, else one from 256 on."""
    visible = {*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)}
    others = iter(range(256, 512))
    return [chr(byte if byte in visible else next(others)) for byte in range(256)]


class JsonTokenizer:
    """A tokenizer that a ``tokenizer.json`` defines, run by the tokenizers library.

    Args:
        eos: the token that ends documents, or its id.

    Raises:
        ValueError: that is no definition of a tokenizer, or it has no token ``eos``.
    """

    def __init__(self, definition: str, eos: str | int) -> None:
        try:
            self._definition = Definition.from_str(definition)
        except Exception as error:  # the library raises nothing more specific
            raise ValueError(f"no definition of a tokenizer: {error}") from None
        self._definition.encode_special_tokens = True
        self._definition.no_truncation()
        self._definition.no_padding()
        eos_id = self._definition.token_to_id(eos) if isinstance(eos, str) else eos
        eos_token = None if eos_id is None else self._definition.id_to_token(eos_id)
        if eos_id is None or eos_token is None:
            raise ValueError(f"it has no token {eos!r} to end documents with")
        self.eos_id, self.eos_token = eos_id, eos_token
        self.vocab_size = max(self.vocabulary().values()) + 1
        self.prefix = self._prefix()

    def _prefix(self) -> list[int]:
        """The ids that the definition's template puts before each text, as <|begin_of_text|>."""
        for text in ("a", *self.vocabulary()):
            with suppress(Exception):  # there may be no id for that text
                encoded = self._definition.encode(text)
                return encoded.ids[: encoded.sequence_ids.index(0)]
        return []

    def token(self, token_id: int) -> str | None:
        return self._definition.id_to_token(token_id)

    def vocabulary(self) -> dict[str, int]:
        return self._definition.get_vocab(with_added_tokens=True)

    def encode(self, texts: Sequence[str]) -> list[NDArray[np.uint32]]:
        try:  # the fast one computes no offsets, in half the time
            encoded = self._definition.encode_batch_fast(list(texts), add_special_tokens=False)
        except Exception as error:  # the library raises nothing more specific
            raise ValueError(f"the tokenizer cannot encode all of the text: {error}") from None
        return [np.array([*self.prefix, *one.ids, self.eos_id], np.uint32) for one in encoded]

    def decode(self, ids: Sequence[int]) -> str:
        """The text of ids; bytes that are not UTF-8 become U+FFFD."""
        return self._definition.decode(list(ids), skip_special_tokens=False)

    def json(self) -> str:
        return self._definition.to_str()


Tokenizer = ByteTokenizer | JsonTokenizer


class TextStream:
    """Text from ids that come one by one: ``push`` returns the text that is certain by now, ``rest`` the last of it.

    Characters of which bytes are still to come are held back; all parts together are what ``decode`` returns.
    """

    def __init__(self, tokenizer: JsonTokenizer) -> None:
        self._decode = tokenizer.decode
        self._ids: list[int] = []
        self._shown = 0

    def push(self, token_id: int) -> str:
        self._ids.append(token_id)
        text = self._decode(self._ids)
        if text.endswith("\ufffd"):
            return ""
        part = text[self._shown :]
        self._ids = [token_id]  # some decoders look at the token before
        self._shown = len(self._decode(self._ids))
        return part

    def rest(self) -> str:
        return self._decode(self._ids)[self._shown :]


def train_bpe(texts: Iterable[str], vocab_size: int) -> JsonTokenizer:
    """A byte-level BPE of ``vocab_size`` tokens, fewer if the texts have no more pairs; id 0 is the end of text.

    Raises:
        ValueError: the vocabulary has no room for all bytes and the end of text.
    """
    if vocab_size < ByteTokenizer.vocab_size:
        least = f"{ByteTokenizer.vocab_size}, all bytes and the end of text"
        raise ValueError(f"--vocab-size must be at least {least}, got {vocab_size}")
    definition = Definition(models.BPE())
    words = pre_tokenizers.ByteLevel(add_prefix_space=False)
    definition.pre_tokenizer = pre_tokenizers.Sequence([words, pre_tokenizers.FixedLength(LONGEST_WORD)])
    definition.decoder = decoders.ByteLevel()
    signs = sorted(_byte_signs())
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size, special_tokens=[END_OF_TEXT], initial_alphabet=signs, show_progress=False
    )
    definition.train_from_iterator(iter(texts), trainer)
    definition.pre_tokenizer = words
    return JsonTokenizer(definition.to_str(), END_OF_TEXT)


def copy_tokenizer(path: Path, folder: Path) -> None:
    """Copy a ``tokenizer.json``, named as for ``load_tokenizer``, and the files that transformers reads with it.

    Raises:
        OSError: one cannot be read or written, and which.
    """
    source = path / TOKENIZER if path.is_dir() else path
    beside = {name: source.with_name(name) for name in BESIDE_TOKENIZER if source.with_name(name).exists()}
    for name, file in ({TOKENIZER: source} | beside).items():
        content = file.read_bytes()
        try:
            (folder / name).write_bytes(content)
        except OSError as error:  # which names no file where the disk is full
            raise OSError(error.errno, error.strerror, str(folder / name)) from error


def load_tokenizer(path: Path, eos: str | int | None = None) -> JsonTokenizer:
    """The tokenizer of a ``tokenizer.json``, or of a folder that has one.

    Args:
        eos: the token that ends documents, or its id; by default the one that ``tokenizer_config.json`` beside it
            names, else ``<|endoftext|>``.

    Raises:
        ValueError: there is none, it is damaged, or it has no such token.
        OSError: it cannot be read.
    """
    file = path / TOKENIZER if path.is_dir() else path
    if not file.exists():
        raise ValueError(f"tokenizer {path}: there is no {file}{how_to_download(path)}")
    config = file.with_name("tokenizer_config.json")
    try:
        if eos is None and config.exists():
            settings = json.loads(config.read_text(encoding="utf-8"))
            named = settings.get("eos_token") if isinstance(settings, dict) else settings
            eos = named.get("content") if isinstance(named, dict) else named
            if not isinstance(eos, str | None):
                raise ValueError(f"{config.name} names no end of text but {str(eos)[:50]}")
        return JsonTokenizer(file.read_text(encoding="utf-8"), END_OF_TEXT if eos is None else eos)
    except json.JSONDecodeError as error:
        raise ValueError(f"{config} is not a JSON file: {error}") from None
    except ValueError as error:
        raise ValueError(f"tokenizer {file}: {error}") from None
