"""The same run in transformers: its model, a plain loop, torch's AdamW, on the same data in the same order.

    model = peer_model(config, device, torch.float32, liger=False)
    loss = train_peer(prepared, weights, rank, log)    # weights: an exported folder that both runs begin with

With ``liger`` the model has Liger's kernels, the loss of the head in chunks among them. Nothing here is shared with our
step but how a batch is dealt out.
"""

import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from cs336_systems.case import Unsupported
from cs336_systems.config import PRECISIONS, ModelConfig
from cs336_systems.distributed.process_group import Rank
from cs336_systems.model.hf_weights import config_to_hf
from cs336_systems.pretraining.deferred import Deferred
from cs336_systems.pretraining.evaluation import evaluate
from cs336_systems.pretraining.options import TrainOptions
from cs336_systems.pretraining.preparation import Prepared, describe_device
from cs336_systems.pretraining.run_log import RunLog
from cs336_systems.pretraining.run_records import End, Evaluation, Model, Options, Step
from cs336_systems.training.precision import autocast, matmul_precision
from cs336_systems.training.step import TrainStep, micro_batches


class PeerModel(nn.Module):
    """A model of transformers: token ids and targets (batch, seq) -> mean loss."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    @property
    def blocks(self) -> list[nn.Module]:
        return list(self.model.model.layers)  # type: ignore[union-attr, arg-type]

    def compile_parts(self, **how: Any) -> None:
        """Compile each block, the last norm and the loss by itself, to one graph each; equal blocks share theirs, so
        that compiling takes as long as for one of them.

        Args:
            how: for torch.compile.
        """
        how = {"fullgraph": True, "dynamic": False} | how
        model: Any = self.model
        for part in (*self.blocks, model.model.norm):
            part.compile(**how)
        model.loss_function = torch.compile(model.loss_function, **how)

    def forward(self, token_ids: Tensor, targets: Tensor) -> Tensor:
        loss: Tensor = self.model(input_ids=token_ids, labels=targets, shift_labels=targets, use_cache=False).loss
        return loss


def peer_model(
    config: ModelConfig, device: torch.device, dtype: torch.dtype, *, liger: bool, weights: Path | None = None
) -> PeerModel:
    """The shape with random weights, or with those of a Hugging Face folder.

    Raises:
        Unsupported: transformers or Liger is not installed.
    """
    try:
        from transformers import AutoConfig, AutoModelForCausalLM
        from transformers.utils.logging import disable_progress_bar

        if liger:
            from liger_kernel.transformers import apply_liger_kernel_to_llama, apply_liger_kernel_to_qwen2

            (apply_liger_kernel_to_qwen2 if config.qkv_bias else apply_liger_kernel_to_llama)()
    except ImportError as error:
        raise Unsupported(f"a peer is not there ({error}): uv sync") from error
    how: dict[str, Any] = {"dtype": dtype, "attn_implementation": "sdpa"}
    if weights is not None:
        if not sys.stderr.isatty():
            disable_progress_bar()
        return PeerModel(AutoModelForCausalLM.from_pretrained(weights, **how).train()).to(device)
    fields = config_to_hf(config)
    shape = AutoConfig.for_model(fields.pop("model_type"), **fields)
    with torch.device(device):
        return PeerModel(AutoModelForCausalLM.from_config(shape, **how).train())


def peer_optimizer(model: nn.Module, options: TrainOptions) -> torch.optim.Optimizer:
    """Torch's fused AdamW with the options' hyperparameters, decay on matrices alone."""
    groups: list[dict[str, Any]] = [
        {"params": [p for p in model.parameters() if p.dim() > 1], "weight_decay": options.weight_decay},
        {"params": [p for p in model.parameters() if p.dim() <= 1], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=options.learning_rate, betas=options.betas, eps=options.eps, fused=True)


def peer_step(
    model: nn.Module, optimizer: torch.optim.Optimizer, batch: tuple[Tensor, Tensor], options: TrainOptions, dtype: str
) -> tuple[Tensor, Tensor]:
    """One step on a batch of all micro-batches; loss and norm before it, on the device."""
    n, precision = options.micro_batches(1), PRECISIONS[dtype]
    loss = torch.zeros((), device=batch[0].device)
    for token_ids, targets in micro_batches(n, *batch):
        with matmul_precision(precision), autocast(precision, token_ids.device):
            part = model(token_ids, targets) / n
        with matmul_precision(precision):
            part.backward()
        loss += part.detach()
    norm = nn.utils.clip_grad_norm_(model.parameters(), options.clip or float("inf"))
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return loss, norm


def train_peer(prepared: Prepared, weights: Path, rank: Rank, log: RunLog) -> float:
    """The whole run in fp32, products in bf16 where ours has them; returns the loss on the held-out tokens.

    Args:
        prepared: of ours, for its data, schedule and shape; its model is not used.
        weights: a Hugging Face folder.

    Raises:
        Unsupported: transformers is not installed.
        ValueError: nothing is held out.
    """
    options, config = prepared.options, prepared.config
    if prepared.evaluation is None:
        raise ValueError(f"{prepared.dataset.folder} holds out nothing to compare losses on")
    dtype = options.dtype if options.dtype in ("fp32", "tf32") else "autocast-bf16"
    model = peer_model(config, rank.device, torch.float32, liger=False, weights=weights)
    optimizer, deferred = peer_optimizer(model, options), Deferred(rank.device, ("loss", "norm"))
    log.write(Options({"model": "transformers", "dtype": dtype}, {}, prepared.n_steps))
    log.write(describe_device(rank))
    log.write(Model(f"{config.name}, transformers", config.n_parameters, config.context_length))
    for step in range(prepared.n_steps + 1):
        if step < prepared.n_steps:
            for group in optimizer.param_groups:
                group["lr"] = prepared.schedule(step)
            done = deferred.push(*peer_step(model, optimizer, next(prepared.loader), options, dtype))
        else:
            done = deferred.flush()
        if done is not None:
            loss, norm, rate = done.values["loss"], done.values["norm"], prepared.schedule(step - 1)
            log.write(Step(step - 1, done.seconds, prepared.tokens_per_step, loss, norm, rate))
    began = time.perf_counter()
    loss, tokens = evaluate(
        TrainStep(model, optimizer, PRECISIONS[dtype], None),
        prepared.evaluation,
        rank,
        context_length=options.context_length,
        batch_size=options.batch_size,
        vocab_size=config.vocab_size,
        limit=options.evaluation_sequences,
    )
    log.write(Evaluation(prepared.n_steps, loss, tokens, time.perf_counter() - began))
    log.write(End(prepared.n_steps, "done"))
    return loss
