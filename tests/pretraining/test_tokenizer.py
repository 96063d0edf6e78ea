"""Tokenizers: every text comes back, through the tokenizer.json that is kept; special tokens in text stay text."""

import json
import random
import time
from pathlib import Path
from unittest.mock import Mock

import hypothesis.strategies as st
import pytest
import tokenizers
from hypothesis import given, settings

from cs336_systems.pretraining.tokenizer import (
    END_OF_TEXT,
    ByteTokenizer,
    JsonTokenizer,
    TextStream,
    copy_tokenizer,
    load_tokenizer,
    train_bpe,
)

TEXTS = [
    *("def f(x):\n    return x + 1\n" * 5, "the theory of the thing, then\n", ""),
    *(f"a {END_OF_TEXT} b", "ünïcödé 🙂\t\r\n\0"),
]
BPE = train_bpe(TEXTS, 300)
BYTES = JsonTokenizer(ByteTokenizer().json(), 256)
UNICODE = st.text(st.characters(exclude_categories=["Cs"]))


@pytest.mark.parametrize("tokenizer", [ByteTokenizer(), BPE], ids=["bytes", "bpe"])
@given(texts=st.lists(UNICODE | st.sampled_from(TEXTS)))
@settings(deadline=None, max_examples=50)
def test_any_text_comes_back_and_ends_once(tokenizer, texts):
    saved = tokenizers.Tokenizer.from_str(tokenizer.json())
    encoded = tokenizer.encode(texts)
    assert [saved.decode(ids[:-1].tolist(), skip_special_tokens=False) for ids in encoded] == texts
    for ids in encoded:
        assert ids[-1] == tokenizer.eos_id
        assert tokenizer.eos_id not in ids[:-1]
        assert ids.max() < tokenizer.vocab_size
    assert saved.decode([tokenizer.eos_id], skip_special_tokens=False) == END_OF_TEXT


@pytest.mark.parametrize("tokenizer", [BYTES, BPE], ids=["bytes", "bpe"])
@given(ids=st.lists(st.integers(0, 256)) | st.sampled_from(TEXTS).map(lambda text: list(text.encode())))
@settings(deadline=None, max_examples=50)
def test_text_from_ids_one_by_one_is_the_text_of_all(tokenizer, ids):
    stream = TextStream(tokenizer)
    parts = [stream.push(token_id) for token_id in ids]
    assert "".join(parts) + stream.rest() == tokenizer.decode(ids)


def test_characters_are_not_shown_by_halves():
    stream = TextStream(BYTES)
    assert [stream.push(byte) for byte in "a🙂é".encode()] == ["a", "", "", "", "🙂", "", "é"]


def test_training_is_deterministic():
    assert train_bpe(TEXTS, 300).json() == BPE.json()
    assert BPE.eos_id == 0
    assert 257 < BPE.vocab_size <= 300
    assert train_bpe([], 300).vocab_size == 257
    with pytest.raises(ValueError, match="--vocab-size must be at least 257, .*got 256"):
        train_bpe(TEXTS, 256)


def test_the_time_to_learn_from_one_long_word_is_linear():
    """Uncut, these took 10 s each at half this length, and four times that at this one."""
    draw = random.Random(0)
    for word in ("a" * 200_000, "".join(draw.choices("abcdefghij", k=200_000))):
        started = time.process_time()
        learned = train_bpe([word], 400)
        assert learned.encode([word])[0].size < 200_000
        assert time.process_time() - started < 8
        assert learned.decode(learned.encode([word])[0][:-1].tolist()) == word


@pytest.fixture
def folder(tmp_path):
    """A folder as Hugging Face has it: two special tokens, truncation and padding left on by its author."""
    definition = tokenizers.Tokenizer.from_str(BPE.json())
    definition.add_special_tokens(["<|im_end|>"])
    definition.enable_truncation(3)
    definition.enable_padding(length=50)
    definition.save(str(tmp_path / "tokenizer.json"))
    return tmp_path


def test_the_end_of_text_is_that_of_the_caller_the_config_or_the_default(folder):
    assert load_tokenizer(folder).eos_id == load_tokenizer(folder, 0).eos_id == 0
    assert load_tokenizer(folder, BPE.vocab_size).eos_token == "<|im_end|>"
    for eos in ("<|im_end|>", {"content": "<|im_end|>", "special": True}):
        (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": eos}))
        tokenizer = load_tokenizer(folder)
        assert (tokenizer.eos_id, tokenizer.vocab_size) == (BPE.vocab_size, BPE.vocab_size + 1)
        assert load_tokenizer(folder / "tokenizer.json", END_OF_TEXT).eos_id == 0


def test_truncation_and_padding_are_not_obeyed(folder):
    for ours, whole in zip(load_tokenizer(folder).encode(TEXTS), BPE.encode(TEXTS), strict=True):
        assert ours.tolist() == whole.tolist()


def test_tokenizers_that_are_not_there_or_not_whole(folder):
    with pytest.raises(ValueError, match=r"there is no .*nowhere"):
        load_tokenizer(folder / "nowhere")
    for eos in ("<eos>", 4000):
        with pytest.raises(ValueError, match=f"tokenizer.json: .*{eos}"):
            load_tokenizer(folder, eos)
    for content in ([], [1], {"eos_token": 3}, {"eos_token": ["</s>"]}):
        (folder / "tokenizer_config.json").write_text(json.dumps(content))
        with pytest.raises(ValueError, match=r"tokenizer.json: tokenizer_config.json names no end of text"):
            load_tokenizer(folder)
    (folder / "tokenizer_config.json").write_text("{")
    with pytest.raises(ValueError, match=r"tokenizer_config.json is not a JSON file: "):
        load_tokenizer(folder)
    (folder / "tokenizer_config.json").unlink()
    (folder / "tokenizer.json").write_text("{}")
    with pytest.raises(ValueError, match=r"tokenizer.json: no definition of a tokenizer"):
        load_tokenizer(folder)


def test_a_full_disk_names_the_file_that_could_not_be_written(folder, tmp_path, monkeypatch):
    monkeypatch.setattr(Path, "write_bytes", Mock(side_effect=OSError(28, "No space left on device")))
    with pytest.raises(OSError, match=r"No space left on device: '.*other.tokenizer\.json'"):
        copy_tokenizer(folder, tmp_path / "other")
