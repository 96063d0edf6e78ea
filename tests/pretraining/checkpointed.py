"""Small models of each family, and runs whose checkpoints hold them."""

from dataclasses import replace
from pathlib import Path

import torch
from torch import nn

from cs336_systems.config import ModelConfig, RopeScaling
from cs336_systems.distributed.checkpoint import save_checkpoint
from cs336_systems.distributed.fsdp import FSDP
from cs336_systems.model import TransformerBlock, TransformerLM
from cs336_systems.pretraining.checkpoint import ModelOfRun, write_run_json
from cs336_systems.pretraining.export import export
from cs336_systems.pretraining.tokenizer import ByteTokenizer

LLAMA = ModelConfig("a-llama", 32, 56, 2, 4, n_kv_heads=2, vocab_size=264, context_length=48)
# With theta 500 and 8-dimensional heads, 32 tokens are 5.1, 1.1, 0.2 and 0.05 turns: kept, between, slowed, slowed.
SCALING = RopeScaling(factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_context_length=32)
FAMILIES = {
    "llama": LLAMA,
    "scaled": replace(LLAMA, name="scaled", rope_theta=500.0, rope_scaling=SCALING, tie_embeddings=True),
    "qwen": replace(LLAMA, name="a-qwen", qkv_bias=True, tie_embeddings=True, rope_theta=1e6, rms_norm_eps=1e-6),
    "all heads": replace(LLAMA, name="all-heads", n_kv_heads=None, vocab_size=257),
}


def model_of(config: ModelConfig, dtype: torch.dtype = torch.float32, seed: int = 0) -> TransformerLM:
    """A model whose gains and biases are far from one and zero, so that a dropped one shows."""
    generator = torch.Generator().manual_seed(seed)
    model = TransformerLM(config, dtype=torch.float64)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.normal_(generator=generator)
            if ".ln" in name or name.startswith("ln"):
                parameter.mul_(0.3).add_(1)
            elif parameter.ndim == 2:
                parameter.mul_(parameter.shape[1] ** -0.5)
    return model.to(torch.float32).to(dtype)


def write_tokenizer(folder: Path) -> Path:
    """That of bytes, as a file in a folder that is made."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "tokenizer.json").write_text(ByteTokenizer().json(), encoding="utf-8")
    return folder / "tokenizer.json"


def export_model(folder: Path, config: ModelConfig, seed: int = 0) -> Path:
    """A Hugging Face folder of a model, with the tokenizer of bytes."""
    model = ModelOfRun(config, write_tokenizer(folder.parent / "tokenizer"), ByteTokenizer.eos_id)
    return export(folder, model_of(config, seed=seed).state_dict(), model).folder


def write_run(folder: Path, config: ModelConfig = LLAMA) -> None:
    """A folder that says which model will be trained in it."""
    write_run_json(folder, ModelOfRun(config, write_tokenizer(folder.parent / "dataset"), ByteTokenizer.eos_id))


def save_model(folder: Path, model: nn.Module, step: int, *, optimizer: bool = True) -> Path:
    """A checkpoint of the model, by all ranks of the group; it is sharded by that and of no more use."""
    fsdp = FSDP(model, units=lambda module: isinstance(module, TransformerBlock))
    adamw = torch.optim.AdamW(fsdp.parameters(), lr=0.0) if optimizer else None
    if adamw is not None:
        fsdp(torch.arange(6)[None]).sum().backward()
        fsdp.finish_gradient_synchronization()
        adamw.step()  # has moments from now on, and changes no weight
    return save_checkpoint(folder, fsdp, adamw, step)
