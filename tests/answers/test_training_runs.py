"""Logs of training runs as evidence: adopted, sealed, refused without provenance; their console in documents."""

import json

import pytest

from cs336_systems.answers.adopt import carry_out, plan
from cs336_systems.answers.committed import Committed, NotMeasured
from cs336_systems.answers.figures import Drawing
from cs336_systems.answers.sums import broken_seals
from cs336_systems.answers.training_runs import console_lines, last_record, problems_of_run, run_problems
from cs336_systems.pretraining.run_log import LOG, LogFile, RunLog
from cs336_systems.pretraining.run_reader import read_run
from cs336_systems.pretraining.run_records import Device, End, Evaluation, Options, Step

COMMIT = "ab" * 20


def written(folder, n_steps=5, device="NVIDIA H200", **provenance):
    folder.mkdir(parents=True)
    with RunLog(LogFile.open(folder / LOG, resume=False)) as log:
        log.write(Options({}, {}, n_steps))
        log.write(Device(device, 1, None, {"commit": COMMIT, "dirty": False} | provenance))
        for step in range(n_steps):
            log.write(Step(step, 0.5, 1000, 3.0 - step / 10, 1.0, 1e-3))
        log.write(Evaluation(n_steps, 2.75, 1000, 0.1))
        log.write(End(n_steps, "done"))
    return folder


def test_a_log_is_adopted_and_read_again_whatever_lies_beside_it(tmp_path):
    beside = written(tmp_path / "run" / "first")
    for name in ("log.png", "run.json", "tokenizer.json"):
        (beside / name).write_bytes(b"x")
    (beside / "step-00000005").mkdir()
    profiles = tmp_path / "profiles"
    carry_out(plan(tmp_path / "run", profiles, "h200", replace=False), profiles)
    files = {path.relative_to(profiles).as_posix() for path in profiles.rglob("*") if path.is_file()}
    assert files == {"runs/h200/first/log.jsonl", "SHA256SUMS"}
    assert len(Committed(profiles, "h200").run("first").steps) == 5
    assert broken_seals(profiles) == run_problems(profiles, {COMMIT}) == []
    with pytest.raises(NotMeasured, match="runs/h200/second"):
        Committed(profiles, "h200").run("second")


@pytest.mark.parametrize(
    ("how", "problem"),
    [
        ({"dirty": True}, "uncommitted changes"),
        ({"commit": ""}, "commit unknown"),
        ({"device": "NVIDIA L4"}, "a run on NVIDIA L4, not on h200"),
    ],
)
def test_a_log_without_provenance_or_of_another_machine_is_refused(tmp_path, how, problem):
    written(tmp_path / "run" / "first", **how)
    (move,) = plan(tmp_path / "run", tmp_path / "profiles", "h200", replace=False)
    assert move.refused and problem in move.what


def test_a_changed_log_and_a_forged_commit_are_named(tmp_path):
    profiles = tmp_path / "profiles"
    written(tmp_path / "run" / "first")
    carry_out(plan(tmp_path / "run", profiles, "h200", replace=False), profiles)
    path = profiles / "runs" / "h200" / "first" / LOG
    (forged,) = run_problems(profiles, {"cd" * 20})
    assert forged == f"runs/h200/first/log.jsonl: is of commit {COMMIT}, which is not in the history"
    path.write_text(path.read_text().replace('"loss": 2.8', '"loss": 2.7'))
    assert "was changed since it was adopted" in broken_seals(profiles)[0]
    path.write_bytes(path.read_bytes()[:-5])
    assert problems_of_run(read_run(path), None) == ["its last line is not whole"]


def test_the_console_of_some_steps(tmp_path):
    run = read_run(written(tmp_path / "first") / LOG)
    assert [line[:7] for line in console_lines(run, [4]).splitlines()] == ["...", "[T] ste", "...", "done, a"]
    lines = console_lines(run, [0, 3, 5]).splitlines()
    assert [line[:12] for line in lines] == [
        "[T] step 0 [",
        "...",
        "[T] step 3 [",
        "...",
        "[V] step 5 [",
        "done, after ",
    ]


def test_a_figure_knows_a_run_by_its_records_and_not_by_its_place(tmp_path):
    here, there = written(tmp_path / "here") / LOG, tmp_path / "there.jsonl"
    there.write_bytes(here.read_bytes())

    def source(path):
        return Drawing(console_lines, lambda: (read_run(path),)).source()

    assert source(here) == source(there)
    there.write_text(json.dumps({}).join(there.read_text().rsplit("{}", 1)).replace("3.0", "3.1"))
    assert source(here) != source(there)


def test_the_last_record_of_a_kind_is_found_by_its_name(tmp_path):
    run = read_run(written(tmp_path / "first") / LOG)
    assert last_record(run, "step") == run.all(Step)[-1] and last_record(run, "end").reason == "done"
    with pytest.raises(ValueError, match="no record of kind 'checkpoint'"):
        last_record(run, "checkpoint")
