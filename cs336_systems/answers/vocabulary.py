"""What templates may call: rows, named questions to them, and functions that turn rows into tables and numbers."""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pandas as pd

from cs336_systems.answers import (
    arithmetic,
    attention,
    memory,
    models,
    outside,
    precision,
    predictions,
    profiles,
    streaming,
    streaming_by_hand,
)
from cs336_systems.answers.committed import Committed, NotMeasured, Rows
from cs336_systems.answers.quantizing import quantizing_table
from cs336_systems.answers.rendering import Pending
from cs336_systems.answers.training_rates import fp8_rates_table, llmq_rates, training_rates_table
from cs336_systems.answers.training_runs import best_evaluation, console_lines, last_record
from cs336_systems.answers.training_scaling import scaling_table
from cs336_systems.config import resolve_size
from cs336_systems.costs.communication import cost
from cs336_systems.costs.fsdp import model_units, state_bytes
from cs336_systems.costs.parallelism.forms import least_tokens_per_device
from cs336_systems.costs.parallelism.mesh import XXL
from cs336_systems.costs.parallelism.scaling import communication_limit
from cs336_systems.costs.sharding import link_bytes_per_step
from cs336_systems.experiments import attention as attention_tables
from cs336_systems.experiments import fp8 as fp8_tables
from cs336_systems.experiments import sharded_optimizer as sharded_tables
from cs336_systems.experiments.blocks import BLOCK_TABLE
from cs336_systems.experiments.collectives import collectives_table
from cs336_systems.experiments.data_parallel import DATA_PARALLEL
from cs336_systems.experiments.fully_sharded import FULLY_SHARDED
from cs336_systems.experiments.fully_sharded_breakdown import breakdown_tables
from cs336_systems.experiments.kernels import KERNEL_TABLE
from cs336_systems.experiments.leaks import flops_against_time, launch_overhead, matmul_data, roofline_knee
from cs336_systems.experiments.leaks.findings import Findings
from cs336_systems.experiments.learning.table import LEARNING_TABLE, loss_deviations
from cs336_systems.experiments.model import step_table
from cs336_systems.experiments.parallelism import QUESTIONS
from cs336_systems.experiments.streaming import STREAMING_TABLE
from cs336_systems.experiments.training.table import TRAINING_TABLE
from cs336_systems.report.tables import Table
from cs336_systems.streaming.choose import DEVICE_OVERHEAD, HOST_OVERHEAD

LEAKS = {leak.NAME: leak.analyse for leak in (matmul_data, roofline_knee, launch_overhead, flops_against_time)}


@dataclass(frozen=True)
class Question:
    """A metric of one cell, by name: ``ddp("exposed", "naive", size="2.7b")``.

    Values that follow the metric answer ``order``; what is not said is as in ``rows``.
    """

    rows: Rows
    order: tuple[str, ...]
    defaults: dict[str, Any]

    def __call__(self, metric: str, *values: object, statistic: str = "median", **settings: object) -> float:
        said = dict(zip(self.order, values, strict=False))
        if len(values) > len(self.order) or said.keys() & settings.keys():
            raise TypeError(f"{metric!r} takes {', '.join(self.order)}, and other settings by name")
        return self.rows.where(**self.defaults | said | settings).number(metric, statistic)


def questions(rows: Callable[..., Rows]) -> dict[str, Question]:
    """Every question by its name in templates: the part, what is said without a name, and what need not be said."""

    def question(part: str, *order: str, machine: str = "", **defaults: Any) -> Question:
        return Question(rows(part, machine=machine), order, defaults)

    pair: dict[str, Any] = {"size": "2.7b", "world_size": 2, "dtype": "fp32"}
    attended, profiled = ("impl", "d_head", "length"), ("size", "context_length", "mode")
    trained = ("size", "recipe", "world_size", "zero", "gather_by")
    # One rank is at ZeRO 0, in earlier rows at what it was asked for.
    sharing: dict[str, Any] = {"zero": [0, 1], "gather_by": "collectives", "apart": "off"}
    timed: dict[str, Any] = {"clock": "harness"}
    step: dict[str, Any] = {"mode": "step", "variant": ["eager", "compiled"]}
    return {
        "model": question("context-512", "size", "dtype", **step),
        "forward_only": question("context-512", "size", "dtype", mode="forward"),
        "ceiling": question("context-512", "dtype", variant="ceiling"),
        "grid": question("grid", "size", "dtype", "context_length", **step),
        "compiled": question("compiled", "size", "dtype", "compile", **step),
        "whole_model": question("whole-model", "size", "dtype", "compile", **step),
        "optimizer": question("optimizers", "size", "optimizer", **step),
        "warmup": question("warmup", "size", "warmup", **step),
        "checkpointed": question("checkpointing", "checkpoint", "context_length", context_length=2048, **step),
        "pytorch_attention": question("attention-pytorch", *attended, **timed),
        "flash_bf16": question("attention-flash-bf16", *attended, **timed),
        "flash_fp32": question("attention-flash-fp32", *attended, **timed),
        "attention_leaderboard": question(
            "attention-training", "impl", batch_size=1, heads=16, length=16_384, d_head=64, **timed
        ),
        "kernel": question("kernels", "kernel", "how", "rows", "width", dtype="bf16"),
        "block": question("fused", "size", "how", attention="hopper", layers=1),
        "fused_step": question("fused-steps", "size", "kernels", mode="backward"),
        "nsys": question("nsys", *profiled, dtype="fp32"),
        "nsys_autocast": question("nsys-autocast", *profiled),
        "memory": question("memory", *profiled, dtype="fp32"),
        "streamed": question("streaming", "size", "context_length", "device_gib", "host_gib"),
        "offloaded": question("streaming-offload", "variant"),
        "planned": question("streaming-simulated", "size", "context_length", "device_gib", "host_gib", machine="cpu"),
        "collective": question("collectives", "collective", "world_size", "size_mb", dtype="fp32"),
        "gloo": question("collectives", "world_size", "size_mb", machine="cpu"),
        "ddp": question("ddp", "ddp", **pair),
        "ddp_host": question("ddp-host", "ddp", "bucket_size_mb", "size"),
        "ddp_ctas8": question("ddp-ctas8", "ddp", **pair),
        "ddp_buckets": question("ddp-buckets", "bucket_size_mb"),
        "sharded": question("sharded-optimizer", "sharding", **pair),
        "fsdp": question("fsdp", "fsdp", **pair),
        "fsdp_gathers": question("fsdp-gathers", "gather_by", fsdp="ours"),
        "leaderboard_gathers": question("leaderboard-gathers", "gather_by"),
        "ranks": question("training-2", *trained, **sharing),
        "ranks_h100": question("training-2", *trained, machine="h100", **sharing),
        "ddp_four": question("ddp-four", "ddp", "size", "world_size", dtype="fp32"),
        "ddp_four_ctas": question("ddp-four-ctas", "max_ctas", "size", "world_size", ddp="bucketed"),
        "fsdp_four": question("fsdp-four", "fsdp", "size", "world_size", world_size=4, dtype="fp32"),
        "leaderboard_four": question("leaderboard-four", "fsdp"),
        "ranks_four": question("training-4", *trained, **sharing),
        "leaderboard_step": question("leaderboard", fsdp="ours"),
        "leaderboard_turns": question("leaderboard-turns", "fsdp", "checkpoint"),
        "leaderboard_attempt": question("leaderboard-attempts", "keep", "warmup", fsdp="ours", kernels="fused"),
        "leaderboard_masters": question("leaderboard-masters", fsdp="ours"),
        "leaderboard_fp8": question("leaderboard-fp8", fsdp="ours"),
        "leaderboard_losses": question("leaderboard-losses", fsdp="ours"),
        "leaderboard_one_gpu": question("leaderboard-one-gpu", "offload", **step),
        "fsdp_leaderboard": question("fsdp-leaderboard", "fsdp", attention="hopper"),
    }


NUMBERS = (
    *(
        models.backward_over_forward,
        models.deviations,
        models.compile_seconds,
        models.first_and_rest,
        models.peak_ratio,
    ),
    *(attention.handout_attention, attention.flash_speedups, attention_tables.time_over),
    *(profiles.kernel_share, profiles.kernel_ms, profiles.top_kernel),
    *(profiles.stage_times, profiles.products_over_softmax, profiles.attention_work),
    *(memory.KeptByBlock, memory.predicted_peak, memory.recomputed_flops, memory.ran_out),
    *(predictions.gradient_sizes, predictions.rung_messages, predictions.predicted_exposed),
    *(predictions.link_of, predictions.best_bucket_mib),
    *(cost, model_units, state_bytes, link_bytes_per_step, resolve_size),
    *(arithmetic.ring_ratio, arithmetic.h100s_that_hide, arithmetic.Mesh, arithmetic.schedule, arithmetic.job),
    *(arithmetic.xxl_threshold, arithmetic.xxl_remedies, least_tokens_per_device, communication_limit),
    *(precision.accumulated, loss_deviations, outside.outside, outside.given, llmq_rates),
    *(streaming_by_hand.streamed_work, streaming_by_hand.sustained),
    *(streaming_by_hand.ByHand, streaming_by_hand.LongByHand),
)

TABLES = (
    *(step_table, models.phases_table, models.mixed_precision_table, models.compiled_table, models.earlier_work_table),
    *(models.memory_errors_table, models.warmup_table, models.harness_text, models.ceilings_table),
    *(attention_tables.comparison_table, attention_tables.account_table),
    *(attention_tables.length_tables, attention_tables.tile_table),
    *(attention.materialised_table, attention.compiled_attention_table, attention.flash_table),
    *(profiles.forward_table, profiles.top_kernels_table, profiles.classes_table, profiles.other_kernels_table),
    profiles.stages_table,
    *(memory.peaks_table, memory.largest_table, memory.residuals_table, memory.checkpoint_table),
    memory.segments_table,
    *(training_rates_table, fp8_rates_table, scaling_table, quantizing_table),
    collectives_table,
    *(predictions.collectives_predictions, predictions.ddp_predictions),
    *(predictions.sharded_predictions, predictions.fsdp_predictions),
    *(precision.sums_table, precision.toy_table, outside.outside_table),
    *(streaming.by_hand_table, streaming.beside_peer_table, streaming.goals_table, streaming.kernels_table),
    streaming.beyond_simulation_table,
)

CONSTANTS = {
    "XXL": XXL,
    "LAYER": arithmetic.LAYER,
    "WORKLOAD": arithmetic.WORKLOAD,
    "H100": arithmetic.H100,
    "TPU": arithmetic.TPU,
    "NVLINK": predictions.DATASHEET,
    "MIB": 2**20,
    "GIB": 2**30,
    "ON_ONE_HOST": attention.ON_ONE_HOST,
    "DEVICE_OVERHEAD": DEVICE_OVERHEAD,
    "HOST_OVERHEAD": HOST_OVERHEAD,
}


def vocabulary(committed: Committed) -> dict[str, Any]:
    """Every name that a template may use; rows that are missing become "not measured yet", or a table's sentence."""
    tables = {table.__name__: table for table in TABLES} | {
        "attention_table": attention_tables.ATTENTION.of,
        "data_parallel_table": DATA_PARALLEL.of,
        "fully_sharded_table": FULLY_SHARDED.of,
        "breakdown_tables": breakdown_tables,
        "sharded_memory_table": sharded_tables.MEMORY.of,
        "sharded_time_table": sharded_tables.TIMES.of,
        "kernel_table": KERNEL_TABLE.of,
        "block_table": BLOCK_TABLE.of,
        "streaming_table": STREAMING_TABLE.of,
        "fp8_block_table": fp8_tables.BLOCK_TABLE.of,
        "fp8_product_table": fp8_tables.PRODUCT_TABLE.of,
        "learning_table": LEARNING_TABLE.of,
        "training_table": TRAINING_TABLE.of,
        "leak_tables": leak_tables,
        "console_of": lambda name, *steps: console_lines(committed.run(name), steps),
    }
    numbers: dict[str, Callable[..., Any]] = {number.__name__: number for number in NUMBERS}
    numbers |= {
        "last_of": lambda name, kind: last_record(committed.run(name), kind),
        "best_evaluation": lambda name: best_evaluation(committed.run(name)),
    }
    numbers |= {"leak": leak, "parallelism": parallelism, **questions(committed.rows)}
    return {
        **{name: answering(table, _sentence) for name, table in tables.items()},
        **{name: answering(number, lambda _: Pending()) for name, number in numbers.items()},
        **CONSTANTS,
        "rows": committed.rows,
        "digests": committed.digests,
        "gpu_tests": committed.gpu_tests,
    }


def leak(rows: pd.DataFrame) -> dict[str, Any]:
    """The main figures of one experiment of ``experiments/leaks``, as its own analysis finds them in its rows."""
    return _findings(rows).figures


def leak_tables(rows: pd.DataFrame) -> str:
    """Its tables."""
    return "\n\n".join(table.markdown() for table in _findings(rows).tables)


def _findings(rows: pd.DataFrame) -> Findings:
    return LEAKS[rows["benchmark"].iloc[0]](rows[rows["status"] == "ok"])


def parallelism(question: str) -> list[Table]:
    """The tables of a question of ``scripts/parallelism.py``, at its defaults."""
    kinds = {kind.__name__.lower(): kind for kind in QUESTIONS}
    return kinds[question]().answer()[0]


def answering(function: Callable[..., Any], instead: Callable[[NotMeasured], Any]) -> Callable[..., Any]:
    """The function over rows as templates name them, and what stands in a document while they are missing."""

    @functools.wraps(function)
    def answer(*arguments: Any, **named: Any) -> Any:
        try:
            return function(*(each.frame() if isinstance(each, Rows) else each for each in arguments), **named)
        except NotMeasured as missing:
            return instead(missing)

    return answer


def _sentence(missing: NotMeasured) -> Pending:
    return Pending(f"**Not measured yet:** {missing}.")
