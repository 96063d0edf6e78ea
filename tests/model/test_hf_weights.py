"""Checkpoints through real files, and the model against transformers' own Llama, Qwen2 and Qwen3.

Agreement is judged in two steps. In fp64 both must give the same logits and gradients but for fp64 rounding: that is
where a wrong formula shows. In fp32 our distance from that answer may be no more than a small multiple of transformers'
own distance from it, so the tolerance is the rounding of an implementation that is not ours.
"""

import json
from dataclasses import replace

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    modeling_rope_utils,
)
from transformers.models.llama import modeling_llama
from transformers.models.qwen2 import modeling_qwen2
from transformers.models.qwen3 import modeling_qwen3

from cs336_systems.config import MODEL_SIZES, ModelConfig, RopeScaling
from cs336_systems.model import TransformerLM
from cs336_systems.model.hf_weights import config_from_hf, config_to_hf, load_hf_weights, save_hf_weights, to_hf_name

SHAPE = {"vocab_size": 61, "hidden_size": 32, "intermediate_size": 56, "num_hidden_layers": 2}
SHAPE |= {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 128}
# With theta 500 and 8-dimensional heads, 64 tokens are 10.2, 2.2, 0.5 and 0.1 turns: kept, between, slowed, slowed.
LLAMA3_ROPE = {"rope_type": "llama3", "rope_theta": 500.0, "factor": 8.0, "low_freq_factor": 1.0}
LLAMA3_ROPE |= {"high_freq_factor": 4.0, "original_max_position_embeddings": 64}
FAMILIES = {
    "llama-tied": lambda: LlamaConfig(**SHAPE, rope_parameters=dict(LLAMA3_ROPE), tie_word_embeddings=True),
    "qwen2": lambda: Qwen2Config(**SHAPE, rope_parameters={"rope_type": "default", "rope_theta": 1e6}),
    "qwen3": lambda: Qwen3Config(**SHAPE, head_dim=12, rope_parameters={"rope_type": "default", "rope_theta": 1e6}),
}
KINDS = {"llama": LlamaForCausalLM, "qwen2": Qwen2ForCausalLM, "qwen3": Qwen3ForCausalLM}
N_TOKENS = 96

TINY = ModelConfig(name="tiny-hf", d_model=16, d_ff=24, n_layers=2, n_heads=4, n_kv_heads=2, vocab_size=30)


def hf_model(family: str) -> PreTrainedModel:
    """A random model in fp32 whose gains and biases are far from one and zero, so that a dropped one shows."""
    config = FAMILIES[family]()
    model = KINDS[config.model_type](config)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.normal_(generator=generator)
            if "norm" in name:
                parameter.mul_(0.3).add_(1)
            elif parameter.ndim == 2 and "embed" not in name:
                parameter.mul_(parameter.shape[1] ** -0.5)
    return model


def reload_hf(family: str, folder, dtype: torch.dtype) -> PreTrainedModel:
    kind = KINDS[family.partition("-")[0]]
    model, report = kind.from_pretrained(folder, dtype=dtype, attn_implementation="eager", output_loading_info=True)
    assert not any(report.values()), report
    return model


def load_ours(folder, dtype: torch.dtype = torch.float32) -> TransformerLM:
    model = TransformerLM(config_from_hf(folder), dtype=dtype)
    load_hf_weights(model, folder)
    return model


class Fp64Torch:
    """``torch`` as transformers' model files see it, but for ``float32``: their fp64 models round to it on the way."""

    float32 = float = torch.float64

    def __getattr__(self, name):
        return getattr(torch, name)


@pytest.fixture
def upcasts_to_fp64(monkeypatch):
    """transformers computes norms, softmax and rotary angles in fp32 whatever the model's dtype; here in fp64."""
    for module in (modeling_llama, modeling_qwen2, modeling_qwen3, modeling_rope_utils):
        monkeypatch.setattr(module, "torch", Fp64Torch())
    monkeypatch.setattr(torch.Tensor, "float", torch.Tensor.double)
    return monkeypatch


def logits_and_gradients(model: torch.nn.Module) -> dict[str, Tensor]:
    """Logits, and the gradient of a random projection of them for every parameter, under Hugging Face's names."""
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(SHAPE["vocab_size"], (2, N_TOKENS), generator=generator)
    direction = torch.randn(2, N_TOKENS, SHAPE["vocab_size"], dtype=torch.float64, generator=generator)
    ours = isinstance(model, TransformerLM)
    logits = model(ids) if ours else model(ids, use_cache=False).logits
    (logits * direction.to(logits.dtype)).sum().backward()
    gradients = {to_hf_name(name) if ours else name: p.grad for name, p in model.named_parameters()}
    assert all(gradient is not None for gradient in gradients.values())
    return {"logits": logits.detach(), **gradients}


def relative_errors(results: dict[str, Tensor], oracle: dict[str, Tensor]) -> dict[str, float]:
    assert results.keys() == oracle.keys()
    norm = torch.linalg.vector_norm
    return {
        name: (norm(results[name].to(torch.float64) - exact) / norm(exact)).item() for name, exact in oracle.items()
    }


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_and_every_gradient_agree_with_transformers(family, tmp_path, upcasts_to_fp64):
    hf_model(family).save_pretrained(folder := tmp_path)
    oracle = logits_and_gradients(reload_hf(family, folder, torch.float64))
    upcasts_to_fp64.undo()
    ours_fp64 = logits_and_gradients(load_ours(folder, torch.float64))
    # A few thousand roundings of 2^-53; a single one to fp32, anywhere, would be 6e-8.
    assert {name: error for name, error in relative_errors(ours_fp64, oracle).items() if not error < 1e-12} == {}

    theirs = relative_errors(logits_and_gradients(reload_hf(family, folder, torch.float32)), oracle)
    ours = relative_errors(logits_and_gradients(load_ours(folder)), oracle)
    eps = torch.finfo(torch.float32).eps
    assert {name: (ours[name], theirs[name]) for name in oracle if not ours[name] <= 2 * theirs[name] + eps} == {}


def test_shards_hold_the_same_model_as_one_file(tmp_path):
    model = hf_model("llama-tied")
    model.save_pretrained(tmp_path / "one")
    model.save_pretrained(tmp_path / "many", max_shard_size="12KB")
    assert len(list((tmp_path / "many").glob("*.safetensors"))) > 3
    assert not (tmp_path / "many" / "model.safetensors").exists()
    one, many = (load_ours(tmp_path / name) for name in ("one", "many"))
    for (name, expected), actual in zip(one.named_parameters(), many.parameters(), strict=True):
        assert torch.equal(actual, expected), name


def test_a_config_comes_back(tmp_path):
    wider = replace(MODEL_SIZES["qwen2.5-0.5b"], head_dim=128)
    for config in (*MODEL_SIZES.values(), wider):
        write_config(tmp_path, config_to_hf(config))
        context = config.max_context_length or config.context_length
        published = {"context_length": context, "max_context_length": context}
        named = {"name": tmp_path.name, "n_kv_heads": config.kv_heads}
        assert config_from_hf(tmp_path) == replace(config, **named, **published)


def test_shards_of_our_own(tmp_path):
    model = TransformerLM(TINY)
    save_hf_weights(dict(model.named_parameters()), tmp_path, shard_bytes=2000)
    assert len(list(tmp_path.glob("model-0000?-of-*.safetensors"))) > 3
    again = load_into_new_model(tmp_path)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), again.parameters(), strict=True))
    for name in ("head.weight", "layers.0.ffn.w4.weight", "lm_head.scale"):
        with pytest.raises(ValueError, match=repr(name)):
            save_hf_weights({name: torch.zeros(1)}, tmp_path)


def stored_weights(config: ModelConfig) -> dict[str, Tensor]:
    """Random fp32 weights of every name that ``config`` has."""
    generator = torch.Generator().manual_seed(2)
    shapes = {to_hf_name(name): p.shape for name, p in TransformerLM(config, device="meta").named_parameters()}
    return {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}


def assert_refused(model: TransformerLM, folder, message: str, error: type[Exception] = ValueError) -> None:
    """One sentence, and the model as it was."""
    before = {name: parameter.clone() for name, parameter in model.named_parameters()}
    with pytest.raises(error, match=message) as refusal:
        load_hf_weights(model, folder)
    assert "\n" not in str(refusal.value)
    assert all(torch.equal(before[name], parameter) for name, parameter in model.named_parameters())


def test_a_model_from_meta_is_complete_after_loading(tmp_path):
    save_file(weights := stored_weights(TINY), tmp_path / "model.safetensors")
    shell = TransformerLM(TINY, device="meta")
    with pytest.raises(ValueError, match="meta device and has no storage to load into; call to_empty first"):
        load_hf_weights(shell, tmp_path)
    with pytest.raises(ValueError, match="meta device and has no weights to save"):
        save_hf_weights(shell, tmp_path)
    model = shell.to_empty(device="cpu")
    for table in model.rotary.buffers():
        table.fill_(float("nan"))
    load_hf_weights(model, tmp_path)
    built = load_into_new_model(tmp_path)
    ids = torch.arange(20)[None]
    assert torch.equal(model(ids), built(ids))
    narrow = TransformerLM(TINY, dtype=torch.bfloat16)
    before = {name: parameter.data_ptr() for name, parameter in narrow.named_parameters()}
    load_hf_weights(narrow, tmp_path)
    for name, parameter in narrow.named_parameters():
        assert parameter.data_ptr() == before[name]
        assert torch.equal(parameter, weights[to_hf_name(name)].bfloat16()), name


def load_into_new_model(folder) -> TransformerLM:
    model = TransformerLM(TINY)
    load_hf_weights(model, folder)
    return model


def test_weights_that_do_not_fit_are_named(tmp_path):
    weights, file = stored_weights(TINY), tmp_path / "model.safetensors"

    def refused(message, config=TINY, without=(), **changed):
        stored = {name: tensor for name, tensor in weights.items() if name not in without}
        save_file(stored | {f"model.{name}": tensor for name, tensor in changed.items()}, file)
        assert_refused(TransformerLM(config), tmp_path, message)

    up = "layers.{}.mlp.up_proj.weight"
    message = r"tiny-hf: it lacks model\.layers\.1\.mlp\.up_proj\.weight and also has model\.layers\.2\."
    refused(message, without=["model." + up.format(1)], **{up.format(2): torch.zeros(1)})
    refused("it lacks .*k_proj.bias", config=replace(TINY, qkv_bias=True))
    refused(r"k_proj\.weight .* \(16, 16\), .* \(8, 16\)", **{"layers.0.self_attn.k_proj.weight": torch.zeros(16, 16)})
    refused(r"model\.norm\.weight .* I8", **{"norm.weight": torch.ones(16, dtype=torch.int8)})
    save_file(stored_weights(replace(TINY, qkv_bias=True)), file)
    assert_refused(TransformerLM(TINY), tmp_path, "it also has .*k_proj.bias")


def test_old_rotary_buffers_are_ignored(tmp_path):
    weights = stored_weights(TINY)
    weights |= {f"model.layers.{layer}.self_attn.rotary_emb.inv_freq": torch.ones(2) for layer in range(2)}
    weights["model.rotary_emb.inv_freq"] = torch.ones(2)
    save_file(weights, tmp_path / "model.safetensors")
    assert torch.equal(load_into_new_model(tmp_path).ln_final.weight, weights["model.norm.weight"])


def test_a_tied_model_takes_an_equal_head_and_refuses_another(tmp_path):
    tied = replace(TINY, tie_embeddings=True)
    weights = stored_weights(tied)
    assert "lm_head.weight" not in weights
    head = weights["model.embed_tokens.weight"].clone()
    save_file({**weights, "lm_head.weight": head}, tmp_path / "model.safetensors")
    model = TransformerLM(tied)
    load_hf_weights(model, tmp_path)
    assert torch.equal(model.lm_head.weight, head)
    assert model.lm_head.weight is model.token_embeddings.weight

    head[3, 5] += 1
    save_file({**weights, "lm_head.weight": head}, tmp_path / "model.safetensors")
    assert_refused(TransformerLM(tied), tmp_path, r"lm_head\.weight in .* differs")
    save_file({**weights, "lm_head.weight": head[1:].clone()}, tmp_path / "model.safetensors")
    assert_refused(TransformerLM(tied), tmp_path, r"lm_head\.weight .* \(29, 16\), .* \(30, 16\)")


def test_files_that_are_no_safetensors_are_refused(tmp_path):
    model, file = TransformerLM(TINY), tmp_path / "model.safetensors"
    assert_refused(model, tmp_path / "absent", "absent", FileNotFoundError)
    torch.save(stored_weights(TINY), tmp_path / "pytorch_model.bin")
    assert_refused(model, tmp_path, r"neither model\.safetensors nor ", FileNotFoundError)
    pickle = (tmp_path / "pytorch_model.bin").read_bytes()
    for content in (b"", b"\x10\x00\x00\x00\x00\x00\x00\x00not json", b"\xff" * 64, pickle):
        file.write_bytes(content)
        assert_refused(model, tmp_path, r"model\.safetensors cannot be read as safetensors")


def test_an_index_names_only_safetensors_of_its_own_folder(tmp_path):
    folder = tmp_path / "checkpoint"
    folder.mkdir()
    save_file(stored_weights(TINY), tmp_path / "x.safetensors")
    index = folder / "model.safetensors.index.json"
    for shard in ("../x.safetensors", "/etc/x.safetensors", "sub/x.safetensors", "..", "weights.bin"):
        index.write_text(json.dumps({"weight_map": dict.fromkeys(stored_weights(TINY), shard)}))
        assert_refused(TransformerLM(TINY), folder, f"index.json names '{shard}'")
    for content, error, message in (
        ("{", ValueError, "is not a JSON file"),
        ("[]", ValueError, "a JSON object"),
        ("{}", ValueError, "no weight_map"),
        ('{"weight_map": {"a": 1}}', ValueError, "no weight_map"),
        ('{"weight_map": {"a": "x.safetensors"}}', FileNotFoundError, r"names x\.safetensors"),
    ):
        index.write_text(content)
        assert_refused(TransformerLM(TINY), folder, rf"index\.json .*{message}", error)


def test_a_weight_in_two_shards_is_refused(tmp_path):
    for name in ("a", "b"):
        save_file(stored_weights(TINY), tmp_path / f"{name}.safetensors")
    index = {"weight_map": {"model.norm.weight": "a.safetensors", "lm_head.weight": "b.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    assert_refused(TransformerLM(TINY), tmp_path, "is in two files of ")


LLAMA = {"model_type": "llama", "attention_bias": False, "hidden_act": "silu", "num_attention_heads": 32}
LLAMA |= {"num_key_value_heads": 8, "rms_norm_eps": 1e-05, "rope_theta": 500000.0, "vocab_size": 128256}
LLAMA3_SCALING = {"rope_type": "llama3", "factor": 32.0, "high_freq_factor": 4.0, "low_freq_factor": 1.0}
LLAMA3_SCALING |= {"original_max_position_embeddings": 8192}
QWEN = {"hidden_act": "silu", "max_position_embeddings": 32768, "rms_norm_eps": 1e-06, "vocab_size": 151936}
QWEN |= {"tie_word_embeddings": True, "use_sliding_window": False}


def sizes(hidden, intermediate, layers):
    return {"hidden_size": hidden, "intermediate_size": intermediate, "num_hidden_layers": layers}


# As published: Llama-3.2-1B, Meta-Llama-3-8B, Qwen2.5-0.5B, Qwen3-0.6B-Base; no fields of tokenizer and generation.
PUBLISHED = {
    "llama3-1b": LLAMA
    | sizes(2048, 8192, 16)
    | {"head_dim": 64, "max_position_embeddings": 131072, "mlp_bias": False, "pretraining_tp": 1}
    | {"rope_scaling": LLAMA3_SCALING, "tie_word_embeddings": True},
    "llama3-8b": LLAMA
    | sizes(4096, 14336, 32)
    | {"max_position_embeddings": 8192, "rope_scaling": None, "tie_word_embeddings": False},
    "qwen2.5-0.5b": QWEN
    | sizes(896, 4864, 24)
    | {"model_type": "qwen2", "max_window_layers": 24, "num_attention_heads": 14, "num_key_value_heads": 2}
    | {"rope_theta": 1000000.0, "sliding_window": 32768, "use_mrope": False},
    "qwen3-0.6b": QWEN
    | sizes(1024, 3072, 28)
    | {"model_type": "qwen3", "attention_bias": False, "head_dim": 128, "max_window_layers": 28}
    | {"num_attention_heads": 16, "num_key_value_heads": 8, "rope_scaling": None, "rope_theta": 1000000},
}


def write_config(folder, config: dict):
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_published_config_is_the_named_size(name, tmp_path):
    config = config_from_hf(write_config(tmp_path, PUBLISHED[name]))
    size = MODEL_SIZES[name]
    assert config == replace(size.at_context(PUBLISHED[name]["max_position_embeddings"]), name=tmp_path.name)


def test_both_layouts_of_rope_parameters_are_read(tmp_path):
    hf = PUBLISHED["llama3-1b"] | {"rope_scaling": None}
    for theta_inside in (True, False):
        rope = LLAMA3_SCALING | ({"rope_theta": 7.0} if theta_inside else {})
        given = hf | {"rope_theta": None if theta_inside else 7.0, "rope_parameters": rope}
        config = config_from_hf(write_config(tmp_path, given))
        assert config.rope_theta == 7.0
        assert config.rope_scaling == RopeScaling(32.0, 1.0, 4.0, 8192)


def test_what_old_configs_leave_out_has_transformers_defaults(tmp_path):
    left_out = ("rope_theta", "rope_scaling", "num_key_value_heads", "tie_word_embeddings", "attention_bias")
    hf = {name: value for name, value in PUBLISHED["llama3-8b"].items() if name not in left_out}
    config = config_from_hf(write_config(tmp_path, hf))
    assert (config.rope_theta, config.rope_scaling, config.kv_heads) == (10_000.0, None, 32)
    assert not config.tie_embeddings


@pytest.mark.parametrize(
    ("change", "value"),
    [
        ({"model_type": "mistral"}, "'mistral'"),
        ({"model_type": None}, "model_type"),
        ({"hidden_size": None}, "hidden_size"),
        ({"hidden_size": "2048"}, "'2048'"),
        ({"hidden_act": "gelu"}, "'gelu'"),
        ({"attention_bias": True}, "attention_bias True"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "'sliding_attention'"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 2.0}}, "'yarn'"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 2.0}}, "low_freq_factor"),
        ({"rope_scaling": {"full_attention": {"rope_type": "default"}}}, "only one set for all layers is"),
        ({"rope_scaling": [2.0]}, r"\[2\.0\]"),
        ({"partial_rotary_factor": 0.5}, r"partial_rotary_factor 0\.5"),
        ({"num_key_value_heads": 5}, "n_kv_heads=5 and n_heads=32"),
    ],
)
def test_a_config_that_the_model_does_not_compute_is_refused(change, value, tmp_path):
    with pytest.raises(ValueError, match=value) as refusal:
        config_from_hf(write_config(tmp_path, PUBLISHED["llama3-1b"] | change))
    assert "\n" not in str(refusal.value)
