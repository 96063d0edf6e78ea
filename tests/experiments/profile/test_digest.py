"""The page, the CSVs and the pictures of a profile."""

from dataclasses import replace

import pandas as pd
import pytest

from cs336_systems.experiments.profile.digest import digest, verdict, write_digest
from cs336_systems.profiling.traces.tables import OPERATOR, Trace
from tests.experiments.profile.profiles import golden_profile


@pytest.fixture(scope="module")
def profile():
    return golden_profile()


def test_everything_is_written(profile, tmp_path, drawn):
    page = write_digest([profile], "case", "NVIDIA H200", "kineto", tmp_path / "new")
    assert sorted(path.name for path in page.parent.iterdir()) == [
        "case-kernels.csv",
        "case-ranges.csv",
        "case-step.png",
        "case.md",
    ]
    kernels = pd.read_csv(page.parent / "case-kernels.csv")
    step = kernels[kernels["passes"] == "full step"]
    assert step["count"].sum() == 322
    assert step["share_percent"].sum() == pytest.approx(100, abs=1e-3)
    ranges = pd.read_csv(page.parent / "case-ranges.csv")
    assert "layers.1.attn (backward)" in set(ranges["range"])
    assert [figure.get_suptitle() for figure in drawn] == [
        "One training step of medium, batch 4, context 512, fp32 on NVIDIA H200"
    ]


def test_the_page_answers_each_question(profile):
    text = digest([profile], "case", "NVIDIA H200", "nsys")
    for heading in ("Phases", "What measuring adds", "Classes of kernels", "Top kernels", "Limits", "Time line"):
        assert f"## {heading}\n" in text
    assert "## Attention, mode step" in text
    assert "NVIDIA H200, recorded with nsys" in text
    assert "![step](case-step.png)" in text
    assert "Without a GPU" not in text
    assert "% of peak" in text


def test_the_verdict_has_its_number(profile):
    assert verdict(profile).startswith("Mode step is limited by **compute**: matrix products run for 77%")
    waiting = replace(profile, unprofiled_ms={**profile.unprofiled_ms, "step": 50.0})
    assert verdict(waiting) == "Mode step is limited by **overhead**: the GPU has nothing to do for 71 % of the time."


def test_without_a_gpu_the_page_says_what_is_absent(profile):
    trace = Trace(profile.trace.ops.assign(kind=OPERATOR), profile.trace.ranges, profile.trace.source)
    text = digest([replace(profile, trace=trace)], "case", "some CPU", "kineto")
    assert "sections about the GPU (limits, idle time, communication) are absent" in text
    assert "## Limits" not in text
    assert "CPU operators ms" in text
