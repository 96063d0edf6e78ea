"""The speed of light of training: the least time per token if every matrix product ran at its dtype's dense peak.

    light = speed_of_light(resolve_size("qwen2.5-0.5b"), 1024, find_hardware(name), block_dtype="fp8")
    light.seconds_per_token           # of forward and backward on one device; None where a peak is unknown
    light.share(tokens_per_s)         # of an achieved rate; 1 is the bound itself

A step has parts, which may multiply in dtypes of their own:

    blocks      the four products of each block, 6 x their parameters per token
    attention   scores and values, 6 x layers x heads x d_head x context per token: the causal half, counted once
    head        6 x vocabulary x d_model per token
    adapters    6 x their parameters, if they are trained in place of the weights (LoRA); blocks and head, whose frozen
                weights get no gradients, are then 4 x their parameters

each divided by the peak of its dtype, summed, and divided by the number of devices. With blocks in fp8 the bound falls
by less than half, as the other parts stay; in one dtype a share of it is MFU. Recomputation and operations that only
move bytes are not counted.

``least_ms`` bounds each kind of work in each phase instead, passes over memory included:

    least = least_ms(config, 1, 32_768, PRECISIONS["bf16"], find_hardware("NVIDIA H200"), n_shards=2)
    least["backward", "attention"]
"""

from collections.abc import Mapping
from dataclasses import dataclass

from cs336_systems.config import Lora, ModelConfig, Precision
from cs336_systems.costs.block import passes
from cs336_systems.costs.flops import forward_flops
from cs336_systems.hardware import Hardware

_TRAINING = 3
"""Forward's products, and two more for each in backward."""
_FROZEN = 2
"""As many if the weight is frozen: backward computes only the input's gradient."""


@dataclass(frozen=True)
class LightPart:
    """The least time of one part of a step."""

    dtype: str
    """The dtype of its matmuls, one of ``hardware.MATMUL_DTYPES``."""
    flops_per_token: float
    seconds_per_token: float | None
    """On all devices together; None where the peak is unknown."""


@dataclass(frozen=True)
class SpeedOfLight:
    """The least time of a token, by part of the step."""

    parts: Mapping[str, LightPart]

    @property
    def seconds_per_token(self) -> float | None:
        """Seconds of all parts together on all devices; None unless each part's peak is known."""
        seconds = [part.seconds_per_token for part in self.parts.values()]
        return None if None in seconds else sum(filter(None, seconds))

    def share(self, tokens_per_s: float) -> float | None:
        """The share of the speed of light that a rate of tokens reaches; None where that is unknown."""
        return None if self.seconds_per_token is None else tokens_per_s * self.seconds_per_token


def speed_of_light(
    config: ModelConfig,
    context_length: int,
    hardware: Hardware | None,
    *,
    block_dtype: str = "bf16",
    dtype: str = "bf16",
    n_stored_blocks: int = 0,
    n_devices: int = 1,
    lora: Lora | None = None,
) -> SpeedOfLight:
    """The bound of training on sequences of ``context_length`` tokens.

    Args:
        hardware: None for a device without published peaks: the operations are counted, the times unknown.
        block_dtype: of the blocks' products, where those are quantized "fp8".
        dtype: of attention and head.
        n_stored_blocks: blocks that the recipe skips, whose products stay in ``dtype``; they are a separate part.
        lora: adapters, in ``dtype``, that are trained instead of the weights.

    Raises:
        ValueError: no such dtype, or no device.
    """
    if n_devices < 1:
        raise ValueError(f"n_devices must be positive, got {n_devices}")
    forward = forward_flops(config, 1, context_length)
    products = forward.projections + forward.feed_forward
    stored = products * n_stored_blocks / config.n_layers
    counted = {
        "blocks": (block_dtype, products - stored),
        **({"stored blocks": (dtype, stored)} if n_stored_blocks else {}),
        "attention": (dtype, forward.attention),
        "head": (dtype, forward.head),
        **({"adapters": (dtype, 2 * lora.n_parameters(config) * context_length)} if lora else {}),
    }
    parts = {}
    for name, (part_dtype, flops) in counted.items():
        times = _TRAINING if lora is None or name in ("attention", "adapters") else _FROZEN
        per_token = times * flops / context_length
        peak = hardware.peak(part_dtype) if hardware else None
        parts[name] = LightPart(part_dtype, per_token, per_token / (peak * n_devices) if peak else None)
    return SpeedOfLight(parts)


def least_ms(
    config: ModelConfig, batch_size: int, seq_len: int, precision: Precision, hardware: Hardware, *, n_shards: int = 1
) -> dict[tuple[str, str], float]:
    """Least milliseconds of each phase and kind of work on one rank, at the device's published peaks.

    The step is that of hand-written blocks, whose head takes its gradients in forward. Kinds are those of
    ``profiling/communication.py``:

        products        every matmul once, at the dtype's dense peak
        attention       scores and values, 2 matmuls in forward and 5 in backward, the causal half
        elementwise     all operations in between, at memory's rate: fused kernels read and write each tensor once
        optimizer       parameter, gradient and moments read, all but the gradient written, of this rank's shard

    Recomputation is above the bound. Statistics, gains and tables of angles are left out. A matmul leaves memory nearly
    idle, so kinds can overlap and the sum of all parts is no bound of the step.

    Raises:
        ValueError: the device's peaks are not published.
    """
    flops_per_s, bytes_per_s = hardware.peaks(precision.matmul_dtype)
    flops, width, tokens = forward_flops(config, batch_size, seq_len), precision.parameter_bytes, batch_size * seq_len
    blocks, stream, words = flops.projections + flops.feed_forward, config.d_model, config.vocab_size
    forward, backward = (config.n_layers * each for each in passes(config))
    forward += 2 * stream + 2 * stream + 2 * words  # embedding, final norm, rows of logits
    backward += 3 * stream + stream
    moved = {
        "forward": tokens * forward,
        "backward": tokens * backward + words * config.d_model,  # the embedding's gradient is written whole
        "optimizer": 7 * config.n_parameters // n_shards,
    }
    multiplied = {
        ("forward", "products"): blocks + 3 * flops.head,
        ("forward", "attention"): flops.attention,
        ("backward", "products"): 2 * blocks,
        ("backward", "attention"): 5 * flops.attention // 2,
    }
    kinds = {"forward": "elementwise", "backward": "elementwise", "optimizer": "optimizer"}
    least = {part: 1e3 * n / flops_per_s for part, n in multiplied.items()}
    return least | {(phase, kinds[phase]): 1e3 * width * n / bytes_per_s for phase, n in moved.items()}
