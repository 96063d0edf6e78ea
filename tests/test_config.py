"""Model sizes against literal counts, and configurations that must be refused."""

from dataclasses import replace

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from cs336_systems.config import HANDOUT_SIZES, MODEL_SIZES, SIZE_ALIASES, ModelConfig, resolve_size
from cs336_systems.model import TransformerLM

N_PARAMETERS = {
    # the handout's rows: 2 V D + D + L (4 D^2 + 3 D F + 2 D), by hand
    "tiny": 139_584,
    "small": 128_625_408,
    "medium": 423_183_360,
    "large": 969_411_840,
    "xl": 1_998_235_200,
    "2.7b": 3_406_809_600,
    "10b": 12_832_823_808,
    "leaderboard-8b": 8_125_698_048,
    # 16,384 x 768 + 12 (2 x 768^2 + 2 x 768 x 128 + 768 + 256 + 3 x 768 x 3072 + 2 x 768) + 768
    "qwen-100m": 114_064_128,
    # as published with the weights
    "llama3-1b": 1_235_814_400,
    "llama3-8b": 8_030_261_248,
    "qwen2.5-0.5b": 494_032_768,
    "qwen2.5-1.5b": 1_543_714_304,
    "qwen2.5-3b": 3_085_938_688,
    "qwen2.5-7b": 7_615_616_512,
    "qwen2.5-14b": 14_770_033_664,
    "qwen2.5-32b": 32_763_876_352,
    "qwen3-0.6b": 596_049_920,
    "qwen3-1.7b": 1_720_574_976,
    "qwen3-4b": 4_022_468_096,
    "qwen3-8b": 8_190_735_360,
}

VALID = ModelConfig(name="valid", d_model=48, d_ff=64, n_layers=1, n_heads=4)


class OnlyMetaTensors(TorchDispatchMode):
    """Fails at the first operation that makes a tensor with storage."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        made = func(*args, **(kwargs or {}))
        for tensor in made if isinstance(made, (tuple, list)) else (made,):
            if isinstance(tensor, torch.Tensor):
                assert tensor.is_meta, f"{func} made a {tensor.device} tensor of shape {tuple(tensor.shape)}"
        return made


def test_every_size_has_a_literal_count():
    assert N_PARAMETERS.keys() == MODEL_SIZES.keys()


@pytest.mark.parametrize("name", MODEL_SIZES)
def test_parameter_count(name):
    assert MODEL_SIZES[name].n_parameters == N_PARAMETERS[name]


@pytest.mark.parametrize("name", MODEL_SIZES)
def test_a_meta_model_has_the_counted_parameters_and_allocates_nothing(name):
    config = MODEL_SIZES[name]
    with OnlyMetaTensors():
        model = TransformerLM(config, device="meta")
    assert sum(parameter.numel() for parameter in model.parameters()) == N_PARAMETERS[name]
    assert sum(parameter.numel() for parameter in model.layers[0].parameters()) == config.n_block_parameters


def test_a_name_is_its_key():
    assert all(config.name == name for name, config in MODEL_SIZES.items())
    assert set(HANDOUT_SIZES) <= MODEL_SIZES.keys()
    assert set(SIZE_ALIASES.values()) <= MODEL_SIZES.keys()


def test_head_widths():
    assert (MODEL_SIZES["small"].d_head, MODEL_SIZES["small"].kv_heads, MODEL_SIZES["small"].d_kv) == (64, 12, 768)
    assert (MODEL_SIZES["llama3-8b"].d_head, MODEL_SIZES["llama3-8b"].kv_heads) == (128, 8)
    assert MODEL_SIZES["llama3-8b"].d_kv == 1024


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"d_model": 0}, "d_model must be a positive integer, got 0"),
        ({"d_ff": -1}, "d_ff must be a positive integer, got -1"),
        ({"n_layers": 0}, "n_layers must be a positive integer, got 0"),
        ({"n_heads": 0}, "n_heads must be a positive integer, got 0"),
        ({"n_kv_heads": 0}, "n_kv_heads must be a positive integer, got 0"),
        ({"vocab_size": 0}, "vocab_size must be a positive integer, got 0"),
        ({"context_length": 0}, "context_length must be a positive integer, got 0"),
        ({"max_context_length": 0}, "max_context_length must be a positive integer, got 0"),
        ({"d_ff": 64.0}, r"d_ff must be a positive integer, got 64\.0"),
        ({"n_heads": 5}, "n_heads must divide d_model, got d_model=48 and n_heads=5"),
        ({"n_kv_heads": 3}, "n_kv_heads must divide n_heads, got n_kv_heads=3 and n_heads=4"),
        ({"n_kv_heads": 8}, "n_kv_heads must divide n_heads, got n_kv_heads=8 and n_heads=4"),
        ({"n_heads": 16}, "must be even for rotary embeddings, got 3"),
        ({"context_length": 9, "max_context_length": 8}, "context length 9 is beyond the 8 tokens of valid"),
    ],
)
def test_an_impossible_shape_is_refused(change, message):
    with pytest.raises(ValueError, match=message):
        replace(VALID, **change)


def test_at_context_changes_the_context_alone():
    config = MODEL_SIZES["xl"].at_context(8192)
    assert config == replace(MODEL_SIZES["xl"], context_length=8192)
    assert MODEL_SIZES["xl"].context_length == 512


def test_at_context_refuses_more_than_the_weights_were_trained_for():
    assert MODEL_SIZES["llama3-8b"].at_context(8192).context_length == 8192
    with pytest.raises(ValueError, match="context length 8193 is beyond the 8192 tokens of llama3-8b"):
        MODEL_SIZES["llama3-8b"].at_context(8193)


@pytest.mark.parametrize("name", [*MODEL_SIZES, *SIZE_ALIASES])
def test_resolve_size_takes_any_case(name):
    assert resolve_size(name.upper()) is MODEL_SIZES[SIZE_ALIASES.get(name, name)]


def test_the_2026_handouts_xl_is_the_2025_handouts_2_7b():
    assert resolve_size("xl-2026") is MODEL_SIZES["2.7b"]
    assert resolve_size("xl") is MODEL_SIZES["xl"]


@pytest.mark.parametrize(("typed", "meant"), [("smal", "small"), ("llama-8b", "llama3-8b"), ("qwen-7b", "qwen2.5-7b")])
def test_an_unknown_size_is_answered_with_near_names(typed, meant):
    with pytest.raises(ValueError, match=f"unknown model size '{typed}': did you mean [^?]*{meant}") as refusal:
        resolve_size(typed)
    assert all(name in str(refusal.value) for name in MODEL_SIZES)


def test_a_size_like_no_other_is_answered_with_all_names():
    with pytest.raises(ValueError, match="unknown model size '@@@': known sizes are tiny, small, "):
        resolve_size("@@@")
