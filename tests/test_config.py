"""Model sizes against literal counts, and configurations that must be refused."""

from dataclasses import replace

import pytest

from cs336_systems.config import MODEL_SIZES, SIZE_ALIASES, ModelConfig, resolve_size
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
    "llama3-70b": 70_553_706_496,
    "llama3.1-8b": 8_030_261_248,
    "llama3.1-405b": 405_853_388_800,
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


def test_every_size_has_its_literal_count_and_a_model_has_as_many():
    assert {name: config.n_parameters for name, config in MODEL_SIZES.items()} == N_PARAMETERS
    for name, config in MODEL_SIZES.items():
        model = TransformerLM(replace(config, n_layers=1), device="meta")
        counts = [sum(each.numel() for each in part.parameters()) for part in (model, model.layers[0])]
        assert counts == [N_PARAMETERS[name] - (config.n_layers - 1) * counts[1], config.n_block_parameters], name


@pytest.mark.parametrize(
    ("change", "value"),
    [
        ({"vocab_size": 0}, "vocab_size .* 0"),
        ({"d_ff": 64.0}, r"d_ff .* 64\.0"),
        ({"n_heads": 5}, "d_model=48 and n_heads=5"),
        ({"n_kv_heads": 3}, "n_kv_heads=3 and n_heads=4"),
        ({"n_kv_heads": 8}, "n_kv_heads=8 and n_heads=4"),
        ({"n_heads": 16}, "even .* 3"),
        ({"rope_theta": 0.0}, r"0\.0 and 1e-05"),
        ({"rms_norm_eps": float("nan")}, "and nan"),
        ({"context_length": 9, "max_context_length": 8}, "9 .* 8 tokens of valid"),
    ],
)
def test_an_impossible_shape_is_refused(change, value):
    with pytest.raises(ValueError, match=value):
        replace(VALID, **change)


def test_at_context_changes_the_context_alone_up_to_what_the_weights_were_trained_for():
    assert MODEL_SIZES["xl"].at_context(8192) == replace(MODEL_SIZES["xl"], context_length=8192)
    assert MODEL_SIZES["xl"].context_length == 512
    assert MODEL_SIZES["llama3-8b"].at_context(8192).context_length == 8192
    with pytest.raises(ValueError, match="8193 .* 8192 tokens of llama3-8b"):
        MODEL_SIZES["llama3-8b"].at_context(8193)


def test_a_size_has_one_meaning_in_any_case_and_an_unknown_one_is_answered_with_near_names():
    for name in (*MODEL_SIZES, *SIZE_ALIASES):
        assert resolve_size(name.upper()) is MODEL_SIZES[SIZE_ALIASES.get(name, name)]
    assert resolve_size("xl-2026") is MODEL_SIZES["2.7b"]
    for typed, meant in {"smal": "small", "llama-8b": "llama3-8b", "qwen-7b": "qwen2.5-7b", "@@@": "tiny"}.items():
        with pytest.raises(ValueError, match=f"'{typed}': .*{meant}") as refusal:
            resolve_size(typed)
        assert all(name in str(refusal.value) for name in MODEL_SIZES)
