"""Steps that llm.q published, with their options translated to this suite's, and predictions of their cost.

``llmq.csv`` has the rows of https://github.com/IST-DASLab/llmq (benchmarks/): a machine, the options of its ``train``,
median tokens/s of a few steps, and their share of the speed of light. Sequences have 1,024 tokens; model, optimizer
states and master weights are bf16. Optimizer states are sharded over GPUs (ZeRO 1), weights and gradients by option.

    recompute: swiglu, norm, ffn, att, block     ``keep``: all without the named ones; block is input
    offload: opt-m, opt-v, master, residual      ``offload``; master weights are the bf16 weights of an fp8 step
    lmhead-chunks, attn-bwd-chunks               no effect on seconds: this suite's head always works in chunks

    row = read_rows()[0]
    row.predicted(LLMQ).total, row.peak_bytes
"""

import csv
import re
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

from cs336_systems.config import ModelConfig, Recipe, resolve_size
from cs336_systems.costs.kept import STORED
from cs336_systems.costs.parallelism.layout import Layout
from cs336_systems.costs.parallelism.rank_memory import rank_peak
from cs336_systems.costs.parallelism.seconds import BF16_MOMENTS, StepSeconds, step_seconds
from cs336_systems.costs.rates import Sustained, ours_on
from cs336_systems.hardware import Hardware, hardware_named

ROWS = Path(__file__).with_name("llmq.csv")
SHARES = replace(ours_on(hardware_named("h100"), "2026-11-29"), products=1.0056, memory=0.9388, quantized=0.9569)
"""llm.q's shares of a GPU's rates, equal for all GPUs. Those in ``FITTED`` were fitted on the named tenth of each GPU's
rows; the others are this suite's on the day of the fit."""
FITTED = ("products", "memory", "quantized")

LENGTH = 1024
_CARDS = {"H100": "h100 sxm", "Pro6000": "rtx pro 6000", "4090": "rtx 4090", "5090": "rtx 5090"}
_MACHINE = re.compile(r"(\w+)x(\d+)")
_OPTION = re.compile(r"--?([a-z-]+)(?:=(\S+))?")


@dataclass(frozen=True)
class Row:
    """A machine, the options of a run on it, and the tokens/s of all its GPUs."""

    machine: str
    options: str
    tokens_per_s: float

    @cached_property
    def _given(self) -> dict[str, str]:
        return dict(_OPTION.findall(self.options))

    @property
    def n_gpus(self) -> int:
        return int(self._machine[1])

    @property
    def card(self) -> str:
        return self._machine[0]

    @property
    def _machine(self) -> tuple[str, ...]:
        match = _MACHINE.fullmatch(self.machine)
        if match is None or match[1] not in _CARDS:
            raise ValueError(f"no machine {self.machine!r}: known are {', '.join(_CARDS)}, with x and a number")
        return match.groups()

    @property
    def hardware(self) -> Hardware:
        return hardware_named(_CARDS[self.card])

    @property
    def config(self) -> ModelConfig:
        return resolve_size(self._given["model"])

    @property
    def recipe(self) -> Recipe:
        return Recipe("e4m3", fast_accumulation=False) if self._given["matmul-dtype"] == "e4m3" else STORED

    @property
    def keep(self) -> str:
        if "recompute-block" in self._given:
            return "input"
        dropped = {"swiglu": ["swiglu"], "norm": ["norm"], "ffn": ["ffn"], "qkv": ["qkv"], "att": ["qkv", "attention"]}
        names = [name for flag, names in dropped.items() if f"recompute-{flag}" in self._given for name in names]
        return "-".join(["all", *names])

    @property
    def offload(self) -> frozenset[str]:
        names = {"opt-m": "m", "opt-v": "v", "master": "master", "residual": "residual"}
        return frozenset(name for flag, name in names.items() if f"offload-{flag}" in self._given)

    @property
    def moments(self) -> tuple[tuple[str, int], ...]:
        """Bytes per parameter of the optimizer states, and of bf16 master weights if they are offloaded."""
        return (*BF16_MOMENTS, *([("master", 2)] if "master" in self.offload else []))

    @property
    def layout(self) -> Layout:
        zero = 3 if "shard-weights" in self._given else 2 if "shard-gradients" in self._given else int(self.n_gpus > 1)
        return Layout.of_data(
            *(self.n_gpus, zero),
            keep=self.keep,
            micro_batch=int(self._given["batch-size"]),
            n_micro_batches=int(self._given["grad-accumulation"]),
        )

    @property
    def tokens(self) -> int:
        """Tokens per step on all GPUs."""
        return LENGTH * self.layout.micro_batch * self.layout.n_micro_batches * self.n_gpus

    def predicted(self, sustained: Sustained) -> StepSeconds:
        """Predict the step's seconds, with an engine's shares of the GPU's rates."""
        return step_seconds(
            self.config,
            LENGTH,
            self.layout,
            self.hardware,
            moments=self.moments,
            recipe=self.recipe,
            offload=self.offload,
            sustained=sustained,
            launches=False,
        )

    @property
    def name(self) -> str:
        return f"{self.machine} {self.options}"

    @property
    def peak_bytes(self) -> int:
        """The predicted peak of one GPU's memory.

        Compared with this suite, which stores blocks' fp8 weights twice, llm.q stores them once. Their bf16 masters are
        sharded with the optimizer states, or on the host.
        """
        peak = rank_peak(
            *(self.config, LENGTH, self.layout), moments=BF16_MOMENTS, recipe=self.recipe, offload=self.offload
        )
        if not self.recipe.quantized or self.layout.zero == 3:
            return peak.n_bytes
        masters = 2 * (1.0 if "master" in self.offload else 1 - 1 / self.n_gpus)
        return peak.n_bytes - int((1 + masters) * self.config.n_layers * self.config.n_block_parameters)

    @property
    def fits(self) -> bool:
        """Whether the predicted peak is within the card's memory."""
        return self.peak_bytes <= (self.hardware.memory_bytes or 0)

    def rate(self, sustained: Sustained) -> float:
        """Return the predicted tokens/s."""
        return self.tokens / self.predicted(sustained).total


def read_rows(path: Path = ROWS) -> list[Row]:
    with path.open(newline="", encoding="utf-8") as file:
        return [Row(row["machine"], row["options"], float(row["tokens_per_s"])) for row in csv.DictReader(file)]
