"""Tokenizers: every text comes back, through the tokenizer.json that is kept; special tokens in text stay text."""

import json
import pickle

import hypothesis.strategies as st
import pytest
import tokenizers
from hypothesis import given, settings

from cs336_systems.pretraining.tokenizer import (
    END_OF_TEXT,
    ByteTokenizer,
    JsonTokenizer,
    TextStream,
    load_tokenizer,
    train_bpe,
)

TEXTS = [
    "def f(x):\n    return x + 1\n" * 5,
    "the theory of the thing, then\n",
    "",
    f"a {END_OF_TEXT} b",
    "ünïcödé 🙂\t\r\n\0",
]
BPE = train_bpe(TEXTS, 300)
UNICODE = st.text(st.characters(exclude_categories=["Cs"]))


@pytest.mark.parametrize("tokenizer", [ByteTokenizer(), BPE], ids=["bytes", "bpe"])
@given(texts=st.lists(UNICODE | st.sampled_from(TEXTS)))
@settings(deadline=None)
def test_any_text_comes_back_and_ends_once(tokenizer, texts):
    saved = tokenizers.Tokenizer.from_str(tokenizer.json())
    encoded = tokenizer.encode(texts)
    assert [saved.decode(ids[:-1].tolist(), skip_special_tokens=False) for ids in encoded] == texts
    for ids in encoded:
        assert ids[-1] == tokenizer.eos_id
        assert tokenizer.eos_id not in ids[:-1]
        assert ids.max() < tokenizer.vocab_size
    assert saved.decode([tokenizer.eos_id], skip_special_tokens=False) == END_OF_TEXT


@pytest.mark.parametrize("tokenizer", [JsonTokenizer(ByteTokenizer().json(), 256), BPE], ids=["bytes", "bpe"])
@given(ids=st.lists(st.integers(0, 256)) | st.sampled_from(TEXTS).map(lambda text: list(text.encode())))
@settings(deadline=None)
def test_text_from_ids_one_by_one_is_the_text_of_all(tokenizer, ids):
    stream = TextStream(tokenizer)
    parts = [stream.push(token_id) for token_id in ids]
    assert "".join(parts) + stream.rest() == tokenizer.decode(ids)


def test_characters_are_not_shown_by_halves():
    stream = TextStream(JsonTokenizer(ByteTokenizer().json(), 256))
    parts = [stream.push(byte) for byte in "a🙂é".encode()]
    assert parts == ["a", "", "", "", "🙂", "", "é"]


def test_the_end_of_text_by_its_id(folder):
    assert load_tokenizer(folder, BPE.vocab_size).eos_token == "<|im_end|>"
    assert load_tokenizer(folder, 0).eos_token == END_OF_TEXT
    with pytest.raises(ValueError, match="it has no token 4000 to end documents with"):
        load_tokenizer(folder, 4000)


def test_bytes_are_bytes_in_the_tokenizer_json_too():
    saved = tokenizers.Tokenizer.from_str(ByteTokenizer().json())
    assert saved.get_vocab_size() == 257
    for text in (TEXTS[0], TEXTS[4]):
        assert saved.encode(text).ids == list(text.encode())


def test_training_is_deterministic_and_the_end_of_text_is_token_0():
    assert train_bpe(TEXTS, 300).json() == BPE.json()
    assert BPE.eos_id == 0
    assert 257 < BPE.vocab_size <= 300
    assert train_bpe([], 300).vocab_size == 257
    with pytest.raises(ValueError, match="has 257, got 256"):
        train_bpe(TEXTS, 256)


def test_another_process_gets_the_same_tokenizer():
    copy = pickle.loads(pickle.dumps(BPE))
    assert [ids.tolist() for ids in copy.encode(TEXTS)] == [ids.tolist() for ids in BPE.encode(TEXTS)]


@pytest.fixture
def folder(tmp_path):
    """As Hugging Face has it: two special tokens, truncation left on by who trained it, padding too."""
    definition = tokenizers.Tokenizer.from_str(BPE.json())
    definition.add_special_tokens(["<|im_end|>"])
    definition.enable_truncation(3)
    definition.enable_padding(length=50)
    definition.save(str(tmp_path / "tokenizer.json"))
    return tmp_path


@pytest.mark.parametrize("eos", ["<|im_end|>", {"content": "<|im_end|>", "special": True}])
def test_the_end_of_text_is_what_the_config_says(folder, eos):
    assert load_tokenizer(folder).eos_id == 0
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": eos}))
    tokenizer = load_tokenizer(folder)
    assert tokenizer.eos_id == BPE.vocab_size
    assert tokenizer.vocab_size == BPE.vocab_size + 1
    assert load_tokenizer(folder / "tokenizer.json", END_OF_TEXT).eos_id == 0


def test_truncation_and_padding_are_not_obeyed(folder):
    for mine, whole in zip(load_tokenizer(folder).encode(TEXTS), BPE.encode(TEXTS), strict=True):
        assert mine.tolist() == whole.tolist()


def test_tokenizers_that_are_not_there_or_not_whole(folder):
    with pytest.raises(ValueError, match=r"tokenizer .*nowhere: there is no .*nowhere"):
        load_tokenizer(folder / "nowhere")
    with pytest.raises(ValueError, match=r"tokenizer.json: it has no token '<eos>' to end documents with"):
        load_tokenizer(folder, "<eos>")
    (folder / "tokenizer.json").write_text("{}")
    with pytest.raises(ValueError, match=r"tokenizer.json: no definition of a tokenizer: "):
        load_tokenizer(folder)


@pytest.mark.slow
@pytest.mark.parametrize("tokenizer", [ByteTokenizer(), BPE], ids=["bytes", "bpe"])
def test_transformers_reads_the_same_ids(tokenizer, tmp_path):
    from transformers import PreTrainedTokenizerFast

    (tmp_path / "tokenizer.json").write_text(tokenizer.json())
    theirs = PreTrainedTokenizerFast(tokenizer_file=str(tmp_path / "tokenizer.json"), eos_token=END_OF_TEXT)
    assert theirs.eos_token_id == tokenizer.eos_id
    for text in (TEXTS[0], TEXTS[1], TEXTS[4]):
        assert [*theirs(text, add_special_tokens=False)["input_ids"], tokenizer.eos_id] == tokenizer.encode([text])[
            0
        ].tolist()
