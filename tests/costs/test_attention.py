"""Counts of attention by itself, from first principles at small sizes."""

from cs336_systems.costs.attention import AttentionWork

WORK = AttentionWork(batch_size=2, heads=4, kv_heads=2, n_queries=8, n_keys=8, d_head=16, causal=False)


def test_flops_follow_the_flash_attention_convention():
    products = 2 * (2 * WORK.n_scores * WORK.d_head)
    assert WORK.forward_flops == products
    assert WORK.backward_flops == 2.5 * products
    causal = AttentionWork(2, 4, 2, 8, 8, 16, causal=True)
    assert causal.forward_flops == products / 2


def test_leaderboard_shape():
    assert AttentionWork(1, 16, 16, 16_384, 16_384, 64, causal=True).forward_flops == 549_755_813_888


def test_bytes_grow_with_the_square_or_with_the_length():
    def at(length):
        return AttentionWork(1, 1, 1, length, length, 64, causal=False)

    assert at(2048).tiled_bytes(2) == 2 * at(1024).tiled_bytes(2)
    for compiled, matrices in ((False, 4), (True, 2)):
        extra = [
            at(n).materialised_bytes(4, compiled=compiled) - at(n).tensor_bytes(4) - 4 * n * 64 for n in (1024, 2048)
        ]
        assert extra == [matrices * 4 * 1024**2, matrices * 4 * 2048**2]


def test_grouped_heads_share_keys_and_values():
    assert WORK.tensor_bytes(1) == 2 * (2 * 2 * 4 * 8 * 16 + 2 * 2 * 2 * 8 * 16)
