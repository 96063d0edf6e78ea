"""A folder with data and a process alone in its group, for runs of tiny tensors; and scripts run in this process."""

import pytest
import torch

from cs336_systems.distributed.process_group import joined
from tests.pretraining.trained import write_dataset


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """With data to train on, in ``data``."""
    folder = tmp_path_factory.mktemp("runs")
    write_dataset(folder / "data")
    return folder


@pytest.fixture(scope="module")
def alone():
    """With one thread: several would only wait for each other."""
    n_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with joined("cpu") as rank:
        yield rank
    torch.set_num_threads(n_threads)


@pytest.fixture
def command(load_script, monkeypatch, capfd):
    """Runs a script, as without a GPU; returns its exit code, stdout and stderr."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")

    def command(name, *arguments):
        try:
            code = load_script(f"scripts/{name}.py").main(list(map(str, arguments)))
        except SystemExit as stop:
            code = stop.code
        return code, *capfd.readouterr()

    return command
