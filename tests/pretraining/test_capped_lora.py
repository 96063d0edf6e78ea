"""Runs that train adapters under caps on memory: those without caps, resumed by each other, exported, in a ring."""

import re
import shutil
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file

from cs336_systems.distributed.checkpoint import complete_checkpoints
from cs336_systems.kernels.host_memory import ALIGNMENT
from cs336_systems.pretraining import capped
from cs336_systems.pretraining.adapters import export_adapter
from cs336_systems.pretraining.checkpoint import load_trained, load_weights
from cs336_systems.pretraining.export import export_saved
from cs336_systems.pretraining.preparation import prepare
from cs336_systems.pretraining.run_log import LOG, read_run
from cs336_systems.pretraining.run_records import Evaluation, LoggedCheckpoint, Memory
from cs336_systems.pretraining.trainer import run_prepared, train
from tests.distributed.checks import on_ranks
from tests.pretraining.checkpointed import LLAMA, export_model
from tests.pretraining.test_capped import ROOMY, smallest_caps
from tests.pretraining.test_capped_ring import in_a_ring
from tests.pretraining.trained import copy_until, losses_and_norms, options, said_by

CONFIG = replace(LLAMA, n_layers=3, d_ff=64, tie_embeddings=True, qkv_bias=True)


@pytest.fixture(scope="module", autouse=True)
def short_searches():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(capped, "EFFORT", 2000)
        yield


@pytest.fixture(scope="module")
def folder(folder):
    """With data, and a model of three layers to begin with."""
    export_model(folder / "hf", CONFIG)
    return folder


def asked(folder, out, **changes):
    """A run of 10 steps of 8 sequences, in one micro-batch or one chunk; without caps unless they are given."""
    return options(folder, out=folder / out, init=folder / "hf", lora_rank=4, lora_alpha=6.0, export=False, **changes)


def adapters_of(run):
    return load_weights(run.out, merge=False).adapters


def assert_close(one, other, atol=1e-5):
    assert losses_and_norms(one.out) == [pytest.approx(pair, rel=1e-5) for pair in losses_and_norms(other.out)]
    expected, found = adapters_of(other), adapters_of(one)
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, rtol=0, atol=atol, msg=name)


@pytest.fixture(scope="module")
def free(folder, alone):
    """The run without caps."""
    run = asked(folder, "free")
    train(run, alone)
    return run


@pytest.fixture(scope="module")
def tight(folder, alone):
    """The run under the smallest caps, and its step at the end."""
    run = asked(folder, "tight", **ROOMY)
    run = replace(run, **smallest_caps(run, alone))
    prepared = prepare(run, alone)
    run_prepared(prepared, alone)
    return run, prepared.step


def test_a_run_is_that_without_caps(folder, alone, free, tight):
    """Fp32, 8 places: the final norm's backward rounds otherwise than autograd's."""
    run, step = tight
    roomy = asked(folder, "roomy", **ROOMY)
    train(roomy, alone)
    assert losses_and_norms(run.out) == losses_and_norms(roomy.out)
    for name, tensor in adapters_of(run).items():
        assert torch.equal(tensor, adapters_of(roomy)[name])
        assert not name.endswith("lora_B.weight") or tensor.abs().max() > 1e-3
    assert_close(run, free)
    held_out = [read_run(one.out / LOG).all(Evaluation) for one in (run, free)]
    assert [one.loss for one in held_out[0]] == pytest.approx([one.loss for one in held_out[1]], rel=1e-6)
    assert re.search(r"Of 3 layers, weights of 3 stream", "\n".join(said_by(run.out)))
    frozen = {name: p for name, p in step.model.named_parameters() if ".lora_" not in name}
    for name, weight in load_trained(folder / "hf", device="cpu", dtype=torch.float32).model.named_parameters():
        assert torch.equal(frozen[name], weight), name
    assert not any(p.requires_grad for p in frozen.values())


def test_adapters_alone_have_states_and_are_saved(tight):
    run, step = tight
    trained = [p for p in step.model.parameters() if p.requires_grad]
    assert {id(p) for p in step.optimizer.state} == {id(p) for p in trained}
    planned, actual = read_run(run.out / LOG).all(Memory)
    assert planned.predicted_bytes["adapters"] == 4 * 4 * sum(p.numel() for p in trained)
    for where in ("", " on the host"):
        assert 0 < actual.actual_bytes[f"in all{where}"] <= planned.predicted_bytes[f"in all{where}"]
    regions = {name for name in planned.predicted_bytes if name.endswith(" on the host")}
    assert not {f"{name} on the host" for name in ("gradients", "exp_avg", "exp_avg_sq")} & regions
    stored = load_file(complete_checkpoints(run.out)[-1] / "rank-0.safetensors")
    assert {name.split("/")[1] for name in stored} == adapters_of(run).keys()
    saved = max(save.n_bytes for save in read_run(run.out / LOG).all(LoggedCheckpoint))
    least = 3 * 4 * sum(p.numel() for p in trained)
    assert least <= saved <= least + 4 * ALIGNMENT * len(trained)  # weight, two moments and steps of each


def test_a_run_resumes_to_the_bit_and_with_or_without_caps(folder, alone, free, tight):
    """Ten steps, of which one way of running makes the first five and the same or another the rest."""
    capped_run, _ = tight
    for source, name, caps in (
        (capped_run, "same", ROOMY),
        (free, "free-then-capped", ROOMY),
        (capped_run, "back", {}),
    ):
        run = asked(folder, name, **caps)
        copy_until(5, source.out, run.out)
        assert train(run, alone).first_step == 5
        if name == "same":
            assert losses_and_norms(run.out) == losses_and_norms(source.out)
            for key, tensor in adapters_of(source).items():
                assert torch.equal(adapters_of(run)[key], tensor), key
        assert_close(run, free)


def test_exports_are_merged_weights_and_pefts_folder(folder, tight):
    run, step = tight
    saved = load_weights(run.out, merge=False)
    assert all(torch.equal(saved.adapters[name], p) for name, p in step.model.named_parameters() if ".lora_" in name)
    export_adapter(folder / "adapter", saved.adapters, saved.model.adapters)
    stored = load_file(folder / "adapter" / "adapter_model.safetensors")
    assert len(stored) == len(saved.adapters) == 3 * 14
    ids = torch.arange(2 * 16).view(2, 16) * 5 % 256
    with torch.no_grad():
        exported = export_saved(folder / "merged", load_weights(run.out)).folder
        merged = load_trained(exported, device="cpu", dtype=torch.float32).model
        loss = torch.nn.functional.cross_entropy(merged(ids).flatten(0, 1), ids.flatten())
        torch.testing.assert_close(step.loss_of(ids, ids), loss, rtol=1e-5, atol=0)


def test_pieces_of_a_sequence_have_adapters_too(folder, alone):
    changes = {"context_length": 32, "batch_size": 4, "steps": 4, "evaluate_every": None}
    free, pieces = asked(folder, "whole", **changes), asked(folder, "pieces", chunk=16, **changes, **ROOMY)
    for run in (free, pieces):
        train(run, alone)
    assert_close(pieces, free, atol=1e-4)


def test_a_ring_has_the_bits_of_one_rank(folder, alone):
    """Each rank draws all adapters and keeps its own; one rank takes up what the ring has saved."""
    changes = {"context_length": 32, "batch_size": 1, "chunk": 16, "steps": 4, "save_every": 2, **ROOMY}
    one, ring = asked(folder, "one", **changes), asked(folder, "ring", **changes)
    train(one, alone)
    assert on_ranks(in_a_ring, 2, ring) == [0, 0]
    assert losses_and_norms(ring.out) == losses_and_norms(one.out)
    for name, tensor in adapters_of(one).items():
        assert torch.equal(adapters_of(ring)[name], tensor), name
    shutil.rmtree(ring.out / "step-00000004")
    assert train(ring, alone).first_step == 2
    assert losses_and_norms(ring.out) == losses_and_norms(one.out)


def test_a_rank_that_is_too_large_is_one_sentence(folder, alone):
    with pytest.raises(
        ValueError, match="^a LoRA rank of 17 is larger than layers.0.attn.k_proj.weight, which is 16 x 32$"
    ):
        prepare(replace(asked(folder, "refused", **ROOMY), lora_rank=17), alone)
    assert not (folder / "refused").exists()
