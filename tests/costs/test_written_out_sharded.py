"""Predicted peaks of a rank of FSDP, against every storage that is alive in one whose collectives send nothing.

Tensors are real here, as FSDP frees memory under tensors that live on; their values are whatever lay there.
"""

import gc
from collections.abc import Iterator

import pytest
import torch

from cs336_systems.config import PRECISIONS, ModelConfig, Recipe
from cs336_systems.costs.kept import STORED
from cs336_systems.costs.memory import PeakMemory
from cs336_systems.costs.written_out import written_out_peak
from cs336_systems.distributed import FSDP
from cs336_systems.model import TransformerBlock
from cs336_systems.training.backward_update import BackwardUpdate
from cs336_systems.training.parallel import _travel
from tests.distributed.one_rank import first_of
from tests.live_bytes import LiveBytes

from .test_written_out import CONFIGS, QUANTIZED, SCALARS, noted_bytes
from .unlaunched import CHUNK, leave_out_launches, unlaunched_model

PARTS_TABLE = 7 * (6 * 8 + 4)
"""Bytes of the table by which a block's rows are quantized, each of its seven parameters a chunk."""


@pytest.fixture
def one_of_two(monkeypatch) -> Iterator[LiveBytes]:
    """The first rank of two, alone; ``compare`` may change when Python's collector comes."""
    leave_out_launches(monkeypatch)
    thresholds = gc.get_threshold()
    with first_of(2) as live:
        yield live
    gc.set_threshold(*thresholds)


def compare(
    live: LiveBytes,
    config: ModelConfig,
    seq_len: int,
    keep: str,
    attention: str,
    prefetch: int,
    update: str = "after-backward",
    recipe: Recipe = STORED,
) -> PeakMemory:
    """The prediction, which is what is alive in the second step, but for a few scalars."""
    how = {"keep": keep, "chunk": CHUNK, "attention": attention, "recipe": recipe, "device_type": "cpu"}
    bf16 = PRECISIONS["bf16"]
    peak = written_out_peak(config, 2, seq_len, bf16, "backward", **how, n_shards=2, prefetch=prefetch, update=update)
    if recipe.quantized:  # by kernels that Triton interprets, which leaves tensors to the collector
        gc.enable()
        gc.set_threshold(100, 2, 2)
    with live:
        model = unlaunched_model(config, "bf16", keep, attention, recipe, remember=False)
        is_block = lambda module: isinstance(module, TransformerBlock)  # noqa: E731
        fsdp = FSDP(model, units=is_block, quantized=_travel, prefetch=prefetch)
        early = update == "under-backward"
        updates = BackwardUpdate(fsdp, torch.optim.SGD(fsdp.parameters(), lr=0.0, foreach=False)) if early else None
        ids, targets = (torch.zeros(2, seq_len, dtype=torch.int64) for _ in range(2))
        for _ in range(2):
            fsdp.zero_grad(set_to_none=True)
            live.peak = live.now
            fsdp(ids, targets).backward()
            if updates:
                updates.finish()
        alive = live.peak - 2 * 8 * ids.numel()
    noted = noted_bytes(config, seq_len) + PARTS_TABLE * config.n_layers if recipe.quantized else 0
    assert 0 <= alive - peak.n_bytes <= SCALARS + noted, (peak, alive)
    return peak


@pytest.mark.parametrize(
    ("config", "seq_len", "keep", "attention", "prefetch", "moment"),
    [
        ("plain", 300, "products", "hopper", 1, "block 2, feed-forward backward"),
        ("grouped-biases", 300, "input", "flash", 1, "block 1, feed-forward backward"),
        ("deep", 300, "products-residual", "flash", 2, "block 8, attention backward"),
        ("deep", 16, "all", "hopper", 0, "block 0, attention backward"),
        ("words", 300, "products", "hopper", 1, "loss"),
        ("words", 16, "input", "hopper", 1, "embedding backward"),
        ("tied", 300, "attention", "hopper", 1, "block 1, attention backward"),
        ("tied-words", 300, "products", "hopper", 1, "loss"),
    ],
)
def test_peak_of_a_rank_is_what_is_alive_there(one_of_two, config, seq_len, keep, attention, prefetch, moment):
    assert compare(one_of_two, CONFIGS[config], seq_len, keep, attention, prefetch).moment == moment


@pytest.mark.parametrize("keep", ["products", "input"])
def test_shards_that_are_updated_under_backward_have_no_gradients_after_it(one_of_two, keep):
    early = compare(one_of_two, CONFIGS["deep"], 16, keep, "hopper", 0, "under-backward")
    late = written_out_peak(CONFIGS["deep"], 2, 16, PRECISIONS["bf16"], "backward", keep=keep, chunk=CHUNK, n_shards=2)
    assert early.n_bytes < late.n_bytes


@pytest.mark.parametrize("keep", ["input", "products", "all-residual-ffn"])
@pytest.mark.parametrize(("config", "recipe"), [("grouped-biases", QUANTIZED[0]), ("broad", QUANTIZED[1])])
def test_the_peak_of_quantized_blocks_is_what_is_alive_there(one_of_two, config, recipe, keep):
    """Their weights travel quantized."""
    compare(one_of_two, CONFIGS[config], 304, keep, "hopper", 1, recipe=recipe)
