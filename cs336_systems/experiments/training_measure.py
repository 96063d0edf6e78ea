"""A run on random tokens: its steps once steady, and its memory.

Ours is ``pretraining.trainer.train`` as a user has it, with loader, log and clipping, and without evaluations and
checkpoints; its steps are timed by the device. The others are a plain loop over transformers' model, parameters and
AdamW's moments in the same dtype, by the same schedule; the host waits for each of their steps. torchao's layers take
the place of those in its blocks; embedding, head and attention stay as stored, as in ours.
"""

import math
import signal
import statistics
import tempfile
import time
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from cs336_systems.case import Unsupported
from cs336_systems.config import resolve_size
from cs336_systems.distributed.process_group import Rank, alone, on_every_rank, on_rank_0
from cs336_systems.experiments.block_measure import with_float8
from cs336_systems.experiments.finetuning_measure import data_of, train_on_input_gradients, train_trl, useful_shares
from cs336_systems.experiments.fp8 import RECIPES
from cs336_systems.experiments.ranked import largest
from cs336_systems.experiments.training import LIGER, TORCHAO, TRL, TrainingRunCell
from cs336_systems.harness.clock import in_gib
from cs336_systems.harness.memory import PeakMeter
from cs336_systems.harness.record import Metric
from cs336_systems.pretraining.dataset import write_random_tokens
from cs336_systems.pretraining.loader import Loader, Sequences
from cs336_systems.pretraining.options import TrainOptions
from cs336_systems.pretraining.peer import peer_model, peer_optimizer, peer_step
from cs336_systems.pretraining.run_log import Sink
from cs336_systems.pretraining.run_records import Light, LoggedStep, Memory, Record
from cs336_systems.pretraining.stop_requests import StopRequests
from cs336_systems.pretraining.trainer import train
from cs336_systems.training.precision import parameter_dtype, recipe_unsupported_reason

_STEPS_OF_DATA = {"off": 4, "packed": 64, "padded": 64}
"""Steps after which tokens repeat, by the layout of conversations. None may repeat during a measurement, where
SFTTrainer would make a partial step, and its next step took 20 s (LOG.md)."""
_N_LEFT = 3
"""Steps that this suite's trainer still makes after a stop request: the next one is queued already, all ranks know of
the request before the second, and that one's record is read a step late."""


class Watch(Sink):
    """A sink that ends the run once its steps after the first ones have taken a given time.

    It requests the end as a user would, so that all ranks end at the same step, ``n_left`` steps later.
    """

    def __init__(self, cell: TrainingRunCell, n_left: int) -> None:
        self._cell, self._n_left, self._asked = cell, n_left, False
        self.steps: list[LoggedStep] = []
        self.light: Light | None = None
        self.memory: Memory | None = None

    def write(self, record: Record) -> None:
        if isinstance(record, Light):
            self.light = record
        elif isinstance(record, Memory):
            self.memory = record
        elif isinstance(record, LoggedStep):
            self.steps.append(record)
            taken = sum(step.seconds for step in self.steady) + self._n_left * record.seconds
            if self.steady and not self._asked and taken >= self._cell.seconds:
                self._asked = True
                signal.raise_signal(signal.SIGTERM)

    @property
    def steady(self) -> list[LoggedStep]:
        return self.steps[self._cell.warmup :]


def measure(cell: TrainingRunCell, rank: Rank) -> list[Metric]:
    """Measure seconds, tokens/s, loss and share of the speed of light of each steady step, and peak memory, with its
    prediction for this suite's runs.

    For independent replicas the steps are those of the rank with the slowest median, and the tokens those of all ranks;
    the median of each rank is a metric, too. All ranks train for the same time, but their steps are not synchronised.

    Returns:
        No metrics on ranks but the first.

    Raises:
        Unsupported: the device cannot do it, or the peer is not installed.
    """
    independent = cell.apart == "on"
    with tempfile.TemporaryDirectory() as name:
        vocab_size = resolve_size(cell.size).vocab_size
        tokens = _STEPS_OF_DATA[cell.conversations] * cell.total_batch_tokens + 1
        lengths = None if cell.conversations == "off" else cell.lengths
        data = write_random_tokens(Path(name) / "data", tokens, max(vocab_size, 264), cell.seed, lengths)
        folder = name if independent else on_rank_0(lambda: name)  # a run has one folder, which ranks must agree on
        options = replace(cell.train_options, data=data, out=Path(folder) / "run")
        watch = Watch(cell, _N_LEFT if cell.how == "ours" else 0)
        meter = PeakMeter(rank.device)
        with alone(rank) if independent else nullcontext(rank) as own:
            if cell.how == "ours":
                train(options, own, watch)
            elif cell.how == "input-gradients":
                train_on_input_gradients(cell, options, own, watch)
            elif cell.how in TRL:
                train_trl(cell, options, own, watch)
            else:
                _train_peer(cell, options, own, watch)
        in_use, targets = useful_shares(cell, options)
        peak = meter.peak_bytes()
        of_all = None if peak is None else largest(peak, rank)
        of_ranks = on_every_rank(lambda: watch.steady) if independent else [watch.steady]
    if rank.rank:
        return []  # the first rank has the log
    medians_ms = [1000 * statistics.median(s.seconds for s in steps) if steps else math.nan for steps in of_ranks]
    steps = of_ranks[medians_ms.index(max(medians_ms))]
    rates = [len(of_ranks) * step.tokens / step.seconds for step in steps]
    metrics = [
        Metric("step", "ms", [1000 * step.seconds for step in steps]),
        Metric("tokens_per_s", "1/s", rates),
        Metric("useful_tokens_per_s", "1/s", [in_use * rate for rate in rates], derived=True),
        Metric("targets_per_s", "1/s", [targets * rate for rate in rates], derived=True),
        Metric("loss", "nats", [step.loss for step in steps]),
    ]
    if independent:
        metrics.append(Metric("step_of_ranks", "ms, the median of each rank", medians_ms))
    # The bound counts attention of whole rows, not of conversations.
    if cell.conversations == "off" and watch.light is not None and (bound := watch.light.seconds_per_token) is not None:
        shares = [100 * bound * step.tokens / step.seconds for step in steps]
        metrics.append(Metric("speed_of_light", "%", shares, derived=True))
    metrics += [] if of_all is None else in_gib(peak_memory=of_all)
    if watch.memory is not None and (predicted := watch.memory.predicted_bytes.get("in all")) is not None:
        metrics += in_gib(predicted_peak_memory=predicted)
    return metrics


def _train_peer(cell: TrainingRunCell, options: TrainOptions, rank: Rank, watch: Watch) -> None:
    _, stream, config = data_of(options)
    assert options.steps is not None
    precision = options.training_case(config, 1).precision
    torch.manual_seed(options.seed)
    with_liger, with_cudnn, on_gpu = cell.how in LIGER, cell.how.endswith("cudnn"), rank.device.type == "cuda"
    if (with_liger or with_cudnn) and not on_gpu:
        raise Unsupported(f"{cell.how} needs a GPU, got {rank.device.type}")
    if reason := recipe_unsupported_reason(RECIPES[cell.recipe], precision, rank.device):
        raise Unsupported(reason)
    model = peer_model(config, rank.device, parameter_dtype(precision), liger=with_liger)
    for block in model.blocks if cell.how in TORCHAO else ():
        with_float8(block, cell.how.removeprefix("torchao-"))
    optimizer = peer_optimizer(model, options)
    if on_gpu and cell.how in TORCHAO:
        model.compile_parts()
    elif on_gpu:
        for part in model.blocks if with_liger and not cell.how.endswith("whole") else [model]:
            part.compile()
    tokens, rate_of = options.tokens_per_step(1), options.rate_of(options.steps)
    sequences = Sequences(stream, options.context_length, config.vocab_size, rank.device)
    attention = sdpa_kernel(SDPBackend.CUDNN_ATTENTION) if with_cudnn else nullcontext()
    loader = Loader(sequences, tokens // options.context_length, seed=options.seed)
    with loader, StopRequests() as stop, attention:
        while stop.asked is None:
            began, rate = time.perf_counter(), rate_of(len(watch.steps))
            for group in optimizer.param_groups:
                group["lr"] = rate
            loss, norm = (value.item() for value in peer_step(model, optimizer, next(loader), options, options.dtype))
            watch.write(LoggedStep(len(watch.steps), time.perf_counter() - began, tokens, loss, norm, rate))
