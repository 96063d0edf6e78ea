"""The names that templates may call: rows, tables of experiments, and functions from rows or arithmetic to numbers."""

import functools
import re
from collections.abc import Callable, Hashable
from typing import Any

from cs336_systems.answers import calculations, handout, optimizers, training
from cs336_systems.answers.choices import choice_table, chosen_is_fastest
from cs336_systems.answers.committed import Committed, Rows
from cs336_systems.answers.pivot import pivot, quoted
from cs336_systems.answers.predicted import predicted_steps, unknown_table
from cs336_systems.answers.predicted_before import before_summary, before_table
from cs336_systems.answers.published import ALL_QUESTIONS
from cs336_systems.config import resolve_size
from cs336_systems.costs.communication import cost
from cs336_systems.costs.flops import hardware_flops
from cs336_systems.costs.fsdp import held_elements, model_units
from cs336_systems.costs.parallelism.mesh import H100_BYTES, XXL
from cs336_systems.costs.parallelism.scaling import communication_limit
from cs336_systems.costs.sharding import link_bytes_per_step
from cs336_systems.experiments import attention as attention_tables
from cs336_systems.experiments import diloco, failures, flops_against_time, launch_overhead, matmul_data, roofline_knee
from cs336_systems.experiments import fp8 as fp8_tables
from cs336_systems.experiments import sharded_optimizer as sharded_tables
from cs336_systems.experiments.blocks import BLOCK_TABLE
from cs336_systems.experiments.collectives import collectives_table
from cs336_systems.experiments.data_parallel import DATA_PARALLEL
from cs336_systems.experiments.fully_sharded import FULLY_SHARDED, breakdown_tables
from cs336_systems.experiments.kernels import KERNEL_TABLE
from cs336_systems.experiments.mesh import MESH
from cs336_systems.experiments.model import step_table
from cs336_systems.experiments.streaming import STREAMING_TABLE, slower_with_more
from cs336_systems.experiments.training import TRAINING_TABLE
from cs336_systems.hardware import GIB, MIB, TERA, hardware_named
from cs336_systems.profiling.traces.kernels import short_name
from cs336_systems.report.tables import Table

FUNCTIONS: tuple[Callable[..., Any], ...] = (
    *(handout.handout_attention, handout.kept_by_block, handout.residuals_table, handout.ran_out),
    *(handout.largest_table, handout.attention_work, handout.sums_table, handout.accumulated, handout.toy_table),
    *(hardware_flops, short_name),
    *(calculations.link_of, calculations.best_bucket_mib, calculations.bucket_overhead_ms),
    *(calculations.exposed_ms, calculations.gradient_sizes),
    *(calculations.rung_messages, calculations.collectives_predictions, calculations.ddp_predictions),
    *(training.outside, training.outside_table, training.llmq_rates, training.llmq_table),
    *(predicted_steps, unknown_table, before_table, before_summary, choice_table, chosen_is_fastest),
    *(training.training_rates_table, training.fp8_rates_table, training.scaling_table),
    *(optimizers.optimizers_table, optimizers.share_of_steps),
    *(cost, model_units, held_elements, link_bytes_per_step, resolve_size, communication_limit),
    *(attention_tables.comparison_table, attention_tables.account_table, attention_tables.time_over),
    *(step_table, collectives_table, breakdown_tables, roofline_knee.chain_table, roofline_knee.knee_of),
    *(failures.goodput_table, slower_with_more),
)
"""Functions that templates call by their own names; rows among their arguments arrive as a frame."""

TABLES = {
    "attention_table": attention_tables.ATTENTION,
    "data_parallel_table": DATA_PARALLEL,
    "fully_sharded_table": FULLY_SHARDED,
    "mesh_table": MESH,
    "sharded_memory_table": sharded_tables.MEMORY,
    "sharded_time_table": sharded_tables.TIMES,
    "kernel_table": KERNEL_TABLE,
    "block_table": BLOCK_TABLE,
    "streaming_table": STREAMING_TABLE,
    "fp8_block_table": fp8_tables.BLOCK_TABLE,
    "training_table": TRAINING_TABLE,
    "speeds_table": matmul_data.SPEEDS,
    "launch_table": launch_overhead.TIMES,
    "failures_table": failures.RUNS,
    "diloco_table": diloco.TABLE,
    "families_table": flops_against_time.SHARES,
}
"""Tables of experiments, by their names in templates."""

CONSTANTS = {
    "XXL": XXL,
    "H100_BYTES": H100_BYTES,
    "WORKLOAD": calculations.WORKLOAD,
    "H100": calculations.H100,
    "TPU": calculations.TPU,
    "NVLINK": calculations.DATASHEET,
    "MIB": MIB,
    "GIB": GIB,
}


def vocabulary(committed: Committed) -> dict[str, Any]:
    """Every name that a template may use."""
    functions = {function.__name__: function for function in FUNCTIONS}
    functions |= {name: table.of for name, table in TABLES.items()}
    return {
        **{name: _over_rows(function) for name, function in functions.items()},
        **CONSTANTS,
        "pivot": pivot,
        "quoted": quoted,
        "given": given,
        "memory_of": memory_of,
        "parallelism": parallelism,
        "rows": committed.rows,
        "runs": committed.runs,
        "digests": committed.digests,
        "recorded": committed.recorded,
        "gpu_tests": committed.gpu_tests,
    }


def _over_rows(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function over frames, as templates call it with rows; what it found for the same rows is remembered."""

    def found(*arguments: Any, **named: Any) -> Any:
        return function(*(each.frame() if isinstance(each, Rows) else each for each in arguments), **named)

    remembered = functools.cache(found)

    @functools.wraps(function)
    def answer(*arguments: Any, **named: Any) -> Any:
        hashable = all(isinstance(each, Hashable) for each in (*arguments, *named.values()))
        return (remembered if hashable else found)(*arguments, **named)

    return answer


def given(setting: str) -> str:
    """Sizes of memory or messages that were set: ``24 GiB``, ``1, 10 and 100 MB``, or device and host, ``24 / 75``.

    Raises:
        ValueError: anything else, as a time, a rate or a share is a result: rows hold it, or ``outside.csv``.
    """
    number = r"\d[\d,]*"
    if not re.fullmatch(rf"{number}(?:(?:, | and | to | / ){number})* [KMG]i?B|{number} / {number}", setting):
        raise ValueError(f"{setting!r} is no size of memory or messages")
    return setting


def memory_of(gpu: str) -> str:
    """The memory of a GPU and its bandwidth, which stand beside each comparison of two cards: ``80 GB, 3.35 TB/s``.

    Raises:
        ValueError: no such GPU.
    """
    card = hardware_named(gpu)
    _, bytes_per_s = card.peaks("bf16")
    assert card.memory_bytes, "every GPU has its memory"
    return f"{card.memory_bytes / GIB:.0f} GB, {bytes_per_s / TERA:.3g} TB/s"


def parallelism(question: str, **options: Any) -> list[Table]:
    """The tables of a question of ``scripts/parallelism.py``, at its defaults but for some options."""
    kinds = {kind.__name__.lower(): kind for kind in ALL_QUESTIONS}
    return kinds[question](**options).answer()[0]
