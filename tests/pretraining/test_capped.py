"""Runs under caps on memory: to the bit those without caps, resumed and ended as any other, refused in a sentence."""

import re
from dataclasses import replace
from unittest.mock import Mock

import numpy as np
import pytest
import torch

from cs336_systems.config import MODEL_SIZES
from cs336_systems.distributed.checkpoint import complete_checkpoints
from cs336_systems.kernels.host_memory import ALIGNMENT
from cs336_systems.pretraining import capped
from cs336_systems.pretraining.options import TrainOptions
from cs336_systems.pretraining.preparation import prepare
from cs336_systems.pretraining.run_log import LOG, read_run
from cs336_systems.pretraining.run_records import Evaluation, LoggedCheckpoint, Memory
from cs336_systems.pretraining.trainer import NonFiniteStep, train
from tests.pretraining.checkpointed import LLAMA, export_model, model_of
from tests.pretraining.trained import EXPLODING, assert_equal_weights, copy_until, losses_and_norms, options, said_by

CONFIG = replace(LLAMA, n_layers=4, d_ff=64, tie_embeddings=True, qkv_bias=True)
ROOMY = {"device_gib": 0.5, "host_gib": 2}


@pytest.fixture(scope="module")
def folder(folder):
    """With data, and a model of four layers to begin with."""
    export_model(folder / "hf", CONFIG)
    return folder


def asked(folder, out, **changes):
    return options(folder, data=folder / "data", init=folder / "hf", out=out, **changes)


def smallest_caps(one, rank):
    """What the refusal of no memory at all says would do."""
    with pytest.raises(ValueError) as refusal:
        prepare(replace(one, device_gib=1e-9, host_gib=1e-9), rank)
    said = re.search(r"; (\S+) GiB of device and (\S+) GiB of host memory would do$", str(refusal.value))
    return {"device_gib": float(said[1]), "host_gib": float(said[2])}


@pytest.mark.slow
@pytest.mark.parametrize("recipe", [{}, {"matmul_dtype": "e4m3"}], ids=["stored", "e4m3"])
def test_steps_are_to_the_bit_those_that_stream_nothing(folder, alone, tmp_path, recipe):
    """Of pieces of a sequence."""
    changes = {"context_length": 32, "batch_size": 2, "chunk": 16} | recipe
    roomy = asked(folder, tmp_path / "roomy", steps=6, evaluate_every=3, **changes, **ROOMY)
    tight = replace(roomy, out=tmp_path / "tight", **smallest_caps(roomy, alone))
    for run in (roomy, tight):
        train(run, alone)
    said = ["\n".join(said_by(run.out)) for run in (roomy, tight)]
    chunkings = [re.search(r"rounds of \d+ chunks of \d+ tokens", each)[0] for each in said]
    assert chunkings[0] == chunkings[1]
    assert ["Of 4 layers, none stream" in each for each in said] == [True, False]
    logs = [read_run(run.out / LOG).all(Evaluation) for run in (roomy, tight)]
    evaluations = [[(one.step, one.loss, one.tokens) for one in log] for log in logs]
    assert [step for step, *_ in evaluations[0]] == [0, 3, 6]
    assert evaluations[0] == evaluations[1]
    assert losses_and_norms(tight.out) == losses_and_norms(roomy.out)
    assert_equal_weights(tight.out, roomy.out)


@pytest.mark.slow
def test_quantized_steps_are_those_without_caps(folder, alone, tmp_path):
    """But for the order of sums; a norm's last bit, by which gradients are clipped, could change what rounds to fp8."""
    changes = {"context_length": 16, "batch_size": 2, "accumulate": 1, "matmul_dtype": "e4m3", "steps": 3, "clip": None}
    free = asked(folder, tmp_path / "free", kernels="reference", keep="products", optimizer="torch-fused", **changes)
    capped = replace(free, out=tmp_path / "capped", keep=None, chunk=32, **ROOMY)
    stored = replace(capped, out=tmp_path / "stored", matmul_dtype="same")
    for run in (free, capped, stored):
        train(run, alone)
    expected, got, other = (np.array(losses_and_norms(run.out)) for run in (free, capped, stored))
    assert abs(got / expected - 1).max() < 1e-5 < 1e-3 < abs(other / expected - 1).max()


@pytest.mark.slow
def test_a_run_goes_on_in_fp8_with_chunks_that_its_matmuls_take(folder, alone, tmp_path):
    less = {"evaluate_every": None, "export": False}
    run = asked(folder, tmp_path / "run", context_length=32, batch_size=2, chunk=8, steps=5, **less, **ROOMY)
    train(run, alone)
    assert train(replace(run, chunk=None, steps=6, matmul_dtype="e4m3"), alone).first_step == 5


def test_plans_cut_no_sequence_that_conversations_share():
    """By default chunks of a long context are pieces or several of it."""
    plain = replace(TrainOptions.default("cpu"), context_length=16_384, batch_size=1, total_batch_tokens=2**16, **ROOMY)
    chunks = []
    for one in (plain, replace(plain, packing=True)):
        one = replace(one, device_gib=4.0, host_gib=8.0)
        case, device = one.training_case(MODEL_SIZES["tiny"], 1), torch.device("cpu")
        (choice,) = capped.chooser(one, case, device)([capped.caps_of(one, case, device)])
        chunks.append(choice.plan.work.chunk)
    assert chunks[0] != 16_384 == chunks[1]


@pytest.fixture(scope="module")
def whole(folder, alone):
    """A run under the smallest caps, with a checkpoint after each step."""
    one = asked(folder, folder / "run", save_every=1, keep_last=20, batch_size=2, accumulate=8, **ROOMY)
    one = replace(one, **smallest_caps(one, alone))
    train(one, alone)
    return one


@pytest.mark.slow
def test_a_run_that_resumes_is_the_run_that_was_not_interrupted(whole, alone, tmp_path):
    """Under other caps, too."""
    copy_until(4, whole.out, tmp_path / "run")
    outcome = train(replace(whole, out=tmp_path / "run", save_every=5, **ROOMY), alone)
    assert (outcome.first_step, outcome.steps) == (4, 10)
    assert losses_and_norms(tmp_path / "run") == losses_and_norms(whole.out)
    assert_equal_weights(tmp_path / "run", whole.out)


@pytest.mark.slow
def test_memory_that_is_planned_adds_up_to_the_caps_and_holds(whole, folder, alone, tmp_path):
    """Copies of a checkpoint are planned for where the cap has room."""
    roomy = asked(folder, tmp_path / "run", save_every=5, export=False, **ROOMY)
    train(roomy, alone)
    run = read_run(roomy.out / LOG)
    saved = max(save.n_bytes for save in run.all(LoggedCheckpoint))
    rounded_up = 4 * ALIGNMENT * len(list(model_of(CONFIG).parameters()))  # weight, two moments and steps of each
    copy = run.last(Memory).predicted_bytes["checkpoint's copy on the host"]
    assert saved - rounded_up <= copy <= saved
    for one in (roomy, whole):
        planned, actual = (memory for memory in read_run(one.out / LOG).all(Memory))
        assert ("checkpoint's copy on the host" in planned.predicted_bytes) is (one is roomy)
        for where, cap in (("", one.device_gib), (" on the host", one.host_gib)):
            total = planned.predicted_bytes[f"in all{where}"]
            assert total + planned.predicted_bytes[f"free{where}"] == int(cap * 2**30)
            used = actual.actual_bytes[f"in all{where}"]
            assert used <= total
            assert used > 0 or one is roomy


@pytest.mark.slow
def test_a_step_that_is_not_finite_ends_the_run(whole, alone, tmp_path):
    one = replace(whole, out=tmp_path / "run", keep_last=20, **EXPLODING)
    with pytest.raises(NonFiniteStep, match=r"step 1: .*, norm (nan|inf)"):
        train(one, alone)
    assert [path.name for path in complete_checkpoints(tmp_path / "run")] == ["step-00000001"]


@pytest.mark.slow
def test_what_cannot_be_is_refused_before_anything_is_written(whole, alone, tmp_path, monkeypatch):
    out = tmp_path / "run"
    for name in ("device_gib", "host_gib"):  # the smallest caps are the smallest
        smaller = replace(whole, out=out, **{name: getattr(whole, name) * 0.9})
        with pytest.raises(ValueError, match=f"^[^\n]*the {name.partition('_')[0]} is .* GiB short; .* would do$"):
            train(smaller, alone)
    monkeypatch.setattr("cs336_systems.kernels.host_memory.allowed_host_bytes", lambda: 1000)
    with pytest.raises(ValueError, match=r"^a host slab of 0\.00 GiB"):
        train(replace(whole, out=out), alone)
    for changes, value in (
        *(({"host_gib": None}, "--host-gib"), ({"device_gib": 0.0}, "0.0"), ({"zero": 1}, "--zero 1 ")),
        *(({"offload": ("m", "v")}, "--offload m v "), ({"keep": "input"}, "--keep input ")),
        *(({"dtype": "autocast-bf16"}, "--dtype autocast-bf16 "), ({"chunk": 48}, "--chunk 48 ")),
        ({"device_gib": None, "host_gib": None, "chunk": 64}, "--chunk 64 "),
    ):
        with pytest.raises(ValueError, match=re.escape(value)):
            options(tmp_path, **ROOMY | changes).check()
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("when", ["__init__", "__call__"])
def test_a_device_that_is_short_is_one_sentence(whole, alone, tmp_path, monkeypatch, when):
    short = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 284.00 MiB.\nSee documentation")
    monkeypatch.setattr(capped.StreamedStep, when, Mock(side_effect=short))
    with pytest.raises(ValueError, match=r"^the device's cap of [^\n]*$"):
        train(replace(whole, out=tmp_path / "run", init=None, evaluate_every=1, **ROOMY), alone)
