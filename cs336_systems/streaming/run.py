"""A step under memory caps, executed: memory as the schedule has it, kernels and copies in its order.

    step = StreamedStep(choice.plan, choice.schedule, ops, torch.device("cuda"))
    step.reset_parameters()
    loss = step(token_ids, targets)              # a whole step: rounds and optimizer; () on the device
    step.evaluate(token_ids, targets)            # a mean loss, of as many sequences as a round has
    model = step.model()                         # views of the weights, and the same of what the optimizer keeps
    save_checkpoint(folder, model, step.optimizer_state(model), n_steps)   # distributed/checkpoint.py; loaded likewise

On a CPU the same schedule runs with a pretended link (``lanes.py``).
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from cs336_systems.blocks import BlockOps
from cs336_systems.blocks.products import STORED, Products
from cs336_systems.costs.lanes import Lane
from cs336_systems.distributed.messages import GroupMessages
from cs336_systems.distributed.pipeline import keep_modules
from cs336_systems.model import TransformerLM
from cs336_systems.streaming.build import build_forward
from cs336_systems.streaming.lanes import Lanes, PretendedLink, Streams
from cs336_systems.streaming.memory import HEAD, MASTER, Fixed, Memory, MemoryMap
from cs336_systems.streaming.passes import LayerOptimizer, Passes, one_block, with_adapters
from cs336_systems.streaming.plan import Plan
from cs336_systems.streaming.schedule import Item, Kind, Operation, Schedule
from cs336_systems.training.clipping import GradientGuard
from cs336_systems.training.optimizer import AdamW, check_hyperparameters, decay_groups

FRAGMENTS = 2**28
"""Bytes of the device that torch may reserve and not use."""


class StreamedStep:
    """A model and its training step under a schedule.

    Args:
        schedule: of the plan (``build.py``).
        ops: operations of blocks for the device and the plan's dtype; plans give the same bits if these are
            deterministic.
        products: matmuls of blocks, by the recipe of the plan's work.
        optimizer: updates one layer at a time; AdamW if None.
        max_norm: norm to which gradients are clipped, if the schedule takes norms.
        lanes: what runs the operations; streams on a GPU and a pretended link elsewhere if None.
        messages: carries messages between ranks of a ring; the plan is then that of one rank's share.

    Raises:
        ValueError: an item is larger than its slot or place, only one of share and messages is given, or only
            one of products and the plan's recipe is quantized.
        RuntimeError: the host has not as much memory, or it cannot be pinned.
    """

    def __init__(
        self,
        plan: Plan,
        schedule: Schedule,
        ops: BlockOps,
        device: torch.device,
        *,
        products: Products = STORED,
        optimizer: LayerOptimizer | None = None,
        max_norm: float = math.inf,
        lanes: Lanes | None = None,
        messages: GroupMessages | None = None,
    ) -> None:
        if (messages is None) is not (plan.work.share is None):
            raise ValueError("a share of a model is trained in a ring, and a whole one alone")
        if products.quantized is not plan.work.recipe.quantized:
            raise ValueError("the plan's matmuls are quantized and the products given are not, or the reverse")
        self.plan, self.schedule, self.device, self.config = plan, schedule, device, plan.work.config
        tensors = MemoryMap.of(plan.work)
        self.memory = Memory(schedule, tensors, device)
        self.fixed = Fixed(plan.work, tensors, device)
        self.optimizer = optimizer or LayerAdamW()
        self.guard = GradientGuard(max_norm)
        self.messages = messages
        self.passes = Passes(plan, self.memory, self.fixed, ops, products, self.optimizer, self.guard)
        self.lanes = lanes or (Streams(device) if device.type == "cuda" else PretendedLink())
        if device.type == "cuda":
            torch.cuda.empty_cache()  # of what made the rotary tables
            # One piece, which torch keeps and cuts: pieces of many sizes would not be reused for each other.
            torch.empty(plan.work.temporary_bytes + FRAGMENTS, dtype=torch.uint8, device=device)

    @property
    def slab_bytes(self) -> tuple[int, int]:
        """Bytes set aside on the device and on the host."""
        return self.memory.device_slab.n_bytes + self.fixed.slab.n_bytes, self.memory.host_slab.n_bytes

    @torch.no_grad()
    def begin_training(self) -> None:
        """Sets moments to zero, steps to none, and masters to the weights."""
        self.passes.steps.zero_()
        weights = self._named("weights")
        for what in self.memory.map.states:
            for name, kept in self._named(what).items():
                kept.copy_(weights[name]) if what == MASTER else kept.zero_()

    @torch.no_grad()
    def __call__(self, token_ids: Tensor, targets: Tensor) -> Tensor:
        """Runs a step on ids (sequences, positions) and waits for nothing; the mean loss before the update, () on
        the device.

        Raises:
            ValueError: not as many ids as the step has.
        """
        self.passes.begin(token_ids, targets)
        self.lanes.run(self.schedule, self.passes.run, self._copy, self.messages)
        return self.passes.loss()

    @torch.no_grad()
    def rehearse(self, token_ids: Tensor, targets: Tensor) -> None:
        """Runs each kind of operation once, on whatever lies in the slots, and updates that change nothing.

        Kernels are compiled then, torch has the memory that they take, and the device knows where tensors are that an
        update reads. Kinds are told apart by level, place of the chunk in its sequence, and whether gradients are added
        to. Weights and what the optimizer keeps stay as they are.
        """
        operations = self.schedule.operations
        updates = (Kind.NORM, Kind.OPTIMIZER, Kind.EMBED_BACKWARD)
        once: dict[tuple, Operation] = {}
        for operation in operations:
            if operation.lane is Lane.COMPUTE and operation.kind not in updates:
                in_sequence = operation.chunk % self.plan.work.chunks_per_sequence
                once.setdefault((operation.kind, operation.level, operation.accumulate, in_sequence), operation)
        rehearsed = tuple(replace(operation, waits=()) for operation in once.values())
        self.passes.begin(token_ids, targets)
        self.lanes.run(replace(self.schedule, operations=rehearsed), self.passes.run, self._copy)
        self.passes.rehearse_updates(operations)

    @torch.no_grad()
    def evaluate(self, token_ids: Tensor, targets: Tensor) -> Tensor:
        """The mean loss of ids (sequences, positions), at most those of a round, () on the device; waits for nothing.

        Raises:
            ValueError: they are none, too many, or of another length.
        """
        self.passes.begin_evaluation(token_ids, targets)
        self.lanes.run(self._forward, self.passes.run, self._copy, self.messages)
        self.passes.add_up()
        return self.passes.loss()

    @cached_property
    def _forward(self) -> Schedule:
        return build_forward(self.plan)

    def _copy(self, operation: Operation) -> tuple[Tensor, Tensor]:
        """Source and target of a copy; for a message its slot is both."""
        held = (*operation.reads, *operation.writes)[0]
        slot = self.memory.slot_bytes(held.slot, held.item.what)
        if operation.place is None:
            n_bytes = operation.n_bytes  # of an input only x, which lies first in the slot
            return slot[:n_bytes], slot[:n_bytes]
        place = self.memory.place_bytes(operation.place, held.item.what)
        return (place, slot) if operation.lane is Lane.IN else (slot, place)

    def _home(self, item: Item) -> Mapping[str, Tensor]:
        """The parts of a layer's state, where they lie between steps."""
        if item in self.schedule.slots:
            return self.memory.tensors(self.schedule.slots[item], item.what)
        return self.memory.place_tensors(self.schedule.places[item], item.what)

    def _named(self, what: str) -> dict[str, Tensor]:
        """This rank's weights, or moments of those that are trained, by name, where they lie between steps."""
        found = dict(self.fixed.states.get(what, {}))
        for layer in self.plan.work.layers:
            found |= {f"layers.{layer}.{name}": tensor for name, tensor in self._layer(what, layer).items()}
        return found

    def _layer(self, what: str, layer: int) -> dict[str, Tensor]:
        """Weights or moments of one layer, by the names of a block's parameters."""
        parts = dict(self.fixed.adapters[what][layer]) if self.fixed.adapters else {}
        if what in self.memory.map.parts:
            parts |= self._home(Item(what, layer))
        return self.passes.by_parameter(parts)

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Makes the random weights of a new model, on the device and a layer at a time; moments become zero.

        A rank of a ring also draws the other ranks' layers, so that all draw the same model.
        """
        work, dtype, drawn = self.plan.work, self.memory.map.dtype, self.fixed.weights
        shell = TransformerLM(replace(self.config, n_layers=1), device="meta", dtype=dtype)
        tied = {HEAD: self.fixed.head} if self.fixed.tied and work.has_head else {}
        shell.load_state_dict(drawn | tied, strict=False, assign=True)
        if not work.has_embedding:
            shell.token_embeddings.weight = nn.Parameter(self._unused((self.config.vocab_size, self.config.d_model)))
        shell.token_embeddings.reset_parameters()
        block = dict(shell.layers[0].to_empty(device=self.device).named_modules())
        adapted = one_block(work, self.passes.ops, dtype).layers[0].named_modules()
        adapters = {name: module.to_empty(device=self.device) for name, module in adapted if ".lora_" in name}
        twice = bool(adapters) and not work.has_head  # another rank's head is drawn into the slots of our layers
        with torch.random.fork_rng([self.device] if self.device.type == "cuda" else [], enabled=twice):
            self._draw(block)
            if work.has_head:
                shell.ln_final.reset_parameters()
            elif twice:
                shell.lm_head.weight = nn.Parameter(self._unused((self.config.vocab_size, self.config.d_model)))
            if work.has_head or twice:
                shell.lm_head.reset_parameters()
            self._draw(adapters)  # after all weights, as where nothing streams
        if twice:
            self._draw(block)
        self.begin_training()

    def _draw(self, modules: Mapping[str, nn.Module]) -> None:
        """Draws these modules of a block for one layer after the other, and keeps those of this rank's layers."""
        for layer in range(self.config.n_layers):
            for module in modules.values():
                if callable(reset := getattr(module, "reset_parameters", None)):
                    reset()
            if layer not in self.plan.work.layers:
                continue
            weights = self._layer("weights", layer)
            for name, module in modules.items():
                for own, parameter in module.named_parameters(recurse=False):
                    weights[f"{name}.{own}"].copy_(parameter)

    def _unused(self, shape: tuple[int, ...]) -> Tensor:
        """Memory for a matrix that is drawn and dropped: the empty slots, or new memory if they are too small."""
        slots, dtype = self.memory.device_slab.memory, self.memory.map.dtype
        n_bytes = math.prod(shape) * dtype.itemsize
        if n_bytes > slots.numel():
            return torch.empty(shape, dtype=dtype, device=self.device)
        return slots[:n_bytes].view(dtype).view(shape)

    def model(self) -> TransformerLM:
        """A model whose parameters are the weights where they lie between steps: to be read when the device is done.

        In a ring it has this rank's weights only; modules of other ranks are replaced by ``ModuleElsewhere``.
        """
        work = self.plan.work
        model = TransformerLM(self.config, device="meta", dtype=self.memory.map.dtype)
        with_adapters(model, work, self.passes.ops)
        here = {"token_embeddings": work.has_embedding, "ln_final": work.has_head, "lm_head": work.has_head}
        keep_modules(model, work.layers, **here)
        model.load_state_dict(self._named("weights"), strict=False, assign=True)
        if self.fixed.tied and work.has_head:
            model.lm_head.weight = model.token_embeddings.weight
        return model

    def optimizer_state(self, model: TransformerLM, **hyperparameters: Any) -> "StateInPlace":
        """The optimizer's state of the parameters of ``model``, which ``model()`` has made, where it lies.

        A checkpoint of both holds the whole state as that of an AdamW over an ordinary model does. It takes no copy and
        is loaded into place; any other plan and the ordinary model can resume from it.

        Args:
            hyperparameters: are saved with it.
        """
        kept = {what: self._named(what) for what in self.memory.map.states}
        whole = with_adapters(TransformerLM(self.config, device="meta"), self.plan.work, self.passes.ops)
        trained = [name for name, parameter in whole.named_parameters() if parameter.requires_grad]
        steps = dict(zip(trained, self.passes.steps.unbind(), strict=True))
        states: dict[Tensor, Mapping[str, Tensor]] = {
            parameter: {"step": steps[name]} | {what: named[name] for what, named in kept.items()}
            for name, parameter in model.named_parameters()
            if name in steps
        }
        return StateInPlace(states, **hyperparameters)


class StateInPlace(AdamW):
    """An AdamW for checkpoints and schedules: the parameters of a streamed step and what its optimizer keeps of them.

    Matrices are one group; norms and biases, which do not decay, are another. The step's own operations update them.
    """

    in_place = True
    """A checkpoint is loaded into the tensors that are there (``distributed/checkpoint_state.py``)."""

    def __init__(self, states: Mapping[Tensor, Mapping[str, Tensor]], **hyperparameters: Any) -> None:
        super().__init__(decay_groups(states), **hyperparameters)
        self.state.update({parameter: dict(state) for parameter, state in states.items()})

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Takes the groups' hyperparameters; the state has been loaded."""
        for own, saved in zip(self.param_groups, state_dict["param_groups"], strict=True):
            own.update({name: saved[name] for name in own.keys() & saved.keys() - {"params"}})


@dataclass
class LayerAdamW:
    """AdamW of one layer at a time, on tensors that are only there while it runs; only matrices decay.

    On a GPU this is ``kernels/adamw.py``: one pass, bf16 rounded stochastically, by bits that depend on a parameter's
    number among all and not on where it lies; beside fp32 masters nothing is rounded so. Elsewhere it is torch's fused
    AdamW.

    Raises:
        ValueError: a hyperparameter is out of range.
    """

    lr: float = 1e-3
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.01
    seed: int = 0
    """Seed of stochastic rounding."""
    _tables: dict[int, Any] = field(default_factory=dict, repr=False)

    def __post_init__(self) -> None:
        check_hyperparameters(self.lr, self.betas, self.eps, self.weight_decay)

    def __call__(
        self, first_number: int, state: Mapping[str, Sequence[Tensor]], steps: Sequence[Tensor], scale: Tensor | None
    ) -> None:
        """Updates some parameters in place.

        Args:
            first_number: the number of the first of these parameters among all of the model.
            state: their ``weights``, ``gradients``, ``exp_avg``, ``exp_avg_sq`` and, if it is kept, ``master``.
            steps: steps that each has made so far; () on the device, int64 on a GPU and fp32 elsewhere.
            scale: factor of gradients, () in fp32; if it is not finite, nothing is updated; 1 if None.
        """
        if steps[0].device.type == "cuda":
            self._in_one_pass(first_number, state, steps, scale)
            return
        skipped = None if scale is None else scale.isfinite().logical_not().float()
        for step, gradient in zip(steps, state["gradients"], strict=True):
            step.add_(1 if skipped is None else 1 - skipped)
            if scale is not None:
                gradient.mul_(scale)
        updated = state.get(MASTER, state["weights"])
        named = (state[name] for name in ("gradients", "exp_avg", "exp_avg_sq"))
        for weight, gradient, exp_avg, exp_avg_sq, step in zip(updated, *named, steps, strict=True):
            torch._fused_adamw_(
                [weight],
                [gradient.to(weight.dtype)],
                [exp_avg],
                [exp_avg_sq],
                [],
                [step],
                lr=self.lr,
                beta1=self.betas[0],
                beta2=self.betas[1],
                weight_decay=self._decay_of(weight),
                eps=self.eps,
                amsgrad=False,
                maximize=False,
                grad_scale=None,
                found_inf=skipped,
            )
        if MASTER in state and (skipped is None or not skipped):
            for weight, master in zip(state["weights"], state[MASTER], strict=True):
                weight.copy_(master)

    def _decay_of(self, weight: Tensor) -> float:
        return self.weight_decay if weight.dim() > 1 else 0.0

    def _in_one_pass(
        self, first_number: int, state: Mapping[str, Sequence[Tensor]], steps: Sequence[Tensor], scale: Tensor | None
    ) -> None:
        from cs336_systems.kernels.adamw import Update, UpdateTable, adamw_  # brings Triton along

        how = self.lr, self.betas, self.eps
        named = (state[name] for name in ("weights", "gradients", "exp_avg", "exp_avg_sq"))
        masters = state.get(MASTER, [None] * len(steps))
        updates = [
            Update(w, g, m, v, step, *how, self._decay_of(w), number=first_number + i, seed=self.seed, master=master)
            for i, (w, g, m, v, step, master) in enumerate(zip(*named, steps, masters, strict=True))
        ]
        table = self._tables.setdefault(first_number, UpdateTable())
        adamw_(updates, scale, table=table)
