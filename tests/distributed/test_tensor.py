"""Tensor and sequence parallelism against one process: losses, every gradient, what is sent, what is refused."""

import itertools
from dataclasses import replace

import pytest
import torch

from cs336_systems.blocks import REFERENCE, head_ops, write_out
from cs336_systems.blocks.products import stored
from cs336_systems.config import ModelConfig
from cs336_systems.costs.kept import LEVELS
from cs336_systems.distributed.mesh import Mesh
from cs336_systems.distributed.process_group import Rank
from cs336_systems.distributed.tensor import GroupRanks, fill_from_whole, tensor_dim, tensor_ops
from cs336_systems.distributed.tensor_travel import tensor_ranks
from cs336_systems.harness.traffic import Traffic
from cs336_systems.kernels.cross_entropy_rows import launch_rows_of_ranks
from cs336_systems.kernels.linear_cross_entropy import plain_rows
from cs336_systems.model import REFERENCE_OPS, TransformerLM
from cs336_systems.model.tensor_ranks import ALONE

from ..kernels.interpreter import interpret_without_gpu
from .checks import checks_of, on_each

LLAMA = ModelConfig("tiny-llama", 32, 48, 2, 4, vocab_size=80, context_length=12, n_kv_heads=2)
CONFIGS = (
    LLAMA,
    replace(LLAMA, name="tiny-qwen2", qkv_bias=True, tie_embeddings=True),
    replace(LLAMA, name="tiny-qwen3", qk_norm=True, head_dim=16),
)


def ranks_by(rank: Rank, by: str):
    return tensor_ranks(Mesh.over(rank, tensor=rank.world_size).group("tensor"), rank.device, by)


def build(config, ranks=ALONE, keep="products", dtype=torch.float64, products=None, device="cpu"):
    torch.manual_seed(0)
    ops = head_ops("reference", REFERENCE_OPS)
    if ranks is ALONE:
        model = TransformerLM(config, ops, dtype=dtype, device=device)
    else:
        model = TransformerLM(config.part(ranks.n_ranks), tensor_ops(ops, ranks), device="meta", dtype=dtype)
        fill_from_whole(model, ranks)
        model.to_empty(device=device).reset_parameters()
    write_out(model, REFERENCE, keep, products or stored(ranks))
    return model


def batch(config):
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(config.vocab_size, (2, 3, config.context_length), generator=generator)
    targets = ids[1].clone()
    targets[0, 3:7], targets[1, :3] = -100, -100  # of the rows of two ranks 8 and 9 are left
    return ids[0][:2], targets[:2]


def own_part(whole, name, ranks):
    dim = tensor_dim(name)
    return whole if dim is None else whole.chunk(ranks.n_ranks, dim)[ranks.rank]


def check_losses_and_gradients_are_those_of_one_process(rank: Rank):
    for config, by in itertools.product(CONFIGS, ("collectives", "copies")):
        ranks = ranks_by(rank, by)
        whole, part = build(config), build(config, ranks)
        optimizers = [torch.optim.AdamW(model.parameters(), lr=1e-2) for model in (whole, part)]
        for step in range(10):
            losses = [model(*batch(config)) for model in (whole, part)]
            torch.testing.assert_close(*losses, rtol=1e-12, atol=0)
            for loss in losses:
                loss.backward()
            for (name, own), other in zip(part.named_parameters(), whole.parameters(), strict=True):
                torch.testing.assert_close(
                    own.grad,
                    own_part(other.grad, name, ranks),
                    rtol=1e-9,
                    atol=1e-12,
                    msg=lambda m, n=f"{config.name} {name} {step}": n + m,
                )
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()


def check_every_level_gives_the_same_bits(rank: Rank):
    for by in ("collectives", "copies"):
        ranks, found = ranks_by(rank, by), []
        for keep in LEVELS:
            model = build(CONFIGS[2], ranks, keep, torch.float32)
            model(*batch(LLAMA)).backward()
            found.append([parameter.grad for parameter in model.parameters()])
        assert all(torch.equal(a, b) for other in found[1:] for a, b in zip(found[0], other, strict=True))


def check_rows_are_sent_twice_a_half_and_pass(rank: Rank):
    """Two gathers and two reduce-scatters of a block in forward and as many in backward, and one sum of its gains.

    The head sends as many rows of each rank as have targets that count on the rank with most.
    """
    mesh = Mesh.over(rank, tensor=2)
    ranks, n_bytes = GroupRanks(mesh.group("tensor")), 2 * LLAMA.context_length * LLAMA.d_model * 4
    model = build(LLAMA, ranks, "all", torch.float32)
    with Traffic() as forward:
        loss = model(*batch(LLAMA))
    with Traffic() as backward:
        loss.backward()
    gathered, scattered = ("_allgather_base", n_bytes), ("_reduce_scatter_base", n_bytes // 2)
    block, gains = [gathered, scattered] * 2, ("allreduce", 2 * LLAMA.d_model * 4)
    of_head, agreed = ("_allgather_base", 2 * 9 * LLAMA.d_model * 4), ("_allgather_base", 2 * 2 * 9 * 2 * 4)
    back = ("_reduce_scatter_base", 9 * LLAMA.d_model * 4)
    sent = [[(event.kind, event.n_bytes) for event in log.sent] for log in (forward, backward)]
    assert sent[0] == [scattered, *block * 2, of_head, agreed, back]
    assert sent[1] == [("allreduce", LLAMA.d_model * 4), *[*block, gains] * 2, gathered]


def check_rows_of_logits_by_the_kernel_are_those_of_plain_torch(rank: Rank):
    interpret_without_gpu()
    ranks, n_words = GroupRanks(Mesh.over(rank, tensor=2).group("tensor")), 37
    targets = torch.tensor([0, 36, 37, 73, -100, 40])
    whole = torch.randn(6, 2 * n_words, generator=torch.Generator().manual_seed(3))
    count, how = torch.tensor(5.0), {"z_loss": 0.1, "gradient": True}
    expected, results = whole.clone(), torch.empty(3, 2, 6)
    plain_rows(expected, targets, *results[0], denominator=count, **how)
    plain = whole.chunk(2, 1)[rank.rank].clone()
    plain_rows(plain, targets, *results[1], denominator=count, ranks=ranks, **how)
    padded = torch.full((6, 48), -torch.inf)
    own = padded[:, :n_words].copy_(whole.chunk(2, 1)[rank.rank])
    lost, scale = torch.empty(2, 6), 1 / count[None]
    beyond = torch.tensor([2 * n_words, -2, -1, 2 * n_words + 1, 2 * n_words, 99])
    launch_rows_of_ranks(padded.clone()[:, :n_words], beyond, *lost, scale=scale, ranks=ranks, **how)
    assert lost[0].isnan().all()
    launch_rows_of_ranks(own, targets, *results[2], scale=scale, ranks=ranks, **how)
    for gradient, found in ((plain, results[1]), (own, results[2])):
        torch.testing.assert_close(found, results[0], rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(gradient, expected.chunk(2, 1)[rank.rank], rtol=1e-5, atol=1e-6)


def check_what_is_refused(rank: Rank):
    ranks = GroupRanks(Mesh.over(rank, tensor=2).group("tensor"))
    model = build(LLAMA, ranks)
    ids, targets = batch(LLAMA)
    for arguments, value in (((ids[:1, :3], targets[:1, :3]), "3 tokens"), ((ids,), "give targets")):
        with pytest.raises(ValueError, match=value):
            model(*arguments)
    for sizes, value in (
        ({"n_kv_heads": 1}, "n_kv_heads 1"),
        ({"vocab_size": 81}, "vocab_size 81"),
        ({"d_ff": 49}, "d_ff 49"),
    ):
        with pytest.raises(ValueError, match=value):
            replace(LLAMA, **sizes).part(2)
    with pytest.raises(ValueError, match="tensor 3 needs a multiple of 3 ranks, got 2"):
        Mesh.over(rank, tensor=3)


test_on_two_ranks = on_each(2, checks_of(globals()))
