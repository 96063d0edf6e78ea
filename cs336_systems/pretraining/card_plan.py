"""The fastest way to train a model on a GPU ("card"), predicted without the GPU.

    plan = CardPlan.of(options, Asked(gpu="rtx-4090", host_gib=64))
    plan.best["bf16"].tokens_per_s, str(plan.fastest)

The search tries every combination of ``--keep``, micro-batch, offload, ZeRO level and tensor ranks, except of options
that were given, in bf16 and with blocks' matmuls in fp8. Memory peaks come from ``costs/parallelism/rank_memory.py``,
seconds from ``seconds.py`` beside it. If none of these options is given but the host's memory is, the search also
streams layers through one GPU (``streaming/choose.py``) in a dtype in which the step does not fit otherwise. A run with
--device-gib always streams layers. ``report/card_plan.py`` prints a plan. Imports no torch.
"""

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import product
from operator import attrgetter
from typing import Any, NoReturn

from cs336_systems.case import RECIPE
from cs336_systems.config import FP8_QUANTUM, ModelConfig, Recipe, resolve_size
from cs336_systems.costs.kept import STORED
from cs336_systems.costs.offload import state_keys
from cs336_systems.costs.parallelism.layout import Layout
from cs336_systems.costs.parallelism.rank_memory import rank_peak
from cs336_systems.costs.parallelism.search import USABLE, divides, divisors
from cs336_systems.costs.parallelism.seconds import BF16_MOMENTS, Moments, StepSeconds, step_seconds
from cs336_systems.costs.rates import Rates
from cs336_systems.declared import flag
from cs336_systems.hardware import GIB, Hardware, hardware_named
from cs336_systems.pretraining.options import CHOSEN, TrainOptions
from cs336_systems.pretraining.plan_options import PRINT_PLAN, Asked
from cs336_systems.pretraining.step_options import TrainerCase
from cs336_systems.refusals import refusal
from cs336_systems.streaming.choose import HOST_OVERHEAD, Caps, CapsTooSmallError, ChosenPlan, choose, staging_bytes

TOKENS_PER_STEP = 524_288
"""Approximate tokens of a step if --total-batch-tokens is not given."""
_LEAST_SHARE = 7 / 8
"""The least share of ``TOKENS_PER_STEP`` to which a step is rounded down so that larger micro-batches divide it."""
KEEPS = ("all", "all-norm", "all-norm-swiglu", "products-ffn", "attention", "input")
OFFLOADS: tuple[tuple[str, ...], ...] = ((), ("m", "v"), ("residual",), ("m", "v", "residual"))
MICRO_BATCHES = (1, 2, 4, 8, 16, 32, 64)
AS_FAST = 2e-3
"""A way with less on the host is preferred if its tokens/s are at most this share below the fastest's."""
EFFORT = 16_000
"""Operations simulated in each part of the search for a streamed plan: a fifth of those simulated for a run."""
TRIED = (*CHOSEN, "zero", "tensor", "tensor_by")
"""Options whose values are all tried unless given."""
RECIPES = {"bf16": STORED, "fp8": Recipe("e4m3")}


def _tokens_per_step(least: int) -> int:
    """Return at most ``TOKENS_PER_STEP``, rounded down so that the largest possible micro-batch size divides it.

    Args:
        least: tokens of a step in which each GPU has one micro-batch of the least size; also the least result.
    """
    for micro_batch in reversed(MICRO_BATCHES):
        tokens = TOKENS_PER_STEP // (micro_batch * least) * micro_batch * least
        if tokens >= _LEAST_SHARE * TOKENS_PER_STEP:
            return tokens
    return max(least, TOKENS_PER_STEP // least * least)


@dataclass(frozen=True)
class Way:
    """One way to run a step, and its prediction."""

    layout: Layout
    offload: frozenset[str]
    recipe: Recipe
    seconds: StepSeconds
    device_parts: dict[str, int] = field(hash=False)
    host_bytes: int
    tokens_per_s: float
    streamed: ChosenPlan | None = field(default=None, hash=False)

    @property
    def device_bytes(self) -> int:
        return sum(self.device_parts.values())

    def __str__(self) -> str:
        """Return the chosen options of train.py except the matmul dtype, or how layers are streamed."""
        if self.streamed is not None:
            plan = self.streamed.plan
            rounds = f"{plan.rounds} {plan.order} rounds of {plan.round_tokens:,} tokens"
            return f"streamed, {rounds}: {plan.rounds * plan.round_tokens:,} a step"
        layout = self.layout
        words = [f"--keep {layout.keep}", f"--batch-size {layout.micro_batch}"]
        words += [f"--offload {' '.join(sorted(self.offload))}"] if self.offload else []
        words += [f"--zero {layout.zero}"] if layout.shards > 1 else []
        words += [f"--tensor {layout.tensor} --tensor-by {layout.tensor_by}"] if layout.tensor > 1 else []
        return " ".join(words)

    @property
    def arguments(self) -> str:
        """The options of train.py that distinguish this way from others of a plan."""
        return f"{self} --matmul-dtype {self.recipe.matmul}" if self.recipe.quantized else str(self)


class NothingFits(ValueError):
    """No way to run the step fits the GPU."""


@dataclass(frozen=True)
class CardPlan:
    """A model, a GPU, and the ways to train the model on it."""

    config: ModelConfig
    length: int
    hardware: Hardware
    asked: Asked
    tokens_per_step: int
    moments: Moments
    own: TrainOptions
    given: frozenset[str] = frozenset()
    """The options in ``TRIED`` that no way changes."""

    @classmethod
    def of(
        cls, options: TrainOptions, asked: Asked, given: Iterable[str] = (), config: ModelConfig | None = None
    ) -> "CardPlan":
        """Return the plan for a run's options.

        Args:
            given: names of options in ``TRIED`` that keep their values.
            config: the model's; by default that of ``--size``.

        Raises:
            ValueError: the GPU is unknown or has no published peak, a step is no whole number of sequences, GPUs
                cannot be divided into tensor ranks, or the options describe steps that are not planned.
        """
        hardware = hardware_named(asked.gpu)
        hardware.peaks("bf16")
        length = options.context_length
        config = replace(config or resolve_size(options.size), max_context_length=None).at_context(length)
        given = frozenset(given)
        if options.capped:
            asked = replace(asked, host_gib=options.host_gib)
            if asked.gpus > 1:
                raise ValueError(f"{PRINT_PLAN} plans layers that stream through one GPU, got --gpus {asked.gpus}")
            memory = (hardware.memory_bytes or math.inf) / GIB
            if (limit := options.device_gib or 0.0) > memory:
                raise ValueError(f"--device-gib {limit:g} is more than {hardware.name} has, {memory:.1f} GiB")
        least = length * asked.gpus * (options.batch_size if "batch_size" in given else 1)
        tokens = options.total_batch_tokens or _tokens_per_step(least)
        if tokens % length:
            raise ValueError(f"--total-batch-tokens {tokens:,} is no whole number of sequences of {length:,}")
        case = replace(options, total_batch_tokens=None).training_case(config, 1)
        if asked.gpus % options.tensor:
            raise ValueError(f"--gpus {asked.gpus} cannot be divided into groups of --tensor {options.tensor}")
        if options.device != "cuda":
            raise ValueError(f"{PRINT_PLAN} plans steps on GPUs, not --device {options.device}")
        if case.dtype != "bf16":
            raise ValueError(f"{PRINT_PLAN} plans steps in bf16 and fp8, and --dtype is {case.dtype}")
        if options.context * options.pipeline * options.replicas > 1:
            others = "--context, --pipeline, --replicas or --agree"
            raise ValueError(f"{PRINT_PLAN} plans data and tensor ranks, not {others}")
        if options.accumulate > 1:
            raise ValueError(f"{PRINT_PLAN} tries micro-batches: say --total-batch-tokens instead of --accumulate")
        for name, n_ranks in (("tensor_by", options.tensor), ("gather_by", asked.gpus)):
            if getattr(options, name) == "copies" and not hardware.copies_reach(n_ranks):
                raise ValueError(f"{flag(name)} copies: {n_ranks} x {hardware.name} cannot write each other's memory")
        if case.recipe.quantized and not hardware.peak("fp8"):
            raise ValueError(f"--matmul-dtype {case.matmul_dtype}: {hardware.name} has no products in fp8")
        if case.attention == "hopper" and not hardware.may_be_hopper:
            raise ValueError(f"--attention hopper runs on H100 and H200 only, not on {hardware.name}")
        if "keep" in given and not case.written_out:
            raise ValueError(f"{PRINT_PLAN} plans blocks with a hand-written backward, not --keep {options.keep}")
        if "keep" in given and "+" in case.keep:
            raise ValueError(f"{PRINT_PLAN} plans blocks that all keep the same, not --keep {options.keep}")
        if case.kernels != "fused":
            raise ValueError(f"{PRINT_PLAN} plans steps of --kernels fused, and --kernels is {case.kernels}")
        if case.lora is not None:
            fault = f"{PRINT_PLAN} plans steps that train all weights, not --lora-rank {case.lora.rank}"
            raise ValueError(f"{fault}: --print-memory predicts what one with adapters needs")
        if case.optimizer == "muon":
            raise ValueError(f"{PRINT_PLAN} knows the time and the moments of AdamW, and --optimizer is muon")
        masters = (("master", 4),) if case.master == "fp32" else ()
        moments = (*((name, case.moment_bytes) for name, _ in BF16_MOMENTS), *masters)
        return cls(config, length, hardware, asked, tokens, moments, options, given)

    @cached_property
    def recipes(self) -> dict[str, Recipe]:
        """The recipes that are tried, by name; ``fp8`` is the options' own recipe if that quantizes.

        There is no ``fp8`` if the GPU has no fp8 matmuls or they do not support sequences of this length.
        """
        own: Recipe = replace(self.own, total_batch_tokens=None).training_case(self.config, 1).recipe
        fp8 = own if own.quantized else RECIPES["fp8"]
        tried = self.hardware.peak("fp8") and self.length % FP8_QUANTUM == 0
        return {"bf16": STORED} | ({"fp8": fp8} if tried else {})

    @property
    def device_bytes(self) -> float:
        """Bytes of one GPU that tensors may take, or the limit of ``--device-gib``."""
        limit = self.own.device_gib
        return USABLE * (self.hardware.memory_bytes or 0) if limit is None else limit * GIB

    @property
    def host_bytes(self) -> float:
        """Bytes of host memory for one rank's states; 0 if the host's memory is not given."""
        given = self.asked.host_gib
        return 0.0 if given is None else max(0.0, given * GIB / self.asked.gpus - HOST_OVERHEAD)

    @property
    def may_stream(self) -> bool:
        """Whether layers must stream, or may if nothing else fits."""
        return self.own.capped or (self.asked.gpus == 1 and self.asked.host_gib is not None and not self.given)

    def _layouts(self) -> Iterator[Layout]:
        n, sequences = self.asked.gpus, self.tokens_per_step // self.length
        shards = "zero" in self.given and self.own.zero > 0 and "tensor" not in self.given
        for tensor in self._tried("tensor", divisors(n)):
            data = n // tensor
            if shards and data == 1 < n:
                continue
            if sequences % data or self.length % tensor or not divides(self.config, tensor):
                continue
            micro_batches = self._tried("batch_size", MICRO_BATCHES)
            for micro_batch in (each for each in micro_batches if sequences // data % each == 0):
                levels = self._tried("zero", (0, 1, 3)) if data > 1 else (0,)
                by = self._tried("tensor_by", ("collectives", "copies")) if tensor > 1 else ("collectives",)
                by = [each for each in by if each != "copies" or self.hardware.copies_reach(tensor)]
                for zero, keep, tensor_by in product(levels, self._tried("keep", KEEPS), by):
                    yield self._layout(data, zero, tensor, tensor_by, keep, micro_batch)

    def _tried(self, name: str, values: Iterable[Any]) -> Iterable[Any]:
        """Return the values to try for an option: all, or the given one."""
        if name not in self.given:
            return values
        return ((self.own.kept if name == "keep" else vars(self.own))[name],)

    def _layout(self, data: int, zero: int, tensor: int, tensor_by: str, keep: str, micro_batch: int) -> Layout:
        n_micro_batches = self.tokens_per_step // self.length // data // micro_batch
        how: dict[str, Any] = {"tensor": tensor, "tensor_by": tensor_by, "keep": keep, "micro_batch": micro_batch}
        return Layout.of_data(data, zero, n_micro_batches=n_micro_batches, **how)

    def way(self, layout: Layout, offload: frozenset[str], recipe: Recipe) -> Way:
        """Predict one way to run the step, whether it fits or not."""
        seconds = step_seconds(self.config, self.length, layout, self.hardware, **self.step_settings(recipe, offload))
        parts = self._peak(layout, offload, recipe)
        rate = self.tokens_per_step / seconds.total
        return Way(layout, offload, recipe, seconds, parts, self._on_host(layout, offload), rate)

    def step_settings(self, recipe: Recipe, offload: frozenset[str]) -> dict[str, Any]:
        """Return keyword arguments of ``step_seconds`` for a way."""
        launches = self.own.cuda_graph == "off"
        return {"moments": self.moments, "recipe": recipe, "offload": offload, "launches": launches}

    def _peak(self, layout: Layout, offload: frozenset[str], recipe: Recipe) -> dict[str, int]:
        how: dict[str, Any] = {"moments": self.moments, "recipe": recipe, "offload": offload, "whole_gradients": True}
        return rank_peak(self.config, self.length, layout, **how).parts

    def _on_host(self, layout: Layout, offload: frozenset[str]) -> int:
        """Return the bytes that one rank has on the host."""
        parameters = self.config.part(layout.tensor).n_parameters
        states = sum(n_bytes for name, n_bytes in self.moments if name in state_keys(offload))
        rows = layout.micro_batch * self.length // layout.tensor
        inputs = rows * self.config.d_model * 2 * self.config.n_layers
        return states * parameters // layout.n_state_shards + inputs * ("residual" in offload)

    @cached_property
    def best(self) -> dict[str, Way]:
        """The fastest way that fits, by dtype: ``bf16`` and ``fp8``, or ``streamed`` and ``streamed fp8`` if only
        streamed layers fit.

        Raises:
            NothingFits: no way fits; the message says what is short, and by how much.
        """
        found, least = ({}, None) if self.own.capped else self._fastest(self.recipes, self._layouts())
        short: ValueError | None = None
        if self.may_stream:
            for name, recipe in self.recipes.items():
                try:
                    if name not in found:
                        found["streamed" if name == "bf16" else f"streamed {name}"] = self._streamed(recipe)
                except (CapsTooSmallError, NothingFits) as error:
                    short = short or error
        if not found and short is not None:
            raise NothingFits(str(short)) from None
        return found or self._refuse(least)

    def _fastest(self, recipes: Mapping[str, Recipe], layouts: Iterable[Layout]) -> tuple[dict[str, Way], Way | None]:
        """Return, by recipe, the way that ``_taken`` picks among those that fit, and the way with the lowest peak."""
        ways: dict[str, list[Way]] = {}
        least: Way | None = None
        for layout, offload in product(layouts, map(frozenset, self._tried("offload", OFFLOADS))):
            on_host = self._on_host(layout, offload) <= self.host_bytes
            if not on_host and "offload" not in self.given:
                continue
            for name, recipe in recipes.items():
                peak = sum(self._peak(layout, offload, recipe).values())
                if on_host and peak <= self.device_bytes:
                    ways.setdefault(name, []).append(self.way(layout, offload, recipe))
                if least is None or peak < least.device_bytes:
                    least = self.way(layout, offload, recipe)
        found = {name: way for name, fitting in ways.items() if (way := self._taken(fitting)) is not None}
        return found, least

    def _taken(self, ways: Iterable[Way]) -> Way | None:
        """Return the valid way with the fewest host bytes among those within ``AS_FAST`` of the fastest.

        Ties are broken by fewer tensor ranks, then by the lower ZeRO level.
        """
        fastest: list[Way] = []
        for way in sorted(ways, key=lambda way: -way.tokens_per_s):
            if fastest and way.tokens_per_s < (1 - AS_FAST) * fastest[0].tokens_per_s:
                break
            if self.fault(way) is None:
                fastest.append(way)
        return min(fastest, key=lambda way: (way.host_bytes, way.layout.tensor, way.layout.zero), default=None)

    def _refuse(self, least: Way | None) -> NoReturn:
        cards, what = f"{self.asked.gpus} x {self.hardware.name}", f"{self.config.name} at {self.length:,} tokens"
        if least is None:
            raise NothingFits(f"steps of {self.tokens_per_step:,} tokens of {what} do not divide among {cards}")
        if least.host_bytes > self.host_bytes:
            needs = (least.host_bytes + HOST_OVERHEAD) * self.asked.gpus / GIB
            raise NothingFits(
                f"{what} on {cards} with {least.arguments} needs --host-gib {math.ceil(10 * needs) / 10} or more"
            )
        short = (least.device_bytes - self.device_bytes) / GIB
        if short <= 0:
            raise NothingFits(f"{what} fits {cards}, but not with these options: {self.fault(least)}")
        host = "; with --host-gib states or layers can lie on the host"
        host = "" if self.asked.host_gib or "offload" in self.given else host
        raise NothingFits(
            f"{what} does not fit {cards}: the least, {least.arguments}, needs {least.device_bytes / GIB:.1f} GiB a "
            f"card, {short:.1f} more than tensors may take{host}"
        )

    @property
    def chosen(self) -> Way | None:
        """The fastest way that fits and differs from the options only in micro-batch, ``keep`` and offload.

        None if ``as_asked`` is None.

        Raises:
            NothingFits: no way fits.
        """
        if (asked := self.as_asked) is None:
            return None
        ranks = attrgetter("zero", "tensor", "tensor_by", "shards")
        layouts = (each for each in self._layouts() if ranks(each) == ranks(asked.layout))
        found, least = self._fastest({"as asked": asked.recipe}, layouts)
        return found.get("as asked") or self._refuse(least)

    def fault(self, way: Way) -> str | None:
        """Return why the options of a way exclude each other, or None if they do not."""
        layout = way.layout
        how: dict[str, Any] = {"batch_size": layout.micro_batch, "keep": layout.keep, "zero": layout.zero}
        how |= {"tensor": layout.tensor, "tensor_by": layout.tensor_by, "offload": tuple(sorted(way.offload))}
        return self._refusal(way.recipe, total_batch_tokens=None, **how)

    def _refusal(self, recipe: Recipe, **how: Any) -> str | None:
        """Return why these options, with the plan's other ones, are invalid, or None if they are valid."""
        # The command of a way without quantized matmuls leaves out their options.
        plain = {} if recipe.quantized else {name: getattr(TrainOptions, name) for name in RECIPE}
        options = replace(self.own, **plain | how | {"matmul_dtype": recipe.matmul})
        try:
            options.check()
            n_ranks = 1 if options.capped else self.asked.gpus
            return refusal(replace(options, total_batch_tokens=None).training_case(self.config, n_ranks))
        except ValueError as error:
            return str(error)

    def _streamed(self, recipe: Recipe) -> Way:
        assert self.asked.host_gib is not None
        caps = {"device_gib": self.device_bytes / GIB, "host_gib": self.asked.host_gib, "batch_size": 1}
        caps |= {name: getattr(TrainOptions, name) for name in ("keep", "offload") if name not in self.given}
        if fault := self._refusal(recipe, total_batch_tokens=self.own.total_batch_tokens or self.length, **caps):
            raise NothingFits(fault)
        width = max(n_bytes for _, n_bytes in (("weights", 2), *self.moments))
        limits = Caps(
            int(self.device_bytes),
            int(self.asked.host_gib * GIB),
            host_overhead=HOST_OVERHEAD + staging_bytes(self.config, width),
        )
        found = choose(
            *(self.config, self.length, limits, Rates.of(self.hardware)),
            moments=dict(self.moments),
            tokens_per_step=self.own.total_batch_tokens,
            chunk=self.own.chunk,
            recipe=recipe,
            effort=EFFORT,
        )
        seconds = StepSeconds(found.times.busy["compute"], 0.0, found.times.span - found.times.busy["compute"], 0.0)
        parts, on_host = found.device_parts, sum(found.host_parts.values())
        return Way(Layout(), frozenset(), recipe, seconds, parts, on_host, found.tokens_per_s, found)

    @property
    def as_asked(self) -> Way | None:
        """The way that the options describe, or None if such steps are not planned.

        Plans are for blocks with a hand-written backward, on data and tensor ranks, in whole micro-batches.
        """
        own = self.own
        case: TrainerCase = replace(own, total_batch_tokens=None).training_case(self.config, 1)
        data = self.asked.gpus // own.tensor
        sequences = self.tokens_per_step // self.length
        shared = own.replicas > 1 or self.asked.gpus % own.tensor or own.capped
        micro_batch = math.gcd(sequences // data, own.batch_size) if own.choose_fastest else own.batch_size
        if not case.written_out or shared or sequences % (data * micro_batch):
            return None
        zero = own.zero if data > 1 else 0
        layout = self._layout(data, zero, own.tensor, own.tensor_by, case.keep, micro_batch)
        return self.way(layout, frozenset(own.offload), case.recipe)

    @property
    def fastest(self) -> Way:
        """The fastest of the best ways; raises as ``best``."""
        return max(self.best.values(), key=lambda way: way.tokens_per_s)
