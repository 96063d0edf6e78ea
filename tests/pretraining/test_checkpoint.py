"""A run's folder read by one process: what ranks of any number wrote, its model alone, and refusals in one sentence."""

import json
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist

from cs336_systems.config import MODEL_SIZES
from cs336_systems.distributed.process_group import Rank, joined
from cs336_systems.model import TransformerLM
from cs336_systems.model.hf_weights import load_hf_weights
from cs336_systems.pretraining.checkpoint import load_trained, load_weights, read_run_json, write_run_json
from cs336_systems.pretraining.export import export
from cs336_systems.pretraining.tokenizer import END_OF_TEXT, ByteTokenizer
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
@pytest.mark.parametrize("world_size", [1, 3])
def test_one_process_reads_what_any_number_of_ranks_wrote(world_size, tmp_path):
    for family, config in FAMILIES.items():
        write_run(tmp_path / family, config)
    spawn(write_all, world_size, tmp_path, timeout_s=120)
    assert not dist.is_initialized()
    for step, (family, config) in enumerate(FAMILIES.items()):
        checkpoint = load_weights(tmp_path / family)
        assert (checkpoint.step, checkpoint.run.config, checkpoint.skipped) == (step, config, {})
        model = model_of(config, DTYPES[family])
        assert_models_weights(checkpoint.weights, model)
        out = tmp_path / family / "hf"
        export(out, checkpoint.weights, config, checkpoint.run.tokenizer, checkpoint.run.eos_id)
        again = TransformerLM(config, dtype=DTYPES[family])
        load_hf_weights(again, out)
        assert_models_weights(dict(again.named_parameters()), model)
        ids = torch.arange(48)[None]
        for path in (tmp_path / family, out):
            trained = load_trained(path, device="cpu", dtype=DTYPES[family])
            assert torch.equal(trained.model(ids), model(ids))
            assert trained.tokenizer.eos_id == 256
            assert trained.step == (step if path != out else None)


@pytest.fixture(scope="module")
def alone():
    with joined("cpu"):
        yield


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


def flip_a_bit(file):
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 4
    file.write_bytes(content)


@pytest.mark.parametrize("name", ["rank-0.safetensors", "tensors.json", "complete.json"])
@pytest.mark.parametrize(
    "harm", [flip_a_bit, lambda file: file.write_bytes(file.read_bytes()[:-1]), lambda file: file.unlink()]
)
def test_damage_is_named_and_the_one_before_read(run, name, harm):
    harm(run / "step-00000002" / name)
    with pytest.raises(ValueError, match="step-00000002 .*" + name):
        load_weights(run / "step-00000002")
    checkpoint = load_weights(run)
    assert checkpoint.step == 1
    assert [path.name for path in checkpoint.skipped] == ["step-00000002"]
    harm(run / "step-00000001" / name)
    with pytest.raises(ValueError, match=f"run holds no checkpoint that is whole.*step-00000001.*{name}"):
        load_weights(run)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"vocab_size": 300}, r"another model: token_embeddings.weight is \(264, 32\).* there and \(300, 32\)"),
        ({"n_layers": 3}, "another model: it lacks model/layers.2.attn.k_proj.weight"),
        ({"n_layers": 1}, "another model: it holds model/layers.1.attn.k_proj.weight besides"),
        ({"qkv_bias": True}, "another model: it lacks model/layers.0.attn.k_proj.bias"),
        ({"tie_embeddings": True}, "another model: it holds model/lm_head.weight besides"),
    ],
)
def test_a_checkpoint_of_another_model(run, change, message):
    (run / "run.json").unlink()
    write_run(run, replace(LLAMA, **change))
    with pytest.raises(ValueError, match=message.replace("model: token", "model: .*token")) as refusal:
        load_weights(run)
    assert "\n" not in str(refusal.value)


def test_folders_that_hold_no_run(tmp_path):
    with pytest.raises(ValueError, match="nowhere does not exist"):
        load_weights(tmp_path / "nowhere")
    with pytest.raises(ValueError, match=f"{tmp_path.name} is no folder of a run: it has no run.json"):
        load_weights(tmp_path)
    write_run(tmp_path / "run")
    with pytest.raises(ValueError, match="run holds no checkpoint$"):
        load_weights(tmp_path / "run")


@pytest.mark.parametrize("config", [*FAMILIES.values(), *MODEL_SIZES.values()], ids=lambda config: config.name)
def test_any_model_is_described(config, tmp_path):
    config = replace(config, vocab_size=max(257, config.vocab_size))
    write_run(tmp_path / "run", config)
    run = read_run_json(tmp_path / "run")
    assert (run.config, run.eos_id) == (config, 256)
    assert run.tokenizer.read_text() == ByteTokenizer().json()


def test_a_run_is_described_once(tmp_path):
    run, tokenizer = tmp_path / "run", write_tokenizer(tmp_path / "dataset")
    (tmp_path / "dataset" / "tokenizer_config.json").write_text(json.dumps({"eos_token": END_OF_TEXT}))
    first = write_run_json(run, LLAMA, tokenizer, 256)
    before = {path.name: path.read_text() for path in run.iterdir()}
    assert before.keys() == {"run.json", "tokenizer.json", "tokenizer_config.json"}
    assert write_run_json(run, LLAMA, tokenizer.parent, 256) == first == read_run_json(run)
    for config, eos_id in ((replace(LLAMA, n_layers=3), 256), (LLAMA, 7)):
        fault = "run is the folder of another run, of model a-llama; name another: (n_layers is 2|eos_id is 256) there"
        with pytest.raises(ValueError, match=fault):
            write_run_json(run, config, tokenizer, eos_id)
    other = write_tokenizer(tmp_path / "other dataset")
    other.write_text(other.read_text().replace('"b"', '"bb"'))
    with pytest.raises(ValueError, match="name another: its tokenizer is another$"):
        write_run_json(run, LLAMA, other, 256)
    assert {path.name: path.read_text() for path in run.iterdir()} == before
    for config, eos_id, message in (
        (replace(LLAMA, vocab_size=256), 256, "has 257 ids, the model 256"),
        (LLAMA, 257, "it has no token 257 to end documents with"),
    ):
        with pytest.raises(ValueError, match=message):
            write_run_json(tmp_path / "other", config, tokenizer, eos_id)
        assert not (tmp_path / "other").exists()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "run.json is damaged"),
        ("[]", "run.json is damaged"),
        ('{"layout": 9}', "run.json is of layout 9; this version reads 1"),
        ('{"layout": 1, "eos_id": 3}', "run.json is damaged: 'model'"),
        ('{"layout": 1, "eos_id": 3, "model": {"rope_scaling": null, "d": 1}}', "run.json is damaged: .* argument 'd'"),
        ('{"layout": 1, "model": {"rope_scaling": {}}}', "run.json is damaged"),
    ],
)
def test_descriptions_that_cannot_be_read(content, message, tmp_path):
    write_run(tmp_path / "run")
    (tmp_path / "run" / "run.json").write_text(content)
    with pytest.raises(ValueError, match=message):
        read_run_json(tmp_path / "run")
