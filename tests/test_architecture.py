"""The house rules as tests: the ladder of imports, quiet imports, and documents that match files and rows."""

import ast
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "cs336_systems"
ARCHITECTURE = ROOT / "docs" / "architecture.md"
LADDER = (
    {"config", "hardware", "processes", "declared"},
    {"ranks"},
    {"case"},
    {"costs"},
    {"refusals"},
    {"model"},
    {"kernels"},
    {"attention"},
    {"blocks"},
    {"distributed"},
    {"training"},
    {"streaming"},
    {"harness"},
    {"profiling"},
    {"pretraining"},
    {"report"},
    {"experiments"},
    {"answers"},
    {"benchmarks", "scripts"},
)
PURE = ("config", "hardware", "declared", "ranks", "case", "costs", "refusals")
SOURCES = sorted(
    path for folder in ("cs336_systems", "benchmarks", "scripts") for path in (ROOT / folder).rglob("*.py")
)


def stage_name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return parts[1] if parts[0] == "cs336_systems" else parts[0]


def stage(name: str) -> int:
    return next(i for i, names in enumerate(LADDER) if name in names)


def imports(path: Path) -> list[str]:
    """Absolute names of all modules that a file imports, wherever in the file."""
    found = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            found.append(node.module or "")
    return found


@pytest.mark.slow
@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_imports_go_up_the_ladder_only(path: Path) -> None:
    if path == PACKAGE / "__init__.py":
        assert imports(path) == []
        return
    own = stage_name(path)
    for module in imports(path):
        if not module.startswith("cs336_systems."):
            continue
        other = module.split(".")[1]
        assert other == own or stage(other) < stage(own), f"{own} must not import {module}"


@pytest.mark.parametrize("path", [p for p in SOURCES if stage_name(p) in PURE], ids=lambda path: path.name)
def test_costs_are_pure_arithmetic(path: Path) -> None:
    assert not [module for module in imports(path) if module.split(".")[0] in ("torch", "numpy", "pandas", "triton")]


def test_files_of_text_are_utf_8_whatever_the_locale() -> None:
    at_fault = []
    for path in SOURCES:
        for call in (node for node in ast.walk(ast.parse(path.read_bytes())) if isinstance(node, ast.Call)):
            of_text = re.fullmatch(r"(?!os\.|[A-Z]\w*\.).+\.(read_text|write_text|open)", ast.unparse(call.func))
            if of_text and not re.search(r"encoding=|'[rwax]b", ast.unparse(call)):
                at_fault.append(f"{path}:{call.lineno}")
    assert at_fault == []


@pytest.mark.slow
def test_importing_touches_nothing() -> None:
    code = """
import os, sys, importlib, pkgutil
before = dict(os.environ)
import cs336_systems
for module in pkgutil.walk_packages(cs336_systems.__path__, "cs336_systems."):
    importlib.import_module(module.name)
import torch
assert not torch.cuda.is_initialized(), "a device was touched"
assert dict(os.environ) == before, set(os.environ.items()) ^ set(before.items())
assert "matplotlib.pyplot" not in sys.modules
"""
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=False)
    assert result.returncode == 0, result.stderr
    assert result.stdout == ""


def drawn_tree() -> list[Path]:
    """The paths in the drawing of the house."""
    block = re.search(r"## Folders\n\n```\n(.*?)```", ARCHITECTURE.read_text(), re.DOTALL)
    assert block is not None
    paths, folder = [], Path()
    for line in block[1].splitlines():
        name = line.split()[0]
        if not line.startswith(" "):
            folder = Path(name) if name.endswith("/") else Path()
            paths.append(Path(name))
        else:
            paths.append(folder / name)
    return paths


def test_the_drawn_tree_matches_the_files() -> None:
    paths = drawn_tree()
    assert [path for path in paths if not (ROOT / path).exists()] == []
    drawn = {path.parts[1] for path in paths if path.parts[0] == "cs336_systems" and len(path.parts) > 1}
    present = {path.name for path in PACKAGE.iterdir() if path.name not in ("__init__.py", "__pycache__")}
    assert drawn == present


NEED_A_GPU_MACHINE = ("training", "variants", "nsys", "fused")
"""Values of options that ask for what machines without a GPU lack: long shapes, nsys, Triton."""


def shown_commands(page: Path) -> list[list[str]]:
    """Every benchmark or script that a page tells a user to run, as arguments after ``uv run``.

    They stand in blocks of code, and in README's table of questions without ``uv run``.
    """
    commands, text = [], page.read_text()
    for block in re.findall(r"```bash\n(.*?)```", text, re.DOTALL):
        for line in block.splitlines():
            words = shlex.split(line, comments=True)
            if "run" in words:
                commands.append(words[words.index("run") + 1 :])
    return commands + [shlex.split(found) for found in re.findall(r"\| `((?:benchmarks|scripts)/[^`]*)` \|", text)]


def test_readme_shows_the_two_commands() -> None:
    commands = shown_commands(ROOT / "README.md")
    assert ["benchmarks/benchmark_model.py", "--size", "xl"] in commands
    assert ["pytest"] in commands
    assert "run --locked pytest" in (ROOT / ".ci" / "run").read_text()


@pytest.mark.slow
@pytest.mark.parametrize("page", [ROOT / "README.md", *(ROOT / "docs").glob("*.md")], ids=lambda page: page.name)
def test_shown_commands_parse(page: Path, load_script, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    monkeypatch.setattr("cs336_systems.experiments.driver.Experiment.run", lambda *arguments: asked.append(arguments))
    for command in shown_commands(page):
        if command[0] == "pytest":
            continue
        start = next(i for i, word in enumerate(command) if word.endswith(".py"))
        script, arguments = command[start], command[start + 1 :]
        assert (ROOT / script).exists()
        if script.startswith("benchmarks/") and not set(arguments) & set(NEED_A_GPU_MACHINE):
            load_script(script).main(arguments)
            experiment, options = asked[-1]
            if getattr(options, "compare", None) is None:  # an earlier run, which is not here
                assert experiment.prepare(options)[1]
    assert page.name != "README.md" or len(asked) >= 10


@pytest.mark.slow
def test_readme_library_example_runs() -> None:
    block = re.search(r"```python\n(.*?)```", ARCHITECTURE.read_text(), re.DOTALL)
    assert block is not None
    result = subprocess.run([sys.executable, "-c", block[1]], capture_output=True, text=True, cwd=ROOT, check=False)
    assert result.returncode == 0, result.stderr
    assert "tensor(" in result.stdout
