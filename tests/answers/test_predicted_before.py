"""Predictions that were made before their rows: the log held them by that commit, and each is older than its row."""

import subprocess
from datetime import datetime
from pathlib import Path

import numpy as np
import pytest

from cs336_systems.answers.predicted_before import WRITTEN, before_summary, predicted_before

ROOT = Path(__file__).resolve().parents[2]


def git(*arguments):
    done = subprocess.run(["git", "-C", str(ROOT), *arguments], capture_output=True, text=True, check=False)
    return done.stdout


@pytest.mark.skipif(not git("rev-parse", "--verify", "daeb3493"), reason="no history here")
def test_the_log_held_them_and_they_are_older_than_their_rows():
    logs = {commit: git("show", f"{commit}:LOG.md") for commit in {each.commit for each in WRITTEN}}
    for written, before in zip(WRITTEN, predicted_before(), strict=False):
        assert written.said in logs[written.commit], written
        assert f"{written.value:g}" in written.said or any(
            f"{written.value / 1000:{form}}k" in written.said for form in ("g", ".1f")
        )
        committed = datetime.fromisoformat(git("log", "-1", "--format=%aI", written.commit).strip())
        assert committed < datetime.fromisoformat(before.timestamp), written


def test_most_were_near():
    speeds = [each.error for each in predicted_before() if each.metric != "peak_memory"]
    assert len(speeds) >= 27 and np.mean(np.abs(speeds) <= 0.05) > 0.9
    n_peaks, most = before_summary("peak_memory")
    assert n_peaks > 100 and most < 1
