"""From options to what a run needs: data, the model and its step, the schedule. The same on every rank."""

import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import psutil
import torch

from cs336_systems.config import ModelConfig, resolve_size
from cs336_systems.distributed.process_group import Rank, on_rank_0
from cs336_systems.distributed.sharded_optimizer import ShardedOptimizer
from cs336_systems.hardware import GIB
from cs336_systems.harness.provenance import host_name, versions
from cs336_systems.kernels.host_memory import free_host_bytes
from cs336_systems.model.hf_weights import config_from_hf, load_hf_weights
from cs336_systems.pretraining.capped import CappedStep
from cs336_systems.pretraining.checkpoint import write_run_json
from cs336_systems.pretraining.corpus import Corpus
from cs336_systems.pretraining.loader import Loader, count_sequences
from cs336_systems.pretraining.memory import predicted_segments
from cs336_systems.pretraining.options import TrainerCase, TrainOptions
from cs336_systems.pretraining.run_records import Device
from cs336_systems.pretraining.schedules import Schedule
from cs336_systems.pretraining.token_stream import Dataset, TokenStream
from cs336_systems.pretraining.tokenize_options import TokenizeOptions
from cs336_systems.pretraining.tokenizer import TOKENIZER, vocabulary
from cs336_systems.pretraining.tokenizing import default_folder, tokenize
from cs336_systems.training.assemble import build_model, finish
from cs336_systems.training.clipping import GradientGuard
from cs336_systems.training.step import TrainStep

_VOCABULARY_MULTIPLE = 64
"""To which a model's vocabulary is rounded up: rows of the head that tensor cores and ranks divide."""


@dataclass(frozen=True)
class Prepared:
    """A run that can begin.

    Attributes:
        evaluation: None if there is none to be made.
        evaluation_batch: sequences at a time, of each rank.
        tokens_per_step: of all ranks.
    """

    options: TrainOptions
    dataset: Dataset
    evaluation: TokenStream | None
    evaluation_batch: int
    config: ModelConfig
    loader: Loader
    n_steps: int
    schedule: Schedule
    case: TrainerCase
    step: TrainStep | CappedStep
    tokens_per_step: int


def describe_device(rank: Rank) -> Device:
    """What a rank runs on, as a run's log says it."""
    count, about = rank.world_size, versions(rank.device)
    if rank.device.type != "cuda":
        return Device(host_name(), count, None, about)
    gpu = torch.cuda.get_device_properties(rank.device)
    return Device(gpu.name, count, gpu.total_memory, about)


def prepare(options: TrainOptions, rank: Rank) -> Prepared:
    """Open the data, describe the run in its folder, build the model and its step; a collective.

    Raises:
        ValueError: options, data, folder, weights or device do not serve; one sentence, and nothing is lost.
        OSError: something cannot be read or written.
    """
    options.check()
    if options.capped and rank.world_size > 1:
        raise ValueError(f"--device-gib and --host-gib are for one rank, and here are {rank.world_size}")
    dataset = Dataset.open(options.data or on_rank_0(default_data))
    if dataset.train is None:
        raise ValueError(f"{dataset.folder} has nothing to train on, all of it is held out")
    evaluation = None if options.evaluate_every is None else dataset.evaluation
    if options.evaluate_every is not None:
        if evaluation is None:
            raise ValueError(f"{dataset.folder} holds out nothing to evaluate on: --evaluate-every None does without")
        count_sequences(evaluation, options.context_length)
    config = config_of(options, dataset)
    on_rank_0(lambda: _check_tokenizer(options.init, dataset))
    n_steps = options.n_steps(count_sequences(dataset.train, options.context_length), rank.world_size)
    schedule = options.schedule_of(n_steps)
    tokens_per_step = options.tokens_per_step(rank.world_size)
    loader = Loader(
        dataset.train,
        context_length=options.context_length,
        batch_size=tokens_per_step // options.context_length,
        rank=rank.rank,
        world_size=rank.world_size,
        seed=options.seed,
        vocab_size=config.vocab_size,
        device=rank.device,
    )
    case = options.training_case(config, rank.world_size)
    if rank.device.type == "cpu" and not options.capped:
        _check_fit(case)
    step = CappedStep(options, case, rank.device) if options.capped else _step(options, case, rank)
    batch = step.evaluation_batch if isinstance(step, CappedStep) else options.batch_size
    on_rank_0(lambda: write_run_json(options.out, config, dataset.tokenizer, dataset.eos_id))
    return Prepared(options, dataset, evaluation, batch, config, loader, n_steps, schedule, case, step, tokens_per_step)


def default_data() -> Path:
    """The folder with Python's standard library as tokens, made if it is not there.

    Raises:
        OSError: it cannot be written.
    """
    options = TokenizeOptions()
    folder = default_folder(options, Corpus.find(options.input))
    return folder if folder.exists() else tokenize(options).folder


def config_of(options: TrainOptions, dataset: Dataset | None) -> ModelConfig:
    """The model's shape: that of the weights, or a named size with the data's vocabulary, its own without data."""
    if options.init is not None:
        return config_from_hf(options.init).at_context(options.context_length)
    if dataset is None:
        return resolve_size(options.size).at_context(options.context_length)
    rounded = -(-dataset.vocab_size // _VOCABULARY_MULTIPLE) * _VOCABULARY_MULTIPLE
    return replace(resolve_size(options.size).at_context(options.context_length), vocab_size=rounded)


def _check_fit(case: TrainerCase) -> None:
    """Raise ValueError if this machine's memory cannot hold the step of each of its ranks, swap included."""
    segments = predicted_segments(case, None)
    needed = segments.get("in all", sum(segments.values())) * int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    free = free_host_bytes() + psutil.swap_memory().free
    if needed > free:
        sizes = f"{needed / GIB:.1f} GiB, and {free / GIB:.1f} are free"
        raise ValueError(
            f"a step of {case.config.name} is predicted to take {sizes}: take a smaller --size or less batch"
        )


def _check_tokenizer(init: Path | None, dataset: Dataset) -> None:
    """Raise ValueError if weights to begin with know other tokens than the data's, as far as their folder tells."""
    if init is None or not (init / TOKENIZER).exists():
        return
    if vocabulary(init / TOKENIZER) != vocabulary(dataset.tokenizer):
        raise ValueError(f"{dataset.folder} has other tokens than {init}: tokenize its text with --tokenizer {init}")


def _step(options: TrainOptions, case: TrainerCase, rank: Rank) -> TrainStep:
    if options.init is None:
        model = build_model(case, rank)
    else:
        model = build_model(replace(case, zero=0), rank)  # whole, as FSDP takes it, too
        load_hf_weights(model, options.init)
    hyperparameters: dict[str, Any] = {"lr": options.learning_rate, "betas": options.betas, "eps": options.eps}
    if options.optimizer == "fused":
        moments = {"same": None, "fp32": torch.float32, "bf16": torch.bfloat16}[options.moments]
        hyperparameters |= {"state_dtype": moments, "seed": options.seed}
    guard = GradientGuard(options.clip or float("inf"), halts=not options.skip_nonfinite)
    weight_decay = options.weight_decay
    step = finish(model, case, rank, guard=guard, decay="matrices", weight_decay=weight_decay, **hyperparameters)
    if isinstance(step.optimizer, ShardedOptimizer) and not case.compiled:
        called = [model.token_embeddings, *model.layers, model.ln_final, model.lm_head]
        step.optimizer.send_under_forward(called)
    return step
