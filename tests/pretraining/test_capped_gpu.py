"""Runs under caps on a GPU: to the bit those with room for everything, resumed too, and below the caps."""

import re
from dataclasses import replace

import pytest

from cs336_systems.distributed.process_group import joined
from cs336_systems.pretraining.options import TrainOptions
from cs336_systems.pretraining.run_log import LOG, read_run
from cs336_systems.pretraining.run_records import Evaluation
from cs336_systems.pretraining.trainer import train
from tests.pretraining.trained import assert_equal_weights, copy_until, losses_and_norms, said_by, write_dataset

pytestmark = pytest.mark.gpu

MEDIUM = {"size": "medium", "context_length": 1024, "batch_size": 2, "chunk": 2048, "steps": 6, "warmup_steps": 2}
MEDIUM |= {"evaluate_every": 3, "evaluation_sequences": 12, "save_every": 3, "log_every": 50, "export": False}
MEDIUM |= {"attention": "hopper", "deterministic": True}  # several tiles of keys, so that dq's sums have an order


def test_a_run_within_little_is_the_one_with_room(tmp_path, device_to_itself):
    write_dataset(tmp_path / "data", 40_000, 13_000)
    roomy = replace(TrainOptions.default("cuda"), data=tmp_path / "data", **MEDIUM)
    roomy = replace(roomy, out=tmp_path / "roomy", device_gib=20.0, host_gib=24.0)
    with joined("cuda") as rank:
        with pytest.raises(ValueError, match=" would do$") as refusal:
            train(replace(roomy, out=tmp_path / "none", device_gib=2.0, host_gib=1.0), rank)
        said = re.search(r"; (\S+) GiB of device and (\S+) GiB of host memory would do$", str(refusal.value))
        # More, for what the first run of the process loads and compiles; less than holds everything.
        caps = {"device_gib": float(said[1]) + 0.3, "host_gib": float(said[2]) + 4}
        tight = replace(roomy, out=tmp_path / "tight", **caps)
        for run in (tight, roomy):  # roomy last: the allocator may keep its memory, which NVML would count
            train(run, rank)
        copy_until(3, tight.out, tmp_path / "resumed")
        train(replace(tight, out=tmp_path / "resumed"), rank)
    streams = [any("none stream" in text for text in said_by(run.out)) for run in (roomy, tight)]
    assert streams == [True, False]
    for other in (tight.out, tmp_path / "resumed"):
        assert losses_and_norms(other) == losses_and_norms(roomy.out)
        assert_equal_weights(other, roomy.out)
    evaluations = [[(one.step, one.loss) for one in read_run(run.out / LOG).all(Evaluation)] for run in (roomy, tight)]
    assert evaluations[0] == evaluations[1]
    assert 0 < read_run(tight.out / LOG).gpu["memory_used_bytes"].max() <= caps["device_gib"] * 2**30


def test_adapters_beside_streamed_weights_are_those_without_caps(tmp_path, device_to_itself):
    """In bf16: what is computed in another order differs by its rounding."""
    write_dataset(tmp_path / "data", 40_000, 13_000)
    own = {"lora_rank": 8, "save_every": None, "keep": "products", "chunk": None}
    free = replace(TrainOptions.default("cuda"), data=tmp_path / "data", out=tmp_path / "free", **MEDIUM | own)
    tight = replace(free, out=tmp_path / "tight", keep=None, chunk=2048, device_gib=2.0, host_gib=16.0)
    with joined("cuda") as rank:
        for run in (tight, free):
            train(run, rank)
    assert re.search(r"Of 24 layers, weights of \d+ stream", "\n".join(said_by(tight.out)))
    for found, expected in zip(losses_and_norms(tight.out), losses_and_norms(free.out), strict=True):
        assert found == (pytest.approx(expected[0], rel=1e-3), pytest.approx(expected[1], rel=2e-2))
    assert 0 < read_run(tight.out / LOG).gpu["memory_used_bytes"].max() <= 2.0 * 2**30
