"""Build the parts of a run from its options: data, model and step, learning rate; and predict its memory.

All ranks do the same. A step under memory caps is set up in ``capped.py``.
"""

import sys
import zlib
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from fractions import Fraction
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from cs336_systems.config import FASTEST, ModelConfig, resolve_size
from cs336_systems.costs.offload import offloaded, state_bytes_per_parameter
from cs336_systems.costs.speed_of_light import speed_of_light
from cs336_systems.declared import flag
from cs336_systems.distributed.context import local_tokens
from cs336_systems.distributed.mesh import Mesh
from cs336_systems.distributed.process_group import Rank, on_every_rank, on_rank_0
from cs336_systems.distributed.sharded_optimizer import ShardedOptimizer
from cs336_systems.distributed.tensor import take_parts
from cs336_systems.hardware import find_hardware
from cs336_systems.harness.isolation import PredictedOutOfMemory
from cs336_systems.harness.memory import check_fit, is_predictable, offloaded_bytes, predicted_peak, predicted_states
from cs336_systems.harness.provenance import device_state, host_name, memory_used_bytes, versions
from cs336_systems.model import TransformerLM
from cs336_systems.model.hf_weights import config_from_hf, load_hf_weights
from cs336_systems.pretraining.adapters import AdaptersOfRun, shapes_of
from cs336_systems.pretraining.capped import CappedStep, planned_segments
from cs336_systems.pretraining.checkpoint import ModelOfRun, check_same_model, goes_on_from, write_run_json
from cs336_systems.pretraining.choice import Choice, attention_on, choose_fastest
from cs336_systems.pretraining.conversations import Conversations
from cs336_systems.pretraining.corpus import Corpus
from cs336_systems.pretraining.dataset import Dataset, TokenStream
from cs336_systems.pretraining.loader import Loader, Sequences, fingerprint
from cs336_systems.pretraining.mixture import Mixture
from cs336_systems.pretraining.options import TrainOptions
from cs336_systems.pretraining.run_records import Data, Device, GpuState, Light, Memory, Message, Model, Record
from cs336_systems.pretraining.schedules import LearningRate
from cs336_systems.pretraining.sources import Source, sources_of
from cs336_systems.pretraining.step_options import TrainerCase
from cs336_systems.pretraining.tokenizer import TOKENIZER, load_tokenizer
from cs336_systems.pretraining.tokenizing import TokenizeOptions, default_folder, tokenize
from cs336_systems.refusals import refusal
from cs336_systems.training.assemble import build_model, finish, mesh_of
from cs336_systems.training.clipping import GradientGuard
from cs336_systems.training.pipelined import PipelinedStep
from cs336_systems.training.precision import DTYPES, parameter_dtype
from cs336_systems.training.step import TrainStep

_MAY_DIFFER = ("data", "walltime", "log_every", "tensorboard", "wandb", "export")
"""Options that may differ between ranks: the data's folder, as its tokens are compared instead; the walltime, which
stops all ranks; and options that only the first rank uses."""
_VOCABULARY_MULTIPLE = 64
"""A model's vocabulary is rounded up to a multiple of this, so that tensor cores and ranks divide the head's rows."""


@dataclass(frozen=True)
class PreparedRun:
    """A run that is ready to begin.

    Attributes:
        train: the sequences to train on.
        evaluation: the held-out sequences; None if there is no evaluation.
        evaluation_batch: sequences per evaluation batch of each rank.
        tokens_per_step: tokens of all ranks and all replicas.
        mesh: the ranks, if some of them share a batch.
        place: (index, number) of this rank among the ranks with different batches.
        origin: the folder or checkpoint that the run resumes if there is one: its own, or another run's.
        chosen: the choice of ``--choose-fastest``, or why there is none.
    """

    options: TrainOptions
    datasets: list[Dataset]
    train: Sequences
    evaluation: Sequences | None
    evaluation_batch: int
    loader: Loader
    n_steps: int
    rate: LearningRate
    case: TrainerCase
    step: TrainStep | CappedStep
    tokens_per_step: int
    mesh: Mesh | None
    place: tuple[int, int]
    origin: Path
    chosen: Choice | str | None = None

    @property
    def dataset(self) -> Dataset:
        """The first dataset; all have its tokenizer."""
        return self.datasets[0]

    def own(self, tokens: Tensor) -> Tensor:
        """Cut this rank's part out of whole sequences, (sequences, positions) or (sequences, positions, 2)."""
        return local_tokens(tokens, self.mesh, self.case.context_order, dim=1)


def describe_device(rank: Rank) -> Device:
    """The device of a rank, for a run's log."""
    count, about = rank.world_size, versions(rank.device)
    if rank.device.type != "cuda":
        return Device(host_name(), count, None, about)
    gpu = torch.cuda.get_device_properties(rank.device)
    return Device(gpu.name, count, gpu.total_memory, about)


def read_gpu_state(step: int, device: torch.device) -> GpuState:
    """Read the state of a GPU from NVML.

    Raises:
        pynvml.NVMLError: NVML cannot read this GPU, for example because it is a MIG slice.
    """
    state, used = device_state(device), memory_used_bytes(device)
    numbers = {name: state[name] for name in ("sm_mhz", "memory_mhz", "power_w", "temperature_c")}
    return GpuState(step, **numbers, throttle=", ".join(state["throttle"]), memory_used_bytes=used)


def prepare(options: TrainOptions, rank: Rank) -> PreparedRun:
    """Open the data, describe the run in its folder, build the model and its step; a collective.

    Raises:
        ValueError: options, data, folder, weights or device are unsuitable, or differ between ranks; nothing is lost.
        OSError: a file cannot be read or written.
    """
    _check_alike(lambda: must_be_alike(options))
    options.data_ranks(rank.world_size)  # raises if the mesh does not fit the ranks, before default data take a minute
    origin = on_rank_0(lambda: goes_on_from(options.out, options.resume_from))
    sources = sources_of(options.data or on_rank_0(default_data))
    _check_alike(lambda: data_identity(options, sources))
    datasets = [Dataset.open(source.folder) for source in sources]
    dataset = datasets[0]
    for each in datasets:
        _check_same_kind(dataset, each)
        if each.train is None:
            raise ValueError(f"{each.folder} has nothing to train on, all of it is held out")
        if options.evaluate_every is not None and each.evaluation is None:
            raise ValueError(f"{each.folder} holds out nothing to evaluate on: --evaluate-every None does without")
    config, length = config_of(options, dataset), options.context_length
    chosen: Choice | str | None = None
    if options.choose_fastest:
        chosen = on_rank_0(lambda: choose_fastest(options, config, rank.device, rank.world_size, origin))
        options = chosen.of(options) if isinstance(chosen, Choice) else options
    if (init := options.init) is not None:
        on_rank_0(lambda: _check_tokenizer(init, dataset))
    _check_chat(options, dataset)
    shares = [source.share for source in sources]
    train = _sequences(options, datasets, [each.train for each in datasets], shares, config, rank)
    assert train is not None
    held_out = [each.evaluation if options.evaluate_every is not None else None for each in datasets]
    evaluation = _sequences(options, datasets, held_out, shares, config, rank)
    n_steps, tokens_per_step = options.n_steps(len(train), rank.world_size), options.tokens_per_step(rank.world_size)
    rate = options.rate_of(n_steps)
    resolved = replace(options, attention=attention_on(rank.device, options, config))
    case = resolved.training_case(config, 1 if options.capped else rank.world_size)
    if reason := refusal(case):
        raise ValueError(reason)
    mesh, n_data = mesh_of(case, rank), options.data_ranks(rank.world_size)
    place = (mesh.place("data") if mesh else rank.rank % n_data, n_data)
    loader = Loader(
        train, tokens_per_step // (length * options.worlds), seed=options.seed, rank=place[0], world_size=n_data
    )
    step: TrainStep | CappedStep
    if options.capped:
        step = CappedStep(options, case, rank)
        batch = step.evaluation_batch
    else:
        if rank.device.type == "cpu":
            _check_fit(case, rank)
        step, batch = _step(options, case, rank, masked=dataset.chat), options.batch_size
    lora, adapters = options.lora, None
    if lora is not None and init is not None:
        adapters = on_rank_0(lambda: AdaptersOfRun.of(lora, init))
    model = ModelOfRun(config, dataset.tokenizer, dataset.eos_id, adapters)
    if origin != options.out:
        on_rank_0(lambda: check_same_model(origin, model))
    on_rank_0(lambda: write_run_json(options.out, model))
    learned = options, datasets, train, evaluation, batch
    return PreparedRun(*learned, loader, n_steps, rate, case, step, tokens_per_step, mesh, place, origin, chosen)


def introduction(prepared: PreparedRun, rank: Rank) -> Iterator[Record]:
    """Yield the records that precede the first step in a log: device, model, data, memory and speed of light."""
    options, config, dataset, step = prepared.options, prepared.case.config, prepared.dataset, prepared.step
    yield (device := describe_device(rank))
    if options.zero and rank.world_size == 1:
        yield Message(f"--zero {options.zero} shards nothing on one rank: torchrun starts several", "warning")
    elif options.zero and rank.world_size == options.tensor * options.pipeline:
        yield Message(f"--zero {options.zero} shards nothing: no two ranks hold the same weights", "warning")
    yield Model(config.name, config.n_parameters, config.context_length)
    if isinstance(chosen := prepared.chosen, Choice):
        yield Message(f"chosen: {chosen}, {chosen.said}; each of these options can be given")
    elif chosen is not None:
        yield Message(f"nothing was chosen for this GPU, --batch-size is {options.batch_size}: {chosen}")
    if options.attention == FASTEST:
        yield Message(f"--attention {FASTEST} is {prepared.case.attention} here")
    if (lora := options.lora) is not None:
        yield Message(f"adapters of {lora}: {lora.n_parameters(config):,} parameters are trained, the rest is frozen")
    datasets = prepared.datasets
    n_learned, n_held_out = (
        sum(each.manifest["splits"].get(name, {"tokens": 0})["tokens"] for each in datasets)
        for name in ("train", "evaluation")
    )
    folders, corpora = [str(each.folder) for each in datasets], [each.manifest["corpus"] for each in datasets]
    described = (", ".join(folders), ", ".join(corpora), dataset.manifest["tokenizer"]["name"], dataset.vocab_size)
    steps_per_epoch = 1 / prepared.loader.epochs_in(1)
    yield Data(*described, n_learned, n_held_out, prepared.tokens_per_step, steps_per_epoch)
    for name, rows in (("to learn", prepared.train), ("held out", prepared.evaluation)):
        for source, part in rows.parts.items() if rows is not None else ():
            if isinstance(part, Conversations):
                yield Message(f"{source + ', ' if source else ''}{name}: {part.said}")
    if isinstance(step, CappedStep):
        yield Memory(planned_segments(step.choice, copies=options.save_every is not None))
        yield from map(Message, step.explanation())
    else:
        yield Memory(predicted_segments(prepared.case, device.memory_bytes))
    if isinstance(step, PipelinedStep):
        yield Message(step.pipeline.messages.how)
    dtype, recipe, hardware = step.precision.matmul_dtype, prepared.case.recipe, find_hardware(device.name)
    how: dict[str, Any] = {"dtype": dtype, "block_dtype": "fp8" if recipe.quantized else dtype}
    how |= {"n_stored_blocks": recipe.n_skipped, "n_devices": rank.world_size, "lora": prepared.case.lora}
    light = speed_of_light(config, options.context_length, hardware, **how)
    yield Light({name: asdict(part) for name, part in light.parts.items()}, light.seconds_per_token)


def default_data() -> Path:
    """Return the folder of Python's standard library as tokens, written if missing; raises OSError if it cannot be."""
    options = TokenizeOptions()
    folder = default_folder(options, Corpus.find(options.input))
    if folder.exists():
        return folder
    print(f"{folder}: Python's standard library is tokenized, once, as there is no --data", file=sys.stderr)
    try:
        return tokenize(options).folder
    except (OSError, ValueError):
        if not folder.exists():  # another run may have written it meanwhile; a second writer writes the same files
            raise
        return folder


def config_of(options: TrainOptions, dataset: Dataset | None) -> ModelConfig:
    """The model's shape: that of the weights, or a named size with the data's vocabulary, its own without data.

    Raises:
        ValueError: there are no such weights, or one of its matrices is smaller than adapters of the rank.
    """
    config = resolve_size(options.size) if options.init is None else config_from_hf(options.init)
    config = config.at_context(options.context_length)
    if options.init is None and dataset is not None:
        rounded = -(-dataset.vocab_size // _VOCABULARY_MULTIPLE) * _VOCABULARY_MULTIPLE
        config = replace(config, vocab_size=rounded)
    if options.lora is not None:
        shapes_of(options.lora, config)
    return config


def _check_alike(say: Callable[[], dict[str, Any]]) -> None:
    """Raise ValueError on every rank unless ``say`` returns the same on all, or what it raises on one; a collective."""
    everyone = on_every_rank(say)
    others = []
    for name, first in everyone[0].items():
        for number, said in enumerate(everyone):
            if said[name] != first:
                others.append(f"{name} is {first} on rank 0 and {said[name]} on rank {number}")
                break
    if others:
        raise ValueError(f"all ranks must train the same: {', '.join(others)}")


def must_be_alike(options: TrainOptions) -> dict[str, Any]:
    """The options that must be the same on all ranks; raises ValueError as their ``check`` does."""
    options.check()
    own = {flag(name): value for name, value in asdict(options).items() if name not in _MAY_DIFFER}
    return own | {"whether there is --data": options.data is not None}


def data_identity(options: TrainOptions, sources: list[Source]) -> dict[str, Any]:
    """Return what identifies data and model on this rank; raises ValueError or OSError if they cannot be read."""
    found: dict[str, Any] = {"the shares of --data": [str(source.share) for source in sources]}
    for number, source in enumerate(sources, 1):
        dataset, of = Dataset.open(source.folder), "" if len(sources) == 1 else f" of source {number}"
        if number == 1:
            found |= {f"the model's {name}": value for name, value in asdict(config_of(options, dataset)).items()}
        for name, stream in (("tokens to learn", dataset.train), ("tokens held out", dataset.evaluation)):
            checksum = None if stream is None else f"{zlib.crc32(repr(fingerprint(stream)).encode()):08x}"
            found |= {f"the number of {name}{of}": stream and len(stream), f"the checksum of {name}{of}": checksum}
    return found


def _check_fit(case: TrainerCase, rank: Rank) -> None:
    """Raise ValueError if this machine's memory cannot hold the step of each of its ranks."""
    try:
        check_fit(case, rank=rank)
    except PredictedOutOfMemory as error:
        raise ValueError(f"a step of {case.config.name} {error}: take a smaller --size or less batch") from None


def _check_tokenizer(init: Path, dataset: Dataset) -> None:
    """Raise ValueError if the initial weights have another vocabulary than the data, if their folder shows it."""
    if not (init / TOKENIZER).exists():
        return
    if load_tokenizer(init, 0).vocabulary() != load_tokenizer(dataset.tokenizer, 0).vocabulary():
        raise ValueError(f"{dataset.folder} has other tokens than {init}: tokenize its text with --tokenizer {init}")


def _check_chat(options: TrainOptions, dataset: Dataset) -> None:
    """Raise ValueError for options that do not fit the data's targets: all tokens, or only answers."""
    if options.packing and not dataset.chat:
        raise ValueError(f"--packing is for conversations, and {dataset.folder} was made without --chat")
    if options.long_conversations == "drop" and not dataset.chat:
        raise ValueError(f"--long-conversations is for conversations, and {dataset.folder} was made without --chat")
    if dataset.chat and options.agree is not None:
        raise ValueError(f"conversations, as in {dataset.folder}, do not go together with --agree {options.agree}")


def _sequences(
    options: TrainOptions,
    datasets: list[Dataset],
    streams: list[TokenStream | None],
    shares: list[Fraction],
    config: ModelConfig,
    rank: Rank,
) -> Sequences | None:
    """Return the sequences of one stream or a mixture of several, or None if there is no stream."""
    parts: dict[str, Sequences] = {}
    for dataset, stream in zip(datasets, streams, strict=True):
        if stream is None:
            return None
        parts[str(dataset.folder)] = sequences_of(dataset, stream, options, config.vocab_size, rank.device)
    return Mixture(parts, shares) if len(parts) > 1 else next(iter(parts.values()))


def sequences_of(
    dataset: Dataset, stream: TokenStream, options: TrainOptions, vocab_size: int, device: torch.device
) -> Sequences:
    """Return the rows into which the options cut or pack a stream; raises ValueError if that is impossible."""
    how = stream, options.context_length, vocab_size, device
    if not dataset.chat:
        return Sequences(*how)
    return Conversations(*how, packing=options.packing, long=options.long_conversations)


def _check_same_kind(first: Dataset, other: Dataset) -> None:
    """Raise ValueError unless two sources can be mixed: the same tokens, and both conversations or neither."""
    if first.chat != other.chat:
        raise ValueError(f"{first.folder} and {other.folder} do not mix: one has conversations, the other text")
    if first.folder == other.folder:
        return
    same = load_tokenizer(first.tokenizer, 0).vocabulary() == load_tokenizer(other.tokenizer, 0).vocabulary()
    if not same or first.eos_id != other.eos_id:
        raise ValueError(f"{first.folder} and {other.folder} do not mix: they have other tokens")


def _step(options: TrainOptions, case: TrainerCase, rank: Rank, *, masked: bool) -> TrainStep:
    if options.init is None:
        model = build_model(case, rank)
    else:
        model = build_model(replace(case, zero=0), rank)  # with values, as FSDP takes it, too
        if case.tensor * case.pipeline == 1:
            load_hf_weights(model, options.init)
        else:
            whole = TransformerLM(case.config, device="cpu", dtype=parameter_dtype(case.precision))
            load_hf_weights(whole, options.init)
            take_parts(model, whole)
    fused: dict[str, Any] = {}
    if options.optimizer == "fused":
        moments = None if options.moments == "same" else DTYPES[options.moments]
        fused = {"state_dtype": moments, "seed": options.seed}
    elif options.optimizer == "muon" and rank.device.type == "cuda":
        fused = {"seed": options.seed}
    guard = GradientGuard(options.max_norm)
    step = finish(model, case, rank, guard=guard, masked=masked, decay="matrices", **options.adamw, **fused)
    if isinstance(step.optimizer, ShardedOptimizer) and not case.compiled:
        called = [model.token_embeddings, *model.layers, model.ln_final, model.lm_head]
        step.optimizer.send_under_forward(called)
    return step


def predicted_segments(case: TrainerCase, total: int | None) -> dict[str, int]:
    """Predict the bytes of one rank's device by segment, before the first step.

    Segments are the memory in use at the step's peak: weights (with masters, if they are the parameters), gradients,
    AdamW's m, v and masters, activations, head and loss; ``in all`` is their sum. Host memory comes last. If the peak
    cannot be predicted (``harness.memory.is_predictable``), there are only weights, gradients and states.

    Args:
        total: memory of the device; None if it has none of its own: then there is no segment ``free``.
    """
    on_host = {f"{name} on the host": n_bytes for name, n_bytes in offloaded_bytes(case, case.world_size).items()}
    if not is_predictable(case):
        return predicted_states(case, case.world_size) | on_host
    states, away = state_bytes_per_parameter(case), offloaded(case)
    states = {name: n_bytes for name, n_bytes in states.items() if name not in away}
    parts = dict(predicted_peak(case, world_size=case.world_size).parts)
    of_states, loss = parts.pop("optimizer state", 0), parts.pop("loss", 0)
    shares = {name: int(of_states * n_bytes / sum(states.values())) for name, n_bytes in states.items()}
    segments = {"weights": parts.pop("parameters"), "gradients": parts.pop("gradients", 0), **shares}
    segments |= {"activations": sum(parts.values()), "head and loss": loss}
    segments["in all"] = sum(segments.values())
    free = {} if total is None else {"free": max(0, total - segments["in all"])}
    return segments | free | on_host
