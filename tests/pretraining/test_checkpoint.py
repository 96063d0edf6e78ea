"""A run's folder read by one process: what ranks of any number wrote, its model alone, and refusals in one sentence."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from cs336_systems.distributed.process_group import Rank
from cs336_systems.model import TransformerLM
from cs336_systems.model.hf_weights import load_hf_weights
from cs336_systems.pretraining.checkpoint import ModelOfRun, load_trained, load_weights, read_run_json, write_run_json
from cs336_systems.pretraining.export import export
from cs336_systems.pretraining.tokenizer import END_OF_TEXT
from tests.distributed.checks import spawn
from tests.pretraining.checkpointed import FAMILIES, LLAMA, model_of, save_model, write_run, write_tokenizer

DTYPES = {"llama": torch.float32, "scaled": torch.bfloat16, "qwen": torch.float32, "all heads": torch.bfloat16}


def write_all(rank: Rank, folder):
    for step, family in enumerate(FAMILIES):
        save_model(folder / family, model_of(FAMILIES[family], DTYPES[family]), step)


def assert_models_weights(weights, model):
    expected = dict(model.named_parameters())
    assert weights.keys() == expected.keys()
    for name, tensor in weights.items():
        assert tensor.device.type == "cpu"
        assert torch.equal(tensor, expected[name]), name  # dtypes too


@pytest.mark.slow
@pytest.mark.parametrize("world_size", [3])
def test_one_process_reads_what_any_number_of_ranks_wrote(world_size, tmp_path):
    for family, config in FAMILIES.items():
        write_run(tmp_path / family, config)
    spawn(write_all, world_size, tmp_path)
    assert not dist.is_initialized()
    for step, (family, config) in enumerate(FAMILIES.items()):
        checkpoint = load_weights(tmp_path / family)
        assert (checkpoint.step, checkpoint.model.config) == (step, config)
        model = model_of(config, DTYPES[family])
        assert_models_weights(checkpoint.weights, model)
        out = tmp_path / family / "hf"
        export(out, checkpoint.weights, checkpoint.model)
        again = TransformerLM(config, dtype=DTYPES[family])
        load_hf_weights(again, out)
        assert_models_weights(dict(again.named_parameters()), model)
        ids = torch.arange(48)[None]
        for path in (tmp_path / family, out):
            trained = load_trained(path, device="cpu", dtype=DTYPES[family])
            assert torch.equal(trained.model(ids), model(ids))
            assert trained.tokenizer.eos_id == 256
            assert trained.step == (step if path != out else None)


@pytest.fixture
def run(tmp_path, alone):
    """A run of which step 1 holds the weights of seed 1, step 2 those of seed 2."""
    write_run(tmp_path / "run")
    for step in (1, 2):
        save_model(tmp_path / "run", model_of(LLAMA, seed=step), step, optimizer=False)
    return tmp_path / "run"


def test_the_newest_or_the_one_that_is_named(run, monkeypatch):
    for path, step in ((run, 2), (run / "step-00000001", 1), (run / "step-00000002", 2)):
        checkpoint = load_weights(path)
        assert checkpoint.step == step
        assert_models_weights(checkpoint.weights, model_of(LLAMA, seed=step))
    (run / "step-00000001").rename(run / "best")  # to have it kept
    assert load_weights(run / "best").step == 1
    monkeypatch.chdir(run / "best")
    assert load_weights(type(run)(".")).step == 1


def _with_a_flipped_bit(content):
    middle = len(content) // 2
    return content[:middle] + bytes([content[middle] ^ 4]) + content[middle + 1 :]


def test_damage_is_named_and_the_one_before_read(run):
    for number, name in enumerate(("rank-0.safetensors", "tensors.json", "complete.json")):
        files = [run / f"step-0000000{step}" / name for step in (2, 1)]
        sound = [file.read_bytes() for file in files]
        harmed = [content[:-1] if number else _with_a_flipped_bit(content) for content in sound]
        files[0].write_bytes(harmed[0])
        with pytest.raises(ValueError, match="step-00000002 .*" + name):
            load_weights(files[0].parent)
        with pytest.warns(UserWarning, match="step-00000002 is passed over"):
            assert load_weights(run).step == 1
        files[1].write_bytes(harmed[1])
        with pytest.raises(ValueError, match=f"run holds no checkpoint that is whole.*step-00000001.*{name}"):
            load_weights(run)
        for file, content in zip(files, sound, strict=True):
            file.write_bytes(content)


def test_a_checkpoint_of_another_model(run):
    for change, fault in (
        ({"vocab_size": 300}, r"\(264, 32\).* \(300, 32\)"),
        ({"n_layers": 3}, "layers.2.attn.k_proj.weight"),
        ({"tie_embeddings": True}, "lm_head.weight"),
    ):
        (run / "run.json").unlink()
        write_run(run, replace(LLAMA, **change))
        with pytest.raises(ValueError, match=f"another model: .*{fault}") as refusal:
            load_weights(run)
        assert "\n" not in str(refusal.value)


def test_folders_that_hold_no_run(tmp_path):
    with pytest.raises(ValueError, match="nowhere does not exist"):
        load_weights(tmp_path / "nowhere")
    with pytest.raises(
        ValueError, match="^Org/Model does not exist; .*: hf download Org/Model --local-dir Model fetches"
    ):
        load_weights(Path("Org/Model"))
    with pytest.raises(ValueError, match=f"{tmp_path.name} is no folder of a run: it has no run.json"):
        load_weights(tmp_path)
    write_run(tmp_path / "run")
    with pytest.raises(ValueError, match="run holds no checkpoint$"):
        load_weights(tmp_path / "run")


def test_a_run_is_described_once(tmp_path):
    run, tokenizer = tmp_path / "run", write_tokenizer(tmp_path / "dataset")
    (tmp_path / "dataset" / "tokenizer_config.json").write_text(json.dumps({"eos_token": END_OF_TEXT}))
    first = write_run_json(run, ModelOfRun(LLAMA, tokenizer, 256))
    before = {path.name: path.read_text() for path in run.iterdir()}
    assert before.keys() == {"run.json", "tokenizer.json", "tokenizer_config.json"}
    assert write_run_json(run, ModelOfRun(LLAMA, tokenizer.parent, 256)) == first == read_run_json(run)
    other = write_tokenizer(tmp_path / "other dataset")
    other.write_text(other.read_text().replace('"b"', '"bb"'))
    for config, named, eos_id, fault in (
        (replace(LLAMA, n_layers=3), tokenizer, 256, "n_layers is 2"),
        (LLAMA, other, 256, "tokenizer"),
        (replace(LLAMA, vocab_size=256), tokenizer, 256, "257 ids, the model 256"),
    ):
        with pytest.raises(ValueError, match=fault):
            write_run_json(run, ModelOfRun(config, named, eos_id))
    assert {path.name: path.read_text() for path in run.iterdir()} == before
    for content, fault in (
        *(("", "damaged"), ("[]", "damaged"), ('{"layout": 9, "model": {}}', "layout 9; this version reads 1")),
        ('{"layout": 1, "eos_id": 3}', "damaged: 'model'"),
        ('{"layout": 1, "eos_id": 3, "model": {"rope_scaling": null, "d": 1}}', "damaged: .* 'd'"),
    ):
        (run / "run.json").write_text(content)
        with pytest.raises(ValueError, match=f"run.json is .*{fault}"):
            read_run_json(run)
