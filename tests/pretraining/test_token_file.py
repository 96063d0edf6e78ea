"""Token files: what is written is read, by this and by others' rules; torn, foreign and impossible ones are refused."""

import struct

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given, settings

from cs336_systems.pretraining.token_file import HEADER_BYTES, MOST_TOKENS, TokenFile, TokenFileWriter
from tests.pretraining.streams import write


@pytest.mark.parametrize("width", [2, 4])
@given(parts=st.lists(st.lists(st.integers(0, 65_535))))
@settings(deadline=None, max_examples=30)
def test_tokens_come_back_and_nothing_else_remains(tmp_path_factory, width, parts):
    path = tmp_path_factory.mktemp("tokens") / "a.bin"
    with TokenFileWriter(path, vocab_size=65_536, bytes_per_token=width, eos_id=7) as file:
        for part in parts:
            file.append(part)
    found = TokenFile.open(path)
    assert found.tokens.tolist() == [token for part in parts for token in part]
    assert (found.vocab_size, found.eos_id, found.tokens.itemsize) == (65_536, 7, width)
    assert [p.name for p in path.parent.iterdir()] == ["a.bin"]


def test_the_header_is_what_llm_q_reads(tmp_path):
    write(tmp_path / "a.bin", [3, 1, 2], vocab_size=9)
    data = (tmp_path / "a.bin").read_bytes()
    words = struct.unpack("<256i", data[:HEADER_BYTES])
    assert data[:8] == b"BIN.TOK\n"
    assert words[2:7] == (2, 4, 3, 9, 0)  # version, bytes per token, tokens, vocabulary, masks
    assert struct.unpack("<3i", data[HEADER_BYTES:]) == (3, 1, 2)


@pytest.mark.parametrize("version", [1, 2])
def test_files_of_llm_q_are_read(tmp_path, version):
    """Its writer fills the header with asterisks; its first version does not say the vocabulary."""
    path = tmp_path / "theirs.bin"
    words = struct.pack("<3i", version, 4, 3) + (struct.pack("<2i", 151_936, 0) if version == 2 else b"")
    header = (b"BIN.TOK\n" + words).ljust(HEADER_BYTES - 1, b"*") + b"\n"
    path.write_bytes(header + struct.pack("<3i", 5, 151_643, 0))
    found = TokenFile.open(path)
    assert found.tokens.tolist() == [5, 151_643, 0]
    assert (found.vocab_size, found.eos_id) == (151_936 if version == 2 else None, None)


@pytest.mark.parametrize(("magic", "version", "dtype"), [(20240520, 1, "<u2"), (20240801, 7, "<u4")])
def test_files_of_llm_c_are_read(tmp_path, magic, version, dtype):
    path = tmp_path / "theirs.bin"
    tokens = np.array([50_256, 0, 17], dtype)
    path.write_bytes(struct.pack("<3i", magic, version, 3).ljust(HEADER_BYTES, b"\0") + tokens.tobytes())
    found = TokenFile.open(path)
    assert found.tokens.tolist() == [50_256, 0, 17]
    assert found.vocab_size is None


def test_tokens_are_mapped_not_loaded(tmp_path):
    assert isinstance(write(tmp_path / "a.bin", range(100)).tokens, np.memmap)
    assert len(write(tmp_path / "empty.bin", []).tokens) == 0


@pytest.mark.parametrize("cut", [1, 4, 4 * 50, 4 * 100, 4 * 100 + 1, 4 * 100 + HEADER_BYTES])
def test_a_torn_file_is_refused(tmp_path, cut):
    path = tmp_path / "a.bin"
    write(path, range(100))
    path.write_bytes(path.read_bytes()[:-cut])
    with pytest.raises(ValueError, match=r"a.bin is torn"):
        TokenFile.open(path)
    write(path, range(100))
    with path.open("ab") as file:
        file.write(bytes(cut))
    with pytest.raises(
        ValueError, match=r"a.bin is torn: its header counts 100 tokens of 4 bytes, 1,424 bytes in all, and"
    ):
        TokenFile.open(path)


@pytest.mark.parametrize(
    ("word", "value", "message"),
    [
        (0, 7, "no token file: it begins with b'"),
        (2, 3, "token file of version 3; known are 1 and 2"),
        (3, 8, "8 bytes per token; known are 2 and 4"),
        (4, -1, "torn: its header counts -1 tokens"),
        (6, 1, "masks of what to learn"),
    ],
)
def test_a_foreign_header_is_refused(tmp_path, word, value, message):
    path = tmp_path / "a.bin"
    write(path, range(100))
    data = bytearray(path.read_bytes())
    struct.pack_into("<i", data, 4 * word, value)
    path.write_bytes(data)
    with pytest.raises(ValueError, match=message):
        TokenFile.open(path)


def test_a_missing_file_says_its_name(tmp_path):
    with pytest.raises(FileNotFoundError, match="nowhere.bin"):
        TokenFile.open(tmp_path / "nowhere.bin")


@pytest.mark.parametrize("token", [-1, 10, 2**32])
def test_tokens_outside_the_vocabulary_are_not_written(tmp_path, token):
    message = f"token {token} at position 5 is outside a vocabulary of 10"
    with (
        pytest.raises(ValueError, match=message),
        TokenFileWriter(tmp_path / "a.bin", vocab_size=10) as file,
    ):
        file.append([1, 2, 3])
        file.append([9, 0, token, 4])
    assert list(tmp_path.iterdir()) == []


def test_a_failure_leaves_an_earlier_file(tmp_path):
    write(tmp_path / "a.bin", [1, 2, 3])
    with pytest.raises(KeyboardInterrupt), TokenFileWriter(tmp_path / "a.bin", vocab_size=10) as file:
        file.append([4])
        raise KeyboardInterrupt
    assert TokenFile.open(tmp_path / "a.bin").tokens.tolist() == [1, 2, 3]
    assert [path.name for path in tmp_path.iterdir()] == ["a.bin"]


def test_what_a_killed_writer_leaves_is_no_token_file(tmp_path):
    file = TokenFileWriter(tmp_path / "a.bin", vocab_size=10)
    file.append(np.zeros(5000, int))
    file._file.flush()
    (left,) = tmp_path.iterdir()
    with pytest.raises(ValueError, match="no token file"):
        TokenFile.open(left)


def test_vocabularies_that_do_not_fit(tmp_path):
    with pytest.raises(ValueError, match="vocabulary of 65,537 does not fit into 2 bytes"):
        TokenFileWriter(tmp_path / "a.bin", vocab_size=65_537, bytes_per_token=2)
    with pytest.raises(ValueError, match="tokens have 2 or 4 bytes, got 3"):
        TokenFileWriter(tmp_path / "a.bin", vocab_size=10, bytes_per_token=3)
    with (
        TokenFileWriter(tmp_path / "a.bin", vocab_size=10) as file,
        pytest.raises(ValueError, match="at most 2,147,483,647"),
    ):
        file.n_tokens = MOST_TOKENS
        file.append([1])
