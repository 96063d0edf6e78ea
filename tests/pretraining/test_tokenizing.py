"""Datasets: the same bytes from any number of processes, every document in one split, shards that are full."""

import filecmp
import json
import os
import signal
import struct
from multiprocessing import Pipe
from pathlib import Path

import numpy as np
import psutil
import pytest

from cs336_systems.pretraining import encoding, tokenizing
from cs336_systems.pretraining.corpus import Corpus
from cs336_systems.pretraining.encoding import is_held_out
from cs336_systems.pretraining.tokenize_options import TokenizeOptions
from cs336_systems.pretraining.tokenizer import ByteTokenizer
from cs336_systems.pretraining.tokenizing import default_folder, tokenize


@pytest.fixture
def lines(tmp_path):
    """200 documents."""
    path = tmp_path / "lines.jsonl"
    path.write_text("".join(json.dumps({"text": f"document {i}: " + "word " * (i % 17)}) + "\n" for i in range(200)))
    return path


def make(lines, name, **options):
    return tokenize(TokenizeOptions(input=(lines,), out=lines.parent / name, evaluation_fraction=0.2, **options))


def tokens(stream):
    out = np.empty(len(stream), np.int64)
    stream.copy(0, out)
    return out


@pytest.mark.parametrize("tokenizer", [{"tokenizer": "bytes"}, {"vocab_size": 300, "bytes_per_token": 2}])
def test_processes_write_what_one_process_writes(lines, monkeypatch, tokenizer):
    serial = make(lines, "serial", processes=1, shard_tokens=1000, **tokenizer)
    monkeypatch.setattr(encoding, "_BATCH_CHARACTERS", 100)
    parallel = make(lines, "parallel", processes=3, shard_tokens=1000, **tokenizer)
    names = sorted(path.name for path in serial.folder.iterdir())
    assert names == sorted(path.name for path in parallel.folder.iterdir())
    assert filecmp.cmpfiles(serial.folder, parallel.folder, names, shallow=False) == (names, [], [])
    assert sum(name.startswith("train") for name in names) > 2


def test_every_document_is_in_the_split_of_its_hash_in_order(lines):
    dataset = make(lines, "out", tokenizer="bytes", processes=1)
    for stream, held_out in ((dataset.train, False), (dataset.evaluation, True)):
        documents = [d.text for d in Corpus.find([lines]).documents() if is_held_out(d.text, 0.2) == held_out]
        assert tokens(stream).tolist() == [token for text in documents for token in (*text.encode(), 256)]
        said = dataset.manifest["splits"]["evaluation" if held_out else "train"]
        assert said["documents"] == len(documents)
        assert said["bytes"] == sum(map(len, documents)) == said["tokens"] - len(documents)
    assert 20 < dataset.manifest["splits"]["evaluation"]["documents"] < 60


def test_shards_are_full_but_the_last_and_change_nothing(lines):
    whole = make(lines, "whole", tokenizer="bytes", processes=1)
    sharded = make(lines, "sharded", tokenizer="bytes", processes=1, shard_tokens=777)
    sizes = [len(file.tokens) for file in sharded.train.files]
    assert set(sizes[:-1]) == {777}
    assert 0 < sizes[-1] <= 777
    assert np.array_equal(tokens(whole.train), tokens(sharded.train))
    exact = make(lines, "exact", tokenizer="bytes", processes=1, shard_tokens=len(whole.train))
    assert len(exact.train.files) == 1


def test_one_split_alone_can_be_asked_for(lines):
    for fraction, train, evaluation in ((0.0, True, False), (1.0, False, True)):
        options = TokenizeOptions(
            input=(lines,),
            out=lines.parent / f"{fraction}",
            evaluation_fraction=fraction,
            tokenizer="bytes",
            processes=1,
        )
        dataset = tokenize(options)
        assert (dataset.train is not None, dataset.evaluation is not None) == (train, evaluation)


def test_the_bpe_does_not_learn_from_what_is_held_out(lines):
    """A word of the evaluation documents alone makes no merge, and the sample ends where it should."""
    with lines.open("a") as file:
        held_out = next(t for n in range(1000) if is_held_out(t := f"{n} " + "zq" * 500, 0.2))
        file.write(json.dumps({"text": held_out}) + "\n")
    make(lines, "out", vocab_size=300, processes=1)
    assert "zq" not in json.loads((lines.parent / "out" / "tokenizer.json").read_text())["model"]["vocab"]
    options = TokenizeOptions(input=(lines,), sample_mb=100e-6, evaluation_fraction=0.2)
    sampled = list(tokenizing._sample(options, Corpus.find([lines])))
    assert 100 <= sum(map(len, sampled)) < 200


def test_an_earlier_dataset_is_replaced_only_when_asked(lines):
    make(lines, "out", tokenizer="bytes", processes=1)
    with pytest.raises(ValueError, match=r"--out .*out is there already; --replace makes it anew"):
        make(lines, "out", tokenizer="bytes", processes=1)
    assert make(lines, "out", vocab_size=300, processes=1, replace=True).vocab_size <= 300
    (lines.parent / "mine").mkdir()
    (lines.parent / "mine" / "diary.txt").write_text("")
    with pytest.raises(ValueError, match=r"--out .*mine is there and no dataset; name another folder"):
        make(lines, "mine", tokenizer="bytes", processes=1, replace=True)
    assert sorted(path.name for path in lines.parent.iterdir()) == ["lines.jsonl", "mine", "out"]


@pytest.mark.parametrize("error", [KeyboardInterrupt, OSError("No space left on device")])
def test_a_failure_leaves_the_earlier_dataset_and_nothing_else(lines, monkeypatch, error):
    before = make(lines, "out", tokenizer="bytes", processes=1)
    monkeypatch.setattr(encoding, "_BATCH_CHARACTERS", 100)
    append, calls = tokenizing._Shards.append, []

    def fail(self, part):
        calls.append(part)
        if len(calls) == 20:
            raise error
        append(self, part)

    monkeypatch.setattr(tokenizing._Shards, "append", fail)
    with pytest.raises(error if isinstance(error, type) else type(error)):
        make(lines, "out", vocab_size=300, processes=1, replace=True)
    monkeypatch.undo()
    assert sorted(path.name for path in lines.parent.iterdir()) == ["lines.jsonl", "out"]
    assert tokenizing.Dataset.open(before.folder).manifest == before.manifest


def test_an_earlier_dataset_comes_back_if_the_new_one_cannot_take_its_place(lines, monkeypatch):
    before = make(lines, "out", tokenizer="bytes", processes=1)
    rename = Path.rename

    def fail(self, target):
        if self.suffix == ".tmp":
            raise OSError("moved by nobody")
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", fail)
    with pytest.raises(OSError, match="moved by nobody"):
        make(lines, "out", vocab_size=300, processes=1, replace=True)
    assert sorted(path.name for path in lines.parent.iterdir()) == ["lines.jsonl", "out"]
    assert tokenizing.Dataset.open(before.folder).manifest == before.manifest


def test_a_killed_process_is_said_and_nothing_is_written(lines, monkeypatch):
    monkeypatch.setattr(encoding, "_BATCH_CHARACTERS", 100)
    receive = encoding._receive

    def kill(process):
        psutil.Process(process._process.pid).send_signal(signal.SIGKILL)
        process._process.join()
        for _ in range(2):  # one answer may be in the pipe already
            receive(process)

    monkeypatch.setattr(encoding, "_receive", kill)
    with pytest.raises(RuntimeError, match="a process that encodes text died without a report: SIGKILL"):
        make(lines, "out", tokenizer="bytes", processes=2)
    assert [path.name for path in lines.parent.iterdir()] == ["lines.jsonl"]


def test_what_cannot_be_divided_is_said(tmp_path):
    (tmp_path / "one.txt").write_text("one document")
    (tmp_path / "empty.txt").write_text("")
    options = {"tokenizer": "bytes", "processes": 1, "out": tmp_path / "out"}
    message = "none of 1 documents is for evaluation at --evaluation-fraction 0.05: take another, or --separator"
    with pytest.raises(ValueError, match=message):
        tokenize(TokenizeOptions(input=(tmp_path / "one.txt",), **options))
    with pytest.raises(ValueError, match=r"there is no text in .*empty.txt"):
        tokenize(TokenizeOptions(input=(tmp_path / "empty.txt",), **options))
    assert len(list(tmp_path.iterdir())) == 2


def test_folders_are_named_by_corpus_and_tokenizer(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "web.jsonl").write_text("")
    (tmp_path / "Qwen2.5-0.5B").mkdir()
    web, library = Corpus.find([tmp_path / "web.jsonl"]), Corpus.find([])
    assert os.fspath(default_folder(TokenizeOptions(), library)) == "data/stdlib-bpe4096"
    assert os.fspath(default_folder(TokenizeOptions(tokenizer="bytes"), web)) == "data/web-bytes"
    for name in ("Qwen2.5-0.5B", "Qwen2.5-0.5B/", "Qwen2.5-0.5B/tokenizer.json"):
        assert os.fspath(default_folder(TokenizeOptions(tokenizer=name), web)) == "data/web-Qwen2.5-0.5B"


@pytest.mark.parametrize("asked", [[], ["a", "b"]])
def test_a_process_ends_quietly_when_nobody_listens(asked):
    ours, theirs = Pipe()
    if asked:
        ours.send(asked)
    ours.close()
    encoding._serve(theirs, ByteTokenizer(), 0.5)


def test_a_process_whose_other_side_goes_in_the_middle_of_a_message_ends_without_a_word():
    ours, theirs = Pipe()
    os.write(ours.fileno(), struct.pack("!i", 100) + b"torn")  # a length, and not so many bytes
    ours.close()
    encoding._serve(theirs, ByteTokenizer(), 0.5)
