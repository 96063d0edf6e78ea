"""What a block with a written-out backward computes a second time, and what that costs.

Backward needs all that ``costs/kept.py`` lists, so what is not kept runs again, once. Products cost floating-point
operations, the rest passes over memory: at a device's peaks both are seconds, a lower bound that puts choices in an
order.

    recomputed(config, 1, 8192, PRECISIONS["bf16"], "products").seconds(hardware, "bf16")
"""

from dataclasses import dataclass

from cs336_systems.config import ModelConfig, Precision
from cs336_systems.costs.kept import flops_again, kept_names
from cs336_systems.hardware import Hardware

WORDS = {
    "normed1": "first norm",
    "qkv": "q, k, v",
    "attended": "attention",
    "residual": "output projection",
    "normed2": "second norm",
    "gate_up": "gate and up",
    "product": "SwiGLU",
}
"""What runs again where an activation is not kept, in the order of forward: backward needs them all."""


@dataclass(frozen=True)
class Recomputed:
    """What one block computes a second time."""

    names: tuple[str, ...]
    flops: int
    """Of matrix products and attention, causal."""
    traffic_bytes: int
    """Of norms, rotation and SwiGLU."""

    def seconds(self, hardware: Hardware, matmul_dtype: str) -> float:
        """At the device's published peaks.

        Raises:
            ValueError: they are not published.
        """
        flops_per_s, bytes_per_s = hardware.peaks(matmul_dtype)
        return self.flops / flops_per_s + self.traffic_bytes / bytes_per_s


def recomputed(config: ModelConfig, batch_size: int, seq_len: int, precision: Precision, keep: str) -> Recomputed:
    """What one block computes a second time.

    Raises:
        ValueError: no such level or switch.
    """
    kept = kept_names(keep)
    names = tuple(name for name in WORDS if name not in kept)
    tokens, width = batch_size * seq_len, precision.parameter_bytes
    stream = tokens * config.d_model * width
    traffic = {
        "normed1": 2 * stream,
        "qkv": 2 * tokens * (config.d_query + config.d_kv) * width,  # rotated in place
        "residual": 4 * stream,  # and its norm
        "normed2": 0 if "residual" in names else 2 * stream,
        "product": tokens * config.d_ff * width,  # written in the pass of SwiGLU's backward
    }
    attention = 2 * tokens * seq_len * config.d_query
    flops = flops_again(config, batch_size, seq_len, keep, attention)
    return Recomputed(names, flops, sum(traffic.get(name, 0) for name in names))
