"""Documents of each kind of file, in their order; what is damaged or missing is named with its line."""

import json
import sys

import hypothesis.strategies as st
import pytest
from hypothesis import given

from cs336_systems.pretraining import corpus as module
from cs336_systems.pretraining.corpus import Corpus


def texts(*paths, **options):
    return [document.text for document in Corpus.find(paths, **options).documents()]


def test_the_default_is_the_standard_library_without_what_is_installed_beside_it():
    corpus = Corpus.find([])
    names = {path.name for path in corpus.files}
    assert {"argparse.py", "this.py", "decoder.py"} < names
    assert not any({"site-packages", "dist-packages"} & set(path.parts) for path in corpus.files)
    assert list(corpus.files) == sorted(corpus.files)
    assert corpus.n_bytes > 5e6
    assert corpus.name == "stdlib"


def test_folders_are_read_by_name_and_suffix_without_hidden_files(tmp_path):
    files = {"b.py": "b", "a/z.py": "z", "a/y.md": "y", ".git/c.py": "-", ".d.py": "-", "e.c": "e", "empty.py": ""}
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    assert texts(tmp_path) == ["y", "z", "b"]
    assert texts(tmp_path, suffixes=(".c",)) == ["e"]
    assert texts(tmp_path / "b.py", tmp_path, tmp_path / "e.c") == ["b", "y", "z", "e"]
    with pytest.raises(ValueError, match=r"has no files that end in .rs, .go"):
        Corpus.find([tmp_path], suffixes=(".rs", ".go"))
    with pytest.raises(ValueError, match="nowhere does not exist"):
        Corpus.find([tmp_path / "nowhere"])


def test_bytes_that_are_not_utf_8_are_marked(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"caf\xe9\r\n")
    assert texts(tmp_path / "a.txt") == ["caf\N{REPLACEMENT CHARACTER}\r\n"]


@given(st.lists(st.text(st.sampled_from("ab<|>é\n")), min_size=1), st.integers(1, 7))
def test_separated_documents_whatever_the_chunks(tmp_path_factory, documents, chunk):
    path = tmp_path_factory.mktemp("text") / "a.txt"
    whole = "<|end|>".join(documents)
    path.write_bytes(whole.encode())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "_CHUNK_BYTES", chunk)
        found = list(Corpus.find([path], separator="<|end|>").documents())
    assert [document.text for document in found] == [text for text in whole.split("<|end|>") if text]


def test_a_text_too_large_for_one_document_asks_for_a_separator(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "MOST_BYTES", 5)
    monkeypatch.setattr(module, "_CHUNK_BYTES", 2)
    (tmp_path / "a.txt").write_text("abc|def|g")
    with pytest.raises(ValueError, match=r"a.txt has a document of .* MiB or more: --separator says where"):
        texts(tmp_path / "a.txt")
    assert texts(tmp_path / "a.txt", separator="|") == ["abc", "def", "g"]
    with pytest.raises(ValueError, match="a separator of documents has at least one character"):
        texts(tmp_path / "a.txt", separator="")


@pytest.mark.parametrize("name", ["a.jsonl.gz", "a.txt.zst"])
def test_what_is_compressed_is_not_read_as_text(tmp_path, name):
    (tmp_path / name).write_bytes(b"\x1f\x8b\x08\x00")
    with pytest.raises(ValueError, match=f"{name} is compressed: unpack it first"):
        texts(tmp_path / name)


def test_lines_of_json(tmp_path):
    path = tmp_path / "a.jsonl"
    rows = [
        {"id": 1, "text": "one\ntwo", "body": "1"},
        {"text": "\ud800 half a pair", "body": "2"},
        {"text": "", "body": "3"},
    ]
    path.write_text("\n\n".join(map(json.dumps, rows)))
    assert texts(path) == ["one\ntwo", "? half a pair"]
    assert texts(path, field="body") == ["1", "2", "3"]
    assert (
        sum(document.file_bytes for document in Corpus.find([path], field="body").documents())
        >= path.stat().st_size - 2
    )


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"text": ', "a.jsonl, line 2: not JSON: "),
        ('{"body": "x", "n": 1}', "a.jsonl, line 2: no text under 'text', it has body, n"),
        ('{"text": 1}', "a.jsonl, line 2: no text under 'text', it has int there"),
        ("[1]", "a.jsonl, line 2: no text under 'text', it has list"),
    ],
)
def test_bad_lines_of_json_are_named(tmp_path, line, message):
    (tmp_path / "a.jsonl").write_text('{"text": "x"}\n' + line)
    with pytest.raises(ValueError, match=message):
        texts(tmp_path / "a.jsonl")


def test_parquet(tmp_path):
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    path = tmp_path / "a.parquet"
    rows = [f"document {number}" for number in range(3000)]
    parquet.write_table(pyarrow.table({"text": [*rows, None, ""], "n": range(3002)}), path)
    assert texts(path) == rows
    with pytest.raises(ValueError, match=r"a.parquet has no column 'body', it has text, n"):
        texts(path, field="body")
    with pytest.raises(ValueError, match=r"a.parquet: column 'n' holds int, not text"):
        texts(path, field="n")
    path.write_bytes(path.read_bytes()[:100])
    with pytest.raises(ValueError, match=r"a.parquet cannot be read: "):
        texts(path)


def test_parquet_without_its_library_is_one_sentence(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    (tmp_path / "a.parquet").write_bytes(b"PAR1")
    with pytest.raises(ValueError, match=r"a.parquet needs pyarrow: uv sync --extra parquet"):
        texts(tmp_path / "a.parquet")
