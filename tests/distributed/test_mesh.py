"""Training over meshes of data, context and tensor ranks against one process: losses, norms, weights."""

from collections import Counter
from contextlib import nullcontext
from dataclasses import replace
from functools import cache
from itertools import cycle, product

import pytest
import torch
import torch.distributed as dist

from cs336_systems.case import Unsupported
from cs336_systems.config import ModelConfig
from cs336_systems.costs.kept import LEVELS
from cs336_systems.costs.parallelism import step as costs
from cs336_systems.costs.parallelism.step import GATHER, REDUCE, SCATTER, SEND, context_sent, tensor_sent
from cs336_systems.distributed.checkpoint import load_checkpoint, save_checkpoint
from cs336_systems.distributed.context import local_tokens, rotate_local
from cs336_systems.distributed.fsdp import FSDP, clip_grad_norm_
from cs336_systems.distributed.mesh import Mesh
from cs336_systems.distributed.process_group import Rank
from cs336_systems.distributed.sharded_optimizer import ShardedOptimizer
from cs336_systems.distributed.tensor import tensor_dim
from cs336_systems.harness.traffic import Traffic
from cs336_systems.kernels.linear_cross_entropy import IGNORED
from cs336_systems.model import TransformerLM
from cs336_systems.ranks import Parallel
from cs336_systems.training.assemble import assemble, build_model, finish, mesh_of, random_batch
from cs336_systems.training.clipping import GradientGuard
from tests.training.shared import Shared

from .checks import checks_of, on_each, on_gpus, on_ranks, spawn

LLAMA = ModelConfig("tiny-llama", 32, 64, 2, 8, vocab_size=96, context_length=16, n_kv_heads=4)
QWEN2 = replace(LLAMA, name="tiny-qwen2", qkv_bias=True, tie_embeddings=True)
QWEN3 = replace(LLAMA, name="tiny-qwen3", qk_norm=True, head_dim=8)
MAX_NORM = 0.7
"""Below the norms of these gradients, so that clipping acts."""
EPS = 1e-3
"""Adam's, of the size of these gradients: a smaller one makes its first steps signs, which near zero go either way."""
N_STEPS = 10
"""Steps of the longer comparisons; the others have three."""
ROUNDING = {"fp32": 2**-24, "bf16": 2**-9}


WAYS = {"ddp": ("bucketed", "replicated"), "zero-1": ("none", "scattered"), "zero-2": ("none", "scattered-gradients")}
WAYS |= {"zero-owned": ("bucketed", "owned"), "fsdp": ("fsdp", "replicated")}


def run_of(context, tensor, way, config=LLAMA, order="zigzag", accumulate=1, by="collectives", replicas=1):
    wrapper, state = WAYS[way]
    how = Parallel(wrapper, state, 0.01, tensor=tensor, tensor_by=by, context=context, context_order=order)
    how = replace(how, replicas=replicas)
    return Shared.of(
        config, how=how, batch_size=2, accumulate=accumulate, keep="products", optimizer="torch-fused", seed=3
    )


ON_FOUR = [
    *(run_of(1, 2, way) for way in WAYS),
    *(run_of(2, 1, way, QWEN2) for way in WAYS),
    *(run_of(2, 2, "ddp", config, accumulate=2) for config in (LLAMA, QWEN2, QWEN3)),
    *(run_of(4, 1, "fsdp", QWEN3, order) for order in ("ring", "gathered")),
    run_of(1, 4, "zero-1", QWEN3, by="copies"),
    run_of(2, 1, "ddp", LLAMA, "ring"),
    run_of(1, 1, "fsdp", QWEN2, replicas=2, accumulate=2),
]
ON_EIGHT = [run_of(2, 2, "fsdp", QWEN3, accumulate=2), run_of(2, 4, "zero-1", QWEN2)]


def ignoring(batch):
    """Targets that do not count, spread unevenly over sequences and positions."""
    ids, targets = batch
    length = targets.shape[-1]
    kept = torch.randint(length, targets.shape, generator=torch.Generator().manual_seed(9)) * 2 > length // 4
    kept[:, : length // 4] = False
    return ids, targets.where(kept.to(ids.device), IGNORED)


def whole_weights(model, mesh):
    """Every parameter whole, by its name, in the model's order."""
    module = model.module if hasattr(model, "module") else model
    named = model.gather_full_params() if isinstance(model, FSDP) else dict(module.named_parameters())
    whole = {}
    for name, own in named.items():
        parts = [torch.empty_like(own) for _ in range(mesh.size("tensor"))]
        dist.all_gather(parts, own.detach().contiguous(), group=mesh.devices.get_group("tensor"))
        dim = tensor_dim(name)
        if dim is None:
            assert all(torch.equal(part, own) for part in parts), name
        whole[name] = own.detach().clone() if dim is None else torch.cat(parts, dim)
    return whole


def train(step, guard, batch, n_steps=3):
    losses, norms = [], []
    for _ in range(n_steps):
        step(*batch)
        losses.append(guard.loss.clone())
        norms.append(guard.norm.clone())
    return torch.stack(losses), torch.stack(norms)


class Noting(GradientGuard):
    """Keeps the gradients of the first step before they are clipped, of shards where the model has shards."""

    first = None

    def __call__(self, model, optimizer, loss=None):
        self.first = self.first or [p.grad.detach().clone() for p in parameters_of(model)]
        self.update(model, optimizer, loss)

    update = GradientGuard.__call__


class NotingExact(Noting):
    """Clips as torch does: torch's fused Adam, which ``GradientGuard`` gives a factor, takes none in fp64."""

    def update(self, model, optimizer, loss):
        self.norm, self.loss = torch.nn.utils.clip_grad_norm_(model.parameters(), self.max_norm), loss
        optimizer.step()


def parameters_of(model):
    if not isinstance(model, FSDP):
        return list(model.parameters())
    return [each.sharded_param for each in model.managed_parameters()]


def whole_gradients(model, first, mesh):
    """Those that ``Noting`` has kept, as ``whole_weights``; they take the place of the model's weights."""
    with torch.no_grad():
        for parameter, gradient in zip(parameters_of(model), first, strict=True):
            parameter.copy_(gradient)
    return whole_weights(model, mesh)


def train_on(rank: Rank, cases, n_steps=3):
    """The results of ``train_one`` for each case."""
    return [train_one(rank, case, n_steps) for case in cases]


def train_one(rank: Rank, case, n_steps, around=nullcontext):
    """(Losses, norms, last weights, gradients of the first step); no gradients where states are divided, as no rank has
    all of them whole. Steps run inside of ``around()``."""
    costs.COPIED_FROM = 0  # rows of tests are few
    mesh, divided = mesh_of(case, rank) or Mesh.over(rank), case.parallel.optimizer_state != "replicated"
    guard = (GradientGuard if divided else Noting)(MAX_NORM)
    step = finish(build_model(case, rank), case, rank, guard=guard, masked=True, eps=EPS)
    whole = replace(case, how=Parallel())
    place = Rank(mesh.place("data"), 0, 1, rank.device, rank.backend)
    ids, targets = ignoring(random_batch(whole, place))
    torch.testing.assert_close(own_tokens(ids, mesh, case), random_batch(case, rank)[0])
    batch = own_tokens(ids, mesh, case), own_tokens(targets, mesh, case)
    with around():
        losses, norms = train(step, guard, batch, n_steps)
    weights = on_cpu(whole_weights(step.model, mesh))
    gradients = {} if divided else on_cpu(whole_gradients(step.model, guard.first, mesh))
    return losses.cpu(), norms.cpu(), weights, gradients


def on_cpu(named):
    return {name: tensor.detach().cpu() for name, tensor in named.items()}


HAND_OVER = [run_of(1, 2, "ddp"), run_of(2, 1, "fsdp"), run_of(1, 2, "zero-2"), run_of(2, 1, "zero-owned")]
HAND_OVER += [run_of(1, 2, "fsdp"), run_of(2, 1, "zero-1"), run_of(2, 1, "fsdp", replicas=2), run_of(1, 2, "ddp")]


def hand_over(rank: Rank, folder, cases, first=0):
    """The losses and norms of one step on each mesh, which resumes from the one before; each takes the same batch."""
    found = []
    for number, case in enumerate(cases, start=first):
        mesh, guard = mesh_of(case, rank), GradientGuard(MAX_NORM)
        drawn = build_model(replace(case, seed=3 + number), rank)  # other weights, but for the first mesh
        step = finish(drawn, case, rank, guard=guard, eps=EPS)
        assert load_checkpoint(folder, step.model, step.optimizer) == (number or None)
        place, n_data = (mesh.place("data"), mesh.size("data")) if mesh else (rank.rank, rank.world_size)
        batch = (each.chunk(n_data)[place] for each in batch_of(run_of(1, 1, "ddp", case.config), 2))
        step(*(own_tokens(each, mesh, case) for each in batch))
        save_checkpoint(folder, step.model, step.optimizer, number + 1)
        found.append(torch.stack([guard.loss, guard.norm]))
    return torch.stack(found, dim=1)


@pytest.mark.slow
@pytest.mark.parametrize("config", [LLAMA, QWEN2, QWEN3], ids=lambda config: config.name)
def test_checkpoints_move_between_meshes(tmp_path, config):
    losses, norms, *_ = alone(run_of(1, 1, "ddp", config), 2, len(HAND_OVER))
    for found in on_ranks(hand_over, 4, tmp_path, [replace(case, size=config) for case in HAND_OVER]):
        torch.testing.assert_close(found, torch.stack([losses, norms]), rtol=1e-4, atol=0)


def own_tokens(tokens, mesh, case):
    return local_tokens(tokens, mesh, case.parallel.context_order)


def batch_of(case, n_data):
    """The sequences of ``n_data`` ranks along data."""
    one, device = replace(case, how=Parallel()), torch.device(case.device)
    batches = [ignoring(random_batch(one, Rank(n, n, n_data, device, ""))) for n in range(n_data)]
    return tuple(torch.cat(parts) for parts in zip(*batches, strict=True))


def alone(case, n_data, n_steps=3, *, exact=False):
    """The results of ``train_on``, of one process on the sequences of ``n_data`` ranks along data; exact in fp64."""
    return _alone(replace(case, how=Parallel()), n_data, n_steps, exact)


@cache
def _alone(case, n_data, n_steps, exact):
    whole, guard = replace(case, batch_size=n_data * case.batch_size), (NotingExact if exact else Noting)(MAX_NORM)
    model = build_model(whole)
    step = finish(model.double() if exact else model, whole, guard=guard, eps=EPS)
    losses, norms = train(step, guard, batch_of(case, n_data), n_steps)
    named = dict(model.named_parameters())
    gradients = dict(zip(named, guard.first, strict=True))
    return losses.cpu(), norms.cpu(), on_cpu(named), on_cpu(gradients)


def train_alone(rank: Rank, cases, world_size):
    return [alone(case, world_size // case.parallel.ranks_per_batch) for case in cases]


def vector(named, names):
    """Tensors of these names as one: rounding is a chance in those that have a few numbers each."""
    return torch.cat([named[name].flatten() for name in names])


def assert_close(mine, one, exact, rounding, what):
    """Off from the exact vector by at most twice what that of one process is, and by its share of ``rounding``."""
    budget = 2 * (one - exact).norm() + rounding * exact.norm()
    assert (mine - exact).norm() <= budget, (what, (mine - exact).norm(), budget)


def compare(world_size, cases, n_steps=3):
    """What ranks find in each case, against one process."""
    found = zip(*on_ranks(train_on, world_size, cases, n_steps), strict=True)
    for case, of_ranks in zip(cases, found, strict=True):
        compare_one(case, of_ranks, n_steps)


def compare_one(case, of_ranks, n_steps):
    """Losses, norms, weights and gradients against one process in fp64, and one in the case's dtype.

    They may be off by twice what the latter's are, and by a rounding for each rank. Weights and gradients are compared
    as one vector.
    """
    n_data = len(of_ranks) // case.parallel.ranks_per_batch
    rounding = len(of_ranks) * ROUNDING[case.dtype]
    one, exact = (alone(case, n_data, n_steps, exact=each) for each in (False, True))
    assert exact[1].min() > MAX_NORM
    weights, stages = exact[2].keys(), [own.keys() for _, _, own, _ in of_ranks]
    for own, held in zip(of_ranks, stages, strict=True):
        names = sorted(held & weights)  # FSDP also names a tied head
        for what, *each in zip(("losses", "norms", "weights", "gradients"), own, one, exact, strict=True):
            if what not in ("weights", "gradients"):
                assert_close(*each, rounding, (str(case), what))
            elif each[0]:
                assert_close(*(vector(named, names) for named in each), rounding, (str(case), what))
    assert weights <= set().union(*stages), str(case)
    assert (weights <= stages[0]) == (case.parallel.pipeline == 1), str(case)


@pytest.mark.slow
def test_four_ranks_train_what_one_process_trains():
    compare(4, ON_FOUR)


@pytest.mark.slow
def test_eight_ranks_train_what_one_process_trains():
    compare(8, ON_EIGHT)


def meshes_of(world_size):
    """Every division of the ranks into replica, shard, context and tensor; each of a model, in turn."""
    sizes = [2**power for power in range(world_size.bit_length())]
    configs, found = cycle((LLAMA, QWEN2, QWEN3)), []
    for replicas, context, tensor in product(sizes, repeat=3):
        shards, rest = divmod(world_size, replicas * context * tensor)
        if shards and not rest:
            way = "fsdp" if replicas > 1 or len(found) % 2 else "ddp"
            config = replace(next(configs), n_kv_heads=max(tensor, LLAMA.n_kv_heads))
            case = run_of(context, tensor, way, config, replicas=replicas)
            found.append(replace(case, batch_size=8 // (replicas * shards)))
    return found


@pytest.mark.slow
@pytest.mark.parametrize("world_size", [2, 4, 8])
def test_every_mesh_trains_what_one_process_trains(world_size):
    """Ten steps in fp32, of one block on eight ranks, and a step of two blocks in bf16."""
    cases, n_layers = meshes_of(world_size), 1 if world_size == 8 else 2
    compare(world_size, [replace(case, size=replace(case.config, n_layers=n_layers)) for case in cases], N_STEPS)
    compare(world_size, [replace(case, dtype="bf16") for case in cases], 1)


WIDE = replace(QWEN3, name="wide-qwen3", d_model=512, d_ff=1024, n_heads=8, head_dim=64, context_length=512)
ON_GPUS = {
    2: [run_of(1, 2, way, WIDE, by=by) for way in ("ddp", "zero-1") for by in ("collectives", "copies")],
    4: [run_of(context, 2, "ddp", WIDE, by="copies") for context in (1, 2)],
}
ON_GPUS[2] += [run_of(2, 1, "ddp", WIDE), run_of(2, 1, "ddp", WIDE, "ring"), run_of(2, 1, "fsdp", WIDE, "gathered")]
ON_GPUS[2] += [run_of(2, 1, "zero-2", WIDE, accumulate=2), run_of(1, 2, "ddp", WIDE, accumulate=2, by="copies")]
ON_GPUS[4] += [run_of(1, 2, "fsdp", WIDE), run_of(2, 1, "zero-1", WIDE), run_of(4, 1, "ddp", WIDE)]
ON_GPUS[4] += [run_of(1, 4, "ddp", WIDE, by=by) for by in ("collectives", "copies")]
ON_GPUS[4] += [run_of(2, 1, "zero-owned", WIDE, "gathered"), run_of(4, 1, "fsdp", WIDE, "ring")]
ON_GPUS[4] += [run_of(1, 2, "fsdp", WIDE, replicas=2), run_of(2, 1, "fsdp", WIDE, replicas=2, accumulate=2)]


@pytest.mark.gpu
@pytest.mark.parametrize(("world_size", "device"), [on_gpus(2), on_gpus(4)])
def test_gpus_train_what_one_trains(world_size, device):
    compare_on_gpus(world_size, device, ON_GPUS[world_size])


def compare_on_gpus(world_size, device, cases):
    """Over NCCL: in fp32 to its rounding, in bf16 with fused kernels within twice one GPU's error."""
    if torch.cuda.device_count() < world_size:  # who shares a GPU cannot copy between GPUs
        cases = [case for case in cases if case.how.tensor_by != "copies"]
    plain = [replace(case, device=device) for case in cases]
    fused = {"dtype": "bf16", "kernels": "fused"}
    ways = [plain, *([replace(case, **fused, attention=name) for case in plain] for name in ("flash", "hopper"))]
    on_one = [spawn(train_alone, 1, cases, world_size, device=device)[0] for cases in ways]
    found = [spawn(train_on, world_size, cases, device=device) for cases in ways]
    for number, (cases, one, of_ranks) in enumerate(zip(ways, on_one, found, strict=True)):
        for case, exact, (losses, norms, *_), *own in zip(cases, on_one[0], one, *of_ranks, strict=True):
            for own_losses, own_norms, *_ in own:
                for mine, whole, right, rtol in (
                    (own_losses, losses, exact[0], 1e-5),
                    (own_norms, norms, exact[1], 1e-4),
                ):
                    budget = 2 * (whole - right).abs().max() + 2**-8 * right.max() if number else rtol * right
                    assert ((mine - right).abs() <= budget).all(), (str(case), mine, whole, right)


def test_what_ranks_cannot_share_is_refused():
    case = run_of(2, 2, "ddp")
    for fields, how, value in (
        ({"keep": "autograd"}, {}, "got autograd"),
        ({"context_length": 18}, {"context": 4}, "8 equal parts, got 18 tokens"),
        ({}, {"tensor": 8}, "n_kv_heads 4"),
        ({"batch_size": 1, "context_length": 4}, {"context": 2, "tensor": 4}, "tensor 4 does not divide the 2 tokens"),
        ({"matmul_dtype": "e4m3", "scaling": "row"}, {}, "scaling row with tensor 2"),
        ({"matmul_dtype": "e4m3"}, {}, "of each of tensor 2 x context 2 .* not d_kv 8, tokens 8"),
        ({}, {"context_order": "circle"}, "circle"),
    ):
        with pytest.raises((ValueError, Unsupported), match=value):
            assemble(replace(case, **fields, how=replace(case.how, **how)))
    with pytest.raises(ValueError, match="context 2 x tensor 2 needs a process group"):
        assemble(case)


def count(rank: Rank, cases):
    """Bytes by kind of one step, measured and predicted."""
    names = {"_allgather_base": GATHER, "_reduce_scatter_base": SCATTER, "allreduce": REDUCE, "send": SEND}
    found = []
    for case in cases:
        step, batch = assemble(case, rank), random_batch(case, rank)
        with Traffic() as log:
            step(*batch)
        sent = Counter()
        for event in log.sent:
            if event.kind != "recv":
                sent[names[event.kind]] += event.n_bytes
        how, n_rows = case.parallel, batch[0].numel() // case.accumulate
        asked = case.config.part(how.tensor), n_rows, case.keep
        predicted = tensor_sent(*asked, how.tensor, 4, by=how.tensor_by, recipe=case.recipe)
        predicted += context_sent(*asked, how.context, 4, rank=rank.rank, order=how.context_order)
        if how.context > 1:  # gradients are averaged besides
            del sent[REDUCE]
        found.append((sent, Counter({kind: case.accumulate * n for kind, n in predicted.items()})))
    return found


def test_bytes_are_those_predicted():
    orders = [{"context": 2, "context_order": order} for order in ("zigzag", "ring", "gathered")]
    ways: list[dict] = [
        {"tensor": 2},
        {"tensor": 2, "tensor_by": "copies"},
        *({"wrapper": "bucketed", **order} for order in orders),
    ]
    keeps = (*LEVELS, "1xall-residual+products-residual")
    base = replace(run_of(1, 1, "zero-1", QWEN3, accumulate=2), optimizer="reference")
    cases = [replace(base, keep=keep, how=Parallel(**way)) for way in ways for keep in keeps]
    fp8, keeps = {"matmul_dtype": "e4m3", "context_length": 32}, (*keeps, "all-qkv", "all-ffn", "all-residual-ffn")
    cases += [replace(base, keep=keep, how=Parallel(**way), **fp8) for way in ways[:2] for keep in keeps]
    cases += [replace(base, how=Parallel(**way), fp8_skip_last=1, **fp8) for way in ways[:2]]
    for of_rank in on_ranks(count, 2, cases):
        for case, (sent, predicted) in zip(cases, of_rank, strict=True):
            assert sent == predicted, case


def check_norms_are_of_the_ranks_that_share_weights(rank: Rank):
    """A sharded optimizer's in its group, without a mesh."""
    torch.manual_seed(rank.rank % 2)
    groups = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    model = torch.nn.Linear(8, 8)
    asked = {"reduce_gradients": "reduce-scatter", "process_group": groups[rank.rank % 2], "fused": True}
    optimizer = ShardedOptimizer(model.parameters(), torch.optim.AdamW, **asked)
    loss = model(torch.ones(1, 8)).square().sum()
    gradients = torch.autograd.grad(loss, list(model.parameters()), retain_graph=True)
    expected = torch.nn.utils.get_total_norm(gradients)
    loss.backward()
    guard = GradientGuard()
    guard(model, optimizer, loss)
    torch.testing.assert_close(guard.norm, expected)
    model = TransformerLM(LLAMA)
    rotate_local(model, groups[rank.rank % 2], "ring")
    model.rotary.reset_parameters()  # as who loads weights does


def check_fsdp_clips_what_tensor_ranks_divide(rank: Rank):
    """Norm and gradients are those of the guard; without tensor ranks other tests have torch's."""
    for config, max_norm in ((LLAMA, 0.1), (QWEN2, 1e9), (QWEN3, 0.1)):
        case = run_of(1, 2, "fsdp", config)
        step, guard = assemble(case, rank), GradientGuard(max_norm, mesh_of(case, rank))
        forward, backward, _ = step.phases("step", *random_batch(case, rank)).values()
        forward()
        backward()
        expected, _ = guard._norm_and_loss(step.model, step.optimizer, None)
        gradients = [p.sharded_param.grad for p in step.model.managed_parameters()]
        before = [gradient.detach().clone() for gradient in gradients]
        norm = clip_grad_norm_(step.model, max_norm)
        torch.testing.assert_close(norm, expected, rtol=1e-6, atol=0)
        factor = min(1.0, max_norm / (norm.item() + 1e-6))
        for gradient, other in zip(gradients, before, strict=True):
            torch.testing.assert_close(gradient.detach(), factor * other)


def check_gradients_of_ddp_take_no_memory_but_their_own(rank: Rank):
    """Those of merged weights come from backward side by side, and leave together."""
    case = run_of(2, 1, "ddp", QWEN2)
    case = replace(case, how=replace(case.how, bucket_size_mb=0.001))  # a matrix is a bucket, as they are at any size
    step = assemble(case, rank)
    forward, backward, _ = step.phases("step", *random_batch(case, rank)).values()
    forward()
    backward()
    storages = {p.grad.untyped_storage().data_ptr(): p.grad.untyped_storage().nbytes() for p in step.model.parameters()}
    assert sum(storages.values()) == sum(p.nbytes for p in step.model.parameters())


class TwoUnits(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.units = torch.nn.ModuleList(torch.nn.Linear(4, 4) for _ in range(2))

    def forward(self, x, order):
        for number in order:
            x = self.units[number](x)
        return x.square().mean()


def check_ranks_of_all_replicas_run_the_same_units(rank: Rank):
    for orders in ([(0, 1), (1, 0)], [(0, 1), (0,)]):
        mesh = Mesh.over(rank, replicas=2)
        how = {"process_group": mesh.shards, "replicas": mesh.group("replica")}
        model = FSDP(TwoUnits(), units=lambda module: isinstance(module, torch.nn.Linear), **how)
        with pytest.raises(RuntimeError, match="same units in the same order"):
            model(torch.ones(2, 4), orders[mesh.place("replica")]).backward()
    with pytest.raises(ValueError, match="mesh="):
        GradientGuard()(model, torch.optim.SGD(model.parameters()), torch.zeros(()))


test_on_four_ranks = on_each(4, checks_of(globals()))
