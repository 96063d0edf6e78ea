"""FSDP over NCCL: the arithmetic of one process again, and communication under compute, which GPUs alone can show."""

import pytest

from cs336_systems.distributed.spawn import spawn
from cs336_systems.experiments.fully_sharded.measure import FullyShardedCell, measure_fully_sharded

from .checks import failures, run_checks
from .test_ddp import on_gpus
from .test_ddp_gpu import COMMON, hidden_shares
from .test_fsdp import (
    a_parameter_that_one_rank_alone_uses,
    accumulation_equals_one_large_batch,
    clipping_bites,
    half_precision_equals_the_same_arithmetic_in_one_process,
    parity_of_blocks_with_adamw,
    parity_of_every_kind_of_parameter,
    parity_without_look_ahead_and_with_much,
    unusual_orders_of_passes,
)
from .test_fsdp_schedule import a_forward_that_changes_course_still_is_right
from .test_fsdp_use import (
    hooks_see_averages,
    methods_of_the_module_inside_use_the_latest_values,
    overflowing_rows_make_all_ranks_skip,
)

CHECKS = [
    parity_of_blocks_with_adamw,
    parity_without_look_ahead_and_with_much,
    parity_of_every_kind_of_parameter,
    a_parameter_that_one_rank_alone_uses,
    accumulation_equals_one_large_batch,
    unusual_orders_of_passes,
    half_precision_equals_the_same_arithmetic_in_one_process,
    clipping_bites,
    a_forward_that_changes_course_still_is_right,
    overflowing_rows_make_all_ranks_skip,
    methods_of_the_module_inside_use_the_latest_values,
    hooks_see_averages,
]

CELL = FullyShardedCell(
    **COMMON, fsdp="ours", size="large", batch_size=4, attention="reference", checkpoint="none", prefetch=1, repeat=0
)


@pytest.mark.parametrize(("world_size", "device"), [on_gpus(2), on_gpus(4)])
def test_arithmetic_is_that_of_one_process(world_size, device):
    world = spawn(run_checks, world_size, CHECKS, device=device, timeout_s=120)
    for check in CHECKS:
        assert failures(world, check) == []


@pytest.mark.parametrize(("world_size", "device"), [on_gpus(2)])
def test_communication_lies_under_compute(world_size, device, tmp_path):
    shares = spawn(hidden_shares, world_size, measure_fully_sharded, [CELL], tmp_path, device=device, timeout_s=120)[0]
    assert shares[0] >= 90
