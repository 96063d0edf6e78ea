"""FSDP over NCCL: the arithmetic of one process again, and communication under compute, which GPUs alone can show.

As of DDP (``test_ddp_gpu.py``), the batch is large enough that GPUs, not hosts, set the pace.
"""

import pytest

from cs336_systems.experiments.fully_sharded import FullyShardedCell
from cs336_systems.experiments.fully_sharded_measure import measure

from .checks import on_gpus, on_ranks
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
from .test_fsdp_backward import (
    a_failed_backward_leaves_nothing_to_the_next_step,
    a_step_needs_no_call_to_finish,
    graphs_of_nested_units_can_be_used_again,
    recomputation_inside_units_finds_their_parameters_whole,
    weights_that_are_read_outside_their_modules_are_told,
)
from .test_fsdp_ranks import (
    ranks_may_leave_different_outputs_out_of_the_loss,
    ranks_that_run_different_units_are_told,
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
    a_step_needs_no_call_to_finish,
    recomputation_inside_units_finds_their_parameters_whole,
    graphs_of_nested_units_can_be_used_again,
    weights_that_are_read_outside_their_modules_are_told,
    a_failed_backward_leaves_nothing_to_the_next_step,
]
OF_TWO = [ranks_may_leave_different_outputs_out_of_the_loss, ranks_that_run_different_units_are_told]

CELL = FullyShardedCell(
    **COMMON, fsdp="ours", size="large", batch_size=8, attention="reference", checkpoint="none", prefetch=1, repeat=0
)


@pytest.mark.parametrize(("world_size", "device"), [on_gpus(2), on_gpus(4)])
def test_arithmetic_is_that_of_one_process(world_size, device):
    checks = [*CHECKS, *OF_TWO] if world_size == 2 else CHECKS
    for check in checks:
        on_ranks(check, world_size, device=device)


@pytest.mark.parametrize(("world_size", "device"), [on_gpus(2)])
def test_communication_lies_under_compute(world_size, device, tmp_path):
    shares = on_ranks(hidden_shares, world_size, measure, [CELL], tmp_path, device=device)[0]
    assert shares[0] >= 90
