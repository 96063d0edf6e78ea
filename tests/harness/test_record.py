"""Rows on disk: what is written is read back, what is foreign or torn is refused, a failed write leaves no trace."""

import errno
import gzip
import math
import os
from concurrent.futures import ThreadPoolExecutor

import pandas as pd
import pytest

from cs336_systems.harness.record import SCHEMA_VERSION, Metric, RowFile, read_rows, schema_columns

CELL_COLUMNS = ("device", "size", "steps")

HEADER = (
    "schema_version,benchmark,variant,device,size,steps,status,message,metric,unit,median,mean,std,p10,p90,n,samples,"
    "gpu,gpu_count,driver,cuda,host,python,torch,triton,nccl,commit,dirty,argv,seed,timestamp,state_before,state_after"
)


def make_row(**values):
    return {"schema_version": SCHEMA_VERSION, "benchmark": "b", "device": "cpu", "size": "tiny", "steps": 3} | values


@pytest.fixture
def path(tmp_path):
    return tmp_path / "results" / "b.csv"


@pytest.fixture
def row_file(path):
    """A file with one whole row."""
    file = RowFile(path, CELL_COLUMNS)
    file.append([make_row(status="ok", message="first", **Metric("step", "ms", [1.0, 2.0]).statistics())])
    return file


def refusal(path, open_it) -> str:
    """The message of the ValueError that opening raises: one line that names the file, which stays as it was."""
    before = path.read_bytes()
    with pytest.raises(ValueError) as caught:
        open_it(path)
    message = str(caught.value)
    assert str(path) in message
    assert len(message.splitlines()) == 1
    assert len(message) < 300 + len(str(path))
    assert path.read_bytes() == before
    return message


def write(path):
    return RowFile(path, CELL_COLUMNS)


def test_statistics_by_hand():
    # sorted 1 2 3 10: p10 lies 0.3 of the way from 1 to 2, p90 0.7 of the way from 3 to 10; deviations -3 -2 -1 6
    assert Metric("step", "ms", [3.0, 1.0, 2.0, 10.0]).statistics() == {
        "metric": "step",
        "unit": "ms",
        "median": 2.5,
        "mean": 4.0,
        "std": pytest.approx(math.sqrt(50 / 3), rel=1e-6),
        "p10": pytest.approx(1.3),
        "p90": pytest.approx(7.9),
        "n": 4,
        "samples": "[3.0, 1.0, 2.0, 10.0]",
    }
    row = Metric("rate", "1/s", [1 / 3], derived=True).statistics()
    assert (row["std"], row["n"], row["samples"], row["median"]) == ("", 1, "", 0.3333333)


@pytest.mark.parametrize("samples", [[], [math.nan], [1.0, -math.inf, 2.0]])
def test_samples_that_are_not_finite_or_not_there_are_refused(samples):
    with pytest.raises(ValueError, match="metric loss needs finite samples, got"):
        Metric("loss", "", samples).statistics()


def test_round_trip(path):
    file = write(path)
    assert path.read_text() == HEADER + "\n"
    file.append([make_row(status="ok", **Metric("step", "ms", [1.5, 2.5, 3.5]).statistics())])
    rate = make_row(status="ok", **Metric("rate", "1/s", [2.0], derived=True).statistics())
    file.append([rate, make_row(status="oom", message="no room")])
    rows = read_rows(path)
    assert list(rows["status"]) == ["ok", "ok", "oom"] and list(rows["metric"]) == ["step", "rate", ""]
    assert list(rows["samples"]) == [[1.5, 2.5, 3.5], [], []] and list(rows["median"])[:2] == [2.5, 2.0]
    assert rows[["median", "mean", "std", "p10", "p90", "n"]].iloc[2].isna().all()
    assert list(rows["gpu"]) == ["", "", ""] and list(rows["message"]) == ["", "", "no room"]


def test_names_that_look_like_numbers_are_read_as_they_were_written(path):
    numbers = {"schema_version", "median", "mean", "std", "p10", "p90", "n", "samples", "gpu_count", "dirty", "seed"}
    names = dict.fromkeys(set(schema_columns(())) - numbers, "12.80") | {"commit": "1e10000"}
    write(path).append([make_row(**names)])
    assert read_rows(path).loc[0, list(names)].to_dict() == names


def test_an_existing_file_is_continued_and_messages_survive(path, row_file):
    first = path.read_bytes()
    messages = ['a, "b", c', "two\nlines", "dos\r\nlines", "a\rreturn", "NA", "nan", "größer – µs", " padded ", "1e3"]
    for message in messages:
        write(path).append([make_row(status="error", message=message, argv=f"b.py {message}", commit="1e10000")])
    write(path).append([make_row(status="error", message="name\udcff", commit="1e10000")])  # of a file, no UTF-8
    assert path.read_bytes().startswith(first)
    rows = read_rows(path)
    assert list(rows["message"]) == ["first", *messages, "name?"]
    assert list(rows["argv"]) == ["", *(f"b.py {message}" for message in messages), ""]
    assert list(rows["commit"][1:]) == ["1e10000"] * (len(messages) + 1)


def test_writers_that_begin_a_file_at_once_write_one_header(tmp_path):
    with ThreadPoolExecutor(8) as threads:
        for number in range(10):
            path = tmp_path / f"{number}.csv"
            list(threads.map(write, [path] * 8))
            assert path.read_text() == HEADER + "\n"


@pytest.mark.parametrize("open_it", [write, read_rows])
def test_foreign_and_torn_files_are_refused(path, row_file, open_it):
    whole = path.read_bytes()
    path.write_bytes(whole.replace(b"\n1,b", b"\n99,b"))
    assert "99" in refusal(path, open_it)
    for foreign in (b"epoch,loss\n1,0.5\n", b"\x89PNG\r\n\x1a\n\x00\xff\xfe"):
        path.write_bytes(foreign)
        assert foreign[:5].decode(errors="replace").strip()[:1] in refusal(path, open_it)
    for lost in (1, 2, 40):
        path.write_bytes(whole[:-lost])
        assert "torn" in refusal(path, open_it)


def test_other_and_missing_columns_are_refused(path, row_file):
    message = refusal(path, lambda path: RowFile(path, ("device", "size", "layers")))
    assert "layers" in message
    assert "steps" in message
    refusal(path, lambda path: RowFile(path, ("size", "device", "steps")))
    assert "layers, heads" in refusal(path, lambda path: read_rows(path, ["size", "layers", "heads"]))
    assert len(read_rows(path, CELL_COLUMNS)) == 1
    columns = [column for column in schema_columns(CELL_COLUMNS) if column != "commit"]
    path.write_text(",".join(columns) + "\n" + ",".join("1" for _ in columns) + "\n")
    assert "commit" in refusal(path, read_rows)


@pytest.mark.parametrize("failure", [OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)), KeyboardInterrupt()])
def test_a_write_that_fails_half_way_leaves_the_file_as_it_was(path, row_file, monkeypatch, failure):
    before = path.read_bytes()
    really_write = os.write
    calls = []

    def write_a_part(descriptor, data):
        """As the kernel does it: what still fits is written, then the next call fails."""
        calls.append(len(data))
        if len(calls) == 1:
            return really_write(descriptor, data[: len(data) // 2])
        raise failure

    monkeypatch.setattr(os, "write", write_a_part)
    with pytest.raises(type(failure)):
        row_file.append([make_row(status="ok", message="lost"), make_row(status="ok", message="lost too")])
    monkeypatch.undo()
    assert len(calls) == 2
    assert path.read_bytes() == before
    row_file.append([make_row(status="ok", message="after")])
    assert list(read_rows(path)["message"]) == ["first", "after"]


def test_a_compressed_csv_reads_like_the_plain_one(row_file, path, tmp_path):
    packed = tmp_path / "rows.csv.gz"
    packed.write_bytes(gzip.compress(path.read_bytes()))
    pd.testing.assert_frame_equal(read_rows(packed), read_rows(path))
    packed.write_bytes(gzip.compress(b"a,b\n1,2\n"))
    refusal(packed, read_rows)
