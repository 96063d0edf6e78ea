"""Runs the kernels of each operation in a schedule, on tensors in slots: blocks, embedding, head and optimizer.

    passes = Passes(plan, memory, fixed, ops, optimizer, guard)
    passes.begin(token_ids, targets)
    passes.run(operation)                        # for every operation on the compute lane, in order
    passes.loss()

The schedule says where results go. Matmuls write into slots directly; other results are copied there. Kernels may also
take memory from torch for the duration of one operation. Sums over chunks and rounds are taken in the schedule's order
for one layer. Plans with the same chunks in a round share that order, so they give the same bits. ``context.py`` has
attention for sequences that are longer than a chunk.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from cs336_systems.blocks import BlockGradients, BlockOps, BlockWeights, Saved, backward, forward, recall, write_out
from cs336_systems.blocks.adapters import adapt
from cs336_systems.blocks.products import Products
from cs336_systems.config import ModelConfig
from cs336_systems.costs.kept import kept_names
from cs336_systems.costs.streaming import HEAD_TOKENS, StreamedWork
from cs336_systems.distributed.process_group import peer_errors_as
from cs336_systems.kernels.linear_cross_entropy import (
    IGNORED,
    linear_cross_entropy,
    linear_cross_entropy_forward_backward,
)
from cs336_systems.model import TransformerLM
from cs336_systems.streaming.context import Sums, attending
from cs336_systems.streaming.memory import EMBEDDING, HEAD, NORM, Fixed, Memory
from cs336_systems.streaming.plan import Plan
from cs336_systems.streaming.schedule import Kind, Operation
from cs336_systems.training.clipping import GradientGuard

LayerOptimizer = Callable[[int, Mapping[str, Sequence[Tensor]], Sequence[Tensor], Tensor | None], None]
"""Takes the arguments of ``run.LayerAdamW.__call__``."""

_OF_CHUNKS = frozenset({"input", "context", "attention", "products", "dy", "dcontext"})
"""The items that exist once for each chunk."""


class Passes:
    """Runs the operations of a step's compute lane.

    Args:
        ops: the blocks' operations. Plans give the same bits if these are deterministic.
        products: the blocks' matmuls, by the recipe of the plan's work.
        guard: computes gradient norms. In a step with operations of kind ``NORM`` it also clips gradients and skips
            steps that are not finite.
    """

    def __init__(
        self,
        plan: Plan,
        memory: Memory,
        fixed: Fixed,
        ops: BlockOps,
        products: Products,
        optimizer: LayerOptimizer,
        guard: GradientGuard,
    ) -> None:
        self.plan, self.work, self.config = plan, plan.work, plan.work.config
        self.memory, self.fixed, self.ops, self.products = memory, fixed, ops, products
        self.optimizer, self.guard = optimizer, guard
        config, dtype, device = self.config, memory.map.dtype, fixed.cos.device
        wide = torch.promote_types(dtype, torch.float32)
        shell = one_block(plan.work, ops, dtype)
        self.block_parameters = dict(shell.layers[0].named_parameters())
        self.trained = [name for name, parameter in self.block_parameters.items() if parameter.requires_grad]
        """Names of a block's trained parameters."""
        self.losses = torch.zeros(plan.rounds, plan.chunks, dtype=wide, device=device)
        self.norms = torch.zeros(config.n_layers + 2, dtype=wide, device=device)
        """L2 norms of the gradients: each layer, the embedding, final norm with head; 0 where another rank has them."""
        self.of_all = self.norms, self.losses
        """(norms, losses) of all ranks, once ``add_up`` has run."""
        self.clipping = False
        """Whether layers' norms have been taken in this step."""
        self.scale: Tensor | None = None
        step_dtype = torch.int64 if device.type == "cuda" else torch.float32
        self.before = 0 if self.work.lora else 1
        """Trained parameters before the first block's."""
        ends = 0 if self.work.lora else 2 if fixed.tied else 3
        n_parameters = config.n_layers * len(self.trained) + ends
        self.steps = torch.zeros(n_parameters, dtype=step_dtype, device=device)
        self.token_ids, self.targets = (torch.zeros(plan.tokens, dtype=torch.int64, device=device) for _ in range(2))
        self.starts: Tensor | None = None
        """The first position of each token's document, (tokens,) int32, where documents share a sequence."""
        self.denominator = torch.zeros((), dtype=torch.int64, device=device)
        context_shape = (self.work.context_length, 2, config.kv_heads, config.d_head)
        self.part = torch.empty(context_shape, dtype=dtype, device=device) if self.work.is_long else None

    def begin(self, token_ids: Tensor, targets: Tensor) -> None:
        """Begins a step on ids (sequences, positions), or on ids with starts (sequences, positions, 2) as
        ``TransformerLM`` takes them. A target of -100 does not count.

        Raises:
            ValueError: the number of ids is not the step's, or there are starts and a sequence is longer than a chunk.
        """
        expected = self.plan.n_sequences, self.work.context_length
        if tuple(token_ids.shape[:2]) != expected or tuple(targets.shape) != expected:
            got = f"{tuple(token_ids.shape)} and targets {tuple(targets.shape)}"
            raise ValueError(f"a step takes {expected} token ids and targets, got {got}")
        self._take(token_ids, targets)
        self.fixed.clear_gradients()
        self.clipping, self.scale = False, None

    def begin_evaluation(self, token_ids: Tensor, targets: Tensor) -> None:
        """Begins an evaluation of ids (sequences, positions), at most one round's; missing ones do not count.

        Raises:
            ValueError: there are no sequences, too many, or sequences of another length.
        """
        most, seq_len = self.plan.round_sequences, self.work.context_length
        n, *rest = targets.shape
        if not 0 < n <= most or rest != [seq_len] or token_ids.shape[:2] != targets.shape:
            got = f"{tuple(token_ids.shape)} and targets {tuple(targets.shape)}"
            raise ValueError(f"an evaluation takes 1 to {most} sequences of {seq_len} token ids and targets, got {got}")
        self.targets.fill_(IGNORED)
        self.losses.zero_()
        self._take(token_ids, targets)
        for filled in (self.token_ids, self.starts):
            if filled is not None:  # copies of the last sequence raise no largest magnitude of their chunk
                filled[n * seq_len :].view(-1, seq_len).copy_(filled[(n - 1) * seq_len : n * seq_len])

    def _take(self, token_ids: Tensor, targets: Tensor) -> None:
        n = targets.numel()
        if token_ids.dim() == 2:
            self.starts = None
        else:
            token_ids, starts = token_ids.unbind(-1)
            if self.work.is_long:
                lengths = f"{self.work.context_length:,} tokens, which chunks of {self.work.chunk:,} would cut"
                raise ValueError(f"documents share sequences of {lengths}")
            if self.starts is None:
                self.starts = torch.zeros_like(self.token_ids, dtype=torch.int32)
            self.starts[:n].copy_(starts.reshape(-1), non_blocking=True)
        self.token_ids[:n].copy_(token_ids.reshape(-1), non_blocking=True)
        self.targets[:n].copy_(targets.reshape(-1), non_blocking=True)
        torch.sum(self.targets != IGNORED, dim=0, out=self.denominator)

    def loss(self) -> Tensor:
        """The mean loss before the update, or of the evaluation, on every rank; () on the device."""
        return self.of_all[1].sum()

    def add_up(self) -> None:
        """Sums norms and losses over all ranks: the ring's one collective.

        Each number is 0 on all ranks but one, so the sums have the same bits as a step on one rank.

        Raises:
            torch.distributed.DistError: another rank is gone, or does not come in time.
        """
        if self.work.share is not None:
            whole = torch.cat([self.norms, self.losses.flatten()])
            with peer_errors_as(f"rank {dist.get_rank()} waited in vain for the others' norms"):
                dist.all_reduce(whole)
            self.of_all = whole[: len(self.norms)], whole[len(self.norms) :].view_as(self.losses)

    def run(self, operation: Operation) -> None:
        """Runs one operation of the compute lane, by the method named after its kind."""
        getattr(self, f"_{operation.kind.replace(' ', '_')}")(operation)

    def _of(self, operation: Operation, what: str, layer: int | None = None) -> dict[str, Tensor]:
        chunk = operation.chunk if what in _OF_CHUNKS else None
        return self.memory.tensors(operation.slot(what, chunk, layer), what)

    def _tokens(self, operation: Operation) -> slice:
        return self.plan.token_slice(operation.round, operation.chunk)

    def _embed(self, operation: Operation) -> None:
        x = self._of(operation, "input")["x"]
        ids = self.token_ids[self._tokens(operation)]
        torch.index_select(self.fixed.embedding, 0, ids, out=x.view(-1, x.shape[-1]))

    def _embed_backward(self, operation: Operation) -> None:
        dy = self._of(operation, "dy")["dy"]
        ids, rows = self.token_ids[self._tokens(operation)], dy.view(-1, dy.shape[-1])
        gradient = self.fixed.gradients[EMBEDDING]
        if gradient.is_cuda:
            from cs336_systems.kernels.add_rows import add_rows_  # brings Triton along

            add_rows_(gradient, ids, rows)  # in one order, where index_add_ has none
        else:
            gradient.index_add_(0, ids, rows)

    def _starts(self, operation: Operation) -> Tensor | None:
        return None if self.starts is None else self.starts[self._tokens(operation)].view(self.work.batch)

    def _products_and_starts(self, operation: Operation) -> dict[str, Any]:
        """The arguments of these names, as blocks take them."""
        return {"products": self.products, "starts": self._starts(operation)}

    def _config_and_tables(self, operation: Operation) -> tuple[ModelConfig, Tensor, Tensor]:
        """The config, and cos and sin of the chunk's positions, as blocks take them."""
        start = self._earlier_chunks(operation) * self.work.chunk
        positions = slice(start, start + self.work.batch[1])
        return self.config, self.fixed.cos[positions], self.fixed.sin[positions]

    def _earlier_chunks(self, operation: Operation) -> int:
        """How many chunks of the sequence come before the operation's."""
        return operation.chunk % self.work.chunks_per_sequence

    def _forward(self, operation: Operation) -> None:
        saved, ops = self._saved(operation), self._attending(operation)
        x, y = (self._of(operation, "input", operation.layer + i)["x"] for i in (0, 1))
        tables, how = self._config_and_tables(operation), self._products_and_starts(operation)
        forward(x, self._weights(operation), saved, ops, *tables, out=y, **how)

    def _recompute(self, operation: Operation) -> None:
        attends = operation.level == "input"
        saved = self._saved(operation, context=attends)
        self._recall(operation, saved, self._attending(operation) if attends else self.ops, "keys_values")

    def _keys(self, operation: Operation) -> None:
        places = self._of(operation, "input") | self._keys_values(operation)
        self._recall(operation, Saved(["rstd1", "keys_values"], places), self.ops)

    def _recall(self, operation: Operation, saved: Saved, ops: BlockOps, *there: str) -> None:
        """Computes the tensors of ``saved`` that the operation's level has not kept, except those named ``there``."""
        found = {*kept_names(operation.level or "input", quantized=self.products.quantized), *there}
        if any(held.item.what == "input" for held in operation.writes):
            found -= {"rstd1", "rstd2"}  # x was restored, without its statistics
        saved.tensors |= {name: place for name, place in saved.places.items() if name in found}
        tables, how = self._config_and_tables(operation), self._products_and_starts(operation)
        recall(saved, self._weights(operation), ops, *tables, **how)

    def _restore(self, operation: Operation) -> None:
        products = self._of(operation, "products")
        places = {name: products[name] for name in ("residual", "gate_up")}
        saved = Saved(places, places)
        saved.tensors["attended"] = self._of(operation, "attention")["attended"]
        x, y = (self._of(operation, "input", operation.layer + i)["x"] for i in (0, 1))
        forward(x, self._weights(operation), saved, self.ops, *self._config_and_tables(operation), out=y)

    def _backward(self, operation: Operation) -> None:
        saved = self._saved(operation)
        saved.tensors |= saved.places
        dy, gradients = self._of(operation, "dy")["dy"], BlockGradients(**self._state(operation, "gradients"))
        weights, ops = self._weights(operation), self._attending(operation, backward=True)
        how = self._products_and_starts(operation) | {"accumulate": operation.accumulate, "consume": True}
        dx = backward(dy, weights, saved, gradients, ops, *self._config_and_tables(operation), **how)
        dy.copy_(dx)

    def _weights(self, operation: Operation) -> BlockWeights:
        weights: dict[str, Any] = self._of(operation, "weights")
        if (lora := self.work.lora) is not None:
            weights = weights | self._state(operation, "weights") | {"adapter_scale": lora.scale}
        return BlockWeights(**weights)

    def _state(self, operation: Operation, what: str) -> dict[str, Tensor]:
        """A layer's trained weights, their gradients, or an optimizer state: the adapters', or those in slots."""
        return self.fixed.adapters[what][operation.layer] if self.work.lora else self._of(operation, what)

    def _saved(self, operation: Operation, *, context: bool = True) -> Saved:
        """The tensors of level ``products`` in slots; ``context`` adds keys and values of a long sequence."""
        places = self._of(operation, "input", operation.layer)
        places = places | self._of(operation, "attention") | self._of(operation, "products")
        if self.part is not None and context:
            places |= self._keys_values(operation)
        return Saved(places, places)

    def _keys_values(self, operation: Operation) -> dict[str, Tensor]:
        """k | v (n, 2 K E) of the chunk, in its slot of ``context``."""
        return {"keys_values": self._of(operation, "context")["keys_values"].view(self.work.chunk, -1)}

    def _attending(self, operation: Operation, *, backward: bool = False) -> BlockOps:
        if self.part is None:
            return self.ops
        context, norm_keys = self._until(operation, "context"), self._norm_keys(operation)
        if not backward:
            return attending(self.ops, context, None, norm_keys)
        is_last = self._earlier_chunks(operation) + 1 == self.work.chunks_per_sequence
        sums = Sums(self._until(operation, "dcontext"), self.part[: len(context)], is_last)
        return attending(self.ops, context, sums, norm_keys)

    def _norm_keys(self, operation: Operation) -> Callable[[Tensor], Tensor] | None:
        """A function for norm and rotation of the keys of a sequence's first chunks; None if keys have no norms."""
        config, weights, fixed = self.config, self._weights(operation), self.fixed
        if weights.q_norm is None or weights.k_norm is None:
            return None
        gains = weights.q_norm, weights.k_norm

        def norm_keys(rows: Tensor) -> Tensor:
            tables = fixed.cos[: len(rows)], fixed.sin[: len(rows)]
            return self.ops.norm_rotate(rows, *gains, config.rms_norm_eps, *tables, 0, config.kv_heads)

        return norm_keys

    def _until(self, operation: Operation, what: str) -> Tensor:
        """An item of the operation's sequence up to its chunk, as one tensor (S, 2, K, E)."""
        slot, earlier = operation.slot(what, operation.chunk), self._earlier_chunks(operation)
        return self.memory.run_of(slot.ring, what, slot.number - earlier, earlier + 1)

    def _normed(self, operation: Operation) -> tuple[Tensor, Tensor, Tensor]:
        """The head's input (n, D), the rows before their norm, and rstd."""
        x = self._of(operation, "input")["x"]
        rows = x.view(-1, x.shape[-1])
        normed, rstd = self.ops.rms_norm_forward(rows, self.fixed.weights[NORM], self.config.rms_norm_eps)
        return normed, rows, rstd

    def _loss(self, operation: Operation) -> None:
        normed, *_ = self._normed(operation)
        targets = self.targets[self._tokens(operation)]
        how: dict[str, Any] = {"reduction": "sum", "chunk": HEAD_TOKENS, "fused": normed.is_cuda, "every_row": True}
        total = linear_cross_entropy(normed, self.fixed.head, targets, **how)
        self.losses[operation.round, operation.chunk].copy_(total / self.denominator)

    def _head(self, operation: Operation) -> None:
        fixed, gain = self.fixed, self.fixed.weights[NORM]
        normed, rows, rstd = self._normed(operation)
        targets = self.targets[self._tokens(operation)]
        how: dict[str, Any] = {"denominator": self.denominator, "chunk": HEAD_TOKENS, "fused": normed.is_cuda}
        how |= {"grad_weight": fixed.gradients.get(HEAD), "frozen": HEAD not in fixed.gradients}
        loss, dnormed, *_ = linear_cross_entropy_forward_backward(normed, fixed.head, targets, **how)
        del normed
        self.losses[operation.round, operation.chunk].copy_(loss)
        dy = self._of(operation, "dy")["dy"]
        dx, dgain = self.ops.rms_norm_backward(dnormed, rows, gain, rstd, dy.zero_().view_as(rows))
        if NORM in fixed.gradients:
            fixed.gradients[NORM].add_(dgain)
        dy.copy_(dx.view_as(dy))

    def _norm(self, operation: Operation) -> None:
        self.clipping = True
        self.norms[operation.layer].copy_(self._norm_of(operation.layer, self._state(operation, "gradients").values()))

    def rehearse_updates(self, operations: Sequence[Operation]) -> None:
        """Loads the kernels of updates by running them with a factor that is not finite, which changes nothing.

        The first update of tensors also sends their addresses to the device, in small copies. Inside a step each of
        these would wait for a large copy.
        """
        for operation in operations:
            if operation.kind is Kind.EMBED_BACKWARD:
                self._embed_backward(operation)
                break
        self.guard.scale(torch.zeros_like(self.norms).norm(), torch.zeros_like(self.losses).sum())
        nothing = torch.full((), torch.nan, device=self.norms.device)
        for operation in operations:
            if operation.kind is Kind.NORM:
                self._norm_of(operation.layer, self._state(operation, "gradients").values())
            elif operation.kind is Kind.OPTIMIZER and operation.layer >= 0:
                self._update_layer(operation, nothing)
        gradients = {name: self.fixed.gradients[name] for name in self.fixed.weights if name in self.fixed.gradients}
        self._norm_ends(gradients)
        self._update_fixed(gradients, nothing)

    def _optimizer(self, operation: Operation) -> None:
        if operation.layer >= 0:
            self._update_layer(operation, self.scale)
            return
        gradients = self.fixed.whole_gradients()
        if self.clipping:
            self._norm_ends(gradients)
        self.add_up()
        if self.clipping:
            self.scale, _ = self.guard.scale(self.of_all[0].norm(), self.loss())
        self._update_fixed(gradients, self.scale)

    def _update_layer(self, operation: Operation, scale: Tensor | None) -> None:
        state = {
            what: list(self.by_parameter(self._state(operation, what)).values())
            for what in ("weights", "gradients", *self.memory.map.states)
        }
        n = len(self.trained)
        first = self.before + operation.layer * n
        self.optimizer(first, state, self.steps[first : first + n].unbind(), scale)

    def _norm_of(self, place: int, gradients: Iterable[Tensor]) -> Tensor:
        """The L2 norm () of the gradients whose norm has this place in ``norms``."""
        return self.guard.norm_of(f"norm {place}", list(gradients), self.norms.device)

    def _norm_ends(self, gradients: Mapping[str, Tensor]) -> None:
        """Computes the norms of the embedding's and of final norm's and head's gradients, if they are on this rank."""
        for place, names in ((-2, (EMBEDDING,)), (-1, (NORM, HEAD))):
            if here := [gradients[name] for name in names if name in gradients]:
                self.norms[place].copy_(self._norm_of(place, here))

    def _update_fixed(self, gradients: Mapping[str, Tensor], scale: Tensor | None) -> None:
        fixed = self.fixed
        numbers = {EMBEDDING: 0, NORM: len(self.steps) - (1 if fixed.tied else 2), HEAD: len(self.steps) - 1}
        for name in gradients:
            number = numbers[name]
            state = {what: [own[name]] for what, own in fixed.states.items()} | {"gradients": [gradients[name]]}
            self.optimizer(number, state, [self.steps[number]], scale)

    def by_parameter(self, parts: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Views of a layer's parts by the names of the reference block's parameters, in their order."""
        views = BlockGradients(**parts).by_parameter(self.block_parameters)
        return {name: views[name] for name in self.block_parameters if name in views}


def one_block(work: StreamedWork, ops: BlockOps, dtype: torch.dtype) -> TransformerLM:
    """A model of one layer on ``meta``, with adapters if these are trained."""
    return with_adapters(TransformerLM(replace(work.config, n_layers=1), device="meta", dtype=dtype), work, ops)


def with_adapters(model: TransformerLM, work: StreamedWork, ops: BlockOps) -> TransformerLM:
    """The model on ``meta``, given adapters if these are trained."""
    if work.lora is not None:
        write_out(model, ops, "products")
        adapt(model, work.lora)
    return model
