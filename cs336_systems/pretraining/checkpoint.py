"""The folder of a run: its model's description, its tokenizer and its checkpoints; writing it and loading the model.

    model = write_run_json(Path("runs/stdlib"), ModelOfRun(config, dataset.tokenizer, dataset.eos_id))  # at the start
    saved = load_weights(Path("runs/stdlib"))                     # the newest; or one: runs/stdlib/step-00000200

    runs/stdlib/
      run.json                  layout, the fields of ModelConfig, the id of the token that ends documents; adapters and
                                their base weights, if adapters are trained (``adapters.py``)
      tokenizer.json            a copy, and the other tokenizer files that transformers reads
      log.jsonl                 the run's records (``run_records.py``)
      step-00000200/            a checkpoint, as distributed/checkpoint.py writes it

Loading takes one process and no GPU, for any number of ranks that saved, and reads no optimizer states.
"""

import json
import os
import warnings
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from cs336_systems.config import ModelConfig, RopeScaling, how_to_download
from cs336_systems.distributed.checkpoint import find_checkpoint, load_whole_model
from cs336_systems.distributed.checkpoint_folder import Tell, is_checkpoint, survey
from cs336_systems.model import TransformerLM
from cs336_systems.model.hf_weights import config_from_hf, load_hf_weights, read_json
from cs336_systems.pretraining.adapters import AdaptersOfRun, shapes_of
from cs336_systems.pretraining.dataset import flush
from cs336_systems.pretraining.tokenizer import TOKENIZER, JsonTokenizer, copy_tokenizer, load_tokenizer

RUN = "run.json"
LAYOUT = 1
"""The version of ``run.json``."""


@dataclass(frozen=True)
class ModelOfRun:
    """The model of a run, its ``tokenizer.json`` or a folder that has one, and the id that ends documents."""

    config: ModelConfig
    tokenizer: Path
    eos_id: int
    adapters: AdaptersOfRun | None = None
    """The adapters, if they are trained instead of the weights."""

    def load_tokenizer(self) -> JsonTokenizer:
        """Load the tokenizer.

        Raises:
            ValueError: it is missing, damaged, without the id ``eos_id``, or larger than the model's vocabulary.
            OSError: it cannot be read.
        """
        loaded = load_tokenizer(self.tokenizer, self.eos_id)
        if loaded.vocab_size > self.config.vocab_size:
            has = f"{loaded.vocab_size:,} ids, the model {self.config.vocab_size:,}"
            raise ValueError(f"tokenizer {self.tokenizer} has {has}")
        return loaded


@dataclass(frozen=True)
class SavedModel:
    """The model of a checkpoint.

    Attributes:
        weights: unsharded CPU tensors by ``TransformerLM`` parameter names, with adapters merged.
        adapters: the adapters' own parameters; empty if none were trained.
    """

    model: ModelOfRun
    path: Path
    step: int
    weights: dict[str, Tensor]
    adapters: dict[str, Tensor]


def write_run_json(folder: Path, model: ModelOfRun) -> ModelOfRun:
    """Create a run's folder with its description and tokenizer; an existing description is checked and kept.

    Raises:
        ValueError: the tokenizer is unsuitable, or the folder belongs to a run of another model.
        OSError: something cannot be read or written.
    """
    loaded = model.load_tokenizer()
    if (folder / RUN).exists():
        there = read_run_json(folder)
        was, now = (_identity(one) for one in (there, model))
        others = [f"{name} is {was[name]} there and {now[name]} here" for name in now if was[name] != now[name]]
        if not others and there.load_tokenizer().json() != loaded.json():
            others.append("its tokenizer is another")
        if others:
            fault = f"{folder} is the folder of another run, of model {there.config.name}; name another"
            raise ValueError(f"{fault}: {', '.join(others[:3])}")
        return there
    folder.mkdir(parents=True, exist_ok=True)
    copy_tokenizer(model.tokenizer, folder)
    unfinished = folder / f".{RUN}.{os.getpid()}.tmp"  # replicas may write it at the same time
    content = {"layout": LAYOUT, "model": asdict(model.config), "eos_id": model.eos_id}
    content |= {} if model.adapters is None else {"adapters": model.adapters.as_json()}
    unfinished.write_text(json.dumps(content, indent=1), encoding="utf-8")
    flush(unfinished)
    unfinished.replace(folder / RUN)
    return read_run_json(folder)


def _identity(model: ModelOfRun) -> dict[str, Any]:
    """Return the properties that a run cannot change, by name."""
    found, adapters = {"eos_id": model.eos_id} | asdict(model.config), model.adapters
    lora = None if adapters is None else str(adapters.lora)
    return found | {"LoRA": lora, "the checksum of its base": adapters and adapters.checksum}


def check_same_model(origin: Path, model: ModelOfRun) -> None:
    """Raise ValueError if the run whose checkpoint is resumed trains another model; the model's name may differ.

    Equal shapes are not enough: models may differ in rotary angles, and adapters in their base.
    """
    folder = origin.resolve().parent if is_checkpoint(origin) else origin
    if not (folder / RUN).exists():  # the checkpoint was moved away from its run
        return
    was, now = (_identity(_written_out(one)) for one in (read_run_json(folder), model))
    if others := [f"{name} is {was[name]} there and {now[name]} here" for name in now if was[name] != now[name]]:
        raise ValueError(f"--resume-from {origin} is of another model: {', '.join(others[:3])}; repeat its options")


def _written_out(model: ModelOfRun) -> ModelOfRun:
    """Return the model without its name, and with derived sizes filled in."""
    config = model.config
    heads: dict[str, Any] = {"n_kv_heads": config.kv_heads, "head_dim": config.d_head}
    return replace(model, config=replace(config, name="", max_context_length=None, **heads))


def read_run_json(folder: Path) -> ModelOfRun:
    """Read what ``write_run_json`` wrote.

    Raises ValueError if ``run.json`` is missing, damaged, or of another version; OSError if it cannot be read.
    """
    file = folder / RUN
    if not file.exists():
        absent = f"does not exist{how_to_download(folder)}"
        fault = f"is no folder of a run: it has no {RUN}" if folder.exists() else absent
        raise ValueError(f"{folder} {fault}")
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
        layout, fields = content["layout"], content["model"]
        if layout == LAYOUT:
            scaling = fields["rope_scaling"]
            config = ModelConfig(**fields | {"rope_scaling": scaling and RopeScaling(**scaling)})
            adapters = AdaptersOfRun.from_json(content["adapters"]) if "adapters" in content else None
            return ModelOfRun(config, folder / TOKENIZER, content["eos_id"], adapters)
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{file} is damaged: {error}") from None
    raise ValueError(f"{file} is of layout {layout}; this version reads {LAYOUT}")


def goes_on_from(out: Path, resume_from: Path | None) -> Path:
    """Return where a run finds its checkpoint: in its own folder, or in ``resume_from`` as long as that has none.

    Raises:
        ValueError: there is no complete checkpoint, or it is in the run's own folder.
        OSError: something cannot be read.
    """
    if resume_from is None:
        return out
    asked, folder = f"--resume-from {resume_from}", resume_from.parent
    if out.resolve() in (resume_from.resolve(), folder.resolve()):
        raise ValueError(f"{asked} is in --out {out}: a run that goes on from an earlier step has a new folder")
    if any(survey(out)):
        return out
    if not resume_from.exists():
        there = ", ".join(stored.path.name for stored in survey(folder)[0])
        raise ValueError(f"{asked} does not exist" + (f": {folder} has {there}" if there else ""))
    complete, unreadable = survey(resume_from)
    if not complete:
        why = "".join(f": {reason}" for reason in list(unreadable.values())[:1])
        raise ValueError(f"{asked} is no complete checkpoint, nor a run that has one{why}")
    return resume_from


def load_weights(path: Path, *, merge: bool = True, tell: Tell = warnings.warn) -> SavedModel:
    """Load the model of a checkpoint, or of the newest undamaged checkpoint in the folder of a run.

    Args:
        merge: merge adapters into their base; without it, only the adapters are loaded and ``weights`` is empty.
        tell: called with a sentence about each checkpoint that is skipped as damaged.

    Raises:
        ValueError: there is no run or no complete checkpoint, it is of another model, or the adapters' base is missing.
        OSError: a file cannot be read.
    """
    model = read_run_json(path.resolve().parent if is_checkpoint(path) else path)
    stored, damaged = find_checkpoint(path)
    for one, reason in damaged.items():
        tell(f"{one} is passed over: {reason}")
    config, adapters, own = model.config, model.adapters, dict[str, Tensor]()
    if adapters is None:
        weights = load_whole_model(stored, dict(TransformerLM(config, device="meta").named_parameters()))
    else:
        shapes = shapes_of(adapters.lora, config)
        own = load_whole_model(stored, {name: torch.empty(shape, device="meta") for name, shape in shapes.items()})
        weights = adapters.merged(own, config) if merge else {}
    return SavedModel(model, stored.path, stored.step, weights, own)


@dataclass(frozen=True)
class RunnableModel:
    """A model that can be run, its tokenizer, and its checkpoint's step (None for a Hugging Face folder).

    Attributes:
        eos_ids: ids that end a text, including the tokenizer's.
    """

    model: TransformerLM
    tokenizer: JsonTokenizer
    eos_ids: frozenset[int]
    step: int | None


def load_trained(
    path: Path, *, device: torch.device | str, dtype: torch.dtype, tell: Tell = warnings.warn
) -> RunnableModel:
    """Load the reference model from the folder of a run, one of its checkpoints, or a Hugging Face folder.

    ``tell`` is that of ``load_weights``.

    Raises:
        ValueError: the path is none of these, damaged, of another model, or without a tokenizer.
        OSError: something cannot be read.
    """
    if (path / "config.json").exists():
        tokenizer, model = load_tokenizer(path), TransformerLM(config_from_hf(path), device="meta", dtype=dtype)
        load_hf_weights(model.to_empty(device=device), path)
        return RunnableModel(model, tokenizer, _eos_ids(path, tokenizer), None)
    saved = load_weights(path, tell=tell)
    tokenizer, model = saved.model.load_tokenizer(), TransformerLM(saved.model.config, device="meta", dtype=dtype)
    model.to_empty(device=device)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(saved.weights.pop(name))  # so that two whole copies never exist
    model.rotary.reset_parameters()
    return RunnableModel(model, tokenizer, frozenset([tokenizer.eos_id]), saved.step)


def _eos_ids(folder: Path, tokenizer: JsonTokenizer) -> frozenset[int]:
    """Return the ids that end a text: the tokenizer's, and those of generation_config.json or else config.json."""
    for file in (folder / "generation_config.json", folder / "config.json"):
        found = read_json(file).get("eos_token_id") if file.exists() else None
        if found is not None:
            ids = found if isinstance(found, list) else [found]
            if not all(type(one) is int for one in ids):
                raise ValueError(f"{file} names no end of text: eos_token_id is {found}")
            return frozenset([tokenizer.eos_id, *ids])
    return frozenset([tokenizer.eos_id])
