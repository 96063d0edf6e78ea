"""Runs under caps on memory: to the bit those without caps, resumed and ended as any other, refused in a sentence."""

import re
import resource
import shutil
from dataclasses import replace
from importlib import import_module

import pytest
import torch

from cs336_systems import blocks
from cs336_systems.distributed.checkpoint import complete_checkpoints
from cs336_systems.distributed.process_group import Rank, joined
from cs336_systems.kernels.host_memory import ALIGNMENT
from cs336_systems.pretraining import capped
from cs336_systems.pretraining.capped import CappedStep
from cs336_systems.pretraining.export import export
from cs336_systems.pretraining.nonfinite import NonFiniteStep
from cs336_systems.pretraining.preparation import prepare
from cs336_systems.pretraining.run_log import LOG
from cs336_systems.pretraining.run_reader import read_run
from cs336_systems.pretraining.run_records import Checkpoint, Evaluation, Memory, Message
from cs336_systems.pretraining.tokenizer import ByteTokenizer
from cs336_systems.pretraining.trainer import train
from cs336_systems.processes import Died, FreshProcess
from tests.pretraining.checkpointed import LLAMA, model_of, write_tokenizer
from tests.pretraining.test_train_command import train_until_killed
from tests.pretraining.test_trainer import assert_equal_weights, weights
from tests.pretraining.trained import EXPLODING, losses_and_norms, options, write_dataset

CONFIG = replace(LLAMA, n_layers=5, tie_embeddings=True, qkv_bias=True)
ROOMY = {"device_gib": 0.5, "host_gib": 2}


@pytest.fixture(scope="module")
def alone():
    n_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with joined("cpu") as rank:
        yield rank
    torch.set_num_threads(n_threads)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """With data, and a model of five layers to begin with."""
    folder = tmp_path_factory.mktemp("capped")
    write_dataset(folder / "data")
    tokenizer = write_tokenizer(folder / "tokenizer")
    export(folder / "hf", model_of(CONFIG).state_dict(), CONFIG, tokenizer, ByteTokenizer.eos_id)
    return folder


def asked(folder, out, **changes):
    return options(folder, data=folder / "data", init=folder / "hf", out=out, **changes)


def smallest_caps(one, rank):
    """What the refusal of no memory at all says would do."""
    with pytest.raises(ValueError) as refusal:
        prepare(replace(one, device_gib=1e-9, host_gib=1e-9), rank)
    said = re.search(r"; (\S+) GiB of device and (\S+) GiB of host memory would do$", str(refusal.value))
    return {"device_gib": float(said[1]), "host_gib": float(said[2])}


def step_of(one, rank) -> CappedStep:
    prepared = prepare(one, rank)
    prepared.loader.close()
    return prepared.step


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize(("module", "caps"), [("pretraining.capped", ROOMY), ("training.assemble", {})])
def test_operations_are_the_same_bits_every_run_if_it_is_asked_for(
    folder, alone, tmp_path, monkeypatch, deterministic, module, caps
):
    asked_for = []

    def block_ops(*names, **how):
        asked_for.append(how)
        return blocks.block_ops(*names, **how)

    monkeypatch.setattr(import_module(f"cs336_systems.{module}"), "block_ops", block_ops)
    keep = {} if caps else {"keep": "products"}
    step_of(asked(folder, tmp_path / "run", deterministic=deterministic, **caps, **keep), alone)
    assert asked_for == [{"deterministic": deterministic}]


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"batch_size": 4, "accumulate": 2},
        pytest.param({"context_length": 32, "batch_size": 2, "chunk": 8}, marks=pytest.mark.slow),
        pytest.param({"dtype": "bf16", "clip": None}, marks=pytest.mark.slow),
    ],
    ids=["a chunk", "two chunks", "pieces of a sequence", "bf16"],
)
def test_ten_steps_are_to_the_bit_those_without_caps(folder, alone, tmp_path, changes):
    roomy = asked(folder, tmp_path / "roomy", **changes, **ROOMY)
    tight = replace(roomy, out=tmp_path / "tight", **smallest_caps(roomy, alone))
    chunkings, evaluations, streamed = [], [], []
    for run in (roomy, tight):
        train(run, alone)
        records = read_run(run.out / LOG)
        said = "\n".join(one.text for one in records.all(Message))
        chunkings.append(re.search(r"A step is \d+ .* rounds of \d+ chunks of \d+ tokens", said)[0])
        streamed.append("Of 5 layers, none stream" not in said)
        evaluations.append([(one.step, one.loss, one.tokens) for one in records.all(Evaluation)])
    assert chunkings[0] == chunkings[1]
    assert streamed == [False, True]
    assert len(evaluations[0]) == 2
    assert evaluations[0] == evaluations[1]
    assert losses_and_norms(tmp_path / "tight") == losses_and_norms(tmp_path / "roomy")
    assert_equal_weights(tmp_path / "tight", tmp_path / "roomy")


@pytest.fixture(scope="module")
def whole(folder, alone):
    """A run under the smallest caps, with a checkpoint after each step."""
    one = asked(folder, folder / "run", save_every=1, keep_last=20, batch_size=2, accumulate=8, **ROOMY)
    one = replace(one, **smallest_caps(one, alone))
    train(one, alone)
    return one


def interrupted(whole, out, step):
    """The run as it was when it was killed in a later step."""
    shutil.copytree(whole.out, out)
    for later in range(step + 1, 11):
        shutil.rmtree(out / f"step-{later:08d}")
    return replace(whole, out=out, save_every=5)


@pytest.mark.parametrize("caps", [{}, ROOMY], ids=["the same caps", "others"])
def test_a_run_that_resumes_is_the_run_that_was_not_interrupted(whole, alone, tmp_path, caps):
    outcome = train(replace(interrupted(whole, tmp_path / "run", 4), **caps), alone)
    assert (outcome.first_step, outcome.steps) == (4, 10)
    assert losses_and_norms(tmp_path / "run") == losses_and_norms(whole.out)
    assert_equal_weights(tmp_path / "run", whole.out)


@pytest.mark.slow
def test_caps_that_do_not_hold_the_chunks_of_before_cut_anew_and_say_so(whole, alone, tmp_path):
    """With more of the device, rounds are longer, as each round brings the layers from the host again."""
    before = replace(whole, out=tmp_path / "run", steps=3, device_gib=1.2 * whole.device_gib)
    assert (step_of(before, alone).chunking.chunks, step_of(whole, alone).chunking.chunks) == (4, 1)
    train(before, alone)
    train(replace(whole, out=tmp_path / "run", steps=4), alone)
    said = [one.text for one in read_run(tmp_path / "run" / LOG).all(Message)]
    assert sum("from here on sums are rounded in another order" in text for text in said) == 1
    got, expected = (torch.tensor(losses_and_norms(out)[:4]) for out in (tmp_path / "run", whole.out))
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=0)


@pytest.mark.slow
def test_a_run_without_caps_takes_it_up_and_the_other_way_round(whole, alone, tmp_path):
    """Within rounding: the plain step adds up otherwise."""
    plain = replace(whole, out=tmp_path / "plain", device_gib=None, host_gib=None, keep="products", save_every=1)
    train(plain, alone)
    for first, second in ((whole, plain), (plain, whole)):
        out = tmp_path / f"from {first.out.name}"
        one = interrupted(first, out, 4)
        outcome = train(replace(second, out=out, save_every=one.save_every), alone)
        assert outcome.first_step == 4
        got = torch.tensor(losses_and_norms(out))
        torch.testing.assert_close(got, torch.tensor(losses_and_norms(plain.out)), rtol=1e-4, atol=0)
    for name, weight in weights(plain.out).items():
        torch.testing.assert_close(weight, weights(whole.out)[name], rtol=1e-3, atol=1e-3, msg=name)


def test_a_checkpoint_of_other_dtypes_is_refused(whole, alone, tmp_path):
    one = interrupted(whole, tmp_path / "run", 4)
    with pytest.raises(ValueError, match=r"is \(16,\) torch.float32 there and \(16,\) torch.bfloat16 here"):
        train(replace(one, dtype="bf16"), alone)
    assert complete_checkpoints(tmp_path / "run")[-1].name == "step-00000004"


def test_what_is_saved_lies_where_the_step_has_it_and_is_not_copied(whole, alone, tmp_path):
    """The host's cap holds no copy; the run says that it waits."""
    train(replace(whole, out=tmp_path / "run", steps=3, save_every=2), alone)
    run = read_run(tmp_path / "run" / LOG)
    (said,) = [one.text for one in run.all(Message) if one.level == "warning"]
    assert "of copies do not fit" in said and said.endswith("training will wait for checkpoints to be written")
    saves = run.all(Checkpoint)
    assert [one.step for one in saves] == [2, 3]
    assert all(one.stall_seconds == one.seconds for one in saves)
    step = step_of(replace(whole, out=tmp_path / "other"), alone)
    memory, fixed = step._step.memory, step._step.fixed
    slabs = {one.memory.untyped_storage().data_ptr() for one in (memory.device_slab, memory.host_slab, fixed.slab)}
    kept = [tensor for state in step.optimizer.state.values() for name, tensor in state.items() if name != "step"]
    assert {tensor.untyped_storage().data_ptr() for tensor in (*step.model.parameters(), *kept)} <= slabs


@pytest.mark.parametrize("save_every", [5, None])
def test_copies_of_a_checkpoint_are_planned_for_where_the_cap_has_room(folder, alone, tmp_path, save_every):
    one = asked(folder, tmp_path / "run", save_every=save_every, export=False, **ROOMY)
    train(one, alone)
    run = read_run(one.out / LOG)
    saved = max((save.n_bytes for save in run.all(Checkpoint)), default=0)
    rounded_up = 4 * ALIGNMENT * len(list(model_of(CONFIG).parameters()))  # weight, two moments and steps of each
    for memory in run.all(Memory):
        planned = memory.predicted_bytes
        copies = planned.get("checkpoint's copy on the host", 0)
        assert saved - rounded_up <= copies <= saved
        assert planned["in all on the host"] + planned["free on the host"] == int(one.host_gib * 2**30)
        assert planned["in all on the host"] == sum(
            n for name, n in planned.items() if name.endswith("host") and not name.startswith(("in all", "free"))
        )
    assert any("copy" in said.text for said in run.all(Message)) is (save_every is not None)


def test_tables_say_what_lives_where_and_what_more_would_bring(whole):
    run = read_run(whole.out / LOG)
    assert not any("checkpoint's copy on the host" in one.predicted_bytes for one in run.all(Memory))
    predicted, actual = (one for one in run.all(Memory))
    for where, cap in (("", whole.device_gib), (" on the host", whole.host_gib)):
        assert predicted.predicted_bytes[f"in all{where}"] + predicted.predicted_bytes[f"free{where}"] == int(
            cap * 2**30
        )
        assert 0 < actual.actual_bytes[f"in all{where}"] <= predicted.predicted_bytes[f"in all{where}"]
    said = " ".join(one.text for one in run.all(Message))
    for words in ("The device has slots, ", "it is bound by ", "One more GiB of device memory would bring "):
        assert words in said


def test_a_step_that_is_not_finite_ends_the_run_or_is_passed_over(whole, alone, tmp_path):
    one = replace(whole, out=tmp_path / "run", keep_last=20, init=None, **EXPLODING)
    one = replace(one, **smallest_caps(one, alone))
    with pytest.raises(NonFiniteStep, match=r"step 1: .*, norm (nan|inf); the first tensor that is not finite is .*by"):
        train(one, alone)
    assert [path.name for path in complete_checkpoints(tmp_path / "run")] == ["step-00000001"]
    train(replace(one, out=tmp_path / "on", skip_nonfinite=True, steps=4), alone)
    assert_equal_weights(tmp_path / "on" / "step-00000001", tmp_path / "on" / "step-00000004")


def test_the_smallest_caps_are_the_smallest(whole, alone, tmp_path):
    for name in ("device_gib", "host_gib"):
        smaller = replace(whole, out=tmp_path / "run", **{name: getattr(whole, name) * 0.9})
        with pytest.raises(ValueError, match=f"the {name.partition('_')[0]} is .* GiB short; .* would do$") as refusal:
            train(smaller, alone)
        assert "\n" not in str(refusal.value)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"host_gib": None}, "--device-gib and --host-gib are one thing: give both or none"),
        ({"device_gib": 0.0}, "--device-gib must be positive, got 0.0"),
        ({"zero": 1}, "--zero 1 does not go together with --device-gib and --host-gib"),
        ({"cuda_graph": "on"}, "--cuda-graph on does not go"),
        ({"matmul_dtype": "e4m3"}, "--matmul-dtype e4m3 does not go"),
        ({"offload": ("m", "v")}, "--offload m v does not go"),
        ({"keep": "input"}, "--keep input does not go"),
        ({"optimizer": "fused"}, "--optimizer fused does not go"),
        ({"dtype": "autocast-bf16"}, "--dtype autocast-bf16 does not go"),
        ({"z_loss": 1e-4}, "--z-loss 0.0001 does not go"),
        ({"chunk": 48}, "--chunk 48 does not divide sequences of 16 tokens and a step of 128 evenly"),
        ({"device_gib": None, "host_gib": None, "chunk": 64}, "--chunk 64 is for a run under --device-gib and --host-"),
    ],
)
def test_options_that_do_not_go_together(alone, tmp_path, changes, message):
    one = options(tmp_path, **ROOMY | changes)  # there are no data
    with pytest.raises(ValueError, match=f"^{re.escape(message)}"):
        train(one, alone)
    assert not list(tmp_path.iterdir())


def test_more_host_memory_than_there_is_is_refused(whole, alone, tmp_path, monkeypatch):
    monkeypatch.setattr("cs336_systems.kernels.host_memory.allowed_host_bytes", lambda: 1000)
    with pytest.raises(ValueError, match="^a host slab of 0.00 GiB is asked for, and 0.00 GiB are free here$"):
        train(replace(whole, out=tmp_path / "run"), alone)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("when", ["__init__", "reset_parameters", "__call__", "evaluate"])
def test_a_device_that_is_short_is_one_sentence(whole, alone, tmp_path, monkeypatch, when):
    def refused(*_, **__):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 284.00 MiB.\nSee documentation")

    monkeypatch.setattr(capped.StreamedStep, when, refused)
    with pytest.raises(
        ValueError, match=r"^the device's cap of .* GiB is short: .*; raise --device-gib, or lower --chunk$"
    ):
        train(replace(whole, out=tmp_path / "run", init=None, evaluate_every=1, **ROOMY), alone)


def test_caps_are_for_one_rank(tmp_path):
    with pytest.raises(ValueError, match="--device-gib and --host-gib are for one rank, and here are 2"):
        prepare(options(tmp_path, **ROOMY), Rank(0, 0, 2, torch.device("cpu"), "gloo"))


@pytest.mark.slow
def test_killed_at_any_moment_a_run_goes_on_as_if_it_had_not_been(folder, alone, tmp_path):
    """Between changes to the disk; a save waits for the one before."""
    one = options(folder, data=folder / "data", out=tmp_path / "run", steps=400, save_every=1, evaluate_every=None)
    one = replace(one, schedule="constant", **ROOMY)  # a rate that does not know how many steps are to come
    one = replace(one, **smallest_caps(one, alone))
    torn = 0
    for n_changes in (5, 14, 17, 28):  # to the checkpoints' files, those read at the start among them
        process = FreshProcess(train_until_killed, one, n_changes, resource.RLIM_INFINITY)
        with pytest.raises(Died, match="SIGKILL"):
            process.receive()
        process.end()
        torn += any(one.out.glob(".step-*.tmp"))
    newest = int(complete_checkpoints(one.out)[-1].name.removeprefix("step-"))
    assert torn >= 2, "few kills came during a save"
    outcome = train(replace(one, steps=newest + 5), alone)
    assert outcome.first_step == newest
    train(replace(one, out=tmp_path / "whole", steps=newest + 5, save_every=1000), alone)
    assert losses_and_norms(one.out) == losses_and_norms(tmp_path / "whole")
