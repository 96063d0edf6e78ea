"""The whole model: causality, replaced operations, construction on meta, tied embeddings, dtypes."""

from collections import Counter
from dataclasses import fields, replace

import pytest
import torch

from cs336_systems.config import ModelConfig
from cs336_systems.model import REFERENCE_OPS, ModelOps, TransformerLM

CONFIG = ModelConfig(
    name="little", d_model=24, d_ff=40, n_layers=3, n_heads=4, n_kv_heads=2, vocab_size=50, context_length=16
)
TIED_WITH_BIASES = replace(CONFIG, tie_embeddings=True, qkv_bias=True)


def token_ids(batch: int = 2, n_tokens: int = 16, seed: int = 1) -> torch.Tensor:
    return torch.randint(CONFIG.vocab_size, (batch, n_tokens), generator=torch.Generator().manual_seed(seed))


def seeded_model(config: ModelConfig = CONFIG, ops: ModelOps = REFERENCE_OPS, **kwargs) -> TransformerLM:
    torch.manual_seed(0)
    return TransformerLM(config, ops, **kwargs)


def assert_same_bits(actual: TransformerLM, expected: TransformerLM) -> None:
    tensors = [dict([*model.named_parameters(), *model.named_buffers()]) for model in (actual, expected)]
    assert tensors[0].keys() == tensors[1].keys()
    for name, tensor in tensors[0].items():
        assert tensor.dtype == tensors[1][name].dtype, name
        assert torch.equal(tensor, tensors[1][name]), name


def counting_ops(counts: Counter[str]) -> ModelOps:
    def counted(name):
        def op(*args, **kwargs):
            counts[name] += 1
            return getattr(REFERENCE_OPS, name)(*args, **kwargs)

        return op

    return ModelOps(**{field.name: counted(field.name) for field in fields(ModelOps)})


def test_a_later_token_leaves_earlier_logits_bitwise_unchanged():
    changed = 9
    model, before = seeded_model(), token_ids()
    after = before.clone()
    after[:, changed] = (after[:, changed] + 1) % CONFIG.vocab_size
    with torch.no_grad():
        logits_before, logits_after = model(before), model(after)
    assert logits_before.shape == (2, 16, CONFIG.vocab_size)
    assert torch.equal(logits_before[:, :changed], logits_after[:, :changed])
    for position in range(changed, 16):
        assert not torch.equal(logits_before[:, position], logits_after[:, position]), position
    with pytest.raises(ValueError, match="17 tokens .* 16"):
        model(token_ids(n_tokens=17))
    for shape in ((16,), (2, 16, 3), (2, 16, 2, 1)):
        with pytest.raises(ValueError, match=rf"\(batch, seq\).*got \({', '.join(map(str, shape))},?\)"):
            model(torch.zeros(shape, dtype=torch.long))


def test_every_operation_goes_through_model_ops():
    counts: Counter[str] = Counter()
    model, ids = seeded_model(ops=counting_ops(counts)), token_ids()
    with torch.no_grad():
        assert torch.equal(model(ids), seeded_model()(ids))
    n_layers = CONFIG.n_layers
    assert counts == {
        "embedding": 1,
        "linear": 7 * n_layers + 1,
        "rms_norm": 2 * n_layers + 1,
        "rotary": 2 * n_layers,
        "attention": n_layers,
        "swiglu": n_layers,
        "stack": 1,
    }


@pytest.mark.parametrize("config", [CONFIG, TIED_WITH_BIASES], ids=["untied", "tied-biases"])
def test_a_model_filled_after_meta_has_the_bits_of_one_built_directly(config):
    shell = TransformerLM(config, device="meta")
    assert all(tensor.is_meta for tensor in [*shell.parameters(), *shell.buffers()])
    model = shell.to_empty(device="cpu")
    with torch.no_grad():
        for tensor in [*model.parameters(), *model.buffers()]:
            tensor.fill_(float("nan"))
    torch.manual_seed(0)
    model.reset_parameters()
    assert_same_bits(model, seeded_model(config))


@pytest.mark.parametrize(
    ("start", "move"),
    [
        ("meta", lambda model: model.to_empty(device="cpu")),
        ("cpu", lambda model: model.to(torch.bfloat16)),
        ("cpu", lambda model: model.to("meta")),
    ],
    ids=["to-empty", "to-bf16", "to-meta"],
)
def test_moving_keeps_embeddings_tied(start, move):
    model = move(TransformerLM(TIED_WITH_BIASES, device=start))
    assert model.lm_head.weight is model.token_embeddings.weight
    assert sum(parameter.numel() for parameter in model.parameters()) == TIED_WITH_BIASES.n_parameters


def test_only_tied_embeddings_share_storage():
    untied, tied = seeded_model(), seeded_model(TIED_WITH_BIASES)
    assert untied.lm_head.weight.data_ptr() != untied.token_embeddings.weight.data_ptr()
    assert tied.lm_head.weight is tied.token_embeddings.weight
    # The head's scale, not the embedding's unit variance: 3 sigma of sqrt(2 / (24 + 50)) is 0.49.
    assert tied.token_embeddings.weight.abs().max() < 0.5
    assert untied.token_embeddings.weight.abs().max() > 2


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_logits_have_the_dtype_of_the_parameters(dtype):
    model = seeded_model(TIED_WITH_BIASES, dtype=dtype)
    assert {parameter.dtype for parameter in model.parameters()} == {dtype}
    assert model.rotary.cos.dtype == model.rotary.sin.dtype == torch.promote_types(dtype, torch.float32)
    logits = model(token_ids())
    assert logits.dtype == dtype
    logits.float().square().mean().backward()
    assert all(p.grad is not None and p.grad.isfinite().all() and p.grad.any() for p in model.parameters())
