"""Plausible training runs, as records."""

import math
import random
from collections.abc import Iterator

from cs336_systems.costs.speed_of_light import SpeedOfLight
from cs336_systems.hardware import GIB
from cs336_systems.pretraining.run_log import LogFile, RunLog
from cs336_systems.pretraining.run_records import (
    Data,
    Device,
    End,
    Evaluation,
    GpuState,
    Light,
    LoggedStep,
    Memory,
    Model,
    Record,
    Session,
)
from cs336_systems.pretraining.schedules import LearningRate

TOKENS = 524_288


def opening(n_steps: int, first_step: int = 0, light: SpeedOfLight | None = None) -> Iterator[Record]:
    """What is said before the first step; without ``light`` the device's peak is unknown."""
    defaults = {"size": "tiny", "learning_rate": 3e-4, "schedule": "cosine", "betas": [0.9, 0.95], "clip": 1.0}
    options = defaults | {"size": "qwen2.5-0.5b", "schedule": "wsd"}
    yield Session(options, defaults, n_steps, first_step)
    provenance = {"torch": "2.11.0", "driver": "580.95", "host": "AMD EPYC", "commit": "0123abcd"}
    yield Device("NVIDIA H200", 1, 141 * GIB, provenance)
    yield Model("qwen2.5-0.5b", 494_032_768, 1024)
    yield Data("data/stdlib-bpe4096", "the standard library", "bpe", 4096, 5_000_000, 250_000, TOKENS)
    predicted = {"weights": 0.92 * GIB, "m": 0.92 * GIB, "v": 0.92 * GIB, "activations": 30 * GIB, "free": 105 * GIB}
    yield Memory({segment: int(n_bytes) for segment, n_bytes in predicted.items()})
    if light is None:
        yield Light({name: _part("bf16", 1e9, None) for name in ("blocks", "attention", "head")}, None)
    else:
        parts = {name: vars(part) for name, part in light.parts.items()}
        yield Light(parts, light.seconds_per_token)


def _part(dtype: str, flops: float, seconds: float | None) -> dict[str, object]:
    return {"dtype": dtype, "flops_per_token": flops, "seconds_per_token": seconds}


def training(
    n_steps: int,
    *,
    first: int = 0,
    stop: int | None = None,
    seed: int = 0,
    seconds: float = 3.2,
    evaluate_every: int = 50,
    gpu_every: int | None = 10,
    end: str | None = "done",
) -> Iterator[Record]:
    """Steps first .. stop-1, with evaluations after every so many and the GPU's state beside them."""
    noise = random.Random(seed)
    rate = LearningRate(3e-4, n_steps, "wsd", n_steps // 20, 0.05)
    stop = n_steps if stop is None else stop
    for step in range(first, stop):
        loss = 2.9 + 7.5 * math.exp(-step / (0.04 * n_steps)) + 1.2 * math.exp(-step / (0.6 * n_steps))
        norm = 0.6 + 4 * math.exp(-step / (0.03 * n_steps)) + noise.gauss(0, 0.04)
        spike = 3.0 if step == int(0.62 * n_steps) else 0.0
        took = seconds * (1 + abs(noise.gauss(0, 0.01)))
        yield LoggedStep(step, took, TOKENS, loss + noise.gauss(0, 0.03) + spike, norm + spike, rate(step))
        if gpu_every and step % gpu_every == 0:
            warm = 1 - math.exp(-step / (0.05 * n_steps))
            watts = 400 + 290 * warm + noise.gauss(0, 6)
            mhz, throttle = (1980, "") if watts < 670 else (1980 - 3 * (watts - 660), "power cap")
            yield GpuState(step, mhz, 3201, watts, 35 + 32 * warm + noise.gauss(0, 0.5), throttle, 37.2 * GIB)
        if evaluate_every and (step + 1) % evaluate_every == 0:
            yield Evaluation(step + 1, loss + 0.06, 250_000, 1.1)
    if end is not None:
        yield End(stop, end)


def write(path, *records: Record) -> None:
    """Append these records to a log."""
    with RunLog(LogFile(path)) as log:
        for record in records:
            log.write(record)


class Kept(list[Record]):
    """A sink that keeps every record."""

    write = list.append

    def close(self) -> None:
        self.closed = True
