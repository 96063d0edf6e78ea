"""Token files, streams over several, and their folder: every token comes back; torn and foreign ones are refused."""

import json
import struct

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given, settings

from cs336_systems.pretraining import dataset as module
from cs336_systems.pretraining.dataset import HEADER_BYTES, Dataset, TokenFile, TokenStream, TokenWriter
from cs336_systems.pretraining.tokenizing import TokenizeOptions, tokenize
from tests.pretraining.trained import counting, write_tokens


@given(parts=st.lists(st.lists(st.integers(0, 65_535))), room=st.integers(1, 20))
@settings(deadline=None, max_examples=30)
def test_tokens_come_back_from_files_that_are_full_but_the_last(tmp_path_factory, parts, room):
    folder = tmp_path_factory.mktemp("tokens")
    with pytest.MonkeyPatch.context() as patch, TokenWriter(folder, "a", vocab_size=65_536, eos_id=7) as writer:
        patch.setattr(module, "FILE_TOKENS", room)
        for part in parts:
            writer.append(part)
    expected = [token for part in parts for token in part]
    found = [TokenFile.open(folder / name) for name in writer.files]
    assert [token for file in found for token in file.tokens] == expected
    assert writer.n_tokens == len(expected) and sorted(p.name for p in folder.iterdir()) == writer.files
    assert all(len(file.tokens) == room for file in found[:-1])


def test_the_header_is_what_llm_q_reads_and_old_files_of_two_bytes_are_read(tmp_path):
    write_tokens(tmp_path, [3, 1, 2], vocab_size=9, eos_id=5)
    data = bytearray((tmp_path / "a-00000.bin").read_bytes())
    words = struct.unpack("<256i", data[:HEADER_BYTES])
    assert data[:8] == b"BIN.TOK\n"
    assert words[2:7] == (2, 4, 3, 9, 0)  # version, bytes per token, tokens, vocabulary, masks
    assert (data[32:40], words[10]) == (b"cs336sys", 5)
    assert struct.unpack("<3i", data[HEADER_BYTES:]) == (3, 1, 2)
    struct.pack_into("<i", data, 12, 2)
    (tmp_path / "old.bin").write_bytes(data[:HEADER_BYTES] + struct.pack("<3H", 3, 1, 2))
    assert TokenFile.open(tmp_path / "old.bin").tokens.tolist() == [3, 1, 2]


def test_torn_and_foreign_files_are_refused(tmp_path):
    write_tokens(tmp_path, range(100))
    path = tmp_path / "a-00000.bin"
    whole = path.read_bytes()
    for cut in (1, 4, 4 * 100 + 1, 4 * 100 + HEADER_BYTES):
        for content in (whole[:-cut], whole + bytes(cut)):
            path.write_bytes(content)
            with pytest.raises(ValueError, match=r"a-00000.bin is torn"):
                TokenFile.open(path)
    for word, value in ((0, 7), (2, 3), (3, 8), (4, -1), (6, 1)):
        data = bytearray(whole)
        struct.pack_into("<i", data, 4 * word, value)
        path.write_bytes(data)
        with pytest.raises(ValueError, match=rf"a-00000.bin is .*{value}"):
            TokenFile.open(path)


@pytest.mark.parametrize("token", [-1, 10])
def test_a_failure_leaves_no_token_file(tmp_path, token):
    writer = TokenWriter(tmp_path, "a", vocab_size=10)
    with pytest.raises(ValueError, match=f"token {token} at position 5 .* 10"), writer:
        writer.append([1, 2, 3])
        writer.append([9, 0, token, 4])
    with pytest.raises(ValueError, match=r"a-00000.bin is no token file"):
        TokenFile.open(tmp_path / "a-00000.bin")


@given(st.data())
def test_any_slice_of_any_division_into_files(data):
    n_tokens = data.draw(st.integers(1, 60))
    shards = data.draw(st.lists(st.integers(0, n_tokens), max_size=6))
    start = data.draw(st.integers(0, n_tokens - 1))
    out = np.empty(data.draw(st.integers(0, n_tokens - start)), np.int64)
    stream = counting(n_tokens, *shards)
    stream.copy(start, out)
    assert len(stream) == n_tokens
    assert out.tolist() == list(range(start, start + len(out)))


def test_a_token_has_a_place_and_files_of_two_vocabularies_do_not_mix(tmp_path):
    stream = counting(10, 0, 4, 4)
    assert (stream.place(3), stream.place(4)) == ("1.bin, position 3", "3.bin, position 0")
    files = [write_tokens(tmp_path, [1], f"{size}", vocab_size=size) for size in (10, 11)]
    for some in (files, []):
        with pytest.raises(ValueError, match=r"10 ids, .* 11 ids" if some else "no file"):
            TokenStream(some)


def test_damaged_datasets_are_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "FILE_TOKENS", 100)
    for number in range(40):
        (tmp_path / f"{number}.txt").write_text(f"document {number}")
    folder = tmp_path / "out"
    dataset = tokenize(TokenizeOptions(input=(tmp_path,), tokenizer="bytes", out=folder))
    assert (dataset.vocab_size, dataset.eos_id, dataset.train.vocab_size) == (257, 256, 257)
    assert len(dataset.train.files) == 5
    file, tokenizer, manifest_file = (folder / name for name in ("train-00000.bin", "tokenizer.json", "dataset.json"))
    whole, manifest = file.read_bytes(), json.loads(manifest_file.read_text())
    train = manifest["splits"]["train"]
    damaged = ({"tokenizer": {}}, {"splits": []}, {"splits": {"train": train | {"tokens": None}}})
    harms = [
        (lambda: file.write_bytes(whole[:-1]), "train-00000.bin is torn"),
        (lambda: file.write_bytes((folder / "train-00004.bin").read_bytes()), "tokens to train, its dataset.json"),
        (tokenizer.unlink, "has no tokenizer.json"),
        (
            lambda: manifest_file.write_text(json.dumps(manifest | {"layout": 9})),
            "layout 9; this version reads 1 and 2",
        ),
        *(
            (lambda lacking=lacking: manifest_file.write_text(json.dumps(manifest | lacking)), "")
            for lacking in damaged
        ),
        (lambda: manifest_file.write_text("{"), "dataset.json is damaged"),
        (manifest_file.unlink, "it has no dataset.json"),
    ]
    sound = {path: path.read_bytes() for path in (file, tokenizer, manifest_file)}
    for harm, message in harms:
        harm()
        with pytest.raises(ValueError, match=message or "dataset.json is damaged") as refusal:
            Dataset.open(folder)
        assert "\n" not in str(refusal.value)
        for path, content in sound.items():
            path.write_bytes(content)
    manifest_file.write_text(json.dumps({k: v for k, v in manifest.items() if k != "chat"} | {"layout": 1}))
    assert not Dataset.open(folder).chat  # as folders were before there were conversations
    file.unlink()
    with pytest.raises(FileNotFoundError, match="train-00000.bin"):
        Dataset.open(folder)
