"""Many files as one sequence, named by paths and patterns; folders that tokenize_data.py has made, and damaged ones."""

import json

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given

from cs336_systems.pretraining.token_stream import Dataset, TokenStream
from cs336_systems.pretraining.tokenize_options import TokenizeOptions
from cs336_systems.pretraining.tokenizing import tokenize
from tests.pretraining.streams import counting, write


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


def test_a_token_has_a_place():
    stream = counting(10, 0, 4, 4)
    assert stream.place(3) == "1.bin, position 3"
    assert stream.place(4) == "3.bin, position 0"


def test_patterns_and_paths_name_each_file_once_in_order(tmp_path):
    for number in (2, 0, 1):
        write(tmp_path / f"train-{number}.bin", [number], eos_id=3)
    stream = TokenStream.open([f"{tmp_path}/train-*.bin", tmp_path / "train-1.bin"])
    assert [int(file.tokens[0]) for file in stream.files] == [0, 1, 2]
    assert (stream.vocab_size, stream.eos_id) == (50_000, 3)
    with pytest.raises(ValueError, match=r"no token files match .*eval-\*.bin"):
        TokenStream.open([tmp_path / "eval-*.bin"])
    with pytest.raises(FileNotFoundError, match=r"eval.bin"):
        TokenStream.open([tmp_path / "eval.bin"])


def test_files_of_two_vocabularies_do_not_mix(tmp_path):
    write(tmp_path / "a.bin", [1], vocab_size=10)
    write(tmp_path / "b.bin", [1], vocab_size=11)
    with pytest.raises(ValueError, match=r"a.bin has vocab_size 10, .*b.bin has 11: they do not belong together"):
        TokenStream.open([tmp_path / "*.bin"])


@pytest.fixture
def folder(tmp_path):
    for number in range(40):
        (tmp_path / f"{number}.txt").write_text(f"document {number}")
    options = TokenizeOptions(input=(tmp_path,), tokenizer="bytes", processes=1, out=tmp_path / "out", shard_tokens=100)
    return tokenize(options).folder


def test_a_dataset_says_what_it_is(folder):
    dataset = Dataset.open(folder)
    assert (dataset.vocab_size, dataset.eos_id) == (257, 256)
    assert dataset.train.vocab_size == 257
    assert dataset.train.eos_id == dataset.evaluation.eos_id == 256
    assert dataset.tokenizer.exists()
    assert len(dataset.train.files) > 1


def test_damaged_datasets_are_refused(folder):
    files = sorted(folder.glob("train-*.bin"))
    whole = files[0].read_bytes()
    files[0].write_bytes(whole[:-1])
    with pytest.raises(ValueError, match="train-00000.bin is torn"):
        Dataset.open(folder)
    files[0].write_bytes(files[-1].read_bytes())
    with pytest.raises(ValueError, match=r"tokens to train, its dataset.json says"):
        Dataset.open(folder)
    files[0].unlink()
    with pytest.raises(FileNotFoundError, match="train-00000.bin"):
        Dataset.open(folder)
    files[0].write_bytes(whole)
    tokenizer = folder / "tokenizer.json"
    tokenizer.rename(folder / "elsewhere")
    with pytest.raises(ValueError, match="has no tokenizer.json"):
        Dataset.open(folder)
    (folder / "elsewhere").rename(tokenizer)
    manifest = json.loads((folder / "dataset.json").read_text())
    (folder / "dataset.json").write_text(json.dumps(manifest | {"layout": 9}))
    with pytest.raises(ValueError, match=r"dataset.json is of layout 9; this version reads 1"):
        Dataset.open(folder)
    tokenizer, train = manifest["tokenizer"], manifest["splits"]["train"]
    for lacking in (
        *({"corpus": None}, {"tokenizer": {}}, {"tokenizer": tokenizer | {"vocab_size": "many"}}),
        *({"splits": []}, {"splits": {"train": "all"}}, {"splits": {"train": train | {"tokens": None}}}),
    ):
        (folder / "dataset.json").write_text(json.dumps(manifest | lacking))
        with pytest.raises(ValueError, match=r"dataset.json is damaged: ") as refusal:
            Dataset.open(folder)
        assert "\n" not in str(refusal.value)
    (folder / "dataset.json").write_text("{")
    with pytest.raises(ValueError, match=r"dataset.json is damaged"):
        Dataset.open(folder)
    (folder / "dataset.json").unlink()
    with pytest.raises(ValueError, match=r"it has no dataset.json"):
        Dataset.open(folder)
