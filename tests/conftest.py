"""How the suite is spread over workers, fixtures that several folders share, and Triton's interpreter where needed.

``pytest`` starts one worker per core; named tests, ``-s`` and ``--pdb`` run in this process. A file stays in one
worker, as its tests may share a fixture that takes long. A test marked ``timing`` runs while no other worker runs any.
"""

import fcntl
import importlib.util
import os
import signal
import sys
from collections.abc import Callable, Generator
from multiprocessing import forkserver
from pathlib import Path
from types import ModuleType

import pytest
import torch
from matplotlib.figure import Figure
from torch import Tensor

from tests.kernels.interpreter import interpret_without_gpu

interpret_without_gpu()  # before anything imports Triton, in every worker
# torch's flight recorder notes each group in a map that no lock guards (torch 2.11, FlightRecorderDetail.hpp), and so
# ends a process of which two threads begin the first collectives of their groups at the same time, as replicas do here.
os.environ["TORCH_FR_BUFFER_SIZE"] = "0"
ROOT = Path(__file__).resolve().parents[1]
GATE, RUNNING = ROOT / "pyproject.toml", Path(__file__)
"""Files that all workers can lock."""

if n_workers := int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", 0)):
    # Threads that wait for each other spin: two workers with two threads each take longer on two cores than one.
    n_threads = max(1, (os.cpu_count() or 1) // n_workers)
    os.environ.setdefault("OMP_NUM_THREADS", str(n_threads))  # of the processes that tests start
    torch.set_num_threads(n_threads)


set_preload = forkserver.set_forkserver_preload


def preload_for_all_tests(modules: list[str]) -> None:
    """What any test's processes need, whichever test starts the fork server: it serves all that come after."""
    ours = sorted(name for name in sys.modules if name.startswith("cs336_systems."))
    set_preload([*ours, "torch._dynamo", "pytest", *modules])  # whose last freezes what is there


forkserver.set_forkserver_preload = preload_for_all_tests


def pytest_xdist_auto_num_workers(config: pytest.Config) -> int:
    """One worker per core, at most eight, as each holds torch; none for tests that are named or talk to a terminal."""
    named = any("::" in argument for argument in config.args)
    return 0 if named or config.option.capture == "no" else min(8, os.cpu_count() or 1)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Skip tests of a GPU where there is none.

    In a worker, files with timings and then those with slow tests come first, so that no long one is left over.
    """
    if not torch.cuda.is_available():
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
    if hasattr(config, "workerinput"):
        items.sort(key=lambda item: [item.get_closest_marker(name) is None for name in ("timing", "slow")])


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    """Tests hold a lock together; one marked ``timing`` has it alone, and those that come later wait at the gate."""
    with GATE.open() as gate, RUNNING.open() as running:
        fcntl.flock(gate, fcntl.LOCK_EX)
        fcntl.flock(running, fcntl.LOCK_EX if item.get_closest_marker("timing") else fcntl.LOCK_SH)
        fcntl.flock(gate, fcntl.LOCK_UN)
        try:
            return (yield)
        finally:
            fcntl.flock(running, fcntl.LOCK_UN)  # closing is not enough while a process that the test forked lives


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
def ctrl_c_is_heard() -> Generator[None]:
    """SIGINT raises KeyboardInterrupt, here and in processes that are started, even where the suite is a shell's
    background job and so has it ignored.
    """
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture
def device_to_itself() -> Generator[None]:
    """For tests with caps: skips where other processes hold memory of the GPU, which a cap would count (run them alone,
    with ``-n 0``), and lifts the cap in the end.
    """
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info()
    besides = total - free - torch.cuda.memory_reserved()
    if besides > 1.5 * 2**30:
        pytest.skip(f"{besides / 2**30:.1f} GiB of the device are not this process's: run this test alone, with -n 0")
    yield
    torch.cuda.set_per_process_memory_fraction(1.0, torch.cuda.current_device())


@pytest.fixture
def poisoned(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory that is not written stays NaN."""
    for name in ("empty", "empty_like"):
        original = getattr(torch, name)

        def poison(*args: object, original: object = original, **kwargs: object) -> Tensor:
            tensor = original(*args, **kwargs)
            return tensor.fill_(float("nan")) if tensor.is_floating_point() else tensor

        monkeypatch.setattr(torch, name, poison)


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
