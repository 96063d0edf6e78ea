"""Predicted peaks of the written-out step against every storage that is alive while it runs.

The step runs on fake tensors, which have sizes and lifetimes but no bytes, through the kernels' own launchers: what
these allocate is alive as well, and only the launch itself is left out.
"""

from dataclasses import replace
from functools import partial
from importlib import import_module

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from cs336_systems.attention.flash import backward as flash_backward
from cs336_systems.attention.flash import forward as flash_forward
from cs336_systems.attention.flash import preprocess as flash_preprocess
from cs336_systems.blocks import BlockOps, write_out
from cs336_systems.blocks.attention import _through
from cs336_systems.config import MODES, PRECISIONS, ModelConfig, resolve_size
from cs336_systems.costs.kept import LEVELS, SWITCHES
from cs336_systems.costs.memory import PARTS, PeakMemory
from cs336_systems.costs.written_out import NORM_PROGRAMS, written_out_peak
from cs336_systems.harness.fit import predicted_bytes
from cs336_systems.harness.memory import cublas_workspace_bytes
from cs336_systems.model import REFERENCE_OPS, TransformerLM
from cs336_systems.training import TrainingCase, assemble, random_batch
from cs336_systems.training.precision import parameter_dtype

from .test_memory import LiveBytes

linear_cross_entropy, rms_norm, swiglu = (
    import_module(f"cs336_systems.kernels.{name}") for name in ("linear_cross_entropy", "rms_norm", "swiglu")
)  # the package has functions of these names

PLAIN = ModelConfig("plain", d_model=128, d_ff=352, n_layers=3, n_heads=2, vocab_size=500, context_length=300)
CONFIGS = {
    "plain": PLAIN,
    "grouped-biases": replace(PLAIN, n_heads=4, n_kv_heads=2, qkv_bias=True),
    "words": replace(PLAIN, vocab_size=50_000, n_layers=2),
    "tied": replace(PLAIN, tie_embeddings=True),
    "tied-words": replace(PLAIN, vocab_size=50_000, n_layers=2, tie_embeddings=True),
    "deep": replace(PLAIN, n_layers=9, d_model=256),
    "broad": replace(PLAIN, d_ff=1024),
}
KEEPS = (
    *LEVELS,
    *(f"all-{switch}" for switch in SWITCHES),
    "products-residual",
    "products-attention-ffn",
    "all-residual-ffn",
)
WHERE = [
    # config, tokens of a sequence, mode, keep, moment of the peak
    ("plain", 300, "forward", "all", "block 0, feed-forward"),
    ("words", 64, "forward", "all", "loss"),
    ("words", 300, "backward", "products", "loss"),
    ("tied-words", 300, "backward", "products", "loss"),
    ("tied-words", 4, "backward", "products", "embedding backward"),
    ("words", 4, "backward", "products", "embedding backward"),
    ("broad", 300, "backward", "products", "block 2, feed-forward backward"),
    ("tied", 300, "backward", "attention", "block 0, attention backward"),
    ("deep", 300, "backward", "products", "block 8, attention backward"),
    ("deep", 64, "backward", "products", "block 0, attention backward"),
]
CHUNK = 256
SCALARS = 32
"""Bytes of the loss and what goes with it."""


@pytest.fixture
def unlaunched(monkeypatch):
    """Launchers that allocate and do not launch, on devices that Triton does not know."""
    modules = (rms_norm, swiglu, linear_cross_entropy, flash_forward, flash_backward, flash_preprocess)
    for module in modules:
        monkeypatch.setattr(module, "launch", lambda *args, **kwargs: None)
    for module in (rms_norm, swiglu, linear_cross_entropy):
        monkeypatch.setattr(module, "check_runnable", lambda *args: None)
    monkeypatch.setattr(rms_norm, "INTERPRETED_PROGRAMS", NORM_PROGRAMS)
    monkeypatch.setattr(rms_norm, "rms_norm_forward", rms_norm_forward)
    monkeypatch.setattr(rms_norm, "rms_norm_backward", rms_norm_backward)
    monkeypatch.setattr(linear_cross_entropy, "linear_cross_entropy_op", linear_cross_entropy_op)


def rms_norm_forward(x: Tensor, gain: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    return rms_norm.launch_forward(x, None, gain, eps)[1:]


def rms_norm_backward(dy: Tensor, x: Tensor, gain: Tensor, rstd: Tensor, dresidual: Tensor | None = None):
    return rms_norm.launch_backward(dy, x, gain, rstd, dresidual, None)


def linear_cross_entropy_op(x, weight, targets, denominator, grad_weight, accumulate, wants_dx, *rest):
    *_, chunk = rest
    losses, dx, lse = linear_cross_entropy.in_chunks(
        x, weight, targets, grad_weight, accumulate, wants_dx, chunk, lambda *args: None
    )
    return losses.sum(), dx, lse


def hopper_backward(q, k, v, *rest) -> tuple[Tensor, Tensor, Tensor]:
    """What attention/hopper allocates, which runs on its own kind of GPU alone: statistics, and sums of dq in fp32."""
    (batch, heads, _, d_head), rows = q.shape, -(-q.shape[2] // 128) * 128
    statistics = torch.empty(batch, heads, 2, rows), torch.empty(batch, heads, rows, 64 if d_head <= 64 else 128)
    gradients = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
    del statistics
    return gradients


ATTENTIONS = {
    "flash": _through(flash_forward.launch_forward, flash_backward.launch_backward),
    "hopper": _through(flash_forward.launch_forward, hopper_backward),
}


def unlaunched_ops(attention: str) -> BlockOps:
    return BlockOps(
        rms_norm_forward=rms_norm_forward,
        add_rms_norm_forward=rms_norm.launch_forward,
        rms_norm_backward=rms_norm_backward,
        swiglu_forward=swiglu._product_like,
        swiglu_backward_=lambda *args, **kwargs: None,
        rotate_=lambda *args, **kwargs: None,
        **ATTENTIONS[attention],
    )


def alive_at_peak(
    config: ModelConfig, batch_size: int, seq_len: int, precision: str, mode: str, keep: str, attention: str
) -> int:
    """Peak of live bytes of forward, or of forward and backward; token ids and targets left out."""
    with FakeTensorMode(), LiveBytes() as live:
        loss_in_chunks = partial(linear_cross_entropy.linear_cross_entropy, chunk=CHUNK)
        ops = replace(REFERENCE_OPS, rms_norm=rms_norm.rms_norm, linear_cross_entropy=loss_in_chunks)
        model = TransformerLM(config, ops, dtype=parameter_dtype(PRECISIONS[precision]))
        write_out(model, unlaunched_ops(attention), keep)
        ids, targets = (torch.zeros(batch_size, seq_len, dtype=torch.int64) for _ in range(2))
        live.peak = live.now
        with torch.set_grad_enabled(mode != "forward"):
            loss = model(ids, targets)
        if mode != "forward":
            loss.backward()
        return live.peak - 2 * 8 * ids.numel()


def compare(config: ModelConfig, seq_len: int, precision: str, mode: str, keep: str, attention: str) -> str:
    """The moment of the predicted peak, which is what is alive but for a few scalars."""
    how = (config, 2, seq_len, PRECISIONS[precision], mode)
    peak = written_out_peak(*how, keep=keep, chunk=CHUNK, attention=attention, device_type="cpu")
    alive = alive_at_peak(config, 2, seq_len, precision, mode, keep, attention)
    if config.tie_embeddings and peak.moment == "embedding backward":
        # Under a dispatch mode torch adds the gradients of a tied matrix into a third one, after the embedding's input
        # gradient has gone; else in place.
        alive -= (config.vocab_size - 2 * seq_len) * config.d_model * PRECISIONS[precision].parameter_bytes
    assert 0 <= alive - peak.n_bytes <= SCALARS, (peak, alive)
    return peak.moment


@pytest.mark.usefixtures("unlaunched")
@pytest.mark.parametrize("keep", KEEPS)
def test_backward_peaks_where_it_is_predicted_at_every_level_and_switch(keep):
    for config in (PLAIN, CONFIGS["grouped-biases"]):
        compare(config, 300, "bf16", "backward", keep, "hopper")
        compare(config, 300, "fp32", "backward", keep, "flash")


@pytest.mark.usefixtures("unlaunched")
@pytest.mark.parametrize(("config", "seq_len", "mode", "keep", "moment"), WHERE)
def test_each_part_of_a_step_can_be_its_peak(config, seq_len, mode, keep, moment):
    for precision, attention in (("bf16", "hopper"), ("fp32", "flash")):
        assert compare(CONFIGS[config], seq_len, precision, mode, keep, attention) == moment


@pytest.mark.parametrize("keep", ["input", "all-residual", "products"])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("n_shards", [1, 2])
def test_the_parts_of_a_peak_add_up(keep, mode, n_shards):
    peak = written_out_peak(PLAIN, 1, 64, PRECISIONS["bf16"], mode, keep=keep, chunk=64, n_shards=n_shards)
    assert peak.n_bytes == peak.moments[peak.moment] == max(peak.moments.values()) == sum(peak.parts.values())
    assert list(peak.parts) == [part for part in PARTS if part in peak.parts]


def test_moments_and_their_optimizer_come_on_top():
    def peak(mode: str, **how) -> PeakMemory:
        return written_out_peak(PLAIN, 1, 4, PRECISIONS["bf16"], mode, keep="all", chunk=64, device_type="cpu", **how)

    parameters = 2 * PLAIN.n_parameters
    assert peak("step").n_bytes - peak("backward").n_bytes == 2 * parameters
    with_temporary = peak("step", optimizer="reference")
    assert with_temporary.moment == "optimizer"
    assert with_temporary.moments["optimizer"] - peak("step").moments["optimizer"] == 2 * 500 * 128


@pytest.mark.parametrize("keep", ["input", "products", "all"])
def test_half_of_the_states_and_all_of_the_activations_on_each_of_two_ranks(keep):
    """Of llama3-8b: what is whole for a while is two units' weights and two units' gradients at most."""
    config = resolve_size("llama3-8b")
    peaks = {
        n: written_out_peak(config, 1, 8192, PRECISIONS["bf16"], "step", keep=keep, chunk=4096, n_shards=n)
        for n in (1, 2)
    }
    for part in ("parameters", "optimizer state"):
        assert peaks[2].parts[part] == pytest.approx(peaks[1].parts[part] / 2, rel=1e-3)
    unit = 2 * max(config.n_block_parameters, config.vocab_size * config.d_model)
    for peak in peaks.values():
        assert peak.parts.get("gathered parameters", 0) <= 2 * unit
    assert peaks[2].parts["gradients"] <= config.n_parameters + 2 * unit


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ({"attention": "reference"}, "unknown attention of fused kernels 'reference': known are flash, hopper"),
        ({"keep": "product"}, "unknown level 'product'"),
        ({"device_type": "tpu"}, "unknown device type 'tpu': known are cuda, cpu"),
    ],
)
def test_unknown_names_are_refused(option, message):
    with pytest.raises(ValueError, match=message):
        written_out_peak(PLAIN, 1, 8, PRECISIONS["bf16"], "step", **({"keep": "all", "chunk": 64} | option))


# ---- on a GPU


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("keep", [*LEVELS, "products-residual", "all-attention-ffn"])
@pytest.mark.parametrize(
    ("size", "n_layers", "context_length"), [("qwen2.5-0.5b", 12, 4096), ("llama3-8b", 4, 8192)], ids=["qwen", "llama"]
)
def test_peak_is_what_a_gpu_allocates(size, n_layers, context_length, keep):
    """Within 3 %, of a step that finds its states in place."""
    config = replace(resolve_size(size), n_layers=n_layers)
    fused = {"kernels": "fused", "attention": "flash", "optimizer": "fused", "keep": keep}
    case = TrainingCase("cuda", config, batch_size=2, context_length=context_length, dtype="bf16", **fused)
    device = torch.device("cuda")
    before = torch.cuda.memory_allocated() - cublas_workspace_bytes(device)  # what other tests have left
    step, batch = assemble(case), random_batch(case)
    for _ in range(2):
        torch.cuda.reset_peak_memory_stats()
        step(*batch)
    measured = torch.cuda.max_memory_allocated() - max(before, 0)
    predicted = predicted_bytes(case)
    print(f"predicted {predicted / 2**30:.3f} GiB, allocated {measured / 2**30:.3f} GiB")
    assert predicted == pytest.approx(measured, rel=0.03)
