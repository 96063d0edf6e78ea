"""Runs that train adapters: equal to transformers' model with the formula, resumed, merged, and as peft's folder."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from cs336_systems.config import ADAPTED
from cs336_systems.distributed.checkpoint import complete_checkpoints
from cs336_systems.model.hf_weights import to_hf_name
from cs336_systems.pretraining.adapters import export_adapter
from cs336_systems.pretraining.card_plan import CardPlan
from cs336_systems.pretraining.checkpoint import load_trained, load_weights
from cs336_systems.pretraining.export import export_saved
from cs336_systems.pretraining.options import TrainOptions
from cs336_systems.pretraining.plan_options import Asked
from cs336_systems.pretraining.preparation import prepare
from cs336_systems.pretraining.trainer import run_prepared, train
from tests.distributed.checks import spawn
from tests.pretraining.checkpointed import FAMILIES, LLAMA, export_model
from tests.pretraining.trained import copy_until, options, train_each

BASE = replace(LLAMA, d_ff=64)
"""Of sizes that products in fp8 take."""


@pytest.fixture(scope="module")
def folder(folder) -> Path:
    """With data, and the folders of two models to begin with."""
    for name, config in (("llama", BASE), ("qwen", FAMILIES["qwen"])):
        export_model(folder / name, config)
    return folder


def lora_options(folder: Path, out: str = "run", base: str = "llama", **changes):
    plain = {"out": folder / out, "init": folder / base, "lora_rank": 4, "lora_alpha": 6.0, "export": False}
    return options(folder, **plain | changes)


@pytest.fixture(scope="module")
def trained(folder, alone):
    """A run of ten steps, and its model at the end."""
    prepared = prepare(lora_options(folder), alone)
    run_prepared(prepared, alone)
    return prepared


class _Adapted(nn.Module):
    """A Linear of transformers with the formula beside it."""

    def __init__(self, linear: nn.Linear, a: torch.Tensor, b: torch.Tensor, scale: float) -> None:
        super().__init__()
        self.linear, self.scale = linear, scale
        self.a, self.b = (nn.Parameter(each.detach().clone()) for each in (a, b))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x) + self.scale * (x @ self.a.T) @ self.b.T


def by_formula(theirs, ours):
    """A model of transformers with the formula in the places of our adapters, and its parameters by our names."""
    theirs.requires_grad_(False)
    adapted = {}
    for name in (name for name in ours if name.endswith("lora_A.weight")):
        module = to_hf_name(name).removesuffix(".lora_A.weight")
        parent, _, child = module.rpartition(".")
        linear = theirs.get_submodule(module)
        own = _Adapted(linear, ours[name], ours[name.replace("lora_A", "lora_B")], 6.0 / 4)
        setattr(theirs.get_submodule(parent), child, own)
        adapted |= {name: own.a, name.replace("lora_A", "lora_B"): own.b}
    return theirs, adapted


def by_peft(theirs, ours):
    """As ``by_formula``, with peft's own adapters."""
    peft = pytest.importorskip("peft")
    modules = {to_hf_name(name).split(".")[-3] for name in ours}
    theirs = peft.get_peft_model(theirs, peft.LoraConfig(r=4, lora_alpha=6, target_modules=modules))
    trained = {name: p for name, p in theirs.named_parameters() if p.requires_grad}
    adapted = {}
    for name, own in ours.items():
        at = f"base_model.model.{to_hf_name(name)}".removesuffix(".weight") + ".default.weight"
        adapted[name] = trained.pop(at)
        adapted[name].data.copy_(own.detach())
    assert not trained
    return theirs, adapted


@pytest.mark.parametrize("oracle", [by_formula, by_peft])
@pytest.mark.parametrize("base, on", [("llama", ADAPTED), ("qwen", ("qkv", "down"))])
def test_ten_steps_are_those_of_transformers_with_adapters(folder, alone, base, on, oracle):
    transformers = pytest.importorskip("transformers")
    prepared = prepare(lora_options(folder, f"steps-{base}-{oracle.__name__}", base, lora_on=on), alone)
    ours = {name: p for name, p in prepared.step.model.named_parameters() if p.requires_grad}
    model = transformers.AutoModelForCausalLM.from_pretrained(folder / base, dtype=torch.float32)
    theirs, adapted = oracle(model, ours)
    assert adapted.keys() == ours.keys() and len(ours) == 2 * 2 * (7 if on == ADAPTED else 4)
    optimizer = torch.optim.AdamW(adapted.values(), lr=0.0, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1)
    batches = iter(prepared.loader)
    for step in range(10):
        for group in (*optimizer.param_groups, *prepared.step.optimizer.param_groups):
            group["lr"] = prepared.rate(step)
        ids, targets = next(batches)
        loss = prepared.step(ids, targets)
        expected = nn.functional.cross_entropy(theirs(ids).logits.flatten(0, 1), targets.flatten())
        expected.backward()
        nn.utils.clip_grad_norm_(adapted.values(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        torch.testing.assert_close(loss, expected.detach(), rtol=1e-5, atol=1e-5)
    for name, parameter in ours.items():
        torch.testing.assert_close(parameter, adapted[name], rtol=1e-4, atol=1e-5)
        assert not name.endswith("lora_B.weight") or parameter.abs().max() > 1e-3


def test_what_is_frozen_has_neither_gradients_nor_states(folder, alone):
    prepared = prepare(lora_options(folder, "frozen", total_batch_tokens=256), alone)
    step = prepared.step
    base = {name: p.detach().clone() for name, p in step.model.named_parameters() if not p.requires_grad}
    phases = step.phases("step", *next(iter(prepared.loader)))
    assert list(phases) == ["forward", "backward", "forward 2", "backward 2", "optimizer"]
    for name, phase in phases.items():
        if name == "optimizer":
            assert all((p.grad is not None) == (".lora_" in name) for name, p in step.model.named_parameters())
        phase()
    assert {id(p) for p in step.optimizer.state} == {id(p) for p in step.model.parameters() if p.requires_grad}
    assert len(base) == 2 * 9 + 3
    for name, before in base.items():
        assert torch.equal(step.model.get_parameter(name), before), name


def test_a_run_resumes_to_the_bit_from_checkpoints_that_hold_adapters_alone(folder, alone, trained):
    copy_until(5, folder / "run", folder / "resumed")
    (first,) = complete_checkpoints(folder / "resumed")
    assert train(lora_options(folder, "resumed"), alone).first_step == 5
    one, other = (load_weights(folder / name, merge=False) for name in ("resumed", "run"))
    assert not one.weights and len(one.adapters) == 28 and one.step == other.step == 10
    assert all(torch.equal(tensor, other.adapters[name]) for name, tensor in one.adapters.items())
    stored = load_file(first / "rank-0.safetensors")
    assert {name.split("/")[1] for name in stored} == one.adapters.keys()


def test_a_run_goes_on_from_adapters_of_another_beside_the_same_base_alone(folder, alone, trained):
    branch = lora_options(folder, "branch", resume_from=folder / "run" / "step-00000005")
    assert train(branch, alone).first_step == 5
    one, other = (load_weights(folder / name, merge=False) for name in ("branch", "run"))
    assert all(torch.equal(tensor, other.adapters[name]) for name, tensor in one.adapters.items())
    export_model(folder / "other", BASE, seed=2)
    with pytest.raises(ValueError, match="is of another model: the checksum of its base is "):
        train(replace(branch, init=folder / "other", out=folder / "elsewhere"), alone)


def test_merged_weights_compute_what_adapters_do(folder, trained):
    ids = torch.arange(2 * 16).view(2, 16) * 5 % 256
    with torch.no_grad():
        expected = trained.step.model(ids)
        merged = load_trained(folder / "run", device="cpu", dtype=torch.float32).model(ids)
        base = load_trained(folder / "llama", device="cpu", dtype=torch.float32).model(ids)
        exported = export_saved(folder / "merged", load_weights(folder / "run")).folder
        again = load_trained(exported, device="cpu", dtype=torch.float32).model(ids)
    torch.testing.assert_close(merged, expected, rtol=1e-4, atol=1e-4)
    assert torch.equal(again, merged)
    assert (expected - base).abs().max() > 0.1
    origin = json.loads((exported / "export.json").read_text())["origin"]
    assert origin["adapters merged into"]["base"] == str(folder / "llama")


def test_the_exported_folder_is_pefts(folder, trained):
    saved = load_weights(folder / "run", merge=False)
    assert export_adapter(folder / "adapter", saved.adapters, saved.model.adapters)
    export_adapter(folder / "adapter", saved.adapters, saved.model.adapters)
    config = json.loads((folder / "adapter" / "adapter_config.json").read_text())
    assert (config["r"], config["lora_alpha"], config["base_model_name_or_path"]) == (4, 6, str(folder / "llama"))
    kinds = {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}
    assert set(config["target_modules"]) == kinds
    stored = load_file(folder / "adapter" / "adapter_model.safetensors")
    first = "base_model.model.model.layers.0.self_attn.k_proj"
    assert stored[f"{first}.lora_A.weight"].shape == (4, 32) and stored[f"{first}.lora_B.weight"].shape == (16, 4)
    assert len(stored) == 28
    (folder / "adapter" / "notes").touch()
    with pytest.raises(ValueError, match="has other files"):
        export_adapter(folder / "adapter", saved.adapters, saved.model.adapters)


def test_peft_loads_it(folder, trained):
    peft, transformers = pytest.importorskip("peft"), pytest.importorskip("transformers")
    saved = load_weights(folder / "run", merge=False)
    export_adapter(folder / "for-peft", saved.adapters, saved.model.adapters)
    base = transformers.AutoModelForCausalLM.from_pretrained(folder / "llama", dtype=torch.float32)
    theirs = peft.PeftModel.from_pretrained(base, folder / "for-peft")
    ids = torch.arange(2 * 16).view(2, 16) * 5 % 256
    with torch.no_grad():
        torch.testing.assert_close(theirs(ids).logits, trained.step.model(ids), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    "changes, complaint",
    [
        ({"lora_rank": 0}, "--lora-rank must be positive, got 0"),
        ({"lora_alpha": -1.0}, "--lora-alpha must be positive, got -1.0"),
        ({"lora_rank": 17}, "rank of 17 is larger than layers.0.attn.k_proj.weight, which is 16 x 32"),
        ({"lora_rank": 10**9}, "rank of 1000000000 is larger than layers"),  # before memory is looked at
        ({"lora_on": ()}, "--lora-on needs at least one of qkv, output, gate_up, down"),
        ({"lora_rank": None}, "--lora-alpha 6.0 is for adapters: give --lora-rank, too"),
        ({"init": None}, "--lora-rank 4 needs --init"),
        ({"keep": "autograd-input"}, "LoRA of rank 4 with keep autograd"),
        ({"agree": "every-step", "replicas": 2}, "--agree every-step does not go together with --lora-rank 4"),
    ],
)
def test_options_that_do_not_serve_are_one_sentence(folder, alone, changes, complaint):
    with pytest.raises(ValueError, match=complaint) as error:
        prepare(lora_options(folder, "refused", **changes), alone)
    assert "\n" not in str(error.value)
    assert not (folder / "refused").exists()


def test_a_plan_for_a_card_refuses_adapters(folder):
    asked = replace(TrainOptions.default("cuda"), init=folder / "llama", lora_rank=16)
    with pytest.raises(ValueError, match="--print-plan plans steps that train all weights, not --lora-rank 16"):
        CardPlan.of(asked, Asked(gpu="h200"))


def test_another_base_or_rank_is_refused(folder, alone, trained, tmp_path):
    before = (folder / "run" / "run.json").read_text()
    export_model(tmp_path / "llama", BASE, seed=1)
    for changes, complaint in (
        ({"init": tmp_path / "llama"}, "the checksum of its base is"),
        ({"lora_rank": 2}, "LoRA is rank 4, alpha 6, on qkv output gate_up down there and rank 2"),
        ({"lora_rank": None, "lora_alpha": None}, "LoRA is rank 4, .* there and None here"),
    ):
        with pytest.raises(ValueError, match=complaint):
            train(replace(lora_options(folder), **changes), alone)
    assert (folder / "run" / "run.json").read_text() == before
    weights = folder / "llama" / "model.safetensors"
    weights.rename(weights.with_suffix(".away"))
    try:
        with pytest.raises((ValueError, OSError), match="llama"):
            load_weights(folder / "run")
        assert load_weights(folder / "run", merge=False).adapters
    finally:
        weights.with_suffix(".away").rename(weights)


@pytest.mark.slow
def test_two_ranks_train_what_one_does(folder, alone):
    """Adapters' gradients are averaged or sharded; the frozen weights stay whole, or are gathered."""

    def of(name, **changes):
        rows = {"batch_size": 4, "total_batch_tokens": 128, "steps": 3, "evaluate_every": None}
        return lora_options(folder, name, **rows | changes)

    quantized = {"matmul_dtype": "e4m3"}
    ways = {f"zero-{zero}": {"zero": zero} for zero in (0, 1, 2, 3)} | {"context": {"context": 2, "zero": 3}}
    ways["fp8"] = quantized | {"zero": 3}
    train(of("one", batch_size=8), alone)
    train(of("one-fp8", **quantized), alone)
    outcomes = spawn(train_each, 2, [of(name, **changes) for name, changes in ways.items()])
    assert all(outcome.reason == "done" for outcome in outcomes[0])
    for name in ways:
        one, found = (load_weights(folder / each, merge=False).adapters for each in ("one", name))
        if name == "fp8":
            one = load_weights(folder / "one-fp8", merge=False).adapters
        for key, tensor in one.items():
            torch.testing.assert_close(found[key], tensor, rtol=1e-3, atol=2e-2 if name == "fp8" else 1e-4)
    assert train(of("zero-3", steps=4), alone).first_step == 3  # of the whole adapters
