"""A step under memory caps, executed: memory as the schedule has it, kernels and copies in its order.

    step = StreamedStep(config, schedule, chunks, ops, torch.device("cuda"), dtype)
    step.load(model.state_dict())
    loss = step(token_ids, targets)              # a whole step: rounds and optimizer; () on the device
    step.evaluate(build_forward(plan), token_ids, targets)       # a mean loss, of as many sequences as a round has
    step.state_dict()                            # weights, on the CPU
    model = step.model()                         # views, and the same of what the optimizer keeps
    save_checkpoint(folder, model, step.optimizer_state(model), n_steps)   # distributed/checkpoint.py; loaded likewise

On a CPU the same schedule runs with a pretended link (``lanes.py``).
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from cs336_systems.blocks import BlockOps, head
from cs336_systems.config import ModelConfig
from cs336_systems.model import TransformerLM
from cs336_systems.streaming.fixed import EMBEDDING, HEAD, Fixed
from cs336_systems.streaming.lanes import Lanes, PretendedLink, Streams
from cs336_systems.streaming.layout import MASTER, Chunks, Layout
from cs336_systems.streaming.optimizer import LayerAdamW
from cs336_systems.streaming.passes import HeadPasses, LayerOptimizer, Passes
from cs336_systems.streaming.schedule import Item, Kind, Lane, Operation, Schedule
from cs336_systems.streaming.slabs import Memory
from cs336_systems.training.clipping import GradientGuard
from cs336_systems.training.optimizer import AdamW, decay_groups

PIECE = 2**24
"""Elements that are looked at together in search of one that is not finite."""


class StreamedStep:
    """A model and its training step under a schedule.

    Args:
        chunks: how the schedule's chunks cut the tokens.
        ops: of blocks; must serve device and dtype; plans give the same bits if they are deterministic.
        moments: bytes a parameter of what the optimizer keeps, as the plan has them (``Plan.work``).
        optimizer: of one layer at a time; AdamW if None.
        max_norm: that gradients are clipped to, if the schedule takes norms.
        halts: as of ``GradientGuard``.
        lanes: what runs the operations; streams on a GPU and a pretended link elsewhere if None.
        temporary_bytes: that kernels need besides slots, set aside on a GPU.

    Raises:
        ValueError: an item is larger than its slot or place, or the optimizer keeps no such moments.
        RuntimeError: the host has not as much memory, or it cannot be pinned.
    """

    def __init__(
        self,
        config: ModelConfig,
        schedule: Schedule,
        chunks: Chunks,
        ops: BlockOps,
        device: torch.device,
        dtype: torch.dtype,
        *,
        moments: Mapping[str, int] | None = None,
        optimizer: LayerOptimizer | None = None,
        max_norm: float = math.inf,
        halts: bool = False,
        lanes: Lanes | None = None,
        temporary_bytes: int = 0,
    ) -> None:
        self.config, self.schedule, self.chunks, self.device = config, schedule, chunks, device
        layout = Layout.of(config, dtype, chunks, moments)
        self.memory = Memory(schedule, layout, device)
        self.fixed = Fixed(config, chunks.seq_len, dtype, device, layout.states)
        self.optimizer = optimizer or LayerAdamW()
        self.guard = GradientGuard(max_norm, halts=halts)
        head, guard = _head_of(device), self.guard
        self.passes = Passes(config, chunks, self.memory, self.fixed, ops, head, self.optimizer, guard)
        self.lanes = lanes or (Streams(device) if device.type == "cuda" else PretendedLink())
        if device.type == "cuda":
            torch.cuda.empty_cache()  # of what made the rotary tables
        # One piece, which torch keeps and cuts: pieces of many sizes would not be reused for each other.
        torch.empty(temporary_bytes, dtype=torch.uint8, device=device)

    @torch.no_grad()
    def begin_training(self) -> None:
        """Moments of zero, no steps made, and masters that are the weights."""
        self.passes.steps.zero_()
        for what in self.memory.layout.states:
            for (_, kept), (_, weight) in zip(self._named(what), self._named("weights"), strict=True):
                kept.copy_(weight) if what == MASTER else kept.zero_()

    @torch.no_grad()
    def __call__(self, token_ids: Tensor, targets: Tensor) -> Tensor:
        """One step on ids (sequences, positions); the mean loss before the update, () on the device; waits for nothing.

        Raises:
            ValueError: not as many ids as the step has.
        """
        self.passes.begin(token_ids, targets)
        self.lanes.run(self.schedule, self.passes.run, self._copy)
        return self.passes.loss()

    @torch.no_grad()
    def rehearse(self, token_ids: Tensor, targets: Tensor) -> None:
        """Run what a step computes once for each kind of operation, level and place of a chunk in its sequence, adding
        to gradients or not, on whatever lies in the slots, and make updates that change nothing, so that kernels are
        compiled, torch has the memory that they take, and the device knows where tensors are that an update reads;
        weights and what the optimizer keeps stay as they are.
        """
        operations = self.schedule.operations
        updates = (Kind.NORM, Kind.OPTIMIZER, Kind.EMBED_BACKWARD)
        once: dict[tuple, Operation] = {}
        for operation in operations:
            if operation.lane is Lane.COMPUTE and operation.kind not in updates:
                in_sequence = operation.chunk % self.chunks.per_sequence
                once.setdefault((operation.kind, operation.level, operation.accumulate, in_sequence), operation)
        rehearsed = tuple(replace(operation, waits=()) for operation in once.values())
        self.passes.begin(token_ids, targets)
        self.lanes.run(replace(self.schedule, operations=rehearsed), self.passes.run, self._copy)
        self.passes.rehearse_updates(operations)

    @torch.no_grad()
    def evaluate(self, forward: Schedule, token_ids: Tensor, targets: Tensor) -> Tensor:
        """The mean loss of ids (sequences, positions), at most those of a round, () on the device; waits for nothing.

        Args:
            forward: ``build_forward`` of the plan whose schedule this step has.

        Raises:
            ValueError: they are none, too many, or of another length.
        """
        self.passes.begin_evaluation(token_ids, targets)
        self.lanes.run(forward, self.passes.run, self._copy)
        return self.passes.loss()

    @torch.no_grad()
    def find_nonfinite(self, token_ids: Tensor, targets: Tensor) -> str | None:
        """The first tensor that is not finite in a step on these ids, in words; None if there is none.

        The step is run again, after one that changed nothing under a guard that halts.
        """
        for name, weight in self._named("weights"):
            if not _finite(weight):
                return f"parameter {name}"
        found: list[str] = []

        def watched(operation: Operation) -> None:
            self.passes.run(operation)
            # Who writes x leaves its statistics, and who restores it q.
            left = ("rstd1", "rstd2", *(("q", "qkv") if operation.kind is Kind.RESTORE else ()))
            for held in () if found else operation.writes:
                for name, tensor in self.memory.tensors(held.slot, held.item.what).items():
                    if not (name in left or _finite(tensor)):
                        found.append(f"{name} of {held.item.what}, layer {operation.layer}, by {operation.kind}")

        self.passes.begin(token_ids, targets)
        self.lanes.run(self.schedule, watched, self._copy)
        return found[0] if found else None

    def _copy(self, operation: Operation) -> tuple[Tensor, Tensor]:
        held = (operation.writes if operation.lane is Lane.IN else operation.reads)[0]
        assert operation.place is not None, operation
        place = self.memory.place_bytes(operation.place, held.item.what)
        slot = self.memory.slot_bytes(held.slot, held.item.what)
        return (place, slot) if operation.lane is Lane.IN else (slot, place)

    def _home(self, item: Item) -> Mapping[str, Tensor]:
        """The parts of a layer's state where they are between steps."""
        if item in self.schedule.slots:
            return self.memory.tensors(self.schedule.slots[item], item.what)
        return self.memory.place_tensors(self.schedule.places[item], item.what)

    def _named(self, what: str) -> Iterator[tuple[str, Tensor]]:
        """Weights or moments by the names of the model's parameters, in their order, where they are between steps."""
        fixed = self.fixed.states[what]
        first, *last = fixed
        yield first, fixed[first]
        for layer in range(self.config.n_layers):
            yield from ((f"layers.{layer}.{name}", tensor) for name, tensor in self._layer(what, layer).items())
        yield from ((name, fixed[name]) for name in last)

    def _layer(self, what: str, layer: int) -> dict[str, Tensor]:
        """Of one layer, by the names of a block's parameters."""
        return self.passes.by_parameter(self._home(Item(what, layer)))

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Random weights, a new model's from the same random numbers, made on the device a layer at a time; moments
        become zero.
        """
        shell = TransformerLM(replace(self.config, n_layers=1), device="meta", dtype=self.fixed.embedding.dtype)
        tied = {HEAD: self.fixed.head} if self.fixed.tied else {}
        shell.load_state_dict(self.fixed.weights | tied, strict=False, assign=True)
        shell.token_embeddings.reset_parameters()
        block = shell.layers[0].to_empty(device=self.device)
        for layer in range(self.config.n_layers):
            for module in block.modules():
                if callable(reset := getattr(module, "reset_parameters", None)):
                    reset()
            for name, weight in self._layer("weights", layer).items():
                weight.copy_(block.get_parameter(name))
        shell.ln_final.reset_parameters()
        shell.lm_head.reset_parameters()
        self.begin_training()

    def model(self) -> TransformerLM:
        """Weights as the model's parameters, where they lie between steps: to be read when the device is done."""
        model = TransformerLM(self.config, device="meta", dtype=self.fixed.embedding.dtype)
        model.load_state_dict(dict(self._named("weights")), strict=False, assign=True)
        if self.fixed.tied:
            model.lm_head.weight = model.token_embeddings.weight
        return model

    def optimizer_state(self, model: TransformerLM, **hyperparameters: Any) -> "StateInPlace":
        """What the optimizer keeps of the parameters of ``model``, which ``model()`` has made, where it lies.

        A checkpoint of both holds the whole state, as one of an AdamW over an ordinary model does, takes no copy of it,
        and is read into its place; any other plan and the ordinary model take it up.

        Args:
            hyperparameters: to be saved with it.
        """
        kept = {what: dict(self._named(what)) for what in self.memory.layout.states}
        steps = self.passes.steps.unbind()
        states: dict[Tensor, Mapping[str, Tensor]] = {
            parameter: {"step": step} | {what: named[name] for what, named in kept.items()}
            for (name, parameter), step in zip(model.named_parameters(), steps, strict=True)
        }
        return StateInPlace(states, **hyperparameters)

    def load(self, weights: Mapping[str, Tensor]) -> None:
        """Take a model's weights, moments of zero, and no steps made.

        Raises:
            KeyError: one is missing.
        """
        for name, weight in self._named("weights"):
            weight.copy_(weights[name])
        self.begin_training()

    def state_dict(self) -> dict[str, Tensor]:
        """Copies of the weights on the CPU as the model's own state dict has them; waits for the device."""
        found = {name: weight.to("cpu", copy=True) for name, weight in self._named("weights")}
        return found | ({HEAD: found[EMBEDDING]} if self.fixed.tied else {})


class StateInPlace(AdamW):
    """The parameters of a streamed step and what its optimizer keeps of them, as who saves or schedules knows it.

    Matrices are one group, norms and biases, which do not decay, another. The step's own operations update them.
    """

    in_place = True
    """What a checkpoint holds is read into the tensors that are there (``distributed/checkpoint_state.py``)."""

    def __init__(self, states: Mapping[Tensor, Mapping[str, Tensor]], **hyperparameters: Any) -> None:
        super().__init__(decay_groups(states), **hyperparameters)
        self.state.update({parameter: dict(state) for parameter, state in states.items()})

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take the groups' hyperparameters; the state has been read."""
        for own, saved in zip(self.param_groups, state_dict["param_groups"], strict=True):
            own.update({name: saved[name] for name in own.keys() & saved.keys() - {"params"}})


def _finite(tensor: Tensor) -> bool:
    """Whether all of it is; in pieces, as memory beside slots is short and this takes some bytes an element."""
    return all(bool(piece.isfinite().all()) for piece in tensor.reshape(-1).split(PIECE))


def _head_of(device: torch.device) -> HeadPasses:
    if device.type != "cuda":
        return HeadPasses(head.linear_cross_entropy_forward_backward, head.linear_cross_entropy)
    from cs336_systems.kernels import linear_cross_entropy as fused  # brings Triton along

    return HeadPasses(fused.linear_cross_entropy_forward_backward, fused.linear_cross_entropy)
