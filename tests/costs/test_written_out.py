"""Predicted peaks of the written-out step against every storage that is alive while it runs.

The step runs on fake tensors, which have sizes and lifetimes but no bytes, through the kernels' own launchers: what
these allocate is alive as well, and only the launch itself is left out.
"""

import gc
from dataclasses import replace
from math import prod

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from cs336_systems.case import Unsupported
from cs336_systems.config import MODES, PRECISIONS, ModelConfig, Recipe, resolve_size
from cs336_systems.costs.kept import LEVELS, SLOPES_BLOCK, STORED, SWITCHES
from cs336_systems.costs.memory import PARTS, PeakMemory
from cs336_systems.costs.written_out import written_out_peak
from cs336_systems.harness.fit import predicted_bytes
from cs336_systems.harness.memory import cublas_workspace_bytes
from cs336_systems.training import TrainingCase, assemble, random_batch
from tests.live_bytes import LiveBytes

from .unlaunched import CHUNK, leave_out_launches, unlaunched_model

PLAIN = ModelConfig("plain", d_model=128, d_ff=352, n_layers=3, n_heads=2, vocab_size=500, context_length=304)
CONFIGS = {
    "plain": PLAIN,
    "grouped-biases": replace(PLAIN, n_heads=4, n_kv_heads=2, qkv_bias=True),
    "words": replace(PLAIN, vocab_size=50_000, n_layers=2),
    "tied": replace(PLAIN, d_ff=256, tie_embeddings=True),
    "tied-words": replace(PLAIN, vocab_size=50_000, n_layers=2, tie_embeddings=True),
    "deep": replace(PLAIN, n_layers=9, d_model=256, d_ff=192),
    "broad": replace(PLAIN, d_ff=1024),
}
KEEPS = (
    *LEVELS,
    *(f"all-{switch}" for switch in SWITCHES),
    "products-residual",
    "products-attention-ffn",
    "all-residual-ffn",
    "1xall+1xinput+products-residual",
    "2xproducts-residual+all",
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
SCALARS = 32
"""Bytes of the loss and what goes with it."""
SCALES = 128
"""Bytes of a block's scales and largest magnitudes."""
QUANTIZED = (Recipe("e4m3"), Recipe("e4m3", skip_first=1, skip_last=1))


@pytest.fixture
def unlaunched(monkeypatch):
    leave_out_launches(monkeypatch)


def alive_at_peak(
    config: ModelConfig,
    batch_size: int,
    seq_len: int,
    precision: str,
    mode: str,
    keep: str,
    attention: str,
    micro_batches: int = 1,
    recipe: Recipe = STORED,
) -> int:
    """Peak of live bytes of the last forward, or forward and backward; token ids and targets left out."""
    with FakeTensorMode(), LiveBytes() as live:
        model = unlaunched_model(config, precision, keep, attention, recipe)
        ids, targets = (torch.zeros(batch_size, seq_len, dtype=torch.int64) for _ in range(2))
        for _ in range(micro_batches - 1):
            model(ids, targets).backward()
        if recipe.quantized:  # weights stay quantized from then on
            with torch.no_grad():
                model(ids)
        live.peak = live.now
        with torch.set_grad_enabled(mode != "forward"):
            loss = model(ids, targets)
        if mode != "forward":
            loss.backward()
        return live.peak - 2 * 8 * ids.numel()


def noted_bytes(config: ModelConfig, seq_len: int) -> int:
    """Scales and slopes of all blocks, for two sequences."""
    slopes = 4 * prod(-(-n // of) for n, of in zip((2 * seq_len, config.d_ff), SLOPES_BLOCK, strict=True))
    return (SCALES + slopes) * config.n_layers


def compare(
    config: ModelConfig,
    seq_len: int,
    precision: str,
    mode: str,
    keep: str,
    attention: str,
    micro_batches: int = 1,
    recipe: Recipe = STORED,
) -> str:
    """The moment of the predicted peak, which is what is alive but for a few scalars."""
    how = (config, 2, seq_len, PRECISIONS[precision], mode)
    counted = {"device_type": "cpu", "accumulates": micro_batches > 1, "recipe": recipe}
    peak = written_out_peak(*how, keep=keep, chunk=CHUNK, attention=attention, **counted)
    alive = alive_at_peak(config, 2, seq_len, precision, mode, keep, attention, micro_batches, recipe)
    if config.tie_embeddings and peak.moment == "embedding backward":
        # Under a dispatch mode torch adds the gradients of a tied matrix into a third one, after the embedding's input
        # gradient has gone; else in place.
        alive -= (config.vocab_size - 2 * seq_len) * config.d_model * PRECISIONS[precision].parameter_bytes
    noted = noted_bytes(config, seq_len) if recipe.quantized else 0
    assert 0 <= alive - peak.n_bytes <= SCALARS + noted, (peak, alive)
    return peak.moment


@pytest.mark.usefixtures("unlaunched")
@pytest.mark.parametrize("keep", KEEPS)
def test_backward_peaks_where_it_is_predicted_at_every_level_and_switch(keep):
    for config in (PLAIN, CONFIGS["grouped-biases"]):
        compare(config, 300, "bf16", "backward", keep, "hopper")
        compare(config, 300, "fp32", "backward", keep, "flash")


@pytest.mark.usefixtures("unlaunched")
@pytest.mark.parametrize("keep", KEEPS)
def test_the_peak_of_quantized_blocks_is_predicted_at_every_level_and_switch(keep):
    for recipe in QUANTIZED:
        for name in ("grouped-biases", "broad"):
            compare(CONFIGS[name], 304, "bf16", "backward", keep, "hopper", recipe=recipe)
        compare(PLAIN, 304, "bf16", "forward", keep, "hopper", recipe=recipe)


@pytest.mark.usefixtures("unlaunched")
@pytest.mark.parametrize(("config", "seq_len", "mode", "keep", "moment"), WHERE)
def test_each_part_of_a_step_can_be_its_peak(config, seq_len, mode, keep, moment):
    for precision, attention in (("bf16", "hopper"), ("fp32", "flash")):
        assert compare(CONFIGS[config], seq_len, precision, mode, keep, attention) == moment


@pytest.mark.usefixtures("unlaunched")
@pytest.mark.parametrize(
    ("config", "seq_len", "mode", "keep"),
    # A tied matrix's third gradient, as in compare, would be another moment's peak at 4 tokens.
    [where[:4] for where in WHERE if where[2] != "forward" and where[:2] != ("tied-words", 4)],
)
def test_gradients_of_an_earlier_micro_batch_are_added_to_unit_by_unit(config, seq_len, mode, keep):
    for precision, attention in (("bf16", "hopper"), ("fp32", "flash")):
        compare(CONFIGS[config], seq_len, precision, mode, keep, attention, micro_batches=3)


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
    assert peaks[2].parts.get("gradients", 0) <= config.n_parameters + 2 * unit


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
    ("size", "n_layers", "context_length", "attention", "accumulate"),
    [
        ("qwen2.5-0.5b", 12, 4096, "flash", 1),
        ("qwen2.5-0.5b", 12, 2048, "flash", 3),
        ("llama3-8b", 4, 8192, "hopper", 1),
    ],
)
def test_peak_is_what_a_gpu_allocates(size, n_layers, context_length, attention, accumulate, keep):
    """Within 3 %, of a step that finds its states in place."""
    config = replace(resolve_size(size), n_layers=n_layers)
    fused = {"kernels": "fused", "attention": attention, "optimizer": "fused", "keep": keep, "accumulate": accumulate}
    case = TrainingCase("cuda", config, batch_size=2, context_length=context_length, dtype="bf16", **fused)
    device = torch.device("cuda")
    gc.collect()
    before = torch.cuda.memory_allocated() - cublas_workspace_bytes(device)  # what other tests have left
    try:
        step, batch = assemble(case), random_batch(case)
    except Unsupported as reason:
        pytest.skip(str(reason))
    for _ in range(2):
        torch.cuda.reset_peak_memory_stats()
        step(*batch)
    measured = torch.cuda.max_memory_allocated() - max(before, 0)
    predicted = predicted_bytes(case)
    print(f"predicted {predicted / 2**30:.3f} GiB, allocated {measured / 2**30:.3f} GiB")
    assert predicted == pytest.approx(measured, rel=0.03)
