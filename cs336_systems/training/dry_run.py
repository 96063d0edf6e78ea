"""The peak memory of a training step, found by running it on fake tensors: shapes and lifetimes without bytes.

    peak = dry_run(case, "step")
    peak.n_bytes, peak.moments, peak.parts

The step is the one that ``assemble`` builds. Tensors on ``meta`` take no memory and hardly any time; a dispatch mode
sees every operator and tracks the storages that it allocates until they are freed. Our own operators run up to their
launches, which are skipped, so that the launchers' buffers count; memory that torch's libraries allocate inside an
operator is calculated (``_WORKSPACES``). On CUDA each storage counts as a block of torch's caching allocator, and
cuBLAS's workspaces are added. A rank of several is predicted as rank 0 of a process group that sends nothing.

Limits: eager execution (a compiled step is followed as if it were eager); the CUDA context and fragmentation are left
out, as ``torch.cuda.max_memory_allocated`` leaves them out. Sizes are in bytes.
"""

import sys
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, fields, replace
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d
from torch import Tensor, nn
from torch._C._distributed_c10d import FakeWork
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from cs336_systems.case import TrainingCase
from cs336_systems.costs.memory import CUBLAS_WORKSPACE_BYTES, PARTS, PeakMemory, cuda_block_bytes
from cs336_systems.costs.parallelism.stages import plan_of
from cs336_systems.distributed.process_group import Rank
from cs336_systems.kernels.allocating import FUNCTIONS, only_allocating
from cs336_systems.model import REFERENCE_OPS, ModelOps, TransformerLM
from cs336_systems.ranks import SHARED_BATCH, Parallel
from cs336_systems.training.assemble import build_unchecked, finish, mailbox_of, mesh_of
from cs336_systems.training.precision import BY_BYTES, matmul_dtype
from cs336_systems.training.step import TrainStep

META = torch.device("meta")
_RESIZE = torch.UntypedStorage.resize_


@dataclass(eq=False)
class _Storage:
    """Bytes that are allocated at the same time; moments are given by their number."""

    part: str
    made_in: int
    n_bytes: int = 0
    freed_in: int | None = None


class LiveStorages(TorchDispatchMode):
    """Tracks every storage that operators allocate until it is freed; storages on ``meta`` take no memory."""

    def __init__(self, block_bytes: Callable[[int], int]) -> None:
        super().__init__()
        self.part = "parameters"
        """The part of memory to which new tensors belong."""
        self.moments = ["states"]
        self.changes: list[tuple[int, _Storage, int]] = []
        """(Number of the moment, storage, change in bytes), in order."""
        self.alive: dict[int, _Storage] = {}
        self._block_bytes = block_bytes

    def begin(self, moment: str, part: str) -> None:
        """Begin a moment of the step; tensors made from now on count as ``part`` of the memory."""
        if self.moments[-1] != moment:
            self.moments.append(moment)
        self.part = part

    @property
    def _now(self) -> int:
        return len(self.moments) - 1

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Return False, else torch imports its compiler, three seconds, to exclude this mode from compilation."""
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func.namespace == "c10d":
            return _nothing_sent(func, args)
        if func in FUNCTIONS and func._opname not in _WITHOUT_BODY:
            with self:
                return FUNCTIONS[func](*args, **kwargs)
        if func is torch.ops.aten.add.Tensor and _accumulates(args[0]):
            self._change(self.alive[args[0].untyped_storage()._cdata], 0)  # it becomes the sum
        made = _scaled_product(*args, **kwargs) if func._opname == "_scaled_mm" else func(*args, **kwargs)
        self.add(made)
        if (workspace := _WORKSPACES.get(func._opname)) is not None and (n_bytes := workspace(args, made)):
            self._change(scratch := _Storage("temporaries", self._now), n_bytes)
            self._change(scratch, 0)
        return made

    def add(self, value: Any) -> None:
        """Count the storages of tensors among the values, which may be nested."""
        if isinstance(value, (list, tuple)):
            for each in value:
                self.add(each)
        elif isinstance(value, Tensor) and (key := (storage := value.untyped_storage())._cdata) not in self.alive:
            self.alive[key] = one = _Storage(self.part, self._now)
            weakref.finalize(storage, self._drop, key).atexit = False
            self._change(one, storage.nbytes())

    def _change(self, storage: _Storage, n_bytes: int) -> None:
        n_bytes = self._block_bytes(n_bytes)
        self.changes.append((self._now, storage, n_bytes - storage.n_bytes))
        storage.n_bytes = n_bytes

    def _drop(self, key: int) -> None:
        storage = self.alive.pop(key)
        storage.freed_in = self._now
        self._change(storage, 0)

    def resize(self, storage: torch.UntypedStorage, size: int) -> None:
        """Replace ``resize_``, which is no operator, and recount a counted storage. FSDP uses it to gather."""
        _RESIZE(storage, size)
        if (one := self.alive.get(storage._cdata)) is not None:
            one.part = "gathered parameters"
            self._change(one, storage.nbytes())

    def leave_out(self, tensor: Tensor) -> None:
        """Do not count a tensor that is in host memory."""
        storage = self.alive[tensor.untyped_storage()._cdata]
        storage.part = "host"
        self._change(storage, 0)

    def label(self, part: str, tensors: Iterable[Tensor | None]) -> None:
        """Assign the tensors to a part of memory."""
        for tensor in tensors:
            if tensor is not None and (one := self.alive.get(tensor.untyped_storage()._cdata)) is not None:
                one.part = part

    def peak(self, start: int, workspaces: int) -> PeakMemory:
        """The peak from this change on, without the library's workspaces."""
        parts = dict.fromkeys((*PARTS, "host"), 0) | {"tables and workspaces": workspaces}
        total, most, at_most = workspaces, -1, parts
        moments: dict[str, int] = {}
        for i, (number, storage, n_bytes) in enumerate(self.changes):
            total += n_bytes
            part = storage.part
            if part == "activations" and storage.freed_in == storage.made_in:
                part = "temporaries"
            parts[part] += n_bytes
            if i >= start:
                moment = self.moments[number]
                moments[moment] = max(moments.get(moment, 0), total)
                if total > most:
                    most, at_most = total, parts.copy()
        return PeakMemory(most, moments, {part: at_most[part] for part in PARTS if at_most[part]})


def _accumulates(tensor: Tensor) -> bool:
    """Whether autograd's engine would add to this gradient in place if there were no dispatch mode.

    It does if nothing else refers to the gradient's memory (torch/csrc/autograd/input_buffer.cpp, accumulate). The
    engine calls from C++, so the Python frame below the dispatch mode's is the one that started backward.
    """
    caller = sys._getframe(2)
    if caller.f_code.co_name != "_engine_run_backward" or not tensor.is_contiguous():
        return False
    n_users = torch._C._storage_Use_Count(tensor.untyped_storage()._cdata)
    return n_users == 2  # the gradient, and the storage as Python sees it


def _nothing_sent(func: Any, args: Any) -> Any:
    """Return what a collective does, with the tensors as they were."""
    results = [FakeWork().boxed() if "Work" in str(each.type) else args[0] for each in func._schema.returns]
    return results[0] if len(results) == 1 else tuple(results)


def _scaled_product(
    a: Tensor, b: Tensor, *rest: Any, out_dtype: torch.dtype | None = None, out: Tensor | None = None, **_: Any
) -> Tensor:
    """The result of ``torch._scaled_mm``, which has no formula for shapes in all of its forms."""
    dtype = out_dtype or next((each for each in rest if isinstance(each, torch.dtype)), None)
    return a.new_empty(a.shape[0], b.shape[1], dtype=dtype) if out is None else out


def _attention_sums(args: Any, made: Any) -> int:
    """Bytes that the Hopper kernels' backward allocates: 16 statistics of 2 bytes a query, and fp32 sums of dq."""
    batch, heads, n_queries, d_head = args[0].shape
    return 4 * batch * heads * -(-n_queries // 128) * 128 * (8 + (64 if d_head <= 64 else 128))


def _embedding_sums(args: Any, made: Any) -> int:
    """Bytes that CUDA allocates to add up an embedding's gradient from more than 3,072 tokens.

    It sorts them, and adds up to ten equal ones at a time (aten/src/ATen/native/cuda/Embedding.cu, NROWS_PER_THREAD in
    EmbeddingBackwardKernel.cu).
    """
    tokens, (n_words, d_model) = args[1].numel(), made.shape
    return 0 if tokens <= 3072 else 4 * (tokens // 10 + min(tokens, n_words)) * d_model + 4 * 8 * tokens


_WORKSPACES: dict[str, Callable[[Any, Any], int]] = {
    "hopper_attention_backward": _attention_sums,
    "hopper_attention_backward_into": _attention_sums,
    "embedding_dense_backward": _embedding_sums,
    "logsumexp": lambda args, made: args[0].nbytes,  # the exponentials
    "_softmax_backward_data": lambda args, made: args[0].nbytes,  # gradient times result (cuda/SoftMax.cu)
}
"""Bytes that operators allocate internally while they run, as functions of their arguments and results."""

_WITHOUT_BODY = ("hopper_attention_forward", "hopper_attention_backward", "hopper_attention_backward_into")
"""Our operators whose launchers need a GPU's driver; only their results are tracked."""


class _Autocast(TorchFunctionMode):
    """``torch.autocast`` for ``meta``, which has none: casts the reference model's operations as autocast does.

    Products are of ``dtype``; CUDA computes softmax in fp32. Casts of weights are kept until forward has ended.
    """

    def __init__(self, dtype: torch.dtype, *, wide_softmax: bool) -> None:
        super().__init__()
        self.dtype, self.wide_softmax = dtype, wide_softmax
        self.cache: dict[Tensor, Tensor] = {}

    @property
    def ops(self) -> ModelOps:
        return replace(REFERENCE_OPS, linear=self._linear, attention=self._attention)

    def _linear(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        return REFERENCE_OPS.linear(*(each if each is None else self._cast(each) for each in (x, weight, bias)))

    def _attention(self, *args: Any, **kwargs: Any) -> Tensor:
        with self:
            return REFERENCE_OPS.attention(*args, **kwargs)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self.wide_softmax and func is torch.softmax:
            args = (args[0].float(), *args[1:])
        elif func in (Tensor.matmul, Tensor.__matmul__):
            args = tuple(map(self._cast, args))
        return func(*args, **(kwargs or {}))

    def _cast(self, x: Tensor) -> Tensor:
        if not (isinstance(x, nn.Parameter) and torch._C._current_graph_task_id() == -1):
            return x.to(self.dtype)
        if x not in self.cache:
            self.cache[x] = x.to(self.dtype)
        return self.cache[x]


@contextmanager
def _one_of(world_size: int, number: int) -> Iterator[Rank]:
    """Make this process one of ``world_size`` ranks that send nothing, in place of a group that it has joined."""
    import torch.testing._internal.distributed.fake_pg  # noqa: F401  (registers the backend)

    joined = c10d._get_default_group() if dist.is_initialized() else None
    c10d._update_default_pg(None)
    dist.init_process_group("fake", store=dist.HashStore(), rank=number, world_size=world_size)
    imagined = c10d._get_default_group()
    try:
        yield Rank(number, number, world_size, META, "fake")
    finally:
        if joined is not None:
            c10d._update_default_pg(joined)
        dist.destroy_process_group(imagined)


def _unwrapped(case: TrainingCase) -> TrainingCase:
    """Return the case of a rank that shares at most its batch. DDP adds no memory: its buckets are the gradients."""
    shared = Parallel(**{name: getattr(case.parallel, name) for name in SHARED_BATCH})
    kind = type("Unwrapped", (type(case),), {"parallel": shared})
    unwrapped: TrainingCase = kind(**{each.name: getattr(case, each.name) for each in fields(case)})
    return unwrapped


def dry_run(
    case: TrainingCase,
    mode: str = "step",
    *,
    world_size: int = 1,
    workspace_bytes: int = CUBLAS_WORKSPACE_BYTES,
) -> PeakMemory:
    """The peak of allocated memory on one rank in any pass of ``mode`` but the first.

    For a pipeline it is the peak of the fullest stage.

    Args:
        case: the step to run; whether its device supports it is not checked.
        world_size: the number of ranks, if the case's ``parallel`` says that ranks share the step.
        workspace_bytes: cuBLAS's, per thread that calls it; only used on CUDA.

    Raises:
        ValueError: no such mode, or a name in the case is unknown.
    """
    stages = case.parallel.pipeline
    first = [stage * (world_size // stages) for stage in range(stages)]
    found = (_dry_run_of(case, mode, world_size, number, workspace_bytes) for number in first)
    return max(found, key=lambda peak: peak.n_bytes)


def _dry_run_of(case: TrainingCase, mode: str, world_size: int, number: int, workspace_bytes: int) -> PeakMemory:
    on_cuda = case.device.startswith("cuda")
    live = LiveStorages(cuda_block_bytes if on_cuda else int)
    dtype = "fp32" if case.precision.autocast else case.dtype
    in_flight = case.accumulate if case.parallel.pipeline > 1 else 2  # else a third micro-batch is like the second
    accumulate = min(case.accumulate, in_flight)
    # Torch's fused AdamW refuses meta; ours has the same states and no more temporaries.
    optimizer = "fused" if case.optimizer == "torch-fused" else case.optimizer
    eager = replace(case, device="meta", dtype=dtype, accumulate=accumulate, optimizer=optimizer)
    eager = replace(eager, compile="off", cuda_graph="off")
    sharded = case.parallel.wrapper in ("fsdp", "fsdp2") or case.parallel.optimizer_state != "replicated"
    if not sharded:
        eager = _unwrapped(eager)
    with ExitStack() as stack:
        rank = None
        if sharded or case.parallel.ranks_per_batch > 1:
            rank = stack.enter_context(_one_of(world_size, number))
        stack.enter_context(only_allocating(live.leave_out))
        casts = _Autocast(matmul_dtype(case.precision), wide_softmax=on_cuda)
        stack.enter_context(patch.object(torch.UntypedStorage, "resize_", lambda *given: live.resize(*given)))
        stack.enter_context(live)
        of_their_own = case.moment_bytes != case.precision.parameter_bytes
        moments: dict[str, Any] = {"state_dtype": BY_BYTES[case.moment_bytes]} if of_their_own else {}
        ops = casts.ops if case.precision.autocast else REFERENCE_OPS
        model = build_unchecked(eager, META, mesh_of(eager, rank), ops)
        step = finish(model, eager, rank, **moments)
        live.label("tables and workspaces", step.model.buffers())
        _note_moments(step, live)
        shape = accumulate * case.batch_size, case.context_length // case.parallel.context
        ids, targets = (torch.zeros(shape, dtype=torch.int64, device=META) for _ in range(2))
        live.label("tables and workspaces", [ids, targets])

        def run(optimizer_part: str) -> None:
            for phase, call in step.phases(mode, ids, targets).items():
                live.begin(phase, optimizer_part if phase == "optimizer" else "activations")
                call()
                casts.cache.clear()

        run("optimizer state")
        for storage in live.alive.values():
            if storage.part not in ("optimizer state", "gathered parameters", "tables and workspaces", "host"):
                storage.part = "parameters"
        start = len(live.changes)
        run("temporaries")
    workspaces = workspace_bytes * (1 if mode == "forward" else 2) if on_cuda else 0
    if on_cuda and case.parallel.pipeline_by in ("auto", "copies") and (plan := plan_of(case)):
        workspaces += mailbox_of(case, plan).n_bytes(plan.stages)
    return live.peak(start, workspaces)


def _note_moments(step: TrainStep, live: LiveStorages) -> None:
    """Register hooks that mark when the parts of the model run."""
    model = step.model if isinstance(step.model, TransformerLM) else step.model.module
    assert isinstance(model, TransformerLM)

    def comes(moment: str, part: str) -> Callable[..., None]:
        def forward(*_: Any) -> None:
            if torch._C._current_graph_task_id() == -1:  # forward, not a block that backward runs again
                live.begin(moment, part)

        return forward

    def leaves(moment: str) -> Callable[..., None]:
        def forward(module: nn.Module, inputs: Any, output: Any) -> None:
            if isinstance(output, Tensor) and output.requires_grad and torch._C._current_graph_task_id() == -1:
                output.register_hook(lambda _: live.begin(moment, "temporaries"))

        return forward

    named: list[tuple[str, nn.Module]] = [("embedding", model.token_embeddings), ("loss", model.ln_final)]
    named += [(f"block {i}", block) for i, block in enumerate(model.layers)]
    for name, module in named:
        module.register_forward_pre_hook(comes(name, "loss" if name == "loss" else "activations"))
        module.register_forward_hook(leaves(f"{name} backward"))
    for parameter in (each for each in step.model.parameters() if each.requires_grad):
        parameter.register_post_accumulate_grad_hook(lambda p: live.label("gradients", [p.grad]))
