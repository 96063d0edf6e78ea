"""FSDP over NCCL: the arithmetic of one process again, and communication under compute, which GPUs alone can show.

As in ``test_ddp_gpu.py``, the batch is large enough that GPUs, not hosts, set the pace.
"""

import pytest

from cs336_systems.experiments.fully_sharded import FullyShardedCell
from cs336_systems.experiments.fully_sharded_measure import measure

from . import test_fsdp, test_fsdp_backward
from .checks import checks_of, on_gpus, on_ranks
from .test_ddp_gpu import COMMON, hidden_shares
from .test_fsdp_ranks import CHECKS as OF_TWO
from .test_fsdp_use import (
    check_hooks_see_averages,
    check_methods_of_the_module_inside_use_the_latest_values,
)

CHECKS = [
    *test_fsdp.CHECKS,
    *checks_of(vars(test_fsdp_backward)),
    check_methods_of_the_module_inside_use_the_latest_values,
    check_hooks_see_averages,
]

CELL = FullyShardedCell(
    **COMMON, fsdp="ours", size="large", batch_size=8, attention="reference", checkpoint="none", prefetch=1, repeat=0
)


@pytest.mark.parametrize(("world_size", "device"), [on_gpus(2), on_gpus(4)])
def test_arithmetic_is_that_of_one_process(world_size, device):
    checks = [*CHECKS, *OF_TWO] if world_size == 2 else CHECKS
    for check in checks:
        on_ranks(check, world_size, device=device)


@pytest.mark.timing
@pytest.mark.parametrize(("world_size", "device"), [on_gpus(2)])
def test_communication_lies_under_compute(world_size, device, tmp_path):
    shares = on_ranks(hidden_shares, world_size, measure, [CELL], tmp_path, device=device)[0]
    assert shares[0] >= 90
