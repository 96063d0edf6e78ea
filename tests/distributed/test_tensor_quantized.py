"""Quantized products of tensor ranks: what they gather is the whole quantized, and they train what one process does."""

import itertools
import math
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist

from cs336_systems.blocks import REFERENCE, QuantizedProducts, block_ops, block_products, write_out
from cs336_systems.blocks.maxima import Quantizers
from cs336_systems.blocks.products import GATHERED
from cs336_systems.blocks.quantized import FORMATS, UnstoredNorm
from cs336_systems.config import ModelConfig, Recipe
from cs336_systems.costs.kept import LEVELS
from cs336_systems.distributed import FSDP
from cs336_systems.distributed.fsdp_quantized import QuantizedGroup
from cs336_systems.distributed.process_group import Rank
from cs336_systems.harness.traffic import Traffic
from cs336_systems.kernels import quantize_reference as plain
from cs336_systems.model.tensor_ranks import ALONE
from cs336_systems.training.assemble import assemble, mesh_of, random_batch

from ..blocks.test_handed_on import Reads
from ..kernels.interpreter import interpret_without_gpu
from .checks import checks_of, on_each, on_gpus, on_ranks
from .test_mesh import run_of, whole_weights
from .test_tensor import build as build_with
from .test_tensor import own_part, ranks_by

LLAMA = ModelConfig(
    "tiny-llama", 64, 128, n_layers=3, n_heads=8, n_kv_heads=4, head_dim=16, vocab_size=96, context_length=32
)
QWEN2 = replace(LLAMA, name="tiny-qwen2", qkv_bias=True, tie_embeddings=True)
QWEN3 = replace(LLAMA, name="tiny-qwen3", qk_norm=True)
CONFIGS = LLAMA, QWEN2, QWEN3
RECIPES = Recipe("e4m3"), Recipe("e4m3", skip_first=1), Recipe("e4m3", "e5m2")
E4M3, SKIPPING, _ = RECIPES
WAYS = "collectives", "copies"


def build(config, ranks=ALONE, recipe=E4M3, keep="products", dtype=torch.float32, quantizers=None, device="cpu"):
    products = None if recipe is None else QuantizedProducts(recipe, quantizers or Quantizers(), True, ranks)
    return build_with(config, ranks, keep, dtype, products, device)


def batch(config, number=0):
    generator = torch.Generator().manual_seed(number)
    ids = torch.randint(config.vocab_size, (2, 2, 32), generator=generator, device="cpu")
    targets = ids[1].clone()
    targets[0, 3:9] = -100
    return ids[0], targets


def train(model, config, n_steps, n_batches=2):
    """Losses of each step and micro-batch, and the gradients of the first step."""
    optimizer, losses, gradients = torch.optim.AdamW(model.parameters(), lr=1e-2), [], {}
    for _ in range(n_steps):
        for number in range(n_batches):
            loss = model(*batch(config, number))
            loss.backward()
            losses.append(loss.detach())
        gradients = gradients or {name: p.grad.clone() for name, p in model.named_parameters()}
        optimizer.step()
        optimizer.zero_grad()
    return torch.stack(losses), gradients


def by_powers_of_two(x, absmax, dtype, **how):
    """Quantize with a scale that is a power of two, so that a number rounds alike whatever it shares its scale with."""
    largest = plain.LARGEST[dtype]
    return plain.quantize(x, largest * torch.exp2(torch.ceil(torch.log2(absmax / largest))), dtype, **how)


def check_ranks_compute_what_one_process_computes(rank: Rank):
    """To fp64's rounding: in e5m2, in which nothing is subnormal, the scales of parts then change no number."""
    how = {
        "recipe": Recipe("e5m2", "e5m2"),
        "dtype": torch.float64,
        "quantizers": Quantizers(quantize=by_powers_of_two),
    }
    for config in CONFIGS[-1:] if rank.world_size > 2 else CONFIGS:
        losses, gradients = train(build(config, **how), config, 3)
        for by in WAYS:
            ranks = ranks_by(rank, by)
            found = train(build(config, ranks, **how), config, 3)
            torch.testing.assert_close(found[0], losses, rtol=1e-9, atol=0)
            for name, own in found[1].items():
                right = own_part(gradients[name], name, ranks)
                assert (own - right).norm() <= 1e-9 * gradients[name].norm(), (config.name, by, name)


def check_errors_are_those_of_fp8(rank: Rank):
    """Against what is not quantized: one process and ranks round the same numbers with different scales, so that errors
    are independent at worst, and apart by sqrt(2) times one's; bound: twice, by kind of parameter."""
    for config, recipe in list(zip(CONFIGS, RECIPES, strict=True))[-1 if rank.world_size > 2 else 0 :]:
        exact, one = (train(build(config, recipe=each), config, 3) for each in (None, recipe))
        for by in WAYS:
            ranks = ranks_by(rank, by)
            losses, gradients = train(build(config, ranks, recipe), config, 3)
            assert (losses - one[0]).abs().max() <= 2 * (one[0] - exact[0]).abs().max()
            assert not torch.equal(losses, exact[0])
            squares = {name.split(".", 2)[-1]: torch.zeros(2) for name in gradients}
            for name, own in gradients.items():
                right, whole = (own_part(each[1][name], name, ranks) for each in (exact, one))
                apart, off = own - whole, whole - right
                squares[name.split(".", 2)[-1]] += torch.stack([apart.square().sum(), off.square().sum()])
            for kind, of_all in zip(squares, ranks.total(list(squares.values())), strict=True):
                assert of_all[0] <= 4 * of_all[1], (config.name, by, kind)


class Recording(QuantizedProducts):
    """Quantized products that note what they gather: names, own rows before they were quantized, operands."""

    def for_another_block(self):
        another = Recording(self.recipe, self.quantizers, self.remember, self.ranks)
        another.noted, another.normed = self.noted, self.normed
        return another

    def read(self, name, x, maxima, **how):
        operand = super().read(name, x, maxima, **how)
        own = self.normed(x) if isinstance(x, UnstoredNorm) else x.clone()
        self.note(name, own, FORMATS[self.recipe.matmul], operand)
        return operand

    def read_gradient(self, name, dy, maxima, **how):
        operand = super().read_gradient(name, dy, maxima, **how)
        self.note(name, dy.clone(), FORMATS[self.recipe.gradient], operand)
        return operand

    def note(self, name, own, dtype, operand):
        if name in GATHERED:
            self.noted.append((name, own, dtype, operand))


def what_is_gathered(config, ranks, keep, kind, **how):
    """What a forward and a backward gather, by plain functions (read), by these as kernels (noted) or by kernels."""
    quantizers, ops, reads = Quantizers(), REFERENCE, Reads()
    if kind == "noted":
        quantizers, ops = reads.products.quantizers, reads.ops
    elif kind == "kernels":
        ops, quantizers = block_ops("fused", "flash"), block_products("fused", E4M3).quantizers
    products = Recording(Recipe("e4m3", "e5m2"), quantizers, True, ranks)
    products.noted = []
    products.normed = lambda x: (
        ops.rms_norm_forward(x.x_RD, x.gain_D, config.rms_norm_eps)[0]
        if kind == "kernels"
        else x.x_RD * x.rstd_R[:, None] * x.gain_D
    )
    model = build(config, ranks, None, keep, **how)
    write_out(model, ops, keep, products)
    model(*(each.to(next(model.parameters()).device) for each in batch(config))).backward()
    return products.noted


def check_what_is_gathered_is_the_whole_quantized(rank: Rank):
    """Whoever finds the largest magnitudes."""
    for by, keep, kind in itertools.product(WAYS, ("input", "all"), ("read", "noted")):
        gathered_is_the_whole_quantized(rank, by, keep, kind, QWEN3)


def check_kernels_gather_the_whole_quantized(rank: Rank):
    """By Triton's interpreter."""
    interpret_without_gpu()
    gathered_is_the_whole_quantized(rank, "copies", "input", "kernels", replace(QWEN2, n_layers=2))


def on_gpus_what_is_gathered_is_the_whole_quantized(rank: Rank):
    for by, keep, config in itertools.product(WAYS, ("input", "all"), (QWEN2, QWEN3)):
        how = {"dtype": torch.bfloat16, "device": rank.device}
        gathered_is_the_whole_quantized(rank, by, keep, "kernels", config, **how)


def gathered_is_the_whole_quantized(rank, by, keep, kind, config, **how):
    """To the bit, by rows and by columns; the first norm is that of one process, as no product has come before it."""
    ranks = ranks_by(rank, by)
    noted = what_is_gathered(config, ranks, keep, kind, **how)
    assert [name for name, *_ in noted[:2]] == ["normed1", "normed2"] and {each[0] for each in noted} == {*GATHERED}
    scales_differ = 0
    for name, own, dtype, operand in noted:
        operand.wait()
        whole = ranks.gather(own)
        expected = plain.quantize(whole, plain.absmax(whole), dtype, transposed=True)
        scales_differ += not torch.equal(plain.absmax(own), plain.absmax(whole))
        columns = operand.whole_columns()
        if columns is None:  # which backward reads, and not where it computes a norm again
            assert keep == "input" and name in ("normed1", "normed2")
            columns = replace(operand.rows, values=expected.q_t)
        for found, q in ((operand.rows, expected.q), (columns, expected.q_t)):
            assert torch.equal(found.values.view(torch.uint8), q.view(torch.uint8)), (by, keep, kind, name)
            assert torch.equal(found.scale, expected.inverse_scale), (by, keep, kind, name)
    on_ranks_whose_own_is_smaller = torch.tensor(scales_differ, device=rank.device)
    dist.all_reduce(on_ranks_whose_own_is_smaller)
    assert on_ranks_whose_own_is_smaller >= len(noted)
    alone = what_is_gathered(config, ALONE, keep, kind, **how)[0][3]
    assert torch.equal(noted[0][3].rows.values.view(torch.uint8), alone.rows.values.view(torch.uint8))


def check_the_largest_is_that_of_all_ranks_and_nan_is_larger(rank: Rank):
    for by in WAYS:
        ranks = ranks_by(rank, by)
        own = torch.tensor([[rank.rank, 2.0**-140, 1.0, math.nan], [rank.rank, 0.0, math.nan, 1.0]][rank.rank])
        assert ranks.largest_(own) is own
        torch.testing.assert_close(own, torch.tensor([1.0, 2.0**-140, math.nan, math.nan]), equal_nan=True)
        assert torch.equal(ranks.largest_(torch.tensor(3.0)), torch.tensor(3.0))


def check_every_level_gives_the_same_bits(rank: Rank):
    for by in WAYS:
        ranks, found = ranks_by(rank, by), []
        for keep in (*LEVELS, "all-norm", "all-qkv", "all-residual", "all-ffn", "all-qkv-residual-ffn"):
            losses, gradients = train(build(QWEN2, ranks, SKIPPING, keep, torch.bfloat16), QWEN2, 1)
            found.append([losses, *gradients.values()])
        assert all(torch.equal(a, b) for other in found[1:] for a, b in zip(found[0], other, strict=True))


def check_micro_batches_add_up(rank: Rank):
    for by in WAYS:
        ranks, model = ranks_by(rank, by), build(QWEN3, ranks_by(rank, by), dtype=torch.bfloat16)
        _, both = train(model, QWEN3, 1)
        found = []
        for number in range(2):
            model = build(QWEN3, ranks, dtype=torch.bfloat16)
            model(*batch(QWEN3, number)).backward()
            found.append([parameter.grad for parameter in model.parameters()])
        for one, other, own in zip(*found, both.values(), strict=True):  # each rounded, as the sum is, to 8 bits
            roundings = 2**-7 * (one.abs().float() + other.abs().float())
            assert ((one.float() + other.float() - own.float()).abs() <= roundings).all()


def check_rows_travel_in_eight_bits(rank: Rank):
    """Each gather of a block sends bytes, after the agreement on one largest magnitude; addends stay as they are."""
    n, d_model = rank.world_size, LLAMA.d_model
    model, rows = build(LLAMA, ranks_by(rank, "collectives"), SKIPPING, "all", torch.bfloat16), 2 * 32
    with Traffic() as forward:
        loss = model(*batch(LLAMA))
    with Traffic() as backward:
        loss.backward()
    sent = [[(each.kind, each.n_bytes, each.dtype) for each in log.sent] for log in (forward, backward)]
    wide, scattered = (
        (kind, size * d_model * 2, torch.bfloat16)
        for kind, size in (("_allgather_base", rows), ("_reduce_scatter_base", rows // n))
    )
    narrow, agreed = ("_allgather_base", rows * d_model, torch.uint8), ("allreduce", 4, torch.int32)
    gains, of_final = (("allreduce", size * d_model * 2, torch.bfloat16) for size in (2, 1))
    of_loss = ("_allgather_base", n * rows * 2 * 4, torch.float32)
    stored, quantized = [wide, scattered] * 2, [agreed, narrow, scattered] * 2
    assert sent[0] == [scattered, *stored, *quantized * 2, wide, of_loss, scattered]
    assert sent[1] == [of_final, *[*quantized, gains] * 2, *stored, gains, wide]


def losses_and_weights(rank: Rank, case):
    step, batch = assemble(case, rank), random_batch(case, rank)
    losses = torch.stack([step(*batch) for _ in range(3)])
    groups = step.model.groups if isinstance(step.model, FSDP) else ()
    assert sum(isinstance(group, QuantizedGroup) for group in groups) == (LLAMA.n_layers if groups else 0)
    return [losses, *whole_weights(step.model, mesh_of(case, rank)).values()]


def ways_of_data_and_of_rows_give_the_same_bits(rank: Rank):
    """Two replicas of two tensor ranks, weights of FSDP in eight bits, too; sums of two have one order."""
    found = []
    for way, by in itertools.product(("ddp", "zero-2", "fsdp"), WAYS):
        case = replace(run_of(1, 2, way, LLAMA, by=by), dtype="bf16", matmul_dtype="e4m3")
        found.append(losses_and_weights(rank, case))
    assert all(torch.equal(a, b) for other in found[1:] for a, b in zip(found[0], other, strict=True))


def context_ranks_share_it_too(rank: Rank):
    """Near what is not quantized, within a percent or two, as one process is."""
    case = replace(run_of(2, 2, "ddp", replace(LLAMA, context_length=64), accumulate=2), dtype="bf16")
    found = [losses_and_weights(rank, replace(case, matmul_dtype=dtype))[0] for dtype in ("e4m3", "same")]
    assert not torch.equal(*found)
    torch.testing.assert_close(*found, rtol=0.02, atol=0)


ON_FOUR = (
    ways_of_data_and_of_rows_give_the_same_bits,
    context_ranks_share_it_too,
    check_ranks_compute_what_one_process_computes,
    check_errors_are_those_of_fp8,
    check_what_is_gathered_is_the_whole_quantized,
    check_rows_travel_in_eight_bits,
)
test_on_two_ranks = pytest.mark.slow(on_each(2, checks_of(globals())))
test_on_four_ranks = pytest.mark.slow(on_each(4, ON_FOUR))


@pytest.mark.gpu
@pytest.mark.parametrize(("world_size", "device"), [on_gpus(2), on_gpus(4)])
def test_gpus(world_size, device):
    on_ranks(on_gpus_what_is_gathered_is_the_whole_quantized, world_size, device=device)
