"""The seconds that are predicted of a step over a mesh, beside the committed rows and by reasoning."""

from pathlib import Path

import pytest

from cs336_systems.config import MODEL_SIZES, resolve_size
from cs336_systems.costs.parallelism.seconds import step_seconds
from cs336_systems.experiments.mesh import MESH, predicted_ms
from cs336_systems.hardware import find_hardware
from cs336_systems.harness.record import read_rows

H200 = find_hardware("NVIDIA H200")
RESULTS = Path(__file__).parents[2] / "profiles/results/h200"


def test_committed_steps_are_within_a_tenth_but_where_the_host_is_late():
    n_compared, beyond = 0, set()
    for part in ("mesh-tensor", "mesh-peers", "mesh-four", "mesh-context", "mesh-long"):
        for line in MESH.lines(read_rows(RESULTS / part / "benchmark_parallelism.csv")):
            if (predicted := predicted_ms(line)) is not None:
                n_compared += 1
                how = line.settings
                if abs(predicted / line.median("step") - 1) > 0.1:
                    beyond.add((how["world_size"], how["tensor"], how["context"], how["tensor_by"]))
    assert n_compared >= 15
    assert beyond == {(4, 4, 1, "copies"), (4, 1, 4, "collectives")}


def seconds(**how):
    return step_seconds(resolve_size("llama3-8b"), 8192, 1, "products", H200, **how)


def test_ranks_divide_work_and_add_what_they_wait_for():
    alone, two, copies = seconds(), seconds(tensor=2), seconds(tensor=2, by="copies")
    assert (alone.waiting, alone.slowed) == (0, 0)
    assert two.compute == pytest.approx(alone.compute / 2)
    assert two.optimizer == pytest.approx(alone.optimizer / 2)
    assert copies.waiting < 0.02 * two.waiting
    orders = {order: seconds(context=2, order=order) for order in ("zigzag", "ring", "gathered")}
    assert orders["ring"].compute > orders["zigzag"].compute == orders["gathered"].compute
    assert orders["gathered"].waiting > orders["zigzag"].waiting == 0
    assert seconds(data=2, sharded=True).optimizer == pytest.approx(alone.optimizer / 2)
    assert 0 < seconds(data=2).slowed < seconds(data=2, sharded=True).slowed


def test_impossible_replicas_are_refused():
    for how in ({"replicas": 3, "sharded": True}, {"replicas": 2}, {"replicas": 0}):
        with pytest.raises(ValueError, match="replicas of shards"):
            seconds(data=4, **how)


def test_what_is_not_published_is_refused():
    with pytest.raises(ValueError, match="published"):
        step_seconds(MODEL_SIZES["tiny"], 128, 1, "all", find_hardware("NVIDIA GeForce RTX 4090"), tensor=2)
