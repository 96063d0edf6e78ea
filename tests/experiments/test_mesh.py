"""``benchmark_parallelism``: its grid and refusals, and cells measured on four gloo ranks."""

from dataclasses import replace

import pytest

from cs336_systems.distributed.process_group import Rank
from cs336_systems.experiments.mesh import MESH, MeshCell, measure
from cs336_systems.harness.sweep import Outcome, make_rows, outcome_rows
from tests.benchmarks.commands import cells_of
from tests.distributed.checks import on_ranks

SMALL = {"size": "tiny", "batch_size": 2, "context_length": 16, "optimizer": "torch-fused", "keep": "products"}
CELL = MeshCell(**SMALL, world_size=4, warmup=1, steps=2)
MEASURED = [
    CELL,
    replace(CELL, tensor=2, context=2),
    replace(CELL, tensor=2, weights="fsdp"),
    replace(CELL, context=4, accumulate=2),
    replace(CELL, weights="fsdp", replicas=2),
    replace(CELL, tensor=4, tensor_by="copies"),
]
OTHERS = [replace(CELL, tensor=2, weights="fsdp2"), replace(CELL, part="attention", context=4)]


def test_every_division_of_the_ranks_is_a_cell():
    made = cells_of("mesh", "--world-size", "1", "2", "4", "--tensor", "1", "2", "--context", "1", "2")
    assert [cell.variant for cell in made] == [
        *("alone", "ddp-2", "zigzag-2", "tensor-2", "ddp-4", "ddp-2-zigzag-2", "ddp-2-tensor-2", "zigzag-2-tensor-2")
    ]
    for arguments, value in (
        (["--tensor", "3", "--context", "2", "--world-size", "4"], "--world-size 4 cannot be divided into tensor 3"),
        (["--tensor", "2", "--keep", "autograd"], "keep autograd"),
    ):
        with pytest.raises(ValueError, match=value):
            cells_of("mesh", *arguments)


def measure_all(rank: Rank):
    return [measure(cell, rank) for cell in MEASURED + OTHERS]


@pytest.mark.slow
def test_messages_are_those_predicted():
    for metrics in on_ranks(measure_all, 4):
        for cell, own in zip(MEASURED, metrics[: len(MEASURED)], strict=True):
            found = {metric.name: metric.samples[0] for metric in own}
            assert found["messages"] == found["predicted_messages"] > 0, cell
    rows = []
    for cell, own in zip(MEASURED + OTHERS, metrics, strict=True):
        rows.append(Outcome(cell, "ok", metrics=own))
        rows[-1].rows = make_rows("benchmark_parallelism", rows[-1], {"provenance": {"gpu": "", "host": "a"}})
    assert len(MESH.of(outcome_rows(rows)).frame) == len(MEASURED + OTHERS)
