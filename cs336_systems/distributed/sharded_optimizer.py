"""An optimizer whose state is divided among the ranks: each updates its share of the parameters and sends the result.

    optimizer = ShardedOptimizer(model.parameters(), torch.optim.AdamW, lr=1e-3)             # gradients averaged by DDP
    optimizer = ShardedOptimizer(model.parameters(), torch.optim.AdamW, lr=1e-3, reduce_gradients="reduce-scatter")
    optimizer = ShardedOptimizer(model.parameters(), torch.optim.AdamW, lr=1e-3, reduce_gradients="shard")
    loss.backward(); optimizer.step(); optimizer.zero_grad()

With P bytes of parameters and W ranks on a ring, and AdamW's two moments:

                        gradients before step()     bytes per link and step    memory per rank
    plain DDP           all-reduced by DDP          2 (W-1)/W P                P + P + 2 P
    default             all-reduced by DDP          2 (W-1)/W P + P            P + P + 2 P/W, up to a tensor more
    "reduce-scatter"    each rank's own: no DDP     2 (W-1)/W P                P + P/W + 2 P/W, and two buckets
    "shard"             each rank's own: no DDP     2 (W-1)/W P                the same

The default is the CS336 handout's: each whole tensor has an owner, balanced by bytes, which broadcasts the tensor after
its update. The other two are ZeRO (Rajbhandari et al. 2020, section 5.1): each rank receives the mean of only those
gradients that it needs and updates its slices, then all ranks gather the parameters. ``shards.py`` lays out the shards,
``scattered.py`` reduces gradients, and ``costs/sharding.py`` has the arithmetic for the busiest link in each
collective.

With several backwards per step, ``"reduce-scatter"`` (ZeRO stage 1) accumulates whole gradients under ``no_sync()`` and
sends them once, with the last backward. ``"shard"`` (stage 2) never holds more than two buckets of whole gradients:
each backward sends, and the means accumulate in the shard. With one backward per step both give the same bits. In both,
``.grad`` is None after a backward that has sent: clip by the optimizer's own ``clip_grad_norm_``, as torch's would find
nothing to clip. ``step`` consumes the gradients; to drop them without a step, call the optimizer's ``zero_grad``.

The optimizer class must update each parameter independently (LBFGS does not). In the two ZeRO forms it must also update
each element independently, as SGD, Adam and AdamW do, and Adafactor and LAMB do not. A class that needs some parameters
whole, as Muon needs matrices, names in ``WHOLE`` an option that is true for their groups: each of these parameters has
an owner, to whom its gradient is reduced. If the optimizer draws random numbers per element, it needs a method
``locate(tensor, number, offset)``, which is told the number of the parameter that ``tensor`` is a slice of and the
slice's first element. ``step`` runs the optimizer once per bucket, so that sending one bucket overlaps with updating
the next. It returns when all parameters have arrived or, after ``send_under_forward``, while those of later layers are
still on their way.

Limits: parameters must be dense, already on their device, and equal on all ranks at the start (DDP ensures this;
without it, use the same seed or broadcast). Outside ``no_sync`` all ranks must run equally many backwards, or none.
"""

import math
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import deepcopy
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor, nn

from cs336_systems.costs.sharding import DEFAULT_BUCKET_SIZE_MB
from cs336_systems.distributed.fsdp_parameters import GradientHooks
from cs336_systems.distributed.norms import check_max_norm, joint_norm, scale_to_norm
from cs336_systems.distributed.process_group import check_same_across_ranks
from cs336_systems.distributed.scattered import GradientScatter
from cs336_systems.distributed.shards import (
    Arrivals,
    Member,
    ParameterBucket,
    Piece,
    Runs,
    owned_buckets,
    owners_of,
    runs_of,
    scattered_buckets,
)
from cs336_systems.distributed.wrapped import check_shapes_are_known
from cs336_systems.hardware import MIB

REDUCE_SCATTER, SHARD = "reduce-scatter", "shard"


class ShardedOptimizer(torch.optim.Optimizer):
    """Works as ``optimizer_cls(params, **kwargs)`` does, but keeps only the state of this rank's shard.

    ``param_groups`` hold the whole model's parameters, and schedulers may change their options. ``state`` is this
    rank's: its keys are the tensors that this rank updates, which are parameters in the default form and
    one-dimensional slices of them in the others.

    Args:
        params: parameters or groups, as for every ``torch.optim.Optimizer``; the same on every rank, in the same order.
        optimizer_cls: the class of the optimizer, such as ``torch.optim.AdamW``.
        reduce_gradients: None if the gradients are averaged over the ranks before ``step``; ``"reduce-scatter"`` or
            ``"shard"`` if that is left to this class.
        bucket_size_mb: the most MiB of parameters that one collective sends, unless one parameter is larger.
        process_group: the ranks that have the same parameters and share the state; None for the default group.
        kwargs: further arguments of ``optimizer_cls``.

    Raises:
        ValueError: there are no parameters, a parameter is sparse, lazy or sharded by FSDP, an argument is not as
            above, or ranks were given different parameters or options (on every rank).
    """

    def __init__(
        self,
        params: Iterable[Any],
        optimizer_cls: type[torch.optim.Optimizer],
        *,
        reduce_gradients: str | None = None,
        bucket_size_mb: float = DEFAULT_BUCKET_SIZE_MB,
        process_group: dist.ProcessGroup | None = None,
        **kwargs: Any,
    ) -> None:
        if not (isinstance(optimizer_cls, type) and issubclass(optimizer_cls, torch.optim.Optimizer)):
            raise ValueError(f"optimizer_cls must be a subclass of torch.optim.Optimizer, got {optimizer_cls!r}")
        if reduce_gradients not in (None, REDUCE_SCATTER, SHARD):
            known = f"None, {REDUCE_SCATTER!r} or {SHARD!r}"
            raise ValueError(f"reduce_gradients must be {known}, got {reduce_gradients!r}")
        if issubclass(optimizer_cls, torch.optim.LBFGS):
            raise ValueError("LBFGS updates all parameters together: ranks cannot divide them")
        if reduce_gradients is not None and issubclass(optimizer_cls, torch.optim.Adafactor):
            raise ValueError(
                f"Adafactor updates whole matrices, and reduce_gradients={reduce_gradients!r} divides them"
            )
        if not 0 < bucket_size_mb < math.inf:
            raise ValueError(f"bucket_size_mb must be positive and finite, got {bucket_size_mb}")
        self.optimizer_cls = optimizer_cls
        self.reduce_gradients = reduce_gradients
        self.bucket_size_mb = bucket_size_mb
        self.member = Member.of(process_group)
        self.world_size = self.member.world_size
        self._kwargs = kwargs
        self._whole: str = getattr(optimizer_cls, "WHOLE", "")
        """The option that is true for groups whose parameters must each be updated whole, by one rank."""
        self.local: torch.optim.Optimizer | None = None
        """The optimizer of this rank's shard; its param_groups correspond to these one by one."""
        self._buckets: list[ParameterBucket] = []  # none in a world of one rank, which updates everything where it lies
        self.pieces: dict[Tensor, Piece] = {}
        """The piece of each parameter that this rank updates; parameters without such a piece are missing."""
        self._names: dict[Tensor, str] = {}
        self._group_of: dict[Tensor, int] = {}
        self._loads = [0] * self.world_size
        self._arrivals: Arrivals | None = None
        self._sending: list[tuple[ParameterBucket, list[nn.Module]]] = []
        self._scatter = GradientScatter(process_group) if reduce_gradients is not None and self.world_size > 1 else None
        super().__init__(params, optimizer_cls([{"params": []}], **kwargs).defaults)
        self._lay_out(self.param_groups, self._agreed(self.param_groups))

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group of parameters, such as layers that are no longer frozen; every rank adds the same ones.

        Raises:
            ValueError: a parameter is sparse, sharded by FSDP, or in a group already; ranks were given different ones,
                or different options for them.
        """
        super().add_param_group(param_group)
        added = self.param_groups[-1:]
        runs = None
        try:
            check_shapes_are_known(("a parameter", parameter) for parameter in added[0]["params"])
            for parameter in added[0]["params"]:
                if isinstance(vars(parameter).get("register_post_accumulate_grad_hook"), GradientHooks):
                    kind = self.optimizer_cls.__name__
                    raise ValueError(f"parameters of FSDP are sharded already, and so is the state of {kind} over them")
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
        """Agree on a layout for the parameters of new groups, equal on every rank."""
        parameters = list(dict.fromkeys(parameter for group in groups for parameter in group["params"]))
        runs = runs_of(parameters)
        if self.world_size > 1:
            numbered = {parameter: i for i, parameter in enumerate(parameters)}
            run_of = {parameter: [numbered[each] for each in run] for run in runs for parameter in run}
            how = f"{self.optimizer_cls.__name__} {self.reduce_gradients} {self.bucket_size_mb}"
            plain = int | float | str | tuple
            options = [
                ", ".join(f"{name} {value}" for name, value in group.items() if isinstance(value, plain))
                for group in groups
            ]
            described = [
                f"{how}, group {i} ({options[i]}): {tuple(p.shape)} {p.dtype}{' frozen' * (not p.requires_grad)}, "
                f"in one memory with parameters {run_of[p]}"
                for i, group in enumerate(groups)
                for p in group["params"]
            ]
            check_same_across_ranks(described, "parameters to shard", self.member.group)
        return runs

    def _lay_out(self, groups: Sequence[dict[str, Any]], runs: Runs) -> None:
        """Divide the parameters of new groups and give this rank's pieces to its optimizer."""
        first = 0 if self.local is None else len(self.local.param_groups)
        for i, group in enumerate(groups, start=first):
            numbered = [f"parameter {j} of group {i}" for j in range(len(group["params"]))]
            self._names |= zip(group["params"], group.get("param_names", numbered), strict=True)
        where = self.member, int(self.bucket_size_mb * MIB)
        if self.world_size == 1:
            self.pieces |= {parameter: Piece(0, parameter) for run in runs for parameter in run}
        elif self._scatter is None:
            self._buckets += owned_buckets(runs, *where, self._loads)
        else:  # last parameters first, as backward makes their gradients
            of_groups = {p for group in groups if group.get(self._whole) for p in group["params"]}
            owners = owners_of([run for run in runs if run[0] in of_groups], self.member, self._loads)
            made = scattered_buckets(reversed(runs), *where, owners)
            for bucket in made:
                if bucket.owner is not None:
                    bucket.take_views()
            self._scatter.watch(made, self._names)
            self._buckets += made
        for bucket in self._buckets:
            self.pieces |= bucket.own
        self._plan_sending()
        local_groups = []
        for i, group in enumerate(groups, start=first):
            tensors = [self.pieces[p].tensor for p in dict.fromkeys(group["params"]) if p in self.pieces]
            self._group_of |= dict.fromkeys(tensors, i)
            local_groups.append({**_options_of(group), "params": tensors})
        if self.local is None:
            self.local = self.optimizer_cls(local_groups, **self._kwargs)
        else:
            for local_group in local_groups:
                self.local.add_param_group(local_group)
        if locate := getattr(self.local, "locate", None):
            for number, parameter in enumerate(self._names):
                if piece := self.pieces.get(parameter):
                    locate(piece.tensor, number, piece.start)
        self.state = self.local.state

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None, **kwargs: Any) -> Any:
        """Update all parameters on all ranks, which must all call it; returns the closure's loss if one is given.

        Args:
            closure: evaluates the model and its gradients anew; called once.
            kwargs: for the ``step`` of ``optimizer_cls``.

        Raises:
            ValueError: a gradient is not dense or a parameter was moved or cast, in a world of more than one rank.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self.wait()
        sent = self._take_gradients()
        options = [_options_of(group) for group in self.param_groups]
        if not self._sending:
            self._update(self._local_tensors(), options, kwargs)
        for bucket, readers in self._sending:
            if self._scatter is not None:
                self._scatter.give(bucket)
            # Counters that the optimizer keeps in its groups count steps, so only its last call may change them.
            last = bucket is self._sending[-1][0]
            if last or bucket.own:
                own = [piece.tensor for piece in bucket.own.values()]
                self._update(own, options if last else deepcopy(options), kwargs)
            works = bucket.send()
            if readers and self._arrivals is not None:
                self._arrivals.expect(works, readers)
            else:
                sent += works
        if self._scatter is not None:
            self._scatter.clear()
        for work in sent:
            work.wait()
        assert self.local is not None
        for group, local_group in zip(self.param_groups, self.local.param_groups, strict=True):
            group.update(_options_of(local_group))
        return loss

    def send_under_forward(self, modules: Iterable[nn.Module]) -> None:
        """Let ``step`` return while parameters of these modules are still being sent; a collective call.

        Parameters of the first modules are sent first, and the others while these compute; each module's next forward
        waits for its own. The modules' state dicts, ``save_checkpoint``, ``load_checkpoint`` and the next ``step``
        wait, too. **All other code that reads or writes the parameters must call ``wait`` before**, such as code that
        copies the model. ``step`` itself waits for parameters that belong to none of the modules.

        Args:
            modules: in the order in which forward calls them on all ranks; parts of them are not called otherwise.

        Raises:
            ValueError: a module is compiled, or ranks were given different ones.
        """
        listed = list(modules)
        number_of = {parameter: number for number, parameter in enumerate(self._names)}
        of_modules = [sorted(number_of.get(parameter, -1) for parameter in own.parameters()) for own in listed]
        if self.world_size > 1:
            check_same_across_ranks(of_modules, "parameters of modules to send under", self.member.group)
        arrivals = Arrivals(listed)
        if self._arrivals is not None:
            self._arrivals.close()
        self._arrivals = arrivals
        weakref.finalize(self, arrivals.close).atexit = False
        self._plan_sending()

    def wait(self) -> None:
        """Make the current stream wait until all parameters have arrived."""
        if self._arrivals is not None:
            self._arrivals.wait()

    def _plan_sending(self) -> None:
        """Record the order in which buckets are sent, each with the modules that wait for it, unless ``step`` waits."""
        self._sending = (self._arrivals or Arrivals()).in_order(self._buckets)

    def reduced_gradients(self) -> list[Tensor]:
        """Return the averaged gradients of this rank's share, after backward; a collective call.

        Shares do not overlap, and together they are the whole gradient.

        Raises:
            ValueError: this is the default form, in which every rank has whole gradients.
        """
        if self._scatter is None:
            raise ValueError("this optimizer leaves gradients whole on every rank: take them from the parameters")
        self.wait()
        for work in self._take_gradients():
            work.wait()
        for bucket in self._buckets:
            self._scatter.give(bucket)
        own = [piece.tensor for bucket in self._buckets for piece in bucket.own.values()]
        return [tensor.grad for tensor in own if tensor.grad is not None]

    @torch.no_grad()
    def clip_grad_norm_(self, max_norm: float) -> Tensor:
        """Scale the averaged gradients so that their joint L2 norm is at most ``max_norm``; a collective call.

        Called between backward and ``step``; torch's would find no gradients in the two ZeRO forms. Returns the norm
        before clipping, a scalar on the device in fp32 or wider.

        Raises:
            ValueError: ``max_norm`` is not positive, or a gradient is sparse.
        """
        check_max_norm(max_norm)
        self._check_dense()
        shared = self._scatter is not None
        gradients = self.reduced_gradients() if shared else [p.grad for p in self._names if p.grad is not None]
        norm = joint_norm(gradients, next(iter(self._names)).device)
        if shared:
            dist.all_reduce(squares := norm.double().square(), group=self.member.group)
            norm = squares.sqrt().to(norm.dtype)
        scale_to_norm(gradients, norm, max_norm)
        return norm

    def _take_gradients(self) -> list[dist.Work]:
        """Check the gradients that backward has left, and reduce the remaining ones in the two ZeRO forms."""
        for bucket in self._buckets:
            bucket.check()
        if self._scatter is not None:
            return self._scatter.reduce_the_rest()
        if self.world_size > 1:
            self._check_dense()
        return []

    def _check_dense(self) -> None:
        for parameter, name in self._names.items():
            if parameter.grad is not None and parameter.grad.layout != torch.strided:
                raise ValueError(f"the gradient of {name} must be dense, got layout {parameter.grad.layout}")

    def _update(self, tensors: list[Tensor], options: list[dict[str, Any]], kwargs: dict[str, Any]) -> None:
        """Step this rank's optimizer over some of its tensors, with these options for its groups."""
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
        """Clear the gradients of all parameters on this rank, and drop those that have been reduced already."""
        super().zero_grad(set_to_none)
        if self._scatter is not None:
            self._scatter.clear()

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Make backward accumulate whole gradients without reducing them, except in the form ``"shard"``."""
        if self._scatter is None or self.reduce_gradients == SHARD:
            yield
            return
        before, self._scatter.enabled = self._scatter.enabled, False
        try:
            yield
        finally:
            self._scatter.enabled = before

    def load_shares(self, states: Mapping[Tensor, dict[str, Any]], param_groups: list[dict[str, Any]]) -> None:
        """Load options in the format of ``torch.optim`` and this rank's states by ``Piece.tensor``.

        Raises:
            ValueError: the options belong to other parameters.
        """
        super().load_state_dict({"param_groups": param_groups, "state": {}})
        assert self.local is not None
        packed = self.local.state_dict()
        ids = [number for group in packed["param_groups"] for number in group["params"]]
        id_of = dict(zip(self._local_tensors(), ids, strict=True))
        packed["state"] = {id_of[tensor]: state for tensor, state in states.items()}
        for group, local_group in zip(self.param_groups, packed["param_groups"], strict=True):
            local_group.update(_options_of(group))
        self.local.load_state_dict(packed)
        self.state = self.local.state

    def _local_tensors(self) -> list[Tensor]:
        assert self.local is not None
        return [tensor for group in self.local.param_groups for tensor in group["params"]]

    def _refuse(self, *_: Any) -> NoReturn:
        """Raise RuntimeError, in place of copying, pickling and state dicts."""
        raise RuntimeError("a ShardedOptimizer holds this rank's share of the state: save it by save_checkpoint")

    state_dict = load_state_dict = __reduce_ex__ = _refuse  # type: ignore[assignment]


def _options_of(group: dict[str, Any]) -> dict[str, Any]:
    """The options of a group: all of its entries but the parameters."""
    return {key: value for key, value in group.items() if key not in ("params", "param_names")}
