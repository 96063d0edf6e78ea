"""Datasets: the same bytes in batches of any size, every document in one split, all of them or nothing."""

import filecmp
import json
import os
from unittest.mock import Mock

import numpy as np
import pytest
import tokenizers

from cs336_systems.pretraining import dataset, tokenizing
from cs336_systems.pretraining.corpus import Corpus
from cs336_systems.pretraining.dataset import Dataset
from cs336_systems.pretraining.tokenizer import END_OF_TEXT
from cs336_systems.pretraining.tokenizing import TokenizeOptions, default_folder, is_held_out, tokenize


@pytest.fixture
def lines(tmp_path):
    """200 documents."""
    path = tmp_path / "lines.jsonl"
    path.write_text("".join(json.dumps({"text": f"document {i}: " + "word " * (i % 17)}) + "\n" for i in range(200)))
    return path


def make(lines, name, **options):
    given = {"tokenizer": "bytes", "evaluation_fraction": 0.2} | options
    return tokenize(TokenizeOptions(input=(lines,), out=lines.parent / name, **given))


def tokens(stream):
    out = np.empty(len(stream), np.int64)
    stream.copy(0, out)
    return out


@pytest.mark.parametrize("tokenizer", [{}, {"tokenizer": "bpe", "vocab_size": 300}])
def test_batches_of_any_size_give_the_same_files(lines, monkeypatch, tokenizer):
    monkeypatch.setattr(dataset, "FILE_TOKENS", 1000)
    whole = make(lines, "whole", **tokenizer)
    monkeypatch.setattr(tokenizing, "_BATCH_CHARACTERS", 100)
    parts = make(lines, "parts", **tokenizer)
    names = sorted(path.name for path in whole.folder.iterdir())
    assert names == sorted(path.name for path in parts.folder.iterdir())
    assert filecmp.cmpfiles(whole.folder, parts.folder, names, shallow=False) == (names, [], [])
    assert sum(name.startswith("train") for name in names) > 2


def test_every_document_is_in_the_split_of_its_hash_in_order(lines):
    whole = make(lines, "whole")
    for name, held_out in (("train", False), ("evaluation", True)):
        stream, said = getattr(whole, name), whole.manifest["splits"][name]
        documents = [d.text for d in Corpus.find([lines]).documents() if is_held_out(d.text, 0.2) == held_out]
        assert tokens(stream).tolist() == [token for text in documents for token in (*text.encode(), 256)]
        assert said["documents"] == len(documents)
        assert said["bytes"] == sum(map(len, documents)) == said["tokens"] - len(documents)
    assert 20 < said["documents"] < 60
    for fraction, train, evaluation in ((0.0, True, False), (1.0, False, True)):
        one = make(lines, f"{fraction}", evaluation_fraction=fraction)
        assert (one.train is not None, one.evaluation is not None) == (train, evaluation)


def test_the_last_part_of_a_lone_document_is_held_out_also_from_the_bpe(tmp_path, capsys):
    (tmp_path / "one.txt").write_text("é " * 400 + "zq" * 100, encoding="utf-8")
    made = make(tmp_path / "one.txt", "out", tokenizer="bpe", vocab_size=300)
    definition = tokenizers.Tokenizer.from_file(str(made.tokenizer))
    parts = [definition.decode(tokens(stream)) for stream in (made.train, made.evaluation)]
    assert parts == ["é " * 400, "zq" * 100]
    assert "zq" not in definition.get_vocab()
    assert capsys.readouterr().err.count("\n") == 1
    assert make(tmp_path / "one.txt", "all", evaluation_fraction=0.0).evaluation is None


def test_the_bpe_does_not_learn_from_what_is_held_out(lines, monkeypatch):
    """A word of the evaluation documents alone makes no merge, and the sample ends where it should."""
    with lines.open("a") as file:
        held_out = next(t for n in range(1000) if is_held_out(t := f"{n} " + "zq" * 500, 0.2))
        file.write(json.dumps({"text": held_out}) + "\n")
    vocabularies = []
    for n_characters in (10**6, 100):
        monkeypatch.setattr(tokenizing, "_SAMPLE_CHARACTERS", n_characters)
        made = make(lines, f"{n_characters}", tokenizer="bpe", vocab_size=300)
        vocabularies.append(json.loads(made.tokenizer.read_text())["model"]["vocab"])
    assert "zq" not in vocabularies[0]
    assert len(vocabularies[1]) < len(vocabularies[0])


def test_an_earlier_dataset_is_replaced_only_when_asked_and_only_by_a_whole_one(lines, monkeypatch):
    before = make(lines, "out")
    with pytest.raises(ValueError, match=r"--out .*out is there already"):
        make(lines, "out")
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(tokenizing, "describe", Mock(side_effect=KeyboardInterrupt))
        make(lines, "out", tokenizer="bpe", vocab_size=300, replace=True)
    assert sorted(path.name for path in lines.parent.iterdir()) == ["lines.jsonl", "out"]
    assert Dataset.open(before.folder).manifest == before.manifest
    assert make(lines, "out", tokenizer="bpe", vocab_size=300, replace=True).vocab_size == 300
    (lines.parent / "mine").mkdir()
    (lines.parent / "mine" / "diary.txt").write_text("")
    with pytest.raises(ValueError, match=r"--out .*mine is there and no dataset"):
        make(lines, "mine", replace=True)
    assert sorted(path.name for path in lines.parent.iterdir()) == ["lines.jsonl", "mine", "out"]


def test_a_tokenizer_without_an_id_for_some_text_is_refused(lines, tmp_path):
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel({"document": 0, END_OF_TEXT: 1}, unk_token="<unk>"))
    words.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    words.save(str(tmp_path / "words.json"))
    with pytest.raises(ValueError, match=r"cannot encode .*Missing"):
        make(lines, "out", tokenizer=str(tmp_path / "words.json"))


def test_what_cannot_be_divided_is_said(tmp_path, lines):
    with pytest.raises(ValueError, match="for evaluation at --evaluation-fraction 1e-09: a larger one holds some out"):
        make(lines, "out", evaluation_fraction=1e-9)
    stories = ("two.txt", f"one{END_OF_TEXT}two", "two.txt .*--separator")
    for name, text, fault in (("one.txt", "1", "none of 1 .* 0.2"), ("empty.txt", "", "no text in .*empty"), stories):
        (tmp_path / name).write_text(text)
        with pytest.raises(ValueError, match=fault):
            make(tmp_path / name, "out")
    assert len(list(tmp_path.iterdir())) == 4  # what was written here and the lines: no folder is begun


def test_folders_are_named_by_corpus_and_tokenizer(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "web.jsonl").write_text("")
    (tmp_path / "Qwen2.5-0.5B").mkdir()
    web, library = Corpus.find([tmp_path / "web.jsonl"]), Corpus.find([])
    assert os.fspath(default_folder(TokenizeOptions(), library)) == "data/stdlib-bpe4096"
    assert os.fspath(default_folder(TokenizeOptions(tokenizer="bytes"), web)) == "data/web-bytes"
    for name in ("Qwen2.5-0.5B", "Qwen2.5-0.5B/", "Qwen2.5-0.5B/tokenizer.json"):
        assert os.fspath(default_folder(TokenizeOptions(tokenizer=name), web)) == "data/web-Qwen2.5-0.5B"
