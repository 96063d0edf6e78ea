"""The speed of light of training: the least time per token if every matrix product ran at its dtype's dense peak.

    light = speed_of_light(resolve_size("qwen2.5-0.5b"), 1024, find_hardware(name), block_dtype="fp8")
    light.seconds_per_token           # of forward and backward on one device; None where a peak is unknown
    light.share(tokens_per_s)         # of an achieved rate; 1 is the bound itself

A step has three parts, which may multiply in dtypes of their own:

    blocks      the four products of each block, 6 x their parameters per token
    attention   scores and values, 6 x layers x heads x d_head x context per token: the causal half, counted once
    head        6 x vocabulary x d_model per token

each over the peak of its dtype, added up, and divided by the number of devices. With blocks in fp8 the bound falls by
less than half, as the other parts stay; in one dtype a share of it is MFU. What recomputation repeats is not
counted, nor is what only moves bytes.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from cs336_systems.config import ModelConfig
from cs336_systems.costs.flops import forward_flops
from cs336_systems.hardware import Hardware

_TRAINING = 3
"""Forward's products, and two more for each in backward."""


@dataclass(frozen=True)
class LightPart:
    """What one part of a step takes at the least."""

    dtype: str
    """Of its products, one of ``hardware.MATMUL_DTYPES``."""
    flops_per_token: float
    seconds_per_token: float | None
    """On all devices together; None where the peak is unknown."""


@dataclass(frozen=True)
class SpeedOfLight:
    """What a token takes at the least, by part of the step."""

    parts: Mapping[str, LightPart]

    @property
    def seconds_per_token(self) -> float | None:
        """All parts together, on all devices; None unless each part's peak is known."""
        seconds = [part.seconds_per_token for part in self.parts.values()]
        return None if None in seconds else sum(filter(None, seconds))

    def share(self, tokens_per_s: float) -> float | None:
        """Of the speed of light, at which a rate of tokens runs; None where that is unknown."""
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
) -> SpeedOfLight:
    """The bound of training on sequences of ``context_length`` tokens.

    Args:
        hardware: None for a device without published peaks: the operations are counted, the times unknown.
        block_dtype: of the blocks' products, where those are quantized "fp8".
        dtype: of attention and head.
        n_stored_blocks: whose products are of ``dtype`` all the same, as a recipe that skips blocks leaves them; a part
            of its own.

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
    }
    parts = {}
    for name, (part_dtype, flops) in counted.items():
        per_token = _TRAINING * flops / context_length
        peak = hardware.peak(part_dtype) if hardware else None
        parts[name] = LightPart(part_dtype, per_token, per_token / (peak * n_devices) if peak else None)
    return SpeedOfLight(parts)
