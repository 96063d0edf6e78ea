"""Which parallelism trains a model fastest on so many GPUs, what binds it, and what would change the answer?

The questions search and cases of ``scripts/parallelism.py``; ``costs/parallelism/search.py`` tries all layouts. Nothing
is measured between hosts: measured are steps on up to four GPUs, and ``published`` compares predictions with steps that
others published.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, Literal

from cs336_systems.config import resolve_size
from cs336_systems.costs.parallelism import scaling
from cs336_systems.costs.parallelism.forms import Device
from cs336_systems.costs.parallelism.search import Candidate, Job, Where
from cs336_systems.costs.parallelism.search import Search as Layouts
from cs336_systems.costs.parallelism.seconds import BF16_MOMENTS
from cs336_systems.costs.streaming import LEVELS, MASTER_MOMENTS
from cs336_systems.declared import sign_refusal
from cs336_systems.experiments.parallelism import Answer
from cs336_systems.hardware import GIB, hardware_named
from cs336_systems.report.tables import Table

BINDING = 0.03
"""The gain in tokens/s by twice as much of something from which this something is said to bind."""

SHOWN = 10
"""Layouts in the table."""

_AMOUNT = re.compile(r"(\d+(?:\.\d+)?)([KMBT]?)")
_RATE = re.compile(r"(\d+(?:\.\d+)?)([GT])(b|B)(?:/s|ps)?")


def amount(option: str, text: str, thousand: int) -> int:
    """Read a number such as 4194304, 4M or 15T, whose K is one ``thousand``, M its square, and so on.

    Raises:
        ValueError: the text is no such number, or the number is not whole or not positive.
    """
    match = _AMOUNT.fullmatch(text.replace("_", "").replace(",", ""))
    value = float(match[1]) * thousand ** " KMBT".index(match[2] or " ") if match else 0.0
    if value <= 0 or value != int(value):
        raise ValueError(f"{option} {text}: say a whole number above 0, such as 4194304, 4M or 15T")
    return int(value)


def rate(option: str, text: str) -> float:
    """Read bytes per second: 400Gb are bits (50e9 bytes), 50GB are bytes.

    Raises:
        ValueError: the text is no such rate, or zero.
    """
    match = _RATE.fullmatch(text)
    value = float(match[1]) * {"G": 1e9, "T": 1e12}[match[2]] / {"b": 8, "B": 1}[match[3]] if match else 0.0
    if value <= 0:
        raise ValueError(f"{option} {text}: say a rate above 0 with its unit, such as 400Gb (bits a second) or 50GB")
    return value


@dataclass(frozen=True)
class Search:
    """The fastest parallelism of a training job: all meshes, ZeRO levels, schedules and levels of what blocks keep.

    FSDP alone still scales at --gpus 256, is stopped by communication at --gpus 2048 --sequence 1024, by the batch at
    --gpus 1024, and by both at --gpus 4096, the lecture's 70B on some 4,000 GPUs; the question cases answers all four.
    """

    gpus: int = 64
    gpu: str = "h100"
    """GPU, as its name begins: h100, h200, b200, a100-sxm-80gb."""
    size: str = "llama3-70b"
    batch_tokens: str = "4M"
    """Tokens of the global batch; K and M are powers of 1,024, so that 4M are 4 x 1024 x 1024 tokens."""
    sequence: int = 8192
    """Tokens of a sequence."""
    device_gib: float | None = None
    """GiB of a GPU's memory, of which tensors get 95 %; as published if not given."""
    network: str = "400Gb"
    """A GPU's bandwidth to other hosts, each way: 400Gb are bits a second, 50GB bytes."""
    tokens: str = "15T"
    """Tokens of the whole run; K, M, B and T are powers of 1,000."""
    master_weights: Literal["fp32", "none"] = "fp32"
    """fp32: 16 bytes a parameter, with FP32 weights and moments in the optimizer; none: 8, all in bf16."""

    def answer(self) -> Answer:
        job, n_tokens = self.job, amount("--tokens", self.tokens, 1000)
        layouts = _layouts_of(job)
        layouts.check_fits()
        best = layouts.best(SHOWN)
        steps = n_tokens / job.batch_tokens
        gains, changes = self._changes(job, layouts, best[0])
        binding = [name for name in ("memory", "batch", "network") if gains.get(f"twice the {name}", 0.0) >= BINDING]
        of_step = {part: getattr(best[0].seconds, part) / best[0].seconds.total for part in ("exposed", "bubble")}
        shares = ", ".join(f"{100 * share:.0f} % {part}" for part, share in of_step.items())
        binds = " and ".join(binding) or "compute"
        fitting = f"{layouts.n_fitting:,} of {len(layouts.peaks):,} layouts fit {job.device_bytes / GIB:.4g} GiB"
        order = "of those equal to three digits the simplest is first"
        caption = f"{self._words(job)}: {fitting}; {order}; exposed is communication that nothing hides"
        lines = [(place, *_line(each, job, steps)) for place, each in enumerate(best, start=1)]
        what = f"What binds: {binds} (of the best step {shares}). What would change the answer"
        columns = ("change", "tokens/s a GPU", "gain %", "layout")
        tables = [Table.of(caption, _COLUMNS, lines), Table.of(what, columns, changes)]
        if job.n_gpus > 1:
            tables.append(fsdp_alone(job))
        seconds = best[0].seconds.total
        summary = {
            "layout": str(best[0].layout),
            "step s": seconds,
            "GiB": best[0].peak_bytes / GIB,
            "exposed s": best[0].seconds.exposed,
            "bubble s": best[0].seconds.bubble,
            "MFU": job.mfu(seconds),
            "days": steps * seconds / 86_400,
            "GPU-hours": steps * seconds * job.n_gpus / 3600,
            "binds": binds,
            "fitting": layouts.n_fitting,
            "layouts": len(layouts.peaks),
            "gains": gains,
        }
        return tables, summary

    @property
    def job(self) -> Job:
        """The job that the options describe; ValueError for a value that makes no sense."""
        for name in ("gpus", "sequence", "device_gib"):
            if refusal := sign_refusal(name, getattr(self, name), "positive"):
                raise ValueError(refusal)
        hardware, config = hardware_named(self.gpu), resolve_size(self.size)
        gib = self.device_gib if self.device_gib is not None else (hardware.memory_bytes or 0) / GIB
        return Job(
            config.at_context(self.sequence),
            self.sequence,
            amount("--batch-tokens", self.batch_tokens, 1024),
            self.gpus,
            hardware,
            gib * GIB,
            rate("--network", self.network),
            tuple(MASTER_MOMENTS.items()) if self.master_weights == "fp32" else BF16_MOMENTS,
        )

    def _words(self, job: Job) -> str:
        return (
            f"{self.size} on {job.n_gpus:,} x {job.hardware.name}, {job.batch_tokens:,} tokens a step in "
            f"{job.n_sequences:,} sequences, {8 * job.network_bytes_per_s / 1e9:g} Gbit/s between hosts"
        )

    def _changes(self, job: Job, layouts: Layouts, best: Candidate) -> tuple[dict[str, float], list[Sequence[object]]]:
        """Gains in tokens/s by what would change, and lines of the table."""
        among: dict[str, Where] = {
            "no pipeline": lambda layout: layout.pipeline == 1,
            "no tensor ranks": lambda layout: layout.tensor == 1,
            "no context ranks": lambda layout: layout.context == 1,
            "FSDP alone": lambda layout: layout.zero == 3 and layout.pipeline * layout.tensor * layout.context == 1,
        }
        among |= {f"keep {level}": lambda layout, level=level: layout.keep == level for level in LEVELS}  # type: ignore[misc]
        at_least = job.tokens_per_s(best.seconds.total)
        found = {name: (job, layouts.best(1, where)) for name, where in among.items() if not where(best.layout)}
        doubled = {
            "network": layouts.of_job(replace(job, network_bytes_per_s=2 * job.network_bytes_per_s)),
            "memory": layouts.of_job(replace(job, device_bytes=2 * job.device_bytes)),
            "batch": Layouts.of(replace(job, batch_tokens=2 * job.batch_tokens)),
        }
        found |= {f"twice the {name}": (each.job, each.best()) for name, each in doubled.items()}
        if job.n_gpus == 1:
            del found["FSDP alone"]
        hidden = layouts.hiding_tensor_ranks()
        found["tensor ranks by copies"] = hidden.job, hidden.best()
        gains, lines = dict[str, float](), list[Sequence[object]]()
        for name, (asked, candidates) in found.items():
            if candidates:
                speed = asked.tokens_per_s(candidates[0].seconds.total)
                gains[name] = speed / at_least - 1
                each = f"{speed / asked.n_gpus:,.0f}", f"{100 * gains[name]:+.1f}", str(candidates[0].layout)
                lines.append((name, *each))
            else:
                lines.append((name, "-", "-", "none fits"))
        return gains, lines


CASES = (Search(256), Search(2048, sequence=1024), Search(1024), Search(4096))
"""FSDP alone reaches no limit, that of communication, that of the batch, and both."""

_COLUMNS = (
    *("place", "step s", "days", "GPU-hours", "MFU %", "GiB", "exposed s", "bubble s"),
    *("replica", "shard", "context", "tensor", "pipeline", "ZeRO", "schedule", "keep", "micro-batches"),
)


def _line(candidate: Candidate, job: Job, steps: float) -> Sequence[object]:
    layout, seconds = candidate.layout, candidate.seconds
    total = seconds.total
    days = steps * total / 86_400
    schedule = f"{layout.schedule} {layout.chunks}" if layout.chunks > 1 else layout.schedule
    return (
        *(f"{total:#.3g}".rstrip("."), f"{days:,.1f}", f"{24 * days * job.n_gpus:,.0f}", f"{100 * job.mfu(total):.1f}"),
        *(f"{candidate.peak_bytes / GIB:.1f}", f"{seconds.exposed:.2f}", f"{seconds.bubble:.2f}"),
        *(layout.replicas, layout.shards, layout.context, layout.tensor, layout.pipeline, layout.zero),
        *(schedule if layout.pipeline > 1 else "-", layout.keep, f"{layout.n_micro_batches} x {layout.micro_batch}"),
    )


@cache
def _layouts_of(job: Job) -> Layouts:
    return Layouts.of(job)


def _limits(job: Job) -> tuple[bool, bool]:
    """Whether FSDP alone reaches the limit of the batch and that of communication, at datasheets' rates."""
    device = Device.of(job.hardware.name, job.hardware, job.network_bytes_per_s)
    workload = scaling.ModelAndBatch(job.config.n_parameters, job.batch_tokens, job.length)
    return scaling.fsdp_step(workload, job.n_gpus, device).limits


def _reached(limits: tuple[bool, bool]) -> list[str]:
    return ["reached" if limit else "-" for limit in limits]


def fsdp_alone(job: Job) -> Table:
    """Which of the two limits FSDP alone reaches on these GPUs, and the remedy."""
    limits = _limits(job)
    return Table.of(
        "FSDP alone on these GPUs, at datasheets' rates",
        ("batch limit", "communication limit", "how", "explanation"),
        [(*_reached(limits), *scaling.REMEDIES[limits])],
    )


@dataclass(frozen=True)
class Cases:
    """The lecture's four cases, a 70B model on ever more H100s: the limits of FSDP alone, and the layout of search.

    Takes about a minute.
    """

    def answer(self) -> Answer:
        lines, summary = list[Sequence[object]](), dict[str, Any]()
        for asked in CASES:
            job = asked.job
            best = _layouts_of(job).best()[0]
            step, _, _, *figures = _line(best, job, 1.0)[:7]
            lines.append((f"{job.n_gpus:,}", job.length, *_reached(_limits(job)), step, *figures, str(best.layout)))
            total, layout = best.seconds.total, str(best.layout)
            summary[f"{job.n_gpus} GPUs"] = {"step s": total, "MFU": job.mfu(total), "layout": layout}
        job = CASES[0].job
        caption = (
            f"{CASES[0].size} on {job.hardware.name}s, {job.batch_tokens:,} tokens a step, "
            f"{8 * job.network_bytes_per_s / 1e9:g} Gbit/s between hosts; limits of FSDP alone, at datasheets' rates"
        )
        columns = ("GPUs", "sequence", "batch limit", "communication limit", "step s", *_COLUMNS[4:8], "layout")
        return [Table.of(caption, columns, lines)], summary
