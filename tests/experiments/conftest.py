"""A fixture that questions of ``scripts/parallelism.py`` share."""

import pytest


@pytest.fixture
def ask(load_script, capsys):
    """(exit code, stdout, stderr) of a command line."""
    script = load_script("scripts/parallelism.py")

    def ask(line):
        code = script.main(line.split())
        return code, *capsys.readouterr()

    return ask
