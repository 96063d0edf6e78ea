"""Llama, Qwen2 and Qwen3 checkpoints as Hugging Face stores them, into a ``TransformerLM`` and out of it.

Only names differ: our rotary embedding uses the half-split layout that these checkpoints are stored in, so no weight is
permuted. ``to_hf_name`` is the one table; loading looks each of the model's own parameters up in it.

    config = config_from_hf("Llama-3.2-1B").at_context(1024)
    model = TransformerLM(config, device="meta").to_empty(device="cuda")
    load_hf_weights(model, "Llama-3.2-1B")

Tensors go one by one from the mapped file into the parameter that is there, in its dtype and on its device, so a second
copy of the model never exists. Names, shapes and dtypes are compared first: a checkpoint that does not fit leaves the
model as it was. Nothing is downloaded and nothing is unpickled: ``.bin`` and ``.pt`` files are not looked at.

Formats: the safetensors header, and ``model.safetensors.index.json`` (a ``weight_map`` from weight name to shard).
"""

import errno
import json
import math
import os
import re
from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from cs336_systems.config import ModelConfig, RopeScaling, how_to_download
from cs336_systems.model.transformer import TransformerLM

_WEIGHTS, _INDEX = "model.safetensors", "model.safetensors.index.json"
_EMBEDDING, _HEAD = "model.embed_tokens.weight", "lm_head.weight"
_FLOATS = ("F64", "F32", "F16", "BF16")

_HF_MODULES = {"token_embeddings": "model.embed_tokens", "ln_final": "model.norm", "lm_head": "lm_head"}
_HF_BLOCK_MODULES = {
    **{"ln1": "input_layernorm", "ln2": "post_attention_layernorm", "attn.output_proj": "self_attn.o_proj"},
    **{f"attn.{name}": f"self_attn.{name}" for name in ("q_proj", "k_proj", "v_proj", "q_norm", "k_norm")},
    **{"ffn.w1": "mlp.gate_proj", "ffn.w2": "mlp.down_proj", "ffn.w3": "mlp.up_proj"},
}
_BLOCK = re.compile(r"layers\.(\d+)\.(.+)")
_ADAPTER = re.compile(r"(.+)\.(lora_[AB])\.weight")
_IGNORED = re.compile(r"(^|\.)rotary_emb\.inv_freq$")
"""Buffers that checkpoints of before 2023 carry; the rotary tables follow from the config."""


def to_hf_name(name: str) -> str:
    """Hugging Face's name of our parameter: ``layers.0.ffn.w1.weight`` -> ``model.layers.0.mlp.gate_proj.weight``.

    Of an adapter's, ``layers.0.ffn.w1.lora_A.weight``, it is peft's below ``base_model.model``.

    Raises:
        ValueError: no parameter of a ``TransformerLM`` has that name.
    """
    if adapter := _ADAPTER.fullmatch(name):
        return f"{to_hf_name(adapter[1] + '.weight').removesuffix('.weight')}.{adapter[2]}.weight"
    module, _, kind = name.rpartition(".")
    block = _BLOCK.fullmatch(module)
    inner = _HF_BLOCK_MODULES.get(block[2]) if block else None
    hf_module = f"model.layers.{block[1]}.{inner}" if block and inner else _HF_MODULES.get(module)
    if hf_module is None or kind not in ("weight", "bias"):
        raise ValueError(f"{name!r} is not the name of a TransformerLM parameter")
    return f"{hf_module}.{kind}"


def _folder(path: str | os.PathLike[str]) -> Path:
    folder = Path(path)
    if not folder.is_dir():
        raise FileNotFoundError(f"no checkpoint folder at {folder}{how_to_download(folder)}")
    return folder


def read_json(file: Path) -> dict[str, Any]:
    """The object that a file holds; OSError if it cannot be read, ValueError if it is no JSON, or no object."""
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{file} is not a JSON file: {error}") from None
    if not isinstance(content, dict):
        raise ValueError(f"{file} does not hold a JSON object")
    return content


def _weight_files(folder: Path) -> list[Path]:
    """The one file, or every shard that the index names; a shard must lie in the folder itself."""
    index = folder / _INDEX
    if (folder / _WEIGHTS).is_file():
        return [folder / _WEIGHTS]
    if not index.is_file():
        raise FileNotFoundError(f"neither {_WEIGHTS} nor {_INDEX} is in {folder}")
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(shard, str) for shard in weight_map.values()):
        raise ValueError(f"{index} has no weight_map from weight names to file names")
    shards = sorted(set(weight_map.values()))
    for shard in shards:
        if not shard.endswith(".safetensors") or "/" in shard or "\\" in shard:
            raise ValueError(f"{index} names {shard!r}, which is not a .safetensors file of its own folder")
        if not (folder / shard).is_file():
            raise FileNotFoundError(f"{index} names {shard}, which is not in the folder")
    return [folder / shard for shard in shards]


def open_weights(folder: Path, stack: ExitStack) -> dict[str, Any]:
    """Weight name -> the mapped file that holds it; files close with ``stack``."""
    stored: dict[str, Any] = {}
    for file in _weight_files(folder):
        try:
            reader = stack.enter_context(safe_open(file, framework="pt", device="cpu"))
        except SafetensorError as error:
            raise ValueError(f"{file} cannot be read as safetensors: {error}") from None
        for name in reader.keys():  # noqa: SIM118 (a safe_open is no mapping)
            if name in stored:
                raise ValueError(f"{name} is in two files of {folder}")
            if not _IGNORED.search(name):
                stored[name] = reader
    return stored


def check_names(weights: str, found: Iterable[str], expected: Iterable[str], model: str) -> None:
    """Raise ValueError unless the names of ``weights``, in words, are those that the model expects."""
    missing, unexpected = set(expected) - set(found), set(found) - set(expected)
    parts = []
    for what, names in (("lacks", sorted(missing)), ("also has", sorted(unexpected))):
        more = f" and {len(names) - 4} more" if len(names) > 4 else ""
        parts += [f"{what} {', '.join(names[:4])}{more}"] if names else []
    if parts:
        raise ValueError(f"{weights} does not fit {model}: it {' and '.join(parts)}")


def _check_fit(stored: dict[str, Any], targets: Mapping[str, Tensor], config: ModelConfig, folder: Path) -> None:
    expected = {name: tuple(parameter.shape) for name, parameter in targets.items()}
    if config.tie_embeddings and _HEAD in stored:
        expected[_HEAD] = expected[_EMBEDDING]
    check_names(f"the checkpoint in {folder}", stored, expected, config.name)
    for name, shape in expected.items():
        header = stored[name].get_slice(name)
        if tuple(header.get_shape()) != shape:
            raise ValueError(f"{name} in {folder} has shape {tuple(header.get_shape())}, the model's has {shape}")
        if header.get_dtype() not in _FLOATS:
            floats = ", ".join(_FLOATS)
            raise ValueError(f"{name} in {folder} is stored as {header.get_dtype()}; only {floats} are read")
    if _HEAD not in targets and _HEAD in stored:
        head, embedding = (stored[name].get_tensor(name) for name in (_HEAD, _EMBEDDING))
        if head.dtype != embedding.dtype or not torch.equal(head, embedding):
            raise ValueError(f"{config.name} ties its embeddings, but {_HEAD} in {folder} differs from {_EMBEDDING}")


@torch.no_grad()
def load_hf_weights(model: TransformerLM, path: str | os.PathLike[str]) -> None:
    """Copy the checkpoint in the folder ``path`` into ``model``, and fill the rotary tables, which no file holds.

    Adapters, which the folder of a model does not have, stay as they are.

    Where the model ties its embeddings, the checkpoint may leave ``lm_head.weight`` out or carry an equal one.

    Raises:
        FileNotFoundError: the folder, its weights, or a shard that the index names is not there.
        ValueError: a file cannot be read as safetensors, weights are missing or unexpected or of another shape, a
            stored dtype is not floating point (a quantised checkpoint), or the model is still on the meta device.
    """
    folder = _folder(path)
    own = ((name, parameter) for name, parameter in model.named_parameters() if not _ADAPTER.fullmatch(name))
    targets = {to_hf_name(name): parameter for name, parameter in own}
    if any(parameter.is_meta for parameter in targets.values()):
        raise ValueError("the model is on the meta device and has no storage to load into; call to_empty first")
    with ExitStack() as stack:
        stored = open_weights(folder, stack)
        whole = TransformerLM(model.config, device="meta")  # ``model`` may be one rank's part of it
        named = {to_hf_name(name): parameter for name, parameter in whole.named_parameters()}
        _check_fit(stored, named, model.config, folder)
        for name, parameter in targets.items():
            parameter.copy_(stored[name].get_tensor(name))
    model.rotary.reset_parameters()


def save_hf_weights(
    weights: TransformerLM | Mapping[str, Tensor], path: str | os.PathLike[str], *, shard_bytes: float = math.inf
) -> None:
    """Write weights under Hugging Face's names into the folder ``path``: ``model.safetensors``, or shards and an index.

    ``config.json`` is not written.

    Args:
        weights: a model, of which a tied head is written once, or whole tensors by our names.
        shard_bytes: the most bytes of a file that holds more than one tensor.

    Raises:
        FileNotFoundError: the folder is not there.
        OSError: they cannot be written, as on a full disk.
        ValueError: a tensor is on the meta device or no parameter of a ``TransformerLM``.
    """
    folder = _folder(path)
    named = weights.named_parameters() if isinstance(weights, TransformerLM) else weights.items()
    shards: list[dict[str, Tensor]] = [{}]
    for name, tensor in named:
        if tensor.is_meta:
            raise ValueError("the model is on the meta device and has no weights to save")
        n_bytes = sum(other.nbytes for other in shards[-1].values())
        if n_bytes and n_bytes + tensor.nbytes > shard_bytes:
            shards.append({})
        shards[-1][to_hf_name(name)] = tensor.detach().contiguous()
    weight_map: dict[str, str] = {}
    for number, shard in enumerate(shards, 1):
        file = _WEIGHTS if len(shards) == 1 else f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        try:
            save_file(shard, folder / file, metadata={"format": "pt"})
        except SafetensorError as error:
            raise OSError(errno.EIO, str(error), str(folder / file)) from None
        weight_map |= dict.fromkeys(shard, file)
    if len(shards) > 1:
        n_bytes = sum(tensor.nbytes for shard in shards for tensor in shard.values())
        index = {"metadata": {"total_size": n_bytes}, "weight_map": weight_map}
        (folder / _INDEX).write_text(json.dumps(index, indent=1) + "\n", encoding="utf-8")


_FIELDS = {
    **{"d_model": "hidden_size", "d_ff": "intermediate_size", "n_layers": "num_hidden_layers"},
    **{"n_heads": "num_attention_heads", "vocab_size": "vocab_size", "rms_norm_eps": "rms_norm_eps"},
}
"""Fields of ``ModelConfig`` by their names in ``config.json``, as far as both mean the same and none may lack."""
_SCALING_FIELDS = {
    **{name: name for name in ("factor", "low_freq_factor", "high_freq_factor")},
    "original_context_length": "original_max_position_embeddings",
}
_UNIFORM = {
    **{"hidden_act": "silu", "attention_bias": False, "mlp_bias": False, "use_sliding_window": False},
    "partial_rotary_factor": 1.0,
}
"""Fields of ``config.json`` that may have this value alone, or none."""


def config_to_hf(config: ModelConfig) -> dict[str, Any]:
    """The content of a ``config.json`` that describes the architecture.

    It is a Qwen3 where queries and keys have norms, else a Qwen2 where projections have biases, else a Llama. Dtype and
    ids of special tokens, no part of the architecture, are left to be added. ``config_from_hf`` reads the same model
    back, at the context of published weights where there is one.

    Raises:
        ValueError: the model has both norms of queries and keys and biases, as no published architecture does.
    """
    if config.qkv_bias and config.qk_norm:
        raise ValueError(f"{config.name} has qkv_bias and qk_norm: Hugging Face has no such architecture")
    kind = "qwen3" if config.qk_norm else "qwen2" if config.qkv_bias else "llama"
    hf: dict[str, Any] = {"model_type": kind, "architectures": [f"{kind.capitalize()}ForCausalLM"]}
    hf |= {"mlp_bias": False} if kind == "llama" else {"use_sliding_window": False}
    if not config.qkv_bias:
        hf["attention_bias"] = False
    if not config.qkv_bias or config.d_query != config.d_model:
        hf["head_dim"] = config.d_head
    rope_scaling = None
    if (scaling := config.rope_scaling) is not None:
        values = {theirs: getattr(scaling, ours) for ours, theirs in _SCALING_FIELDS.items()}
        rope_scaling = {"rope_type": "llama3"} | values
    hf |= {theirs: getattr(config, ours) for ours, theirs in _FIELDS.items()}
    return hf | {
        "num_key_value_heads": config.kv_heads,
        "max_position_embeddings": config.max_context_length or config.context_length,
        "hidden_act": "silu",
        "rope_theta": config.rope_theta,
        "rope_scaling": rope_scaling,
        "tie_word_embeddings": config.tie_embeddings,
        "attention_dropout": 0.0,
    }


def config_from_hf(path: str | os.PathLike[str]) -> ModelConfig:
    """The architecture that ``config.json`` in the folder ``path`` describes, at its full published context.

    The rotary tables then cover ``max_position_embeddings`` tokens; ``at_context`` shortens them.

    Raises:
        FileNotFoundError: no such folder, or no ``config.json`` in it.
        ValueError: a field is missing, or asks for what ``TransformerLM`` cannot do; the message names the value.
    """
    file = _folder(path) / "config.json"
    if not file.is_file():
        raise FileNotFoundError(f"no config.json in {file.parent}")
    hf = read_json(file)

    def required(source: dict[str, Any], key: str) -> Any:
        if source.get(key) is None:
            raise ValueError(f"{file} does not give {key}")
        return source[key]

    model_type = required(hf, "model_type")
    if model_type not in ("llama", "qwen2", "qwen3"):
        raise ValueError(f"{file}: model_type {model_type!r} is not supported, only llama, qwen2 and qwen3 are")
    rope = hf.get("rope_scaling") or hf.get("rope_parameters") or {}
    if not isinstance(rope, dict) or any(isinstance(value, dict) for value in rope.values()):
        raise ValueError(f"{file}: rope parameters {rope!r} are not supported, only one set for all layers is")
    rope_type = rope.get("rope_type", rope.get("type", "default"))
    asked = [(name, value, (hf | rope).get(name, value)) for name, value in _UNIFORM.items()]
    asked += [("layer_types", "full_attention", kind) for kind in hf.get("layer_types") or ()]
    for field, allowed, value in [*asked, ("rope type", "default", "default" if rope_type == "llama3" else rope_type)]:
        if value not in (allowed, None):
            raise ValueError(f"{file}: {field} {value!r} is not supported")
    scaling = None
    if rope_type == "llama3":
        scaling = RopeScaling(**{ours: required(rope, theirs) for ours, theirs in _SCALING_FIELDS.items()})
    config = ModelConfig(
        name=file.parent.resolve().name,
        **{ours: required(hf, theirs) for ours, theirs in _FIELDS.items()},
        n_kv_heads=hf.get("num_key_value_heads"),
        head_dim=hf.get("head_dim", 128 if model_type == "qwen3" else None),  # the value that Qwen3Config assumes
        context_length=required(hf, "max_position_embeddings"),
        max_context_length=hf["max_position_embeddings"],
        qkv_bias=model_type == "qwen2",
        qk_norm=model_type == "qwen3",
        tie_embeddings=bool(hf.get("tie_word_embeddings", False)),
        rope_theta=float(rope.get("rope_theta") or hf.get("rope_theta") or 10_000.0),
        rope_scaling=scaling,
    )
    return config if config.d_query != config.d_model else replace(config, head_dim=None)
