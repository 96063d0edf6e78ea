"""Exported folders: transformers loads them and computes the same, we read the same bits back, nothing else is lost.

Logits are judged in two steps, as those of loaded weights are: in fp64 both give the same but for fp64 rounding, and in
fp32 we are no further from that than a small multiple of transformers' own distance.
"""

import itertools
import json
import os
import shutil
from dataclasses import replace
from unittest.mock import Mock

import pytest
import tokenizers
import torch
from safetensors import safe_open
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast

from cs336_systems.distributed.process_group import Rank
from cs336_systems.model.hf_weights import config_from_hf
from cs336_systems.pretraining import export as export_module
from cs336_systems.pretraining.checkpoint import ModelOfRun, write_run_json
from cs336_systems.pretraining.export import export
from cs336_systems.pretraining.tokenizer import ByteTokenizer, load_tokenizer, train_bpe
from cs336_systems.pretraining.tokenizing import TokenizeOptions, tokenize
from tests.distributed.checks import spawn
from tests.distributed.disks import Death, Killed, full_disk
from tests.model.test_hf_weights import load_ours
from tests.pretraining.checkpointed import FAMILIES, LLAMA, model_of, write_tokenizer

TEXT = "def f(x_1):\n\treturn ünïcödé + 12345  # 🙂\n"


@pytest.fixture
def tokenizer(tmp_path):
    return write_tokenizer(tmp_path / "tokenizer")


@pytest.fixture
def write(tmp_path, tokenizer):
    """Export a model as ``out``."""

    def write(model, **options):
        return export(tmp_path / "out", model.state_dict(), ModelOfRun(model.config, tokenizer, 256), **options)

    return write


def load_theirs(folder, **options):
    model, report = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True, **options)
    assert not any(report.values()), report
    return model


@pytest.mark.parametrize(("family", "dtype"), list(zip(FAMILIES, [torch.float32, torch.bfloat16] * 2, strict=True)))
def test_reading_back_gives_the_same_bits_and_config(family, dtype, write, tmp_path, monkeypatch):
    model = model_of(FAMILIES[family], dtype)
    monkeypatch.setattr(export_module, "SHARD_BYTES", 9000)
    exported = write(model)
    again = load_ours(tmp_path / "out", dtype)
    for (name, before), after in zip(model.named_parameters(), again.parameters(), strict=True):
        assert torch.equal(before, after), name
    named = {"name": "out", "max_context_length": 48, "n_kv_heads": model.config.kv_heads}
    assert again.config == replace(model.config, **named)
    theirs = load_theirs(tmp_path / "out", dtype="auto")
    assert theirs.dtype == dtype == exported.dtype
    ids = torch.arange(48)[None]
    with torch.no_grad():  # each within its own rounding; the model's tests compare them to the last digits
        torch.testing.assert_close(
            theirs(ids).logits.float(), again(ids).float(), rtol=0, atol=2e3 * torch.finfo(dtype).eps
        )
    assert type(theirs).__name__ == ("Qwen2ForCausalLM" if model.config.qkv_bias else "LlamaForCausalLM")
    shards = [name for name in exported.files if name.startswith("model-0")]
    assert len(shards) > 3
    largest = max(tensor.nbytes for tensor in model.state_dict().values())
    for name in shards:
        with safe_open(tmp_path / "out" / name, framework="pt") as file:
            sizes = [file.get_tensor(key).nbytes for key in file.keys()]  # noqa: SIM118
        assert sum(sizes) <= 9000 or sizes == [largest]


BPE = train_bpe([TEXT, "the theory of the thing\n" * 9, "x = x_1 + 1\n" * 9], 290)


@pytest.mark.parametrize(("family", "kind"), [("llama", "bytes"), ("llama", "bpe"), ("qwen", "bpe")])
def test_the_tokenizer_is_the_runs(family, kind, tmp_path):
    ours = {"bytes": ByteTokenizer(), "bpe": BPE}[kind]
    (tmp_path / "tokenizer.json").write_text(ours.json())
    config = replace(FAMILIES[family], vocab_size=300)
    exported = export(tmp_path / "out", model_of(config).state_dict(), ModelOfRun(config, tmp_path, ours.eos_id))
    assert f"the last {300 - ours.vocab_size} are padding" in exported.notes[0]
    # transformers 5 leaves no other way for models of Qwen's type
    said = "load it from the folder tokenizer inside" in " ".join(exported.notes)
    assert said == (family == "qwen") == ("tokenizer/tokenizer.json" in exported.files)
    theirs = AutoTokenizer.from_pretrained(tmp_path / "out" / ("tokenizer" if said else ""))
    assert [*theirs(TEXT)["input_ids"], theirs.eos_token_id] == ours.encode([TEXT])[0].tolist()
    assert theirs.decode(theirs(TEXT)["input_ids"]) == TEXT
    automatic = AutoTokenizer.from_pretrained(tmp_path / "out")
    for loaded in (theirs, automatic):
        assert loaded.eos_token_id == loaded.bos_token_id == loaded.pad_token_id == ours.eos_id
    assert max(automatic.get_vocab().values()) < ours.vocab_size
    model = load_theirs(tmp_path / "out")
    for settings in (model.config, model.generation_config):
        assert (settings.eos_token_id, settings.bos_token_id) == (ours.eos_id, ours.eos_id)
    assert load_tokenizer(tmp_path / "out").eos_id == ours.eos_id


def test_a_tokenizer_with_a_template_goes_from_data_to_the_export_as_transformers_reads_it(tmp_path):
    definition = tokenizers.Tokenizer.from_str(BPE.json())
    definition.add_special_tokens(["<|begin|>", "<|end|>", "<|pad|>"])
    begin, end, pad = range(BPE.vocab_size, BPE.vocab_size + 3)
    template = tokenizers.processors.TemplateProcessing(single="<|begin|> $A", special_tokens=[("<|begin|>", begin)])
    definition.post_processor = tokenizers.processors.Sequence([tokenizers.processors.ByteLevel(), template])
    PreTrainedTokenizerFast(
        tokenizer_object=definition,
        bos_token="<|begin|>",
        eos_token="<|end|>",
        pad_token="<|pad|>",
        model_max_length=77,
        chat_template="{{ messages[0].content }}",
    ).save_pretrained(tmp_path / "original")
    original = AutoTokenizer.from_pretrained(tmp_path / "original")
    (tmp_path / "a.txt").write_text(TEXT)
    how = {"tokenizer": str(tmp_path / "original"), "evaluation_fraction": 0.0}
    data = tokenize(TokenizeOptions(input=(tmp_path / "a.txt",), out=tmp_path / "data", **how))
    assert data.train is not None
    assert data.train.files[0].tokens.tolist() == [*original(TEXT)["input_ids"], end]
    config = replace(LLAMA, vocab_size=data.vocab_size)
    run = write_run_json(tmp_path / "run", ModelOfRun(config, data.tokenizer, data.eos_id))
    export(tmp_path / "out", model_of(config).state_dict(), run)
    theirs = AutoTokenizer.from_pretrained(tmp_path / "out")
    assert theirs(TEXT)["input_ids"] == original(TEXT)["input_ids"]
    for name in ("bos_token", "eos_token", "pad_token", "model_max_length", "chat_template"):
        assert getattr(theirs, name) == getattr(original, name)
    generation = load_theirs(tmp_path / "out").generation_config
    assert (generation.bos_token_id, generation.eos_token_id, generation.pad_token_id) == (begin, end, pad)
    (tmp_path / "run/tokenizer_config.json").unlink()  # the template alone says how text begins
    export(tmp_path / "out", model_of(config).state_dict(), run)
    assert AutoTokenizer.from_pretrained(tmp_path / "out").bos_token_id == begin


def test_a_tokenizer_of_qwen_comes_through_auto_tokenizer(tmp_path):
    from transformers import Qwen2Tokenizer

    vocab = json.loads(BPE.json())["model"]["vocab"]
    merges = [tuple(pair) for pair in json.loads(BPE.json())["model"]["merges"]]
    original = Qwen2Tokenizer(vocab=vocab, merges=merges, chat_template="{{ messages[0].content }}")
    original.save_pretrained(tmp_path / "qwen")
    config = replace(FAMILIES["qwen"], vocab_size=BPE.vocab_size)
    exported = export(
        tmp_path / "out", model_of(config).state_dict(), ModelOfRun(config, tmp_path / "qwen", BPE.eos_id)
    )
    assert exported.notes == ()
    theirs = AutoTokenizer.from_pretrained(tmp_path / "out")
    assert theirs(TEXT)["input_ids"] == original(TEXT)["input_ids"]
    assert theirs.chat_template == original.chat_template
    assert theirs.bos_token is None
    assert json.loads((tmp_path / "out" / "config.json").read_text())["bos_token_id"] is None


def content(folder):
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_what_may_be_replaced(write, tmp_path):
    out, first, second = tmp_path / "out", model_of(LLAMA), model_of(FAMILIES["qwen"])
    disk = tmp_path / "disk" / "models"
    disk.mkdir(parents=True)
    out.symlink_to(disk)
    write(first)
    write(second)  # an earlier export, untouched
    assert config_from_hf(disk).qkv_bias and out.is_symlink() and os.listdir(disk.parent) == ["models"]
    (tmp_path / "usual").touch()
    modes = {path.stat().st_mode for path in (tmp_path / "usual", *disk.rglob("*")) if path.is_file()}
    assert len(modes) == 1, "weights are not read by others as usual"
    out.unlink()
    write(first)
    for name in ("README.md", "tokenizer/added.json"):
        (out / name).write_text("precious")
        before = content(out)
        with pytest.raises(ValueError, match=f"as {name}; --replace"):
            write(first)
        assert content(out) == before
        write(second, replace=True)
        assert not (out / name).exists()
    (out / "export.json").unlink()
    with pytest.raises(ValueError, match="out .*; --replace replaces it"):
        write(second)
    write(second, replace=True)
    for precious in (out / "thesis.tex", out):
        shutil.rmtree(out)
        precious.parent.mkdir(exist_ok=True)
        precious.write_text("precious")
        for options in ({}, {"replace": True}):
            with pytest.raises(ValueError, match="out is there and no model's folder"):
                write(first, **options)
        assert precious.read_text() == "precious"


def test_an_export_that_fails_leaves_the_earlier_one(write, tmp_path, monkeypatch):
    write(model_of(LLAMA))
    before = content(tmp_path / "out")
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(export_module, "_copy_tokenizer", Mock(side_effect=KeyboardInterrupt))
        write(model_of(LLAMA, seed=1))
    with full_disk(20_000), pytest.raises(OSError, match="File too large.*out.model.safetensors"):
        write(model_of(LLAMA, seed=1))
    assert content(tmp_path / "out") == before
    assert sorted(os.listdir(tmp_path)) == ["out", "tokenizer"]


def die_at_every_operation(rank: Rank, folder):
    """Exports over an earlier one that end before their first, second, ... change to the disk; how many did."""
    death = Death()
    tokenizer = write_tokenizer(folder / "tokenizer")
    models = [model_of(LLAMA, seed=seed) for seed in (0, 1)]
    for n_operations in itertools.count():
        out = folder / f"{n_operations}" / "out"
        for number, model in enumerate(models):
            try:
                with death.after(n_operations if number else float("inf")):
                    export(out, model.state_dict(), ModelOfRun(LLAMA, tokenizer, 256))
            except Killed:
                break
        else:
            return n_operations
        moved = list(out.parent.glob(".out.*.old"))
        found = load_ours(out if out.exists() else moved[0])
        assert any(torch.equal(found.lm_head.weight, model.lm_head.weight) for model in models)
        assert out.exists() or len(moved) == 1


@pytest.mark.slow
def test_a_kill_at_any_moment_loses_nothing(tmp_path):
    (n_deaths,) = spawn(die_at_every_operation, 1, tmp_path)
    assert n_deaths > 15


def test_weights_and_tokenizers_that_are_not_the_models(tmp_path, tokenizer):
    config = replace(LLAMA, tie_embeddings=True)
    weights = model_of(config).state_dict()

    def refuse(message, changed=None, dropped=(), config=config, tokenizer=tokenizer, eos_id=256):
        altered = {name: tensor for name, tensor in (weights | (changed or {})).items() if name not in dropped}
        with pytest.raises(ValueError, match=message):
            export(tmp_path / "out", altered, ModelOfRun(config, tokenizer, eos_id))
        assert os.listdir(tmp_path) == ["tokenizer"]

    refuse(r"a-llama: it lacks ln_final.weight$", dropped=["ln_final.weight"])
    refuse(r"also has layers.0.attn.q_proj.bias$", {"layers.0.attn.q_proj.bias": torch.zeros(32)})
    refuse("lm_head.weight differs", {"lm_head.weight": torch.zeros(264, 32)})
    refuse("torch.bfloat16, torch.float32", {"ln_final.weight": torch.zeros(32).bfloat16()})
    refuse("257 ids, the model 256", config=replace(config, vocab_size=256))
    refuse("no token 263", eos_id=263)
    untied = {name: tensor for name, tensor in weights.items() if name != "lm_head.weight"}
    export(tmp_path / "out", untied, ModelOfRun(config, tokenizer, 256))
