"""What a run should cost on a card that need not be here: what fits, what is fastest, its time, energy and price.

    plan = CardPlan.of(options, Asked(gpu="rtx-4090", host_gib=64))
    plan.best["bf16"].tokens_per_s, plan.lines()

Every choice of what blocks keep, micro-batch, what lies on the host, ZeRO level and tensor ranks is tried, in bf16 and
with blocks' products in fp8: peaks by ``costs/parallelism/rank_memory.py``, seconds by ``seconds.py`` beside it. Where
the host's memory is given, one GPU may also stream layers within both (``streaming/choose.py``). Imports no torch.

Tokens/s have a range: nine of ten published or measured steps of the card, or of cards that nothing was fitted on, were
that near (``scripts/parallelism.py cards``).
"""

import argparse
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from itertools import product
from typing import Any, NoReturn

from cs336_systems.config import ModelConfig, Recipe, resolve_size
from cs336_systems.costs.kept import STORED
from cs336_systems.costs.offload import state_keys
from cs336_systems.costs.parallelism.layout import Layout
from cs336_systems.costs.parallelism.rank_memory import rank_peak
from cs336_systems.costs.parallelism.search import USABLE, divisors
from cs336_systems.costs.parallelism.seconds import BF16_MOMENTS, Moments, StepSeconds, by_class, step_seconds
from cs336_systems.costs.rates import Rates
from cs336_systems.costs.speed_of_light import speed_of_light
from cs336_systems.hardware import GIB, Hardware, hardware_named
from cs336_systems.pretraining.options import TrainerCase, TrainOptions
from cs336_systems.streaming.choose import HOST_OVERHEAD, Caps, CapsTooSmallError, ChosenPlan, choose

PRINT_PLAN = "--print-plan"
TOKENS_PER_STEP = 524_288
"""Tokens of a step where --total-batch-tokens is not given."""
KEEPS = ("all", "all-norm", "all-norm-swiglu", "products-ffn", "attention", "input")
OFFLOADS: tuple[tuple[str, ...], ...] = ((), ("m", "v"), ("residual",), ("m", "v", "residual"))
MICRO_BATCHES = (1, 2, 4, 8, 16, 32, 64)
USUAL = 16_384
"""Tokens of a micro-batch."""
ERRORS = {"H100 SXM": 0.05, "H200": 0.05, "RTX 3090": 0.12, "RTX PRO 6000 Blackwell": 0.12}
"""The error that nine of ten predictions stay below, by card, of this suite's own steps on an H100 and an H200 and of
others' on the rest (profiles/your-card.md); ``UNFITTED`` where nothing was fitted on a card's steps, ``SEVERAL`` on
more GPUs than four."""
UNFITTED, SEVERAL = 0.2, 0.15
EFFORT = 4000
"""Operations that are simulated in each part of the search for a streamed plan: 70B takes two seconds."""
RECIPES = {"bf16": STORED, "fp8": Recipe("e4m3")}


@dataclass(frozen=True)
class Asked:
    """The options of a plan, beside those of the run.

    Raises:
        ValueError: a number is not positive, or the price is below zero.
    """

    gpu: str = ""
    gpus: int = 1
    host_gib: float | None = None
    price_per_gpu_hour: float | None = None
    run_tokens: float | None = None
    picture: str | None = None

    def __post_init__(self) -> None:
        for name in ("gpus", "host_gib", "run_tokens"):
            value = getattr(self, name)
            if value is not None and not 0 < value < math.inf:
                raise ValueError(f"--{name.replace('_', '-')} must be positive and finite, got {value:g}")
        if self.price_per_gpu_hour is not None and not 0 <= self.price_per_gpu_hour < math.inf:
            raise ValueError(f"--price-per-gpu-hour must not be negative, got {self.price_per_gpu_hour:g}")

    @classmethod
    def taken_from(cls, arguments: Sequence[str]) -> "tuple[Asked, list[str]]":
        """The options of a plan, and the arguments without them, for a run on a GPU.

        Raises:
            ValueError: a value is no number, or is missing.
        """
        parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
        for each in fields(cls):
            kind = {"gpu": str, "picture": str, "gpus": int}.get(each.name, float)
            parser.add_argument(f"--{each.name.replace('_', '-')}", type=_tokens if each.name == "run_tokens" else kind)
        try:
            known, rest = parser.parse_known_args([each for each in arguments if each != PRINT_PLAN])
        except (argparse.ArgumentError, argparse.ArgumentTypeError) as error:
            raise ValueError(str(error).replace("argument ", "", 1)) from None
        rest = rest if "--device" in rest else [*rest, "--device", "cuda"]
        return cls(**{name: value for name, value in vars(known).items() if value is not None}), rest


def _tokens(text: str) -> float:
    """Read 100B, 15T or a number."""
    scale = {"K": 1e3, "M": 1e6, "B": 1e9, "T": 1e12}.get(text[-1:], 1.0)
    return float(text.rstrip("KMBT")) * scale


@dataclass(frozen=True)
class Way:
    """One way to run a step, and its prediction."""

    name: str
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
        """Return how it runs, in a few words."""
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


class NothingFits(ValueError):
    """No way to run the step fits the card."""


@dataclass(frozen=True)
class CardPlan:
    """The ways of a run on a card."""

    config: ModelConfig
    length: int
    hardware: Hardware
    asked: Asked
    tokens_per_step: int
    moments: Moments
    own: TrainOptions

    @classmethod
    def of(cls, options: TrainOptions, asked: Asked) -> "CardPlan":
        """The plan of a run's options.

        Raises:
            ValueError: the card is unknown, or has no published peak, or its tokens are no whole number of sequences.
        """
        hardware = hardware_named(asked.gpu)
        hardware.peaks("bf16")
        length = options.context_length
        config = replace(resolve_size(options.size), max_context_length=None).at_context(length)
        least = length * asked.gpus
        tokens = options.total_batch_tokens or max(least, TOKENS_PER_STEP // least * least)
        if tokens % length:
            raise ValueError(f"--total-batch-tokens {tokens:,} is no whole number of sequences of {length:,}")
        case = replace(options, total_batch_tokens=None).training_case(config, 1)
        if case.dtype != "bf16":
            raise ValueError(f"{PRINT_PLAN} plans steps in bf16 and fp8, and --dtype is {case.dtype}")
        if case.lora is not None:
            fault = f"{PRINT_PLAN} plans steps that train all weights, not --lora-rank {case.lora.rank}"
            raise ValueError(f"{fault}: --print-memory predicts what one with adapters needs")
        if case.optimizer == "muon":
            raise ValueError(f"{PRINT_PLAN} knows the time and the moments of AdamW, and --optimizer is muon")
        masters = (("master", 4),) if case.master == "fp32" else ()
        moments = (*((name, case.moment_bytes) for name, _ in BF16_MOMENTS), *masters)
        return cls(config, length, hardware, asked, tokens, moments, options)

    @property
    def device_bytes(self) -> float:
        """Bytes of one card that tensors may take."""
        return USABLE * (self.hardware.memory_bytes or 0)

    @property
    def host_bytes(self) -> float:
        """Bytes of the host for one rank's states; none where the host's memory is not given."""
        given = self.asked.host_gib
        return 0.0 if given is None else max(0.0, given * GIB - HOST_OVERHEAD) / self.asked.gpus

    def _layouts(self) -> Iterator[Layout]:
        n, sequences = self.asked.gpus, self.tokens_per_step // self.length
        for tensor in (each for each in divisors(n) if self._divides(each)):
            data = n // tensor
            if sequences % data:
                continue
            for micro_batch in (each for each in self._micro_batches if sequences // data % each == 0):
                levels = (0, 1, 3) if data > 1 else (0,)
                by = ("collectives", "copies") if tensor > 1 else ("collectives",)
                for zero, keep, tensor_by in product(levels, KEEPS, by):
                    yield Layout.of_data(
                        *(data, zero),
                        tensor_by=tensor_by,
                        tensor=tensor,
                        keep=keep,
                        micro_batch=micro_batch,
                        n_micro_batches=sequences // data // micro_batch,
                    )

    @property
    def _micro_batches(self) -> list[int]:
        """Those of about ``USUAL`` tokens first: where nothing else decides, kernels are neither short nor many."""
        return sorted(MICRO_BATCHES, key=lambda each: abs(math.log2(each * self.length / USUAL)))

    def _divides(self, tensor: int) -> bool:
        try:
            self.config.part(tensor)
        except ValueError:
            return False
        return self.length % tensor == 0

    def way(self, name: str, layout: Layout, offload: frozenset[str], recipe: Recipe) -> Way:
        """A way to run the step, and its prediction; it need not fit."""
        how: dict[str, Any] = {"moments": self.moments, "recipe": recipe, "offload": offload}
        seconds = step_seconds(self.config, self.length, layout, self.hardware, **how)
        parts = self._peak(layout, offload, recipe)
        rate = self.tokens_per_step / seconds.total
        return Way(name, layout, offload, recipe, seconds, parts, self._on_host(layout, offload), rate)

    def _peak(self, layout: Layout, offload: frozenset[str], recipe: Recipe) -> dict[str, int]:
        how: dict[str, Any] = {"moments": self.moments, "recipe": recipe, "offload": offload, "whole_gradients": True}
        return rank_peak(self.config, self.length, layout, **how).parts

    def _on_host(self, layout: Layout, offload: frozenset[str]) -> int:
        """Bytes on the host of one rank."""
        parameters = self.config.part(layout.tensor).n_parameters
        states = sum(n_bytes for name, n_bytes in self.moments if name in state_keys(offload))
        inputs = layout.micro_batch * self.length * self.config.d_model * 2 * self.config.n_layers
        return states * parameters // layout.n_state_shards + inputs * ("residual" in offload)

    @cached_property
    def best(self) -> dict[str, Way]:
        """The fastest way that fits, by the dtype of blocks' products, and streamed, where the host's memory is given.

        Raises:
            NothingFits: none does; one sentence says what is short, and by how much.
        """
        recipes = {name: each for name, each in RECIPES.items() if name != "fp8" or self.hardware.peak("fp8")}
        found, least = self._fastest(recipes, self._layouts())
        if self.asked.gpus == 1 and self.asked.host_gib is not None and "bf16" not in found:
            try:
                found["streamed"] = self._streamed()
            except CapsTooSmallError as error:
                if not found:
                    raise NothingFits(str(error)) from None
        return found or self._refuse(least)

    def _fastest(self, recipes: Mapping[str, Recipe], layouts: Iterable[Layout]) -> tuple[dict[str, Way], Way | None]:
        """The fastest way that fits and runs, by recipe; and of all ways the one that needs the fewest bytes."""
        ways: dict[str, list[Way]] = {}
        least: Way | None = None
        for layout, offload in product(layouts, map(frozenset, OFFLOADS)):
            if offload and self._on_host(layout, offload) > self.host_bytes:
                continue
            for name, recipe in recipes.items():
                peak = sum(self._peak(layout, offload, recipe).values())
                if peak <= self.device_bytes:
                    ways.setdefault(name, []).append(self.way(name, layout, offload, recipe))
                if least is None or peak < least.device_bytes:
                    least = self.way(name, layout, offload, recipe)
        found: dict[str, Way] = {}
        for name, those in ways.items():
            fastest = sorted(those, key=lambda way: -way.tokens_per_s)
            if (first := next(filter(self.runs, fastest), None)) is not None:
                found[name] = first
        return found, least

    def _refuse(self, least: Way | None) -> NoReturn:
        cards, what = f"{self.asked.gpus} x {self.hardware.name}", f"{self.config.name} at {self.length:,} tokens"
        if least is None:
            raise NothingFits(f"steps of {self.tokens_per_step:,} tokens of {what} do not divide among {cards}")
        short = (least.device_bytes - self.device_bytes) / GIB
        if short <= 0:
            raise NothingFits(f"{what} fits {cards}, but not with these options: {self._fault(least)}")
        host = "" if self.asked.host_gib else "; with --host-gib states or layers can lie on the host"
        raise NothingFits(
            f"{what} does not fit {cards}: the least, {self._said(least)}, needs {least.device_bytes / GIB:.1f} GiB a "
            f"card, {short:.1f} more than tensors may take{host}"
        )

    @property
    def chosen(self) -> Way | None:
        """The fastest way that fits and differs from the options only in micro-batch, ``keep`` and offload.

        None where ``as_asked`` is None.

        Raises:
            NothingFits: no way fits.
        """
        if (asked := self.as_asked) is None:
            return None
        names = ("zero", "tensor", "tensor_by", "shards")
        layouts = (each for each in self._layouts() if all(getattr(each, n) == getattr(asked.layout, n) for n in names))
        found, least = self._fastest({"as asked": asked.recipe}, layouts)
        return found.get("as asked") or self._refuse(least)

    def runs(self, way: Way) -> bool:
        """Whether train.py would run it on a GPU that can: whether no options of it exclude each other."""
        return self._fault(way) is None

    def _fault(self, way: Way) -> str | None:
        """Why train.py would not run it, or None if it would."""
        layout = way.layout
        try:
            replace(
                self.own,
                batch_size=layout.micro_batch,
                total_batch_tokens=None,
                keep=layout.keep,
                offload=tuple(sorted(way.offload)),  # type: ignore[arg-type]
                zero=layout.zero,
                tensor=layout.tensor,
                tensor_by=layout.tensor_by,  # type: ignore[arg-type]
                matmul_dtype=way.recipe.matmul,
            ).check()
        except ValueError as error:
            return str(error)
        return None

    def _streamed(self) -> Way:
        assert self.asked.host_gib is not None
        caps = Caps(int(self.device_bytes), int(self.asked.host_gib * GIB))
        moments = dict(self.moments)
        asked = self.own.total_batch_tokens
        found = choose(
            *(self.config, self.length, caps, Rates.of(self.hardware)),
            moments=moments,
            tokens_per_step=asked,
            effort=EFFORT,
        )
        seconds = StepSeconds(found.times.busy["compute"], 0.0, found.times.span - found.times.busy["compute"], 0.0)
        parts, on_host = found.device_parts, sum(found.host_parts.values())
        return Way("streamed", Layout(), frozenset(), STORED, seconds, parts, on_host, found.tokens_per_s, found)

    @property
    def as_asked(self) -> Way | None:
        """The way that the options say; None where it is not planned.

        Planned are steps of whole micro-batches whose blocks have a hand-written backward, on data and tensor ranks.
        """
        own = self.own
        case: TrainerCase = replace(own, total_batch_tokens=None).training_case(self.config, 1)
        data = self.asked.gpus // own.tensor
        sequences = self.tokens_per_step // self.length
        shared = own.context * own.pipeline * own.replicas > 1 or self.asked.gpus % own.tensor or own.capped
        micro_batch = math.gcd(sequences // data, own.batch_size) if own.choose_fastest else own.batch_size
        if not case.written_out or shared or sequences % (data * micro_batch):
            return None
        layout = Layout.of_data(
            *(data, own.zero if data > 1 else 0),
            tensor=own.tensor,
            keep=case.keep,
            tensor_by=own.tensor_by,
            micro_batch=micro_batch,
            n_micro_batches=sequences // data // micro_batch,
        )
        return self.way("as asked", layout, frozenset(own.offload), case.recipe)

    @property
    def error(self) -> float:
        """The relative error that nine of ten predictions for this card stay below, on so many GPUs."""
        return max(ERRORS.get(self.hardware.name, UNFITTED), SEVERAL if self.asked.gpus > 4 else 0.0)

    def command(self, way: Way) -> str:
        """The options of train.py for a way."""
        words = f"--size {self.own.size} --context-length {self.length}"
        if way.streamed is not None:
            gib = self.device_bytes / GIB
            tokens = way.streamed.plan.rounds * way.streamed.plan.round_tokens
            return f"{words} --total-batch-tokens {tokens} --device-gib {gib:.1f} --host-gib {self.asked.host_gib:g}"
        return f"{words} --total-batch-tokens {self.tokens_per_step} {self._said(way)}"

    @staticmethod
    def _said(way: Way) -> str:
        """The options of train.py in which a way differs from others of the plan."""
        return f"{way} --matmul-dtype {way.recipe.matmul}" if way.recipe.quantized else str(way)

    @property
    def fastest(self) -> Way:
        return max(self.best.values(), key=lambda way: way.tokens_per_s)

    def light(self, way: Way) -> float | None:
        """The share of the speed of light that a way reaches."""
        how: dict[str, Any] = {"block_dtype": "fp8" if way.recipe.quantized else "bf16", "n_devices": self.asked.gpus}
        return speed_of_light(self.config, self.length, self.hardware, **how).share(way.tokens_per_s)

    def classes(self, way: Way) -> dict[str, float]:
        """Seconds of a step by class of kernel."""
        if way.streamed is not None:
            return {"kernels": way.seconds.compute, "waiting for copies": way.seconds.waiting}
        how: dict[str, Any] = {"moments": self.moments, "recipe": way.recipe, "offload": way.offload}
        return by_class(self.config, self.length, way.layout, self.hardware, **how)

    @property
    def run_tokens(self) -> float:
        """Tokens of the whole run: those asked for, else its steps', else a billion."""
        if self.asked.run_tokens is not None:
            return self.asked.run_tokens
        return 1e9 if self.own.steps is None else self.own.steps * self.tokens_per_step

    def hours(self, way: Way) -> float:
        return self.run_tokens / way.tokens_per_s / 3600

    def kwh(self, way: Way) -> float | None:
        """Energy of the cards alone, at their full power."""
        watts = self.hardware.watts
        return None if watts is None else self.hours(way) * self.asked.gpus * watts / 1000

    def price(self, way: Way) -> float | None:
        each = self.asked.price_per_gpu_hour
        return None if each is None else each * self.asked.gpus * self.hours(way)

    @property
    def fp8_pays(self) -> str:
        """One sentence on whether fp8 pays here."""
        if not self.hardware.peak("fp8"):
            return f"fp8: {self.hardware.name} has no products in fp8."
        ways = {name: self.best.get(name) for name in ("fp8", "bf16")}
        if ways["fp8"] is None or ways["bf16"] is None:
            fits = [name for name, way in ways.items() if way]
            return f"fp8: {'only ' + fits[0] if fits else 'neither'} fits without streaming."
        times = ways["fp8"].tokens_per_s / ways["bf16"].tokens_per_s
        return f"fp8 {'pays' if times > 1 + _PAYS else 'does not pay'} here: {times:.2f} times as fast as bf16."


_PAYS = 0.03
"""The gain from which on fp8, which loses accuracy, pays."""
