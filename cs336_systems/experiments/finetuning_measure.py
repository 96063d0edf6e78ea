"""Peers of fine-tuning: TRL's SFTTrainer, and a bound on how fast adapters train.

SFTTrainer is set as its documentation says is fastest: packing (best-fit decreasing, without padding), weights in our
dtype, torch's fused AdamW, Liger's kernels, no checkpointing, no logging but of each step's loss. It is given the
conversations of our dataset, packs them itself, and computes its loss by its own kernels. FlashAttention is
flash-attn-4, which installs without a compiler.

The bound: our blocks and head with unquantized products, of which only the first norm's gain is trained. So backward
computes the gradient of every product's input, and of no weight.
"""

import itertools
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from cs336_systems.case import Unsupported
from cs336_systems.config import ModelConfig
from cs336_systems.distributed.process_group import Rank
from cs336_systems.experiments.peers import installed
from cs336_systems.experiments.training import TRL, TrainingRunCell
from cs336_systems.kernels.linear_cross_entropy import IGNORED
from cs336_systems.pretraining.conversations import Conversations
from cs336_systems.pretraining.dataset import ANSWER, BEGIN, Dataset, TokenStream
from cs336_systems.pretraining.loader import Loader
from cs336_systems.pretraining.options import TrainOptions
from cs336_systems.pretraining.peer import peer_model
from cs336_systems.pretraining.preparation import config_of, sequences_of
from cs336_systems.pretraining.run_records import LoggedStep
from cs336_systems.pretraining.sources import sources_of
from cs336_systems.pretraining.stop_requests import StopRequests
from cs336_systems.pretraining.tokenizer import END_OF_TEXT
from cs336_systems.training.assemble import build_model
from cs336_systems.training.precision import autocast, matmul_precision, parameter_dtype
from cs336_systems.training.step import micro_batches

if TYPE_CHECKING:
    from cs336_systems.experiments.training_measure import Watch


def data_of(options: TrainOptions) -> tuple[Dataset, TokenStream, ModelConfig]:
    """The dataset of a run, its tokens to learn, and the config of the model that it trains."""
    assert options.data is not None
    dataset = Dataset.open(sources_of(options.data)[0].folder)
    assert dataset.train is not None
    return dataset, dataset.train, config_of(options, dataset)


def useful_shares(cell: TrainingRunCell, options: TrainOptions) -> tuple[float, float]:
    """(share of a step's tokens that is not padding, share that is targets). TRL's steps have no padding."""
    dataset, tokens, config = data_of(options)
    rows = sequences_of(dataset, tokens, options, config.vocab_size, torch.device("cpu"))
    if not isinstance(rows, Conversations):
        return 1.0, 1.0
    in_use = 1.0 if cell.how in TRL else rows.share_in_use
    return in_use, in_use * rows.share_of_targets / rows.share_in_use


def train_on_input_gradients(cell: TrainingRunCell, options: TrainOptions, rank: Rank, watch: "Watch") -> None:
    """Run forward, and backward for the gradients of inputs alone, until the run is asked to end.

    The host waits for each step.
    """
    dataset, stream, config = data_of(options)
    case = options.training_case(config, 1)
    model = build_model(case, rank)
    model.requires_grad_(False)
    gain = model.get_parameter("layers.0.ln1.weight").requires_grad_(True)
    sequences = sequences_of(dataset, stream, options, config.vocab_size, rank.device)
    n, rows = options.micro_batches(1), options.tokens_per_step(1) // options.context_length
    with Loader(sequences, rows, seed=options.seed) as loader, StopRequests() as stop:
        while stop.asked is None:
            began, loss = time.perf_counter(), torch.zeros((), device=rank.device)
            for token_ids, targets in micro_batches(n, *next(loader)):
                with matmul_precision(case.precision), autocast(case.precision, rank.device):
                    part = model(token_ids, targets) / n
                with matmul_precision(case.precision):
                    part.backward()
                loss += part.detach()
            assert gain.grad is not None
            norm, gain.grad = gain.grad.norm().item(), None
            tokens = rows * options.context_length
            watch.write(LoggedStep(len(watch.steps), time.perf_counter() - began, tokens, loss.item(), norm, 0.0))


def train_trl(cell: TrainingRunCell, options: TrainOptions, rank: Rank, watch: "Watch") -> None:
    """Run SFTTrainer until the run is asked to end.

    Raises:
        Unsupported: a package that the way needs is not installed, or it needs a GPU.
    """
    how: dict[str, Any] = dict(TRL[cell.how])
    attention, on_gpu = how.pop("attn_implementation", "sdpa"), rank.device.type == "cuda"
    if attention != "sdpa" and not on_gpu:
        raise Unsupported(f"{cell.how} needs a GPU, got {rank.device.type}")
    if attention.startswith("flash"):
        installed("flash_attn.cute", "flash-attn-4")
    trl, datasets = installed("trl", "trl"), installed("datasets", "datasets")
    transformers: Any = installed("transformers", "transformers")
    dataset, stream, config = data_of(options)
    torch.manual_seed(options.seed)
    dtype = parameter_dtype(options.training_case(config, 1).precision)
    model = peer_model(config, rank.device, dtype, liger=False, attention=attention).model
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_file=str(dataset.tokenizer), eos_token=END_OF_TEXT, pad_token=END_OF_TEXT
    )
    # Rows lie behind each other in one sequence, of which sdpa computes all scores, and masks most of them.
    rows, n_rows = options.batch_size, options.tokens_per_step(1) // options.context_length
    rows = 1 if attention == "sdpa" else rows
    settings = trl.SFTConfig(
        output_dir=str(options.out),
        **{"packing": True, "max_length": options.context_length, "max_steps": options.steps},
        **{"per_device_train_batch_size": rows, "gradient_accumulation_steps": n_rows // rows},
        **{"learning_rate": options.learning_rate, "max_grad_norm": options.clip, "weight_decay": options.weight_decay},
        **{"optim": "adamw_torch_fused", "bf16": False, "gradient_checkpointing": False, "use_cpu": not on_gpu},
        **{"use_liger_kernel": on_gpu, "logging_steps": 1, "save_strategy": "no", "report_to": "none"},
        **{"disable_tqdm": True, "seed": options.seed, "dataloader_num_workers": 2, **how},
    )
    with StopRequests() as stop, _not_launched():

        class Watched(trl.SFTTrainer):  # type: ignore[name-defined]
            """Logs each step, with the tokens that were learned in it, counted on the device."""

            learned = torch.zeros((), dtype=torch.int64, device=rank.device)
            began = time.perf_counter()

            def training_step(self, model: Any, inputs: Any, *more: Any, **named: Any) -> Any:
                self.learned += (inputs["position_ids"] != 0).sum()  # all but each conversation's first, as ours
                return super().training_step(model, inputs, *more, **named)

            def log(self, logs: dict[str, float], *more: Any) -> None:
                super().log(logs, *more)
                if "loss" not in logs:  # the run's summary
                    return
                tokens, ended = int(self.learned.item()), time.perf_counter()
                step = LoggedStep(len(watch.steps), ended - self.began, tokens, logs["loss"], logs["grad_norm"], 0.0)
                watch.write(step)
                self.learned.zero_()
                self.began, self.control.should_training_stop = ended, stop.asked is not None

        Watched(
            model=model,
            args=settings,
            train_dataset=datasets.Dataset.from_list(list(_conversations(stream))),
            processing_class=tokenizer,
        ).train()


@contextmanager
def _not_launched() -> Iterator[None]:
    """Hides the variables of a rank from accelerate, which would wrap the model in DDP."""
    names = [name for name in os.environ if name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")]
    before = {name: os.environ.pop(name) for name in names}
    try:
        yield
    finally:
        os.environ.update(before)


def _conversations(stream: TokenStream) -> Iterator[dict[str, list[int]]]:
    """Ids and labels of each conversation; outside answers the loss ignores labels."""
    ids, marks = np.empty(len(stream), np.int64), np.empty(len(stream), np.uint8)
    stream.copy(0, ids)
    stream.copy(0, marks, marks=True)
    labels = np.where(marks & ANSWER, ids, IGNORED)
    edges = [*np.flatnonzero(marks & BEGIN), len(ids)]
    for begin, end in itertools.pairwise(edges):
        yield {"input_ids": ids[begin:end].tolist(), "labels": labels[begin:end].tolist()}
