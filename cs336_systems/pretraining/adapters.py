"""The LoRA adapters of a run and their base weights: described in ``run.json``, merged, and exported for peft.

    adapters = AdaptersOfRun.of(lora, Path("Qwen2.5-0.5B"))     # in run.json, beside the model
    merged = adapters.merged(own, config)                       # base + scale B A, by the names of a TransformerLM
    export_adapter(Path("out"), own, adapters)                  # what peft.PeftModel.from_pretrained(base, "out") loads

Checkpoints of such a run hold only adapters, so the base must stay where it is. The base's checksum covers the name,
shape, dtype and first row of every tensor: enough to distinguish a model from one that was trained further, without
reading all of it.
"""

import json
import zlib
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import torch
from safetensors.torch import save_file
from torch import Tensor

from cs336_systems.blocks.adapters import adapter_shapes
from cs336_systems.config import Lora, ModelConfig
from cs336_systems.model import TransformerLM
from cs336_systems.model.hf_weights import load_hf_weights, open_weights, to_hf_name
from cs336_systems.pretraining.dataset import published

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
"""The names of peft's files."""


@dataclass(frozen=True)
class AdaptersOfRun:
    """The adapters that a run trains, and the weights that they are added to."""

    lora: Lora
    base: Path
    """The Hugging Face folder of the weights."""
    checksum: str

    @classmethod
    def of(cls, lora: Lora, base: Path) -> Self:
        """Describe adapters of the weights in a folder; raises what ``load_hf_weights`` does."""
        return cls(lora, base.resolve(), checksum_of(base))

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> Self:
        """Read what ``as_json`` wrote; raises KeyError and TypeError."""
        lora = Lora(content["rank"], content["alpha"], tuple(content["on"]))
        return cls(lora, Path(content["base"]), content["checksum"])

    def as_json(self) -> dict[str, Any]:
        """Return plain values for ``run.json``."""
        lora = self.lora
        of_lora = {"rank": lora.rank, "alpha": lora.alpha, "on": list(lora.on)}
        return of_lora | {"base": str(self.base), "checksum": self.checksum}

    @torch.no_grad()
    def merged(self, own: Mapping[str, Tensor], config: ModelConfig) -> dict[str, Tensor]:
        """Return the base with scale B A added to the adapted matrices; the sum is computed in fp32 and rounded once.

        Args:
            own: the adapters' unsharded parameters, on the CPU, in the dtype that the run used for the base.

        Raises:
            ValueError: the base's folder is missing, or its weights have changed since the run began.
            OSError: it cannot be read.
        """
        if not self.base.is_dir() or checksum_of(self.base) != self.checksum:
            raise ValueError(f"the run trains adapters of the weights in {self.base}, which are not there any more")
        dtype = next(iter(own.values())).dtype
        model = TransformerLM(config, device="meta", dtype=dtype).to_empty(device="cpu")
        load_hf_weights(model, self.base)
        weights = {name: parameter.detach() for name, parameter in model.named_parameters()}
        for name in own:
            if name.endswith(".lora_A.weight"):
                module = name.removesuffix(".lora_A.weight")
                a, b = own[name].float(), own[f"{module}.lora_B.weight"].float()
                weight = weights[f"{module}.weight"]
                weight.copy_(weight.float().addmm_(b, a, alpha=self.lora.scale))
        return weights


def shapes_of(lora: Lora, config: ModelConfig) -> dict[str, tuple[int, int]]:
    """The parameters of adapters in a model; raises ValueError if a matrix is smaller than the rank."""
    return adapter_shapes(TransformerLM(config, device="meta"), lora)


def checksum_of(folder: Path) -> str:
    """Return a checksum of a Hugging Face folder's weights, 8 hexadecimal digits; raises what ``open_weights`` does."""
    found = 0
    with ExitStack() as stack:
        for name, file in sorted(open_weights(folder, stack).items()):
            part = file.get_slice(name)
            head = f"{name} {part.get_shape()} {part.get_dtype()}".encode()
            row = part[:1].contiguous().view(torch.uint8).numpy().tobytes()
            found = zlib.crc32(head + row, found)
    return f"{found:08x}"


def export_adapter(folder: Path, own: Mapping[str, Tensor], adapters: AdaptersOfRun) -> list[str]:
    """Write a folder that peft loads with the base; replaces an earlier one. Returns the names of the files.

    Raises:
        ValueError: the folder exists and holds other files.
        OSError: it cannot be written.
    """
    if folder.exists() and not (folder.is_dir() and {each.name for each in folder.iterdir()} <= {CONFIG, WEIGHTS}):
        raise ValueError(f"{folder} is there and has other files than adapters; name another")
    lora = adapters.lora
    modules = sorted({to_hf_name(name).rsplit(".", 3)[1] for name in own})
    alpha = int(lora.alpha) if lora.alpha == int(lora.alpha) else lora.alpha
    described = {
        **{"peft_type": "LORA", "task_type": "CAUSAL_LM", "base_model_name_or_path": str(adapters.base)},
        **{"r": lora.rank, "lora_alpha": alpha, "target_modules": modules, "lora_dropout": 0.0, "bias": "none"},
        **{"fan_in_fan_out": False, "use_rslora": False, "use_dora": False, "init_lora_weights": True},
        **{"modules_to_save": None, "inference_mode": True},
    }
    with published(folder) as hidden:
        weights = {f"base_model.model.{to_hf_name(name)}": tensor.contiguous() for name, tensor in own.items()}
        save_file(weights, hidden / WEIGHTS, metadata={"format": "pt"})
        (hidden / CONFIG).write_text(json.dumps(described, indent=2) + "\n", encoding="utf-8")
    return [CONFIG, WEIGHTS]
