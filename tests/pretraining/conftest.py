"""A process alone in its group, for runs of tiny tensors: several threads would only wait for each other."""

import pytest
import torch

from cs336_systems.distributed.process_group import joined


@pytest.fixture(scope="module")
def alone():
    n_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with joined("cpu") as rank:
        yield rank
    torch.set_num_threads(n_threads)
