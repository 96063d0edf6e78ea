"""Fixtures that several folders share; and Triton's interpreter, chosen before anything imports Triton."""

import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest
from matplotlib.figure import Figure

from tests.kernels.interpreter import interpret_without_gpu

interpret_without_gpu()
ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture(scope="session")
def load_script() -> Callable[[str], ModuleType]:
    """Import a file of benchmarks/ or scripts/ by its path below the project's root."""

    def load(path: str) -> ModuleType:
        name = Path(path).stem
        if name not in sys.modules:
            spec = importlib.util.spec_from_file_location(name, ROOT / path)
            assert spec is not None
            assert spec.loader is not None
            sys.modules[name] = importlib.util.module_from_spec(spec)
            spec.loader.exec_module(sys.modules[name])
        return sys.modules[name]

    return load


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> list[Figure]:
    """The figures that are saved, in order."""
    figures: list[Figure] = []
    savefig = Figure.savefig

    def save(self: Figure, *args: object, **kwargs: object) -> None:
        figures.append(self)
        savefig(self, *args, **kwargs)

    monkeypatch.setattr(Figure, "savefig", save)
    return figures
