"""The folder of a run: which model it trains, with which tokenizer, and the checkpoints; its model read by anyone.

    write_run_json(Path("runs/stdlib"), config, dataset.tokenizer, dataset.eos_id)     # once, before the first step
    checkpoint = load_weights(Path("runs/stdlib"))                # the newest; or one: runs/stdlib/step-00000200
    checkpoint.run.config, checkpoint.step, checkpoint.weights    # by the model's names, whole, in their dtypes

    runs/stdlib/
      run.json                  layout, the fields of ModelConfig, the id of the token that ends documents
      tokenizer.json            a copy; tokenizer_config.json and chat_template.jinja too where the original has them
      step-00000200/            what distributed/checkpoint.py writes; the step is said there

Reading takes one process and no GPU, whatever the number of ranks that wrote, and leaves optimizer states on the disk.
"""

import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from cs336_systems.config import ModelConfig, RopeScaling
from cs336_systems.distributed.checkpoint import find_checkpoint, load_whole_model
from cs336_systems.distributed.checkpoint_folder import is_checkpoint
from cs336_systems.model import TransformerLM
from cs336_systems.model.hf_weights import config_from_hf, load_hf_weights
from cs336_systems.pretraining.tokenizer import TOKENIZER, JsonTokenizer, copy_tokenizer, load_tokenizer

RUN = "run.json"
LAYOUT = 1
"""Of ``run.json``."""


@dataclass(frozen=True)
class Run:
    """What ``run.json`` holds.

    Attributes:
        tokenizer: its ``tokenizer.json``.
        eos_id: of the token that ends each document.
    """

    config: ModelConfig
    tokenizer: Path
    eos_id: int


@dataclass(frozen=True)
class Checkpoint:
    """The model of a checkpoint.

    Attributes:
        weights: whole tensors on the CPU, by the names of a ``TransformerLM``.
        skipped: checkpoints that were passed over as damaged, and why.
    """

    run: Run
    path: Path
    step: int
    weights: dict[str, Tensor]
    skipped: dict[Path, str]


def write_run_json(folder: Path, config: ModelConfig, tokenizer: Path, eos_id: int) -> Run:
    """Describe a run in its folder, which is made, and copy the tokenizer there; once described it stays as it is.

    Args:
        tokenizer: a ``tokenizer.json``, or a folder that has one.
        eos_id: of the token that ends each document.

    Raises:
        ValueError: the tokenizer is missing, damaged, without that token or larger than the model's vocabulary, or the
            folder is that of another run.
        OSError: something cannot be read or written.
    """
    loaded = load_tokenizer(tokenizer, eos_id)
    if loaded.vocab_size > config.vocab_size:
        raise ValueError(f"tokenizer {tokenizer} has {loaded.vocab_size:,} ids, the model {config.vocab_size:,}")
    run = Run(config, folder / TOKENIZER, eos_id)
    if (folder / RUN).exists():
        there = read_run_json(folder)
        was, now = ({"eos_id": one.eos_id} | asdict(one.config) for one in (there, run))
        others = [f"{name} is {was[name]} there and {now[name]} here" for name in now if was[name] != now[name]]
        if not others and load_tokenizer(there.tokenizer, eos_id).json() != loaded.json():
            others.append("its tokenizer is another")
        if others:
            fault = f"{folder} is the folder of another run, of model {there.config.name}; name another"
            raise ValueError(f"{fault}: {', '.join(others[:3])}")
        return there
    folder.mkdir(parents=True, exist_ok=True)
    copy_tokenizer(tokenizer, folder)
    unfinished = folder / f".{RUN}.{os.getpid()}.tmp"
    try:
        with unfinished.open("w") as file:
            json.dump({"layout": LAYOUT, "model": asdict(config), "eos_id": eos_id}, file, indent=1)
            file.flush()
            os.fsync(file.fileno())
        unfinished.replace(folder / RUN)
    finally:
        unfinished.unlink(missing_ok=True)
    return run


def read_run_json(folder: Path) -> Run:
    """What ``write_run_json`` wrote.

    Raises:
        ValueError: there is none, it is damaged, or of another version.
        OSError: it cannot be read.
    """
    file = folder / RUN
    if not folder.exists():
        raise ValueError(f"{folder} does not exist")
    if not file.exists():
        raise ValueError(f"{folder} is no folder of a run: it has no {RUN}")
    try:
        content = json.loads(file.read_text())
        layout = content["layout"]
        if layout == LAYOUT:
            return Run(_config(content["model"]), folder / TOKENIZER, content["eos_id"])
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{file} is damaged: {error}") from None
    raise ValueError(f"{file} is of layout {layout}; this version reads {LAYOUT}")


def _config(fields: dict[str, Any]) -> ModelConfig:
    scaling = fields["rope_scaling"]
    return ModelConfig(**fields | {"rope_scaling": scaling and RopeScaling(**scaling)})


def load_weights(path: Path) -> Checkpoint:
    """The model of a checkpoint, or of the newest sound one in the folder of a run.

    Raises:
        ValueError: there is no run, no checkpoint, none that is whole, or it is of another model.
        OSError: something cannot be read.
    """
    run = read_run_json(path.resolve().parent if is_checkpoint(path) else path)
    stored, skipped = find_checkpoint(path)
    parameters = dict(TransformerLM(run.config, device="meta").named_parameters())
    return Checkpoint(run, stored.path, stored.step, load_whole_model(stored, parameters), skipped)


@dataclass(frozen=True)
class Trained:
    """A model that can be run, and its tokenizer.

    Attributes:
        step: of the checkpoint that it is from; None if it is from Hugging Face.
    """

    model: TransformerLM
    tokenizer: JsonTokenizer
    step: int | None
    skipped: dict[Path, str]


def load_trained(path: Path, *, device: torch.device | str, dtype: torch.dtype) -> Trained:
    """The reference model from the folder of a run, one of its checkpoints, or a Hugging Face folder.

    Raises:
        ValueError: it is none of these, damaged, of another model, or without a tokenizer.
        OSError: something cannot be read.
    """
    if (path / "config.json").exists():
        model = _empty(config_from_hf(path), device, dtype)
        tokenizer = load_tokenizer(path)
        load_hf_weights(model, path)
        return Trained(model, tokenizer, None, {})
    checkpoint = load_weights(path)
    tokenizer = load_tokenizer(checkpoint.run.tokenizer, checkpoint.run.eos_id)
    model = _empty(checkpoint.run.config, device, dtype)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(checkpoint.weights.pop(name))  # so that two copies are never whole
    model.rotary.reset_parameters()
    return Trained(model, tokenizer, checkpoint.step, checkpoint.skipped)


def _empty(config: ModelConfig, device: torch.device | str, dtype: torch.dtype) -> TransformerLM:
    model = TransformerLM(config, device="meta", dtype=dtype)
    model.to_empty(device=device)
    return model
