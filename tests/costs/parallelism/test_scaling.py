"""The crossing against a search, and a workload for each of the four cases."""

import pytest

from cs336_systems.costs.parallelism.forms import DEVICES
from cs336_systems.costs.parallelism.scaling import LLAMA3_70B, ModelAndBatch, communication_limit, fsdp_step

H100 = DEVICES["h100"]
FOUR_MILLION = ModelAndBatch(LLAMA3_70B.n_parameters, 2**22, 8192)


@pytest.mark.slow
@pytest.mark.parametrize("name", DEVICES)
@pytest.mark.parametrize("batch", [2**13, 2**20, 2**22])
def test_the_crossing_is_where_a_search_finds_it(name, batch):
    device, workload = DEVICES[name], ModelAndBatch(70_000_000_000, batch, 4096)
    steps = {n: fsdp_step(workload, n, device) for n in range(1, 12_000)}
    hidden = (n for n, step in steps.items() if step.communication_s <= step.compute_s)
    assert communication_limit(workload, device) == max(hidden)


def test_the_batch_limit_comes_first_for_long_sequences():
    """512 sequences of 8,192 tokens, but 1,696 H100s until the network is the limit."""
    assert LLAMA3_70B.n_parameters == 70_553_706_496
    assert FOUR_MILLION.n_sequences == 512
    assert communication_limit(FOUR_MILLION, H100) == 1696


@pytest.mark.parametrize(
    ("sequence_length", "n_devices", "local", "communication"),
    [(8192, 256, False, False), (512, 2048, False, True), (8192, 1024, True, False), (8192, 2048, True, True)],
)
def test_each_case_has_a_workload(sequence_length, n_devices, local, communication):
    step = fsdp_step(ModelAndBatch(70_000_000_000, 2**22, sequence_length), n_devices, H100)
    assert step.limits == (local, communication)


def test_bad_input():
    for wrong in ((0, 1, 1), (1, 4, 8)):
        with pytest.raises(ValueError, match="got 0|4 tokens is shorter than a sequence of 8"):
            ModelAndBatch(*wrong)
    with pytest.raises(ValueError, match="got 0"):
        fsdp_step(FOUR_MILLION, 0, H100)
