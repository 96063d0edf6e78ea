"""Which tiles a search considers; what they take is timed on GPUs alone."""

import pytest
import torch

from cs336_systems.attention.flash import tiles
from cs336_systems.attention.flash.tiles import KERNELS, Tile, committed_tile, tile_for, use_tile
from cs336_systems.experiments.attention.tile_search import candidates, search_tiles


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("d_head", [16, 64, 80, 128, 256])
@pytest.mark.parametrize("element_size", [2, 4])
def test_the_committed_tile_comes_first_and_none_twice(kernel, d_head, element_size):
    found = candidates(kernel, d_head, element_size)
    assert found[0] == committed_tile(kernel, d_head, element_size)
    assert len(set(found)) == len(found)
    if element_size == 2:
        assert all((tile.block_k if kernel == "dkdv" else tile.block_q) >= 64 for tile in found[1:])


def test_a_tile_in_use_leaves_the_table_alone(monkeypatch):
    monkeypatch.setattr(tiles, "_replaced", {})
    committed = tile_for("dq", 100, 2)
    other = Tile(64, 32, 4, 2)
    use_tile("dq", 128, 2, other)
    assert tile_for("dq", 100, 2) == other
    assert committed_tile("dq", 100, 2) == committed
    assert candidates("dq", 128, 2)[0] == committed
    assert tile_for("dq", 64, 2) == committed_tile("dq", 64, 2)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_search_times_the_committed_tile_of_every_kernel(monkeypatch):
    monkeypatch.setattr(
        "cs336_systems.experiments.attention.tile_search.candidates",
        lambda *key: [committed_tile(*key), Tile(32, 32, 4, 2)],
    )
    q, k, v, do = (torch.randn(1, 2, 300, 64, device="cuda", dtype=torch.bfloat16) for _ in range(4))
    found = list(search_tiles(q, k, v, do, causal=True))
    assert [timing.kernel for timing in found] == list(KERNELS)
    for timing in found:
        assert committed_tile(timing.kernel, 64, 2) in timing.samples_ms
        assert timing.best in timing.samples_ms
        assert all(len(samples) == 15 for samples in timing.samples_ms.values())
