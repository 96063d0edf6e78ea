"""One training step of a fully sharded model on every rank: time, memory by kind, what was sent, what was waited for.

A cell is one implementation: ours, torch's FSDP2 (``fully_shard`` of the embedding, of every block, and of norm and
head, as torchtitan applies it), or our bucketed DDP, which holds everything whole. All run the same model from the
same seed on the same data, with fp32 masters and, under ``bf16-compute``, bf16 weights and fp32 reductions (DDP then
computes under bf16 autocast). Repeats of the grid interleave them.
"""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from cs336_systems.attention.dispatch import attention_op
from cs336_systems.config import PRECISIONS, resolve_size
from cs336_systems.costs.fsdp import model_units, state_bytes, step_traffic
from cs336_systems.distributed.ddp import BucketedDDP
from cs336_systems.distributed.fsdp import FSDP
from cs336_systems.distributed.process_group import Rank
from cs336_systems.harness.clock import WHOLE, synchronize
from cs336_systems.harness.memory import PeakMeter, free_bytes
from cs336_systems.harness.process import PredictedOutOfMemory
from cs336_systems.harness.ranks import time_phases_of_ranks
from cs336_systems.harness.record import Metric
from cs336_systems.harness.traffic import Event, Traffic
from cs336_systems.model import REFERENCE_OPS, TransformerLM
from cs336_systems.model.transformer import TransformerBlock
from cs336_systems.profiling.gather_waits import GatherWaits
from cs336_systems.profiling.rank_traces import communication_metrics, record_phases_of_ranks
from cs336_systems.profiling.traces import kineto
from cs336_systems.training.activation_checkpointing import checkpointed_stack
from cs336_systems.training.loss import cross_entropy
from cs336_systems.training.optimizer import make_optimizer
from cs336_systems.training.step import TrainStep

GIB, MIB = 1024**3, 1024**2

OURS, TORCH, DDP = "ours", "torch", "ddp"
BF16_COMPUTE = "bf16-compute"

_DDP_BUCKET_MB = 25.0


@dataclass(frozen=True)
class FullyShardedCell:
    """One implementation on one model; the fields are columns."""

    device: str
    fsdp: str
    size: str
    batch_size: int
    """Per rank."""
    context_length: int
    dtype: str
    attention: str
    checkpoint: str
    compile: str
    prefetch: int | None
    """Of ours, else None."""
    optimizer: str
    world_size: int
    warmup: int
    steps: int
    repeat: int
    seed: int

    @property
    def variant(self) -> str:
        return self.fsdp

    @property
    def name(self) -> str:
        """In file names."""
        compiled = "-compiled" if self.compile == "on" else ""
        ahead = "" if self.prefetch is None else f"-ahead{self.prefetch}"
        return (
            f"{self.size}-{self.dtype}-{self.checkpoint}{compiled}-{self.fsdp}{ahead}-{self.world_size}ranks"
            f"-{self.repeat}"
        )

    @property
    def compute_dtype(self) -> torch.dtype | None:
        return torch.bfloat16 if self.dtype == BF16_COMPUTE else None


class PreparedModel:
    """A cell's model, data and optimizer on this rank, ready to take steps."""

    def __init__(self, cell: FullyShardedCell, rank: Rank) -> None:
        self.cell, self.rank = cell, rank
        config = resolve_size(cell.size).at_context(cell.context_length)
        ops = REFERENCE_OPS
        if cell.attention != "reference":
            ops = replace(ops, attention=attention_op(cell.attention))
        ops = replace(ops, stack=checkpointed_stack(cell.checkpoint, ops.stack))
        torch.manual_seed(cell.seed)
        model = TransformerLM(config, ops, device="meta" if cell.fsdp == OURS else rank.device)
        loss_function: Callable[[Tensor, Tensor], Tensor] = cross_entropy
        if cell.compile == "on":
            for block in model.layers:
                block.compile(fullgraph=True, dynamic=False)
            loss_function = torch.compile(cross_entropy, fullgraph=True, dynamic=False)
        precision = PRECISIONS["autocast-bf16" if cell.fsdp == DDP and cell.compute_dtype else "fp32"]
        self.model = _IMPLEMENTATIONS[cell.fsdp](model, cell, rank)
        synchronize(rank.device)
        self.meter = PeakMeter(rank.device)
        optimizer = make_optimizer(cell.optimizer, self.model.parameters())
        self.step = TrainStep(self.model, optimizer, precision, loss_function)
        generator = torch.Generator().manual_seed(cell.seed * 1009 + rank.rank + 1)
        shape = (cell.batch_size, cell.context_length)
        self.token_ids, self.targets = (
            torch.randint(config.vocab_size, shape, generator=generator).to(rank.device) for _ in range(2)
        )

    def phases(self) -> dict[str, Callable[[], None]]:
        """Forward, backward and optimizer; backward holds the wait for the gradients."""
        phases = self.step.phases("step", self.token_ids, self.targets)
        backward = phases["backward"]

        def backward_and_wait() -> None:
            backward()
            if isinstance(self.model, (FSDP, BucketedDDP)):
                self.model.finish_gradient_synchronization()

        return phases | {"backward": backward_and_wait}

    def states(self) -> dict[str, int]:
        """Bytes that this rank holds of parameters, gradients and optimizer state, taken in a step of its own."""
        phases = self.phases()
        phases["forward"]()
        phases["backward"]()
        gradients = _storage_bytes(p.grad for p in self.model.parameters() if p.grad is not None)
        phases["optimizer"]()
        states = (value for state in self.step.optimizer.state.values() for value in state.values())
        return {
            "parameters": _storage_bytes(self.model.parameters()),
            "gradients": gradients,
            "optimizer_state": _storage_bytes(value for value in states if isinstance(value, Tensor)),
        }

    def traffic(self) -> list[Event]:
        """The collectives of one step."""
        with Traffic() as traffic:
            for phase in self.phases().values():
                phase()
        return traffic.sent

    def waits(self) -> list[Metric]:
        """What the units of our FSDP waited for their weights, in steps of their own."""
        assert isinstance(self.model, FSDP)
        watch = GatherWaits(self.model)
        totals, late, largest, n_gathers = [], [], [], 0
        for _ in range(self.cell.steps):
            dist.barrier()
            for phase in self.phases().values():
                phase()
            found = watch.read()
            n_gathers = len(found)
            totals.append(sum(wait.ms for wait in found))
            late.append(float(sum(wait.late for wait in found)))
            largest.append(max((wait.ms for wait in found), default=0.0))
        watch.remove()
        return [
            Metric("gathers", "per step", [n_gathers]),
            Metric("gather_wait", "ms per step, of the computing stream", totals),
            Metric("late_gathers", "per step", late),
            Metric("largest_gather_wait", "ms, the longest of a step", largest),
        ]

    def record(self, path: Path) -> None:
        """Run one warm-up step and a few more, recorded by torch.profiler on rank 0 to ``path``."""
        record_phases_of_ranks(self.phases(), self.rank, path)


def _shard_ours(model: TransformerLM, cell: FullyShardedCell, rank: Rank) -> nn.Module:
    return FSDP(
        model,
        cell.compute_dtype,
        prefetch=1 if cell.prefetch is None else cell.prefetch,
        units=lambda module: isinstance(module, TransformerBlock),
        device=rank.device,
    )


def _shard_torch(model: TransformerLM, cell: FullyShardedCell, rank: Rank) -> nn.Module:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    mesh = init_device_mesh(rank.device.type, (rank.world_size,))
    # Block inputs are in the compute dtype already, but for the tables of angles, which ours leaves in fp32 too.
    policy = MixedPrecisionPolicy(cell.compute_dtype, torch.float32, cast_forward_inputs=False)
    if not resolve_size(cell.size).tie_embeddings:
        fully_shard(model.token_embeddings, mesh=mesh, mp_policy=policy)
        fully_shard([model.ln_final, model.lm_head], mesh=mesh, mp_policy=policy, reshard_after_forward=False)
    for block in model.layers:
        fully_shard(block, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    return model


def _replicate(model: TransformerLM, cell: FullyShardedCell, rank: Rank) -> nn.Module:
    return BucketedDDP(model, _DDP_BUCKET_MB, broadcast_buffers=False)


_IMPLEMENTATIONS: dict[str, Callable[[TransformerLM, FullyShardedCell, Rank], nn.Module]] = {
    OURS: _shard_ours,
    TORCH: _shard_torch,
    DDP: _replicate,
}


def _storage_bytes(tensors: Iterable[Tensor]) -> int:
    """Bytes of the storages behind these tensors on this rank, each counted once."""
    storages = {}
    for tensor in tensors:
        local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        storages[local.untyped_storage().data_ptr()] = local.untyped_storage().nbytes()
    return sum(storages.values())


def sent_bytes(events: Iterable[Event], world_size: int) -> float:
    """What a rank sends for these collectives on a ring; an all-gather or reduce-scatter is listed by its output."""
    share = (world_size - 1) / world_size
    factors = {"allgather": share, "reduce_scatter": world_size - 1.0, "allreduce": 2 * share}
    return sum(
        event.n_bytes * factor
        for event in events
        for kind, factor in factors.items()
        if event.kind.lstrip("_").startswith(kind)
    )


def measure_fully_sharded(cell: FullyShardedCell, rank: Rank, *, trace: Path | None = None) -> list[Metric]:
    """Everything about one cell; ``trace`` is a folder for a recording of rank 0.

    Raises:
        PredictedOutOfMemory: the states alone would not fit beside those of this machine's other ranks.
        FloatingPointError: the loss is not finite on some rank.
    """
    config = resolve_size(cell.size).at_context(cell.context_length)
    units = model_units(config)
    n_bytes = 2 if cell.compute_dtype else 4
    shards = 1 if cell.fsdp == DDP else cell.world_size
    predicted = state_bytes(units, shards, compute_bytes=n_bytes)
    _check_memory(predicted.total, rank)

    prepared = PreparedModel(cell, rank)
    times = time_phases_of_ranks(prepared.phases(), rank, warmup=cell.warmup, steps=cell.steps)
    peak = _most(prepared.meter.peak_bytes(), rank)
    held = {name: _most(size, rank) for name, size in prepared.states().items()}
    sent = prepared.traffic()
    assert prepared.step.loss is not None
    if _most(not math.isfinite(prepared.step.loss.item()), rank):
        raise FloatingPointError("the loss is not finite on every rank")

    metrics = [Metric(name, "ms", samples) for name, samples in times.samples_ms.items()]
    if times.warmup_ms:
        metrics.append(Metric("warmup_step", "ms", times.warmup_ms))
    tokens = cell.world_size * cell.batch_size * cell.context_length
    state = sum(held.values())
    metrics += [
        Metric("tokens_per_s", "1/s, all ranks", [tokens / ms * 1e3 for ms in times.samples_ms[WHOLE]], derived=True),
        *(Metric(name, "GiB, the most of any rank", [size / GIB]) for name, size in held.items()),
        Metric("state", "GiB, the most of any rank", [state / GIB]),
        Metric("predicted_state", "GiB, of the fullest rank", [predicted.total / GIB]),
        Metric("state_error", "% of predicted", [100 * (state / predicted.total - 1)]),
        Metric("peak_memory", "GiB, the most of any rank, construction excluded", [peak / GIB]),
        Metric("collectives", "per step", [len(sent)]),
        Metric("sent", "MiB per step and rank, on a ring", [sent_bytes(sent, cell.world_size) / MIB]),
    ]
    if cell.fsdp == OURS:
        expected = step_traffic(units, cell.world_size, compute_bytes=n_bytes).sent_per_rank
        metrics.append(Metric("predicted_sent", "MiB per step and rank, on a ring", [expected / MIB]))
        metrics += prepared.waits()
    if trace is not None:
        path = trace / f"{cell.name}.json.gz"
        prepared.record(path)
        if rank.rank == 0:
            metrics += communication_metrics(kineto.read(path))
    return metrics


def _most(value: float, rank: Rank) -> float:
    """The largest of the ranks' values."""
    found = torch.tensor(float(value), dtype=torch.float64, device=rank.device)
    dist.all_reduce(found, op=dist.ReduceOp.MAX)
    return found.item()


def _check_memory(needed: int, rank: Rank) -> None:
    here = 1 if rank.device.type == "cuda" else rank.world_size
    free = free_bytes(rank.device)
    dist.barrier()  # nobody builds a model before all have looked
    if needed * here > free:
        raise PredictedOutOfMemory(f"needs at least {needed * here / GIB:.1f} GiB, {free / GIB:.1f} GiB are free")
