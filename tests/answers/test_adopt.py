"""A run's rows and digests moved into profiles/: checked, merged, refused, and never half."""

import gzip

import pandas as pd
import pytest

from cs336_systems.answers import adopt
from cs336_systems.answers.adopt import carry_out, plan
from cs336_systems.answers.sums import broken_seals
from cs336_systems.harness.record import RowFile, read_rows
from tests.report.rows import SETTINGS, make_cell, ms

WHERE = {"gpu": "NVIDIA H200", "device": "cuda", "commit": "abc", "argv": "x", "dirty": False}


def write(path, *milliseconds, day=1, **values):
    file = RowFile(path, SETTINGS)
    for time in milliseconds:
        file.append(make_cell(ms("step", time), timestamp=f"2026-01-{day:02}T00:00:00+00:00", **(WHERE | values)))
    return path


@pytest.fixture
def run(tmp_path):
    return tmp_path / "run7"


@pytest.fixture
def profiles(tmp_path):
    return tmp_path / "profiles"


def adopted(run, profiles, **how):
    moves = plan(run, profiles, how.pop("machine", "h200"), replace=how.pop("replace", False))
    carry_out(moves, profiles)
    return moves


def medians(profiles, name="benchmark_model.csv"):
    return list(read_rows(profiles / "results" / "h200" / "grid" / name)["median"])


def test_rows_and_digests_go_to_their_parts_and_raw_recordings_stay(run, profiles):
    write(run / "grid" / "benchmark_model.csv", 1.0)
    (run / "grid" / "benchmark_model_frontier.png").write_bytes(b"drawn from the rows")
    write(run / "nsys" / "profile_model.csv", 2.0)
    for name in ("small-nsys.md", "small-nsys-kernels.csv", "small-nsys-step.png", "small.nsys-rep", "t.json.gz"):
        (run / "nsys" / name).write_bytes(b"x")
    drawn_again = ("memory-2.7b-b4-c128-fp32-step.png", "memory-2.7b-b4-c128-fp32-step-active.png")
    (run / "memory").mkdir()
    for name in (*drawn_again, "memory-2.7b-b4-c128-fp32-step.pickle.gz"):
        (run / "memory" / name).write_bytes(b"x")
    adopted(run, profiles)
    found = {path.relative_to(profiles).as_posix() for path in profiles.rglob("*") if path.is_file()}
    digests = ("profile_model.csv", "small-nsys.md", "small-nsys-kernels.csv", "small-nsys-step.png")
    adopted_files = {"results/h200/grid/benchmark_model.csv"} | {f"digests/h200/nsys/{name}" for name in digests}
    adopted_files |= {f"digests/h200/memory/{name}" for name in drawn_again}
    assert found == adopted_files | {"SHA256SUMS"}
    assert {line.split()[1] for line in (profiles / "SHA256SUMS").read_text().splitlines()} == adopted_files
    assert broken_seals(profiles) == []


def test_newer_rows_are_appended_and_adopting_again_changes_nothing(run, profiles):
    source = write(run / "grid" / "benchmark_model.csv", 1.0)
    adopted(run, profiles)
    write(source, 2.0, 3.0, day=2)
    (move,) = adopted(run, profiles)
    assert move.what == "2 of 3 rows appended"
    assert medians(profiles) == [1.0, 2.0, 3.0]
    assert broken_seals(profiles) == []
    assert (profiles / "results/h200/grid/benchmark_model.csv").read_bytes() == source.read_bytes()
    assert adopted(run, profiles)[0].what == "all there already"
    assert medians(profiles) == [1.0, 2.0, 3.0]


@pytest.mark.parametrize("day", [1, 2])
def test_rows_that_differ_and_are_no_newer_are_refused_unless_told(run, profiles, day):
    write(profiles / "results" / "h200" / "grid" / "benchmark_model.csv", 1.0, day=2)
    write(run / "grid" / "benchmark_model.csv", 9.0, day=day)
    (move,) = plan(run, profiles, "h200", replace=False)
    assert str(move).startswith("refused: ") and "no newer" in str(move)
    with pytest.raises(ValueError, match="nothing was moved"):
        carry_out([move], profiles)
    assert medians(profiles) == [1.0]
    adopted(run, profiles, replace=True)
    assert medians(profiles) == [9.0]


@pytest.mark.parametrize(
    ("values", "reason"),
    [
        ({"dirty": True}, "uncommitted changes"),
        ({"commit": ""}, "do not say their commit"),
        ({"gpu": "NVIDIA B200"}, "rows of NVIDIA B200, not of h200"),
        ({"device": "cpu", "gpu": ""}, "rows of cpu, not of h200"),
    ],
)
def test_rows_that_cannot_be_committed_keep_everything_back(run, profiles, values, reason):
    write(run / "fine" / "benchmark_model.csv", 1.0)
    write(run / "grid" / "benchmark_model.csv", 1.0, **values)
    moves = plan(run, profiles, "h200", replace=True)
    assert [move.refused for move in moves] == [False, True]
    assert reason in moves[1].what
    with pytest.raises(ValueError, match="refused"):
        carry_out(moves, profiles)
    assert not profiles.exists()


def test_a_machine_is_named_after_its_gpu_or_is_a_cpu(run, profiles):
    write(run / "collectives" / "benchmark_collectives.csv", 1.0, device="cpu", gpu="")
    adopted(run, profiles, machine="cpu")
    assert (profiles / "results" / "cpu" / "collectives" / "benchmark_collectives.csv").exists()


def test_rows_join_earlier_ones_with_columns_in_another_order_and_none_for_nccl(run, profiles):
    write(run / "grid" / "benchmark_model.csv", 2.0, day=2, nccl='{"version": "2.28.9"}')
    committed = profiles / "results" / "h200" / "grid" / "benchmark_model.csv"
    write(committed, 1.0)
    earlier = pd.read_csv(committed, dtype=str, keep_default_na=False).drop(columns="nccl")
    earlier = earlier[[*earlier.columns[:1], *earlier.columns[:0:-1]]]
    earlier.to_csv(committed, index=False)
    (move,) = adopted(run, profiles)
    assert move.what == "1 of 1 rows appended"
    assert medians(profiles) == [1.0, 2.0]
    assert list(read_rows(committed)["nccl"]) == ["", '{"version": "2.28.9"}']
    assert adopted(run, profiles)[0].what == "all there already"


def test_earlier_rows_say_what_later_ones_could_be_asked(run, profiles):
    """In the committed file, as they are read."""
    write(run / "grid" / "benchmark_model.csv", 2.0, day=2)
    committed = profiles / "results" / "h200" / "grid" / "benchmark_model.csv"
    write(committed, 1.0)
    earlier = pd.read_csv(committed, dtype=str, keep_default_na=False).drop(columns=["offload", "fp8_skip_last"])
    earlier.to_csv(committed, index=False)
    (move,) = adopted(run, profiles)
    assert move.what == "1 of 1 rows appended"
    assert medians(profiles) == [1.0, 2.0]
    text = pd.read_csv(committed, dtype=str, keep_default_na=False)
    assert list(text["offload"]) == ["none", "none"] and list(text["fp8_skip_last"]) == ["0", "0"]


def test_profiles_without_repeats_are_joined_by_those_with_them(run, profiles):
    source = write(run / "nsys" / "profile_model.csv", 2.0, day=2)
    newer = pd.read_csv(source, dtype=str, keep_default_na=False).assign(profiler="nsys", repeat="0")
    newer.to_csv(source, index=False)
    committed = profiles / "digests" / "h200" / "nsys" / "profile_model.csv"
    committed.parent.mkdir(parents=True)
    newer.assign(median="1.0", timestamp="2026-01-01T00:00:00+00:00").drop(columns="repeat").to_csv(
        committed, index=False
    )
    (move,) = adopted(run, profiles)
    assert move.what == "1 of 1 rows appended"
    assert list(read_rows(committed)["repeat"]) == [0, 0]


def test_earlier_rows_of_attention_are_of_the_first_turn_by_the_harness(run, profiles):
    name, settings = "benchmark_attention.csv", ("device", "impl", "d_head", "clock", "repeat")
    committed = profiles / "results" / "h200" / "grid" / name
    for day, path in ((1, committed), (2, run / "grid" / name)):
        cell = WHERE | {"impl": "flash", "d_head": 64, "clock": "do-bench", "repeat": 1}
        file = RowFile(path, settings)
        file.append(make_cell(ms("both", day), timestamp=f"2026-01-{day:02}T00:00:00+00:00", **cell))
    earlier = pd.read_csv(committed, dtype=str, keep_default_na=False).drop(columns=["clock", "repeat"])
    earlier.to_csv(committed, index=False)
    adopted(run, profiles)
    rows = read_rows(committed)
    assert list(rows["clock"]) == ["harness", "do-bench"] and list(rows["repeat"]) == [0, 1]


def test_torn_files_and_other_columns_are_refused(run, profiles):
    source = write(run / "grid" / "benchmark_model.csv", 1.0)
    committed = profiles / "results" / "h200" / "grid" / "benchmark_model.csv"
    RowFile(committed, ["size"]).append(make_cell(ms("step", 1.0), **WHERE))
    assert "other columns" in plan(run, profiles, "h200", replace=False)[0].what
    source.write_bytes(source.read_bytes()[:-5])
    assert "torn line" in plan(run, profiles, "h200", replace=True)[0].what


def test_large_rows_are_compressed_and_stay_so_and_large_pages_refused(run, profiles, monkeypatch):
    source = write(run / "grid" / "benchmark_model.csv", 1.0)
    adopted(run, profiles)
    monkeypatch.setattr(adopt, "LARGEST", 600)
    write(source, 2.0, day=2)
    adopted(run, profiles)
    folder = profiles / "results" / "h200" / "grid"
    assert [path.name for path in folder.iterdir()] == ["benchmark_model.csv.gz"]
    write(source, 3.0, day=3)
    adopted(run, profiles)
    assert medians(profiles, "benchmark_model.csv.gz") == [1.0, 2.0, 3.0]
    assert broken_seals(profiles) == []
    assert gzip.decompress((folder / "benchmark_model.csv.gz").read_bytes()) == source.read_bytes()
    (run / "grid" / "page.md").write_text("x" * 1001)
    assert [move.refused for move in plan(run, profiles, "h200", replace=True)] == [False, True]


def test_pages_that_differ_are_refused_unless_told(run, profiles):
    (run / "nsys").mkdir(parents=True)
    page, committed = run / "nsys" / "page.md", profiles / "digests" / "h200" / "nsys" / "page.md"
    page.write_text("one")
    assert adopted(run, profiles)[0].what == "new"
    assert adopted(run, profiles)[0].what == "there already"
    page.write_text("two")
    assert plan(run, profiles, "h200", replace=False)[0].refused
    adopted(run, profiles, replace=True)
    assert committed.read_text() == "two"


def test_a_file_is_whole_or_as_it_was(run, profiles, monkeypatch):
    source = write(run / "grid" / "benchmark_model.csv", 1.0)
    adopted(run, profiles)
    write(source, 2.0, day=2)

    def full(descriptor):
        raise OSError("disk full")

    monkeypatch.setattr("os.fsync", full)
    moves = plan(run, profiles, "h200", replace=False)
    with pytest.raises(OSError, match="disk full"):
        carry_out(moves, profiles)
    assert medians(profiles) == [1.0]
    assert len(list((profiles / "results" / "h200" / "grid").iterdir())) == 1


def test_a_folder_without_parts_is_an_error(run, profiles):
    with pytest.raises(ValueError, match="holds no folder of a part"):
        plan(run, profiles, "h200", replace=False)
