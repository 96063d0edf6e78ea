"""Hashes of what was measured: changed, missing and foreign files are named."""

import shutil
import subprocess

import pytest

from cs336_systems.answers.sums import broken_seals, seal

NAMES = ("results/h200/grid/rows.csv", "digests/h200/nsys/page.md", "figures/grid.png")


@pytest.fixture
def profiles(tmp_path):
    for name in NAMES:
        (tmp_path / name).parent.mkdir(parents=True)
        (tmp_path / name).write_text(name)
    seal(tmp_path, [tmp_path / name for name in NAMES])
    return tmp_path


def test_sealed_files_pass_and_files_elsewhere_are_nobodys_business(profiles):
    (profiles / "README.md").write_text("x")
    assert broken_seals(profiles) == []


@pytest.mark.skipif(not shutil.which("sha256sum"), reason="coreutils")
def test_the_list_is_one_that_sha256sum_reads(profiles):
    subprocess.run(["sha256sum", "-c", "SHA256SUMS"], cwd=profiles, check=True, capture_output=True)


@pytest.mark.parametrize("name", NAMES)
def test_a_changed_and_a_missing_file_are_named(profiles, name):
    (profiles / name).write_text("forged")
    assert [sentence.split(" was changed since")[0] for sentence in broken_seals(profiles)] == [name]
    (profiles / name).unlink()
    assert broken_seals(profiles) == [f"{name} is listed in SHA256SUMS and missing"]
    seal(profiles, [profiles / name])
    assert broken_seals(profiles) == []


def test_a_file_that_nobody_sealed_is_named_unless_it_is_rendered(profiles):
    (profiles / "digests/h200/README.md").write_text("x")
    (sentence,) = broken_seals(profiles)
    assert sentence.startswith("digests/h200/README.md is not listed")
    assert broken_seals(profiles, rendered=["digests/h200/README.md"]) == []
