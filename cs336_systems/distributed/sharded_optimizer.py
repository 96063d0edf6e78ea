"""An optimizer whose state is divided among the ranks: each updates its share of the parameters and sends the result.

    optimizer = ShardedOptimizer(model.parameters(), torch.optim.AdamW, lr=1e-3)             # gradients averaged by DDP
    optimizer = ShardedOptimizer(model.parameters(), torch.optim.AdamW, lr=1e-3, reduce_gradients="reduce-scatter")
    optimizer = ShardedOptimizer(model.parameters(), torch.optim.AdamW, lr=1e-3, reduce_gradients="shard")
    loss.backward(); optimizer.step(); optimizer.zero_grad()

Three forms; with P bytes of parameters and W ranks on a ring, and AdamW's two moments:

                        gradients before step()     bytes per link and step    memory per rank
    plain DDP           all-reduced by DDP          2 (W-1)/W P                P + P + 2 P
    default             all-reduced by DDP          2 (W-1)/W P + P            P + P + 2 P/W, up to a tensor more
    "reduce-scatter"    each rank's own: no DDP     2 (W-1)/W P                P + P + 2 P/W
    "shard"             each rank's own: no DDP     2 (W-1)/W P                P + P/W + 2 P/W, and two buckets

The default is the CS336 handout's: whole tensors have owners, balanced by bytes, who broadcast what they updated.
``"reduce-scatter"`` is ZeRO stage 1 (Rajbhandari et al. 2020, section 5.1): each rank receives the sum of only those
gradients that it needs (divided by W, as DDP does), updates its slices, and all ranks gather the parameters. It sends
as much as plain DDP; the default's broadcasts, one after another, come on top. ``shards.py`` and ``scattered.py`` have
the layouts, ``costs/sharding.py`` the arithmetic: of the busiest link in each collective.

``"shard"`` is stage 2: whole gradients are freed as their buckets are reduced. With one backward a step it is the same
numbers, to the bit. Each of several backwards reduces (and sends) its own, and their means add up in the shard.

What the optimizer class must be like: it updates each parameter by itself (no LBFGS), and element by element for all
but the default (SGD, Adam, AdamW; not Adafactor, Muon or LAMB). One that draws random numbers per element has a
method ``locate(tensor, number, offset)`` and is told of which parameter, and from which element on. ``step`` runs it
once per bucket, so that sending one overlaps with updating the next. With ``"reduce-scatter"``, ``.grad`` is scratch
memory between backward and ``zero_grad``, and several backwards of a step go under ``no_sync()``, but for the last.
With ``"shard"``, ``.grad`` is None after backward, and gradients are cleared by the optimizer's ``zero_grad`` alone.

``step`` returns when all parameters are there, for whatever the current stream does next. After ``send_under_forward``
it returns earlier, and the next forward runs while later layers' parameters are still on their way.

Limits: ``torch.amp.GradScaler`` needs whole gradients, thus the default form; parameters must be dense, be on their
device before, and begin equal on all ranks (DDP sees to that; without it, seed alike or broadcast). For clipping there
is ``reduced_gradients``.
"""

import math
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, overload

import torch
import torch.distributed as dist
from torch import Tensor, nn

from cs336_systems.costs.sharding import DEFAULT_BUCKET_SIZE_MB
from cs336_systems.distributed.arrivals import Arrivals
from cs336_systems.distributed.fsdp_parameters import GradientHooks
from cs336_systems.distributed.optimizer_state import (
    check_state_fits,
    copied,
    layout_descriptions,
    options_of,
    parameters_of,
    state_of_piece,
    whole_state,
)
from cs336_systems.distributed.process_group import check_same_across_ranks
from cs336_systems.distributed.scattered import GradientScatter
from cs336_systems.distributed.shards import (
    BucketLayout,
    ParameterBucket,
    Piece,
    Runs,
    check_dense,
    local_layout,
    owned_layout,
    runs_of,
)

REDUCE_SCATTER, SHARD = "reduce-scatter", "shard"


class ShardedOptimizer(torch.optim.Optimizer):
    """``optimizer_cls(params, **kwargs)``, with the state of each rank's share only.

    ``param_groups`` are the whole model's, and what schedulers write there is what the step uses. ``state`` is this
    rank's: its keys are what it updates, parameters or, unless in the default form, one-dimensional slices of them.

    Args:
        params: as for every ``torch.optim.Optimizer``; the same on every rank, in the same order.
        optimizer_cls: such as ``torch.optim.AdamW``.
        reduce_gradients: None if the gradients are averaged over the ranks before ``step``; ``"reduce-scatter"`` or
            ``"shard"`` if that is left to this class.
        bucket_size_mb: most MiB of parameters that one collective sends, unless one is larger.
        kwargs: for ``optimizer_cls``.

    Raises:
        ValueError: there are no parameters, a parameter is sparse or sharded by FSDP, an argument is not as above, or
            ranks were given different parameters (on every rank).
        TypeError: as ``optimizer_cls`` and ``torch.optim.Optimizer`` raise it.
    """

    def __init__(
        self,
        params: Iterable[Any],
        optimizer_cls: type[torch.optim.Optimizer],
        *,
        reduce_gradients: str | None = None,
        bucket_size_mb: float = DEFAULT_BUCKET_SIZE_MB,
        **kwargs: Any,
    ) -> None:
        if not (isinstance(optimizer_cls, type) and issubclass(optimizer_cls, torch.optim.Optimizer)):
            raise ValueError(f"optimizer_cls must be a subclass of torch.optim.Optimizer, got {optimizer_cls!r}")
        if reduce_gradients not in (None, REDUCE_SCATTER, SHARD):
            known = f"None, {REDUCE_SCATTER!r} or {SHARD!r}"
            raise ValueError(f"reduce_gradients must be {known}, got {reduce_gradients!r}")
        if not 0 < bucket_size_mb < math.inf:
            raise ValueError(f"bucket_size_mb must be positive and finite, got {bucket_size_mb}")
        self.optimizer_cls = optimizer_cls
        self.reduce_gradients = reduce_gradients
        self.bucket_size_mb = bucket_size_mb
        distributed = dist.is_available() and dist.is_initialized()
        self.rank = dist.get_rank() if distributed else 0
        self.world_size = dist.get_world_size() if distributed else 1
        self._kwargs = kwargs
        self._prepare_layout()
        super().__init__(params, optimizer_cls([{"params": []}], **kwargs).defaults)
        self._lay_out(self.param_groups, self._agreed(self.param_groups))

    def _prepare_layout(self) -> None:
        self.local: torch.optim.Optimizer | None = None
        """The optimizer of this rank's share; its param_groups correspond to these one by one."""
        self._buckets: list[ParameterBucket] = []
        self._pieces: dict[Tensor, list[Piece]] = {}
        self._names: dict[Tensor, str] = {}
        self._group_of: dict[Tensor, int] = {}
        self._loads = [0] * self.world_size
        self._arrivals: Arrivals | None = None
        self._sending: list[tuple[ParameterBucket, list[nn.Module]]] = []
        scattered = self.reduce_gradients is not None and self.world_size > 1
        self._scatter = GradientScatter(self._names, frees=self.reduce_gradients == SHARD) if scattered else None

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters, such as layers that are no longer frozen; called with the same on every rank.

        Raises:
            ValueError: a parameter is sparse, sharded by FSDP, or in a group already; ranks were given different ones.
            TypeError: it is no group of tensors.
        """
        super().add_param_group(param_group)
        added = self.param_groups[-1:]
        runs = None
        try:
            for parameter in added[0]["params"]:
                if isinstance(vars(parameter).get("register_post_accumulate_grad_hook"), GradientHooks):
                    raise ValueError(
                        "parameters of an FSDP module are sharded already, and so is the state of "
                        f"{self.optimizer_cls.__name__} over them: use it without ShardedOptimizer"
                    )
                if parameter.layout != torch.strided:
                    raise ValueError(f"parameters must be dense to share a flat buffer, got layout {parameter.layout}")
            if self.local is not None:
                runs = self._agreed(added)
        except ValueError:
            del self.param_groups[-1]
            raise
        if runs is not None:
            self._lay_out(added, runs)

    def _agreed(self, groups: Sequence[dict[str, Any]]) -> Runs:
        """How to lay out the parameters of new groups, which is the same on every rank."""
        runs = runs_of(parameters_of(groups))
        if self.world_size > 1:
            options = f"{self.optimizer_cls.__name__} {self.reduce_gradients} {self.bucket_size_mb}"
            described = [f"{options}, {parameter}" for parameter in layout_descriptions(groups, runs)]
            check_same_across_ranks(described, "parameters to shard")
        return runs

    def _lay_out(self, groups: Sequence[dict[str, Any]], runs: Runs) -> None:
        """Divide the parameters of new groups and give this rank's pieces to its optimizer."""
        layout = self._layout(runs)
        self._buckets += layout.buckets
        self._pieces |= layout.pieces
        self._plan_sending()
        first = 0 if self.local is None else len(self.local.param_groups)
        local_groups = []
        for i, group in enumerate(groups, start=first):
            numbered = [f"parameter {j} of group {i}" for j in range(len(group["params"]))]
            self._names |= zip(group["params"], group.get("param_names", numbered), strict=True)
            pieces = [piece for parameter in dict.fromkeys(group["params"]) for piece in self._pieces[parameter]]
            tensors = [piece.tensor for piece in pieces if piece.tensor is not None]
            self._group_of |= dict.fromkeys(tensors, i)
            local_groups.append({**options_of(group), "params": tensors})
        if self.local is None:
            self.local = self.optimizer_cls(local_groups, **self._kwargs)
        else:
            for local_group in local_groups:
                self.local.add_param_group(local_group)
        if locate := getattr(self.local, "locate", None):
            for number, parameter in enumerate(self._names):
                for piece in self._pieces[parameter]:
                    if piece.tensor is not None:
                        locate(piece.tensor, number, piece.start)
        self.state = self.local.state

    def _layout(self, runs: Runs) -> BucketLayout:
        bucket_bytes = int(self.bucket_size_mb * 1024**2)
        if self.world_size == 1:
            return local_layout([parameter for run in runs for parameter in run])
        if self._scatter is not None:
            return self._scatter.layout(runs, self.rank, self.world_size, bucket_bytes)
        return owned_layout(runs, self.rank, self.world_size, bucket_bytes, self._loads)

    @overload
    def step(self, closure: None = None, **kwargs: Any) -> None: ...
    @overload
    def step(self, closure: Callable[[], float], **kwargs: Any) -> float: ...
    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None, **kwargs: Any) -> float | None:
        """Update all parameters on all ranks, which must all call it; returns the closure's loss if one is given.

        Args:
            closure: evaluates the model and its gradients anew; called once.
            kwargs: for the ``step`` of ``optimizer_cls``.

        Raises:
            ValueError: a gradient is not dense, in a world of more than one rank.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self.wait()
        if self.world_size > 1:
            for parameter, name in self._names.items():
                check_dense(parameter, name)
        sent = self._scatter.reduce_the_rest() if self._scatter is not None else []
        options = [options_of(group) for group in self.param_groups]
        for bucket, readers in self._sending:
            # What the optimizer counts in its groups counts steps, so only the last of its calls may change them.
            last = bucket is self._sending[-1][0]
            self._update(bucket.prepare(), options if last else [copied(each) for each in options], kwargs)
            works = bucket.send()
            if readers and self._arrivals is not None:
                self._arrivals.expect(works, readers)
            else:
                sent += works
        for work in sent:
            work.wait()
        assert self.local is not None
        for group, local_group in zip(self.param_groups, self.local.param_groups, strict=True):
            group.update(options_of(local_group))
        return loss

    def send_under_forward(self, modules: Iterable[nn.Module]) -> None:
        """Let ``step`` return while parameters of these modules are on their way; a collective.

        The first modules' are sent first, and the others while these compute: a module's next forward waits for its
        own. State dicts, ``save_checkpoint``, ``load_checkpoint`` and the next ``step`` wait, too. **Whoever else reads
        or writes the parameters calls ``wait`` before**, such as who copies the model,
        makes another optimizer over them, or computes with them on another stream than the one that trains.
        Parameters in none of the modules are there when ``step`` returns.

        Args:
            modules: in the order in which forward calls them, which is that of all ranks; parts of them are not called
                otherwise. They replace those of an earlier call.

        Raises:
            ValueError: a module is compiled, or ranks were given different ones.
        """
        listed = list(modules)
        if self.world_size > 1:
            number_of = {parameter: number for number, parameter in enumerate(self._names)}
            of_modules = [sorted(number_of.get(parameter, -1) for parameter in own.parameters()) for own in listed]
            check_same_across_ranks(of_modules, "parameters of modules to send under")
        arrivals = Arrivals(listed)
        if self._arrivals is not None:
            self._arrivals.close()
        self._arrivals = arrivals
        weakref.finalize(self, arrivals.close).atexit = False
        self._plan_sending()

    def wait(self) -> None:
        """Wait until all parameters are there, for whatever the current stream does next."""
        if self._arrivals is not None:
            self._arrivals.wait()

    def _plan_sending(self) -> None:
        """Note in which order buckets are sent, each with the modules that wait for it, if ``step`` does not."""
        arrivals = self._arrivals or Arrivals()
        self._sending = arrivals.in_order(self._buckets)

    def reduced_gradients(self) -> list[Tensor]:
        """The gradients of this rank's share, averaged over the ranks, as ``step`` will take them; a collective.

        After backward, unless in the default form: shares do not overlap, and together are the whole gradient.

        Raises:
            ValueError: this is the default form, in which every rank has whole gradients.
        """
        if self._scatter is None:
            raise ValueError("this optimizer leaves gradients whole on every rank: take them from the parameters")
        self.wait()
        for parameter, name in self._names.items():
            check_dense(parameter, name)
        for work in self._scatter.reduce_the_rest():
            work.wait()
        tensors = [tensor for bucket in self._buckets for tensor in bucket.prepare()]
        return [tensor.grad for tensor in tensors if tensor.grad is not None]

    def _update(self, tensors: list[Tensor], options: list[dict[str, Any]], kwargs: dict[str, Any]) -> None:
        """Step this rank's optimizer over some of its tensors only, its groups with these options."""
        assert self.local is not None
        groups = self.local.param_groups
        everything = [group["params"] for group in groups]
        for i, group in enumerate(groups):
            group.clear()
            group |= {**options[i], "params": [tensor for tensor in tensors if self._group_of[tensor] == i]}
        try:
            self.local.step(**kwargs)
        finally:
            for group, params in zip(groups, everything, strict=True):
                group["params"] = params

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients of all parameters, on this rank."""
        super().zero_grad(set_to_none)
        if self._scatter is not None:
            self._scatter.forget(free=set_to_none)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Let backward accumulate whole gradients without reducing them, if only this class would do so.

        In the form ``"shard"``, which has no room for whole gradients, each backward reduces all the same.
        """
        if self._scatter is None or self._scatter.frees:
            yield
            return
        before, self._scatter.enabled = self._scatter.enabled, False
        try:
            yield
        finally:
            self._scatter.enabled = before

    def state_dict(self, *, to: int | None = None) -> dict[str, Any]:
        """The whole state in ``torch.optim``'s own format, as copies on the CPU; every rank must call it.

        It loads into a ``ShardedOptimizer`` of any form and world size, and into a plain ``optimizer_cls``.

        Args:
            to: the only rank that gets it, for saving; the others get an empty dict. By default all ranks do, which
                takes the memory of the whole state once per rank.
        """
        keep = to is None or to == self.rank
        whole = whole_state(self._pieces, self.state, self.world_size, keep=keep)
        if not keep:
            return {}
        mine, self.state = self.state, whole
        try:
            return super().state_dict()
        finally:
            self.state = mine

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take options and this rank's share of a state that ``state_dict`` or a plain ``optimizer_cls`` returned.

        Raises:
            ValueError: it holds no parameter groups (another rank got them), or belongs to other parameters; nothing
                has changed then.
        """
        if "param_groups" not in state_dict or "state" not in state_dict:
            raise ValueError(f"a state dict needs state and param_groups, got keys {sorted(state_dict)}")
        numbers = [number for group in state_dict["param_groups"] for number in group["params"]]
        by_parameter = {
            parameter: state_dict["state"][number]
            for number, parameter in zip(numbers, self._parameters(), strict=False)
            if number in state_dict["state"]
        }
        for parameter, state in by_parameter.items():
            check_state_fits(state, parameter)
        shares = {
            piece.tensor: state_of_piece(state, parameter, piece)
            for parameter, state in by_parameter.items()
            for piece in self._pieces[parameter]
            if piece.tensor is not None
        }
        self.load_shares(shares, state_dict["param_groups"])

    def shares(self) -> list[tuple[Tensor, Piece, dict[str, Any]]]:
        """Each parameter that this rank updates a piece of, the piece, and its state, empty before the first step."""
        return [
            (parameter, piece, self.state.get(piece.tensor, {}))
            for parameter, pieces in self._pieces.items()
            for piece in pieces
            if piece.tensor is not None
        ]

    def load_shares(self, states: Mapping[Tensor, dict[str, Any]], param_groups: list[dict[str, Any]]) -> None:
        """Take options as of ``state_dict``, and this rank's states by ``Piece.tensor``; of the others it has none.

        Raises:
            ValueError: the groups belong to other parameters; nothing has changed then.
        """
        super().load_state_dict({"param_groups": param_groups, "state": {}})
        assert self.local is not None
        packed = self.local.state_dict()
        ids = [number for group in packed["param_groups"] for number in group["params"]]
        id_of = dict(zip(self._local_tensors(), ids, strict=True))
        packed["state"] = {id_of[tensor]: state for tensor, state in states.items()}
        for group, local_group in zip(self.param_groups, packed["param_groups"], strict=True):
            local_group.update(options_of(group))
        self.local.load_state_dict(packed)
        self.state = self.local.state

    def _parameters(self) -> list[Tensor]:
        return [parameter for group in self.param_groups for parameter in group["params"]]

    def _local_tensors(self) -> list[Tensor]:
        assert self.local is not None
        return [tensor for group in self.local.param_groups for tensor in group["params"]]

    def __reduce_ex__(self, protocol: Any) -> Any:
        """What ``copy`` and ``pickle`` call; raises RuntimeError."""
        raise RuntimeError(
            "ShardedOptimizer cannot be copied or pickled, as its parameters share buffers with those of other ranks: "
            "save its state_dict(), or a checkpoint by save_checkpoint"
        )

    def __repr__(self) -> str:
        name = type(self).__name__
        place = f"{self.optimizer_cls.__name__}, rank {self.rank} of {self.world_size}"
        return super().__repr__().replace(f"{name} (", f"{name} of {place} (", 1)
