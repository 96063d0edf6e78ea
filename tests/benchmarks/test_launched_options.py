"""torchrun reads what stands behind a script too, and takes the beginning of an option of its own for that option.

It refuses one that could be several of its own (``--master``: address or port) before the script starts; whether one
that could be a single one reaches the script is up to Python's argparse.
"""

import re

import pytest
from torch.distributed.run import get_args_parser

from tests.benchmarks.commands import ROOT

LAUNCHED = [*sorted(f"benchmarks/{path.name}" for path in (ROOT / "benchmarks").glob("*.py")), "scripts/train.py"]


def options_in(text: str) -> set[str]:
    return {option.replace("_", "-") for option in re.findall(r"(?<![\w-])--[a-z][\w-]*", text)}


def abbreviations(options: set[str]) -> dict[str, list[str]]:
    """Those of the options that begin an option of torchrun, with what they begin."""
    torchruns = options_in(get_args_parser().format_help())
    assert {"--master-addr", "--nproc-per-node"} <= torchruns
    found = {option: sorted(its for its in torchruns - {option} if its.startswith(option)) for option in options}
    return {option: begun for option, begun in found.items() if begun}


@pytest.mark.parametrize("command", LAUNCHED)
def test_no_option_abbreviates_one_of_torchruns(command, load_script, monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "160")  # names in one piece
    with pytest.raises(SystemExit):
        load_script(command).main(["--help"])
    options = options_in(capsys.readouterr().out)
    assert {"--device", "--seed", "--out"} <= options
    assert abbreviations(options) == {}


def test_torchrun_hands_on_what_abbreviates_none_of_its_own():
    assert set(abbreviations({"--master", "--master-weights", "--role"})) == {"--master"}
    given = ["--master-weights", "fp32", "--role", "x"]
    assert get_args_parser().parse_args(["script.py", *given]).training_script_args == given
