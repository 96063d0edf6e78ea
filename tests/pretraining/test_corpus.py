"""Documents of each kind of file, in their order; damaged and missing ones are named with their line."""

import bz2
import gzip
import json
import lzma
import os
import sys
from dataclasses import replace
from pathlib import Path

import hypothesis.strategies as st
import pytest
from hypothesis import given

from cs336_systems.pretraining import corpus as module
from cs336_systems.pretraining.corpus import Corpus


def texts(*paths, **options):
    return [document.text for document in Corpus.find(paths, **options).documents()]


def test_the_default_is_the_standard_library_without_what_is_installed_beside_it():
    corpus = Corpus.find([])
    assert {"argparse.py", "this.py", "decoder.py"} < {path.name for path in corpus.files}
    assert not any({"site-packages", "dist-packages"} & set(path.parts) for path in corpus.files)


def test_folders_are_read_by_name_and_suffix_without_hidden_files(tmp_path):
    files = {"b.py": "b", "a/z.py": "z", "a/y.md": "y", ".git/c.py": "-", ".d.py": "-", "e.c": "e", "empty.py": ""}
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    assert texts(tmp_path) == ["y", "z", "b"]
    assert texts(tmp_path, suffixes=(".c",)) == ["e"]
    assert texts(tmp_path / "b.py", tmp_path, tmp_path / "e.c") == ["b", "y", "z", "e"]
    with pytest.raises(ValueError, match=r".rs, .go"):
        Corpus.find([tmp_path], suffixes=(".rs", ".go"))
    with pytest.raises(ValueError, match="nowhere does not exist"):
        Corpus.find([tmp_path / "nowhere"])


def test_a_folder_that_cannot_be_read_is_not_left_out(tmp_path, monkeypatch):
    (tmp_path / "closed").mkdir()
    (tmp_path / "a.txt").write_text("a")

    def scandir(path, open_folder=os.scandir):
        if str(path).endswith("closed"):
            raise PermissionError(13, "Permission denied", path)
        return open_folder(path)

    monkeypatch.setattr(os, "scandir", scandir)
    with pytest.raises(PermissionError, match="closed"):
        Corpus.find([tmp_path])


@given(st.lists(st.text(st.sampled_from("ab<|>é\n")), min_size=1), st.integers(1, 7))
def test_separated_documents_whatever_the_chunks(tmp_path_factory, documents, chunk):
    path = tmp_path_factory.mktemp("text") / "a.txt"
    whole = "<|end|>".join(documents)
    path.write_bytes(whole.encode())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "_CHUNK_BYTES", chunk)
        found = list(Corpus.find([path], separator="<|end|>").documents())
        assert texts(path) == ([whole] if whole else [])
    assert [document.text for document in found] == [text for text in whole.split("<|end|>") if text]


def test_files_are_taken_for_what_they_are_or_refused(tmp_path):
    inside, linked = tmp_path / "inside", tmp_path / "linked"
    inside.mkdir()
    linked.mkdir()
    rows = b'\xef\xbb\xbf{"text": "one"}\n{"text": null}\n{"text": "\\u0000"}\n'
    for name, content in (("b.JSONL", rows), ("c.Txt", b"\xef\xbb\xbfcaf\xc3\xa9\r\n"), ("d.rst", b"-"), ("e", b"-")):
        (inside / name).write_bytes(content)
    (linked / "f.MD").write_text("linked")
    (inside / "a").symlink_to(linked)
    (linked / "loop").symlink_to(inside)
    corpus = Corpus.find([inside])
    assert [document.text for document in corpus.documents()] == ["linked", "one", "\0", "café\r\n"]
    assert dict(corpus.skipped) == {".rst": 1, "without suffix": 1}
    (inside / "b.JSONL").rename(inside / "web.json")
    assert texts(inside / "web.json") == ["one", "\0"]
    for name in ("g.jsonl.ZIP", "g.parquet.gz"):
        (inside / name).write_bytes(b"")
        with pytest.raises(ValueError, match=f"{name} is compressed"):
            texts(inside)
        (inside / name).unlink()
    for content, byte in (
        (b"a|caf\xe9", 5),
        ("ab".encode("utf-16-le"), 1),
        (b"PK\3\4\0", 4),
        (b"\x1f\x8b", 1),
    ):
        for name in ("x.bin", "x.json"):
            (tmp_path / name).write_bytes(content)
            with pytest.raises(ValueError, match=rf"{name}.* (no UTF-8 text from byte|a zero byte, at) {byte}\b"):
                texts(tmp_path / name, separator="|")


def test_texts_that_are_no_document(tmp_path, monkeypatch):
    path = tmp_path / "a.txt"
    monkeypatch.setattr(module, "MOST_BYTES", 5)
    monkeypatch.setattr(module, "_CHUNK_BYTES", 2)
    path.write_text("abc|def|g")
    assert texts(path, separator="|") == ["abc", "def", "g"]
    with pytest.raises(ValueError, match=r"a.txt .* --separator "):
        texts(path)
    with pytest.raises(ValueError, match="separator"):
        texts(path, separator="")


def test_lines_of_json(tmp_path):
    path = tmp_path / "a.jsonl"
    rows = [{"text": "one\ntwo", "body": "1"}, {"text": "\ud800 half a pair", "body": "2"}, {"text": "", "body": "3"}]
    path.write_text("\n\n".join(map(json.dumps, rows)))
    assert texts(path) == ["one\ntwo", "? half a pair"]
    assert texts(path, field="body") == ["1", "2", "3"]
    accounted = sum(document.file_bytes for document in Corpus.find([path], field="body").documents())
    assert accounted >= path.stat().st_size - 2
    for line, fault in (
        ('{"text": ', "not JSON"),
        ('{"body": "x", "n": 1}', "'text', it has body, n"),
        ('{"text": 1}', "'text', it has int there"),
        ("[1]", "'text', it has list"),
    ):
        path.write_text('{"text": "x"}\n' + line)
        with pytest.raises(ValueError, match=f"a.jsonl, line 2: .*{fault}"):
            texts(path)


def test_parquet(tmp_path, monkeypatch):
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    path = tmp_path / "a.parquet"
    rows = [f"document {number}" for number in range(3000)]
    parquet.write_table(pyarrow.table({"text": [*rows, None, ""], "n": range(3002)}), path)
    assert texts(path) == rows
    for field, fault in (("body", "'body', it has text, n"), ("n", "'n' holds int")):
        with pytest.raises(ValueError, match=f"a.parquet.*{fault}"):
            texts(path, field=field)
    path.write_bytes(path.read_bytes()[:100])
    with pytest.raises(ValueError, match=r"a.parquet cannot be read: "):
        texts(path)
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    for name in ("a.parquet", "a.txt.zst"):
        path.rename(path := tmp_path / name)
        with pytest.raises(ValueError, match=f"{name} needs pyarrow: uv sync --extra parquet"):
            texts(path)


def zstd(data: bytes) -> bytes:
    pyarrow = pytest.importorskip("pyarrow")
    sink = pyarrow.BufferOutputStream()
    with pyarrow.CompressedOutputStream(sink, "zstd") as packed:
        packed.write(data)
    return sink.getvalue().to_pybytes()


PACK = {".gz": gzip.compress, ".zst": zstd, ".bz2": bz2.compress, ".XZ": lzma.compress}
LINES = '{"text": "caf\u00e9\u2028"}\n\n{"text": "two"}\n'  # a line's end for Python, not for JSON lines


@pytest.mark.parametrize("suffix", PACK)
def test_compressed_files_are_unpacked_whole_or_refused(suffix, tmp_path):
    pack, folder = PACK[suffix], tmp_path / "texts"
    folder.mkdir()
    (folder / f"a.jsonl{suffix}").write_bytes(pack(LINES.encode()))
    (folder / f"b.txt{suffix}").write_bytes(pack(b"one|") + pack("zwei ü".encode()))  # two, one after the other
    corpus = Corpus.find([folder], separator="|")
    found = list(corpus.documents())
    assert [document.text for document in found] == ["café\u2028", "two", "one", "zwei ü"]
    assert sum(document.file_bytes for document in found) == corpus.n_bytes
    assert Corpus.find([folder / f"a.jsonl{suffix}"]).name == "a"
    whole = (folder / f"a.jsonl{suffix}").read_bytes()
    for broken in (whole[:-9], b"no such thing, but longer", whole[: len(whole) // 2]):
        (folder / f"a.jsonl{suffix}").write_bytes(broken)
        with pytest.raises(ValueError, match=rf"a.jsonl{suffix} cannot be unpacked: "):
            texts(folder)


def test_a_mark_or_the_caller_says_the_encoding_and_what_becomes_of_text_is_counted(tmp_path):
    for encoding in ("utf-8-sig", "utf-16", "utf-32"):
        (tmp_path / "a.jsonl").write_bytes(LINES.encode(encoding))
        (tmp_path / "b.txt").write_bytes("Größe|\r\n€".encode(encoding))
        corpus = Corpus.find([tmp_path], separator="|", encoding="cp1252")  # for files without a mark
        assert [document.text for document in corpus.documents()] == ["café\u2028", "two", "Größe", "\r\n€"]
        marked = encoding.removesuffix("-sig")
        assert dict(+corpus.counted) == ({} if marked == "utf-8" else {f"files read as {marked}-le": 2})
    (tmp_path / "b.txt").write_bytes("Größe|\r\n€".encode("cp1252"))
    (tmp_path / "c.txt.gz").write_bytes(gzip.compress("Größe".encode("latin-1")))
    named = Corpus.find([tmp_path / "b.txt", tmp_path / "c.txt.gz"], encoding="cp1252")
    assert [document.text for document in named.documents()] == ["Größe|\r\n€", "Größe"]
    with pytest.raises(ValueError, match=r"b.txt is no UTF-8 text from byte 2 on: .* --encoding says"):
        texts(tmp_path / "b.txt")
    (tmp_path / "b.txt").write_bytes("Größe".encode("utf-16")[:-1])
    (tmp_path / "c.txt").write_bytes(b"no mark")
    with pytest.raises(ValueError, match=r"c.txt is no utf-16 text: "):
        texts(tmp_path / "c.txt", encoding="utf-16")
    with pytest.raises(ValueError, match=r"b.txt is no utf-16-le text: truncated data"):
        texts(tmp_path / "b.txt")
    for unknown in ("latin-99", "base64"):
        with pytest.raises(ValueError, match=f"--encoding {unknown} is unknown"):
            texts(tmp_path, encoding=unknown)


def test_rows_that_are_left_out_or_changed_are_counted_in_each_pass(tmp_path):
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    parquet.write_table(pyarrow.table({"text": ["a", None, "", None]}), tmp_path / "a.parquet")
    (tmp_path / "b.jsonl").write_text('{"text": null}\n{"text": "\\ud800"}\n')
    corpus = Corpus.find([tmp_path])
    for _ in range(2):
        assert [document.text for document in corpus.documents()] == ["a", "?"]
        assert dict(corpus.counted) == {
            "rows without text left out": 4,
            "rows with halves of surrogate pairs, which became ?": 1,
        }
    (tmp_path / "c.py").write_bytes(b"caf\xe9\n")
    lenient = replace(Corpus.find([tmp_path / "c.py"]), strict=False)
    assert [document.text for document in lenient.documents()] == ["caf\ufffd\n"]
    assert dict(lenient.counted) == {"files not UTF-8 in places, where bytes became U+FFFD": 1}


def test_a_name_of_the_hub_says_how_to_download(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match="hf download org/web --repo-type dataset --local-dir web fetches it$"):
        texts(Path("org/web"))
    (tmp_path / "org").mkdir()
    for path in ("org/web", "texts/web.jsonl.gz"):
        with pytest.raises(ValueError, match=f"^{path} does not exist$"):
            texts(Path(path))
