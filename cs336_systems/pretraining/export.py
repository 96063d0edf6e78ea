"""Export a trained model as a Hugging Face folder, for ``AutoModelForCausalLM``, ``AutoTokenizer`` and this suite.

    exported = export(folder, weights, ModelOfRun(config, tokenizer, eos_id))

    config.json                 LlamaForCausalLM, or Qwen2ForCausalLM where query, key and value have biases
    model.safetensors           or shards and model.safetensors.index.json, above a size
    tokenizer.json, tokenizer_config.json, chat_template.jinja (if there is one)
    tokenizer/                  the tokenizer alone, where transformers would put another in its place
    generation_config.json      ids that begin a text (of the tokenizer's template, or end of text) and that end it
    export.json                 the origin, and the names of these files

The folder appears when it is complete. An earlier export is replaced unless other files were added to it; another
model's folder is replaced only with ``replace``, and any other folder never.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from cs336_systems.config import ModelConfig
from cs336_systems.model import TransformerLM
from cs336_systems.model.hf_weights import check_names, config_to_hf, read_json, save_hf_weights
from cs336_systems.pretraining.checkpoint import ModelOfRun, SavedModel
from cs336_systems.pretraining.dataset import published
from cs336_systems.pretraining.tokenizer import JsonTokenizer, copy_tokenizer

MANIFEST = "export.json"
LAYOUT = 1
"""The version of the manifest."""
ALONE = "tokenizer"
"""Folder of a tokenizer without a model's config beside it."""
SHARD_BYTES = 5 * 2**30
"""The most bytes of weights in a file."""

_QWEN_SPLIT = json.dumps(r"\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+")[1:-1]
"""Part of the pattern by which Qwen's tokenizers split text, as it stands in a ``tokenizer.json``."""


@dataclass(frozen=True)
class Exported:
    """A folder that was written: names of its files, dtype of the weights, and advice on loading it."""

    folder: Path
    files: tuple[str, ...]
    dtype: torch.dtype
    notes: tuple[str, ...]


def export(
    folder: Path,
    weights: Mapping[str, Tensor],
    model: ModelOfRun,
    *,
    replace: bool = False,
    origin: Mapping[str, Any] | None = None,
) -> Exported:
    """Write the folder.

    Args:
        weights: unsharded tensors by ``TransformerLM`` names, such as its state dict, with or without a tied head.
        model: its config and tokenizer; transformers' files in the tokenizer's folder are copied, too.
        replace: also replace another model's folder.
        origin: written to ``export.json``.

    Raises:
        ValueError: the weights are not the model's, or have several dtypes; the tokenizer is unsuitable; or the folder
            must not be replaced.
        OSError: a file cannot be read or written.
    """
    check_target(folder, replace)
    config, loaded, notes = model.config, model.load_tokenizer(), []
    parameters = _parameters(weights, config)
    if len(found := {tensor.dtype for tensor in parameters.values()}) > 1:
        raise ValueError(f"weights are exported in one dtype, not in {', '.join(sorted(map(str, found)))}")
    (written,) = found
    if unused := config.vocab_size - loaded.vocab_size:
        sizes = f"the tokenizer has {loaded.vocab_size:,} ids, the model {config.vocab_size:,}"
        notes.append(f"{sizes}: the last {unused:,} are padding")
    with published(folder) as hidden:
        save_hf_weights(parameters, hidden, shard_bytes=SHARD_BYTES)
        _copy_tokenizer(hidden, model.tokenizer, loaded)
        # AutoTokenizer takes the vocabulary alone beside a config of type qwen2.
        if config.qkv_bias and _QWEN_SPLIT not in loaded.json():
            notes.append(
                "AutoTokenizer of transformers 5 splits text as Qwen's tokenizer does for any model of this type, not "
                f"as this one: load it from the folder {ALONE} inside"
            )
            (hidden / ALONE).mkdir()
            _copy_tokenizer(hidden / ALONE, model.tokenizer, loaded)
        special = {"bos_token_id": _id_in(hidden, "bos_token", loaded), "eos_token_id": loaded.eos_id}
        pad_id = _id_in(hidden, "pad_token", loaded)
        _write_json(
            hidden / "config.json",
            config_to_hf(config) | special | {"torch_dtype": str(written).removeprefix("torch.")},
        )
        _write_json(
            hidden / "generation_config.json", special | {"pad_token_id": loaded.eos_id if pad_id is None else pad_id}
        )
        files = sorted(_files(hidden))
        _write_json(hidden / MANIFEST, {"layout": LAYOUT, "origin": dict(origin or {}), "files": files})
    return Exported(folder, tuple(files), written, tuple(notes))


def export_saved(folder: Path, saved: SavedModel, **how: Any) -> Exported:
    """Export a checkpoint, with its origin."""
    origin: dict[str, Any] = {"checkpoint": str(saved.path), "step": saved.step, "model": saved.model.config.name}
    if saved.model.adapters is not None:
        origin["adapters merged into"] = saved.model.adapters.as_json()
    return export(folder, saved.weights, saved.model, origin=origin, **how)


def check_target(folder: Path, replace: bool) -> None:
    """Raise ValueError unless the folder can be written: nothing is there, or what may be replaced."""
    if not folder.exists() or (folder.is_dir() and not any(folder.iterdir())):
        return
    if not (folder / "config.json").exists():
        raise ValueError(f"{folder} is there and no model's folder; name another")
    if replace:
        return
    if not (folder / MANIFEST).exists():
        raise ValueError(f"{folder} is there and was not written by this command; --replace replaces it")
    ours = {MANIFEST, *read_json(folder / MANIFEST).get("files", [])}
    if foreign := sorted(_files(folder) - ours):
        raise ValueError(f"{folder} has files that this command did not write, as {foreign[0]}; --replace removes them")


def _parameters(weights: Mapping[str, Tensor], config: ModelConfig) -> dict[str, Tensor]:
    """Return the weights by the names of a checkpoint, without a tied head.

    Raises:
        ValueError: names or shapes are not the model's, or a head that should be tied is not.
    """
    shapes = {name: p.shape for name, p in TransformerLM(config, device="meta").named_parameters()}
    head, embedding = "lm_head.weight", "token_embeddings.weight"
    tied = {head} if config.tie_embeddings and head in weights else set()
    check_names("a set of weights", weights, shapes.keys() | tied, config.name)
    for name, shape in shapes.items():
        if weights[name].shape != shape:
            raise ValueError(f"{name} has shape {tuple(weights[name].shape)}, that of {config.name} {tuple(shape)}")
    if tied and not torch.equal(weights[head], weights[embedding]):
        raise ValueError(f"{config.name} ties its embeddings, but {head} differs from {embedding}")
    return {name: weights[name] for name in shapes}


def _copy_tokenizer(folder: Path, tokenizer: Path, loaded: JsonTokenizer) -> None:
    """Copy the tokenizer's definition, with its own config or one that any version of transformers understands."""
    copy_tokenizer(tokenizer, folder)
    config, eos = folder / "tokenizer_config.json", loaded.eos_token
    begin = {"bos_token": loaded.token(loaded.prefix[0])} if loaded.prefix else {}
    settings: dict[str, Any] = {"bos_token": eos, "pad_token": eos, "unk_token": None}
    settings |= {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
    if config.exists():
        settings = read_json(config)
    _write_json(config, settings | begin | {"eos_token": eos})


def _files(folder: Path) -> set[str]:
    """The names of all files below."""
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*") if not path.is_dir()}


def _id_in(folder: Path, name: str, loaded: JsonTokenizer) -> int | None:
    """The id of a special token, such as ``bos_token``, in the tokenizer's config; None if it says there is none."""
    named = read_json(folder / "tokenizer_config.json").get(name)
    token = named["content"] if isinstance(named, dict) else named
    return None if token is None else JsonTokenizer(loaded.json(), token).eos_id


def _write_json(file: Path, content: Mapping[str, Any]) -> None:
    file.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
