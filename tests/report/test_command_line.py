"""Commands answer at once, and survive readers that leave, closed streams and terminals that know ASCII alone."""

import subprocess
import sys
from pathlib import Path

import pytest

from cs336_systems.experiments import driver
from cs336_systems.experiments.model import EXPERIMENT
from cs336_systems.report import command_line

ROOT = Path(__file__).resolve().parents[2]
COMMANDS = sorted(
    str(path.relative_to(ROOT)) for name in ("benchmarks", "scripts") for path in (ROOT / name).rglob("*.py")
)
SCRIPT = """
import sys
from cs336_systems.report.command_line import exit_with
def main():
    for i in range(20000):
        print("row – ", i)
    print("kept", file=open(sys.argv[1], "w"))
    return 3
exit_with("test", main)
"""


def shell(line: str, **environment: str) -> subprocess.CompletedProcess:
    names = {"PATH": "/usr/bin:/bin", "PYTHON": sys.executable, "SCRIPT": SCRIPT, "PYTHONPATH": str(ROOT)}
    return subprocess.run(
        ["bash", "-c", line], env=names | environment, cwd=ROOT, capture_output=True, text=True, check=False
    )


def test_what_comes_after_the_output_still_happens(tmp_path):
    """A reader that leaves, a closed stdout, and a terminal that knows ASCII alone."""
    lines = {
        '"$PYTHON" -c "$SCRIPT" {} | head -1; exit ${{PIPESTATUS[0]}}': {},
        '"$PYTHON" -c "$SCRIPT" {} >&-': {},
        '"$PYTHON" -c "$SCRIPT" {}': {"PYTHONIOENCODING": "ascii", "LC_ALL": "C"},
    }
    for i, (line, environment) in enumerate(lines.items()):
        found = shell(line.format(tmp_path / str(i)), **environment)
        assert (found.returncode, found.stderr) == (3, "")
        assert (tmp_path / str(i)).read_text() == "kept\n"


@pytest.mark.slow
def test_help_imports_nothing_heavy():
    """torch, pandas and matplotlib take seconds; whoever asks for help or mistypes a flag does not wait for them."""
    code = (
        "import sys, runpy\nsys.path[:0] = ['.', 'scripts']\n"
        f"for command in {COMMANDS!r}:\n"
        "    sys.argv = [command, '--help']\n"
        "    try:\n        runpy.run_path(command, run_name='__main__')\n"
        "    except SystemExit as stop:\n        assert not stop.code, command\n"
        "    heavy = {'torch', 'pandas', 'matplotlib', 'triton'} & set(sys.modules)\n"
        "    assert not heavy, (command, heavy)\n"
    )
    found = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert (found.returncode, found.stderr) == (0, "")
    assert found.stdout.count("--help") >= len(COMMANDS)
    assert "``" not in found.stdout and "{None}" not in found.stdout
    assert all(len(line) <= 80 or line.startswith(("    ", "usage")) for line in found.stdout.splitlines())


@pytest.mark.parametrize(("file", "said"), [(command_line.__file__, "warning: slow\n"), ("/a.py", "/a.py:3: slow")])
def test_a_warning_of_this_package_is_a_sentence_without_code(file, said):
    def others(message, category, filename, number, line=None):
        return f"{filename}:{number}: {message}"

    assert command_line.warning_as_sentence(others, UserWarning("slow"), UserWarning, file, 3) == said


def test_the_process_server_imports_while_a_command_does(monkeypatch):
    done = []
    monkeypatch.setattr(driver, "start_server", lambda *modules: done.append(modules))
    monkeypatch.setattr(driver.Experiment, "run", lambda experiment, options: done.append(options.mode) or 0)
    assert driver.command(EXPERIMENT, "")(["--device", "cpu", "--mode", "forward"]) == 0
    assert done == [("cs336_systems.training",), ("forward",)]
    assert driver.command(EXPERIMENT, "")(["--device", "cpu", "--compile"]) == 0
    assert "torch._dynamo" in done[2]
