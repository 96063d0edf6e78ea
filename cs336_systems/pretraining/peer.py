"""The same step in transformers: its model, torch's AdamW, a plain loop over micro-batches.

    model = peer_model(config, device, torch.float32, liger=False)
    optimizer = peer_optimizer(model, options)
    loss, norm = peer_step(model, optimizer, batch, options, dtype)

With ``liger`` the model has Liger's kernels, including its chunked head and loss. The peer shares with this suite's
step only how a batch is divided.
"""

import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from cs336_systems.case import Unsupported
from cs336_systems.config import PRECISIONS, ModelConfig
from cs336_systems.model.hf_weights import config_to_hf
from cs336_systems.pretraining.options import TrainOptions
from cs336_systems.training.precision import autocast, matmul_precision
from cs336_systems.training.step import micro_batches


class PeerModel(nn.Module):
    """A model of transformers: token ids and targets (batch, seq) -> mean loss."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    @property
    def blocks(self) -> list[nn.Module]:
        return list(self.model.model.layers)  # type: ignore[union-attr, arg-type]

    def compile_parts(self, **how: Any) -> None:
        """Compile each block, the last norm and the loss separately, to one graph each; equal blocks share a graph.

        Args:
            how: for torch.compile.
        """
        how = {"fullgraph": True, "dynamic": False} | how
        model: Any = self.model
        for part in (*self.blocks, model.model.norm):
            part.compile(**how)
        model.loss_function = torch.compile(model.loss_function, **how)

    def forward(self, token_ids: Tensor, targets: Tensor) -> Tensor:
        targets = targets.to(token_ids.device, non_blocking=True)
        loss: Tensor = self.model(input_ids=token_ids, labels=targets, shift_labels=targets, use_cache=False).loss
        return loss


def peer_model(
    config: ModelConfig,
    device: torch.device,
    dtype: torch.dtype,
    *,
    liger: bool,
    weights: Path | None = None,
    attention: str = "sdpa",
) -> PeerModel:
    """Return the model with random weights, or with those of a Hugging Face folder.

    Args:
        attention: transformers' name of the implementation.

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
    how: dict[str, Any] = {"dtype": dtype, "attn_implementation": attention}
    if weights is not None:
        if not sys.stderr.isatty():
            disable_progress_bar()
        return PeerModel(AutoModelForCausalLM.from_pretrained(weights, **how).train()).to(device)
    fields = config_to_hf(config)
    shape = AutoConfig.for_model(fields.pop("model_type"), **fields)
    with torch.device(device):
        return PeerModel(AutoModelForCausalLM.from_config(shape, **how).train())


def peer_optimizer(model: nn.Module, options: TrainOptions) -> torch.optim.Optimizer:
    """Return torch's fused AdamW with the options' hyperparameters, and weight decay only on matrices."""
    groups: list[dict[str, Any]] = [
        {"params": [p for p in model.parameters() if p.dim() > 1]},
        {"params": [p for p in model.parameters() if p.dim() <= 1], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, **options.adamw, fused=True)


def peer_step(
    model: nn.Module, optimizer: torch.optim.Optimizer, batch: tuple[Tensor, Tensor], options: TrainOptions, dtype: str
) -> tuple[Tensor, Tensor]:
    """Make one step on a batch of all micro-batches; return loss and gradient norm before it, on the device."""
    n, precision = options.micro_batches(1), PRECISIONS[dtype]
    loss = torch.zeros((), device=batch[0].device)
    for token_ids, targets in micro_batches(n, *batch):
        with matmul_precision(precision), autocast(precision, token_ids.device):
            part = model(token_ids, targets) / n
        with matmul_precision(precision):
            part.backward()
        loss += part.detach()
    norm = nn.utils.clip_grad_norm_(model.parameters(), options.max_norm)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return loss, norm
