"""What quantizing to fp8 moves over memory: bytes of a token in a block, by tensor, beyond what a block in bf16 moves.

With one scale for each tensor, fused kernels, and blocks that keep at least the results of their products. The largest
magnitudes of what norms, SwiGLU and rotation write are found as they write it, and those of weights by the optimizer;
attention's output is read for its own. The gradient that comes into the block brings it along, but in the last block,
which reads it once more and is not counted so. One pass reads a tensor and writes it in fp8, as it is for a product,
transposed for the gradient of a weight, or both. Norms and SwiGLU's backward store no result besides: norms read their
input twice, SwiGLU's backward its gradient, and gate and up in the few blocks whose bounds do not exclude the largest
magnitude, which are not counted (``kernels/rms_norm_quantize.py``, ``kernels/swiglu_quantize.py``).
``tests/costs/test_quantizing.py`` counts the same in a block that runs.

    sum(quantizing_bytes(config, "all").values())     # of a token and a block
    quantizing_weights_bytes(config)                   # of a block, once a step
"""

from cs336_systems.config import ModelConfig
from cs336_systems.costs.kept import kept_names


def quantizing_bytes(config: ModelConfig, keep: str, element_bytes: int = 2) -> dict[str, int]:
    """Bytes read and written for a token of one block, forward and backward, by the tensor that products read.

    Args:
        keep: what the block keeps for backward, as of ``costs/kept.py``.
        element_bytes: of what is quantized.

    Raises:
        ValueError: the block keeps less than the results of its products, so that forward is partly repeated.
    """
    names, e = kept_names(keep), element_bytes
    if missing := {"attended", "qkv", "residual", "gate_up"}.difference(names):
        raise ValueError(f"keep {keep} computes {', '.join(sorted(missing))} again: not counted here")
    d, d_qkv, d_ff = config.d_model, config.d_qkv, config.d_ff
    rows, both = e + 1, e + 2  # a pass that writes a tensor one way, and both ways

    def norm(name: str) -> int:
        """Rows in forward; their transpose then, if it is kept, or in backward, where bf16 reads x and writes y."""
        return both - e if name in names else (rows - e) + (rows - 2 * e)

    in_two_passes, stored = 4 * e + 4, 5 * e  # SwiGLU's backward: reads dz, gate and up; writes both gradients
    if "product" not in names:
        in_two_passes, stored = in_two_passes + 1, stored + e  # and its result again
    return {
        "normed1": norm("normed1") * d,
        "attended": (e + rows + rows) * d,
        "normed2": norm("normed2") * d,
        "product": (both if "product" in names else rows) * d_ff,
        "dy": both * d,
        "dgate_up": (in_two_passes - stored) * d_ff,
        "dresidual": both * d,
        "dqkv": both * d_qkv,
    }


def quantizing_weights_bytes(config: ModelConfig, element_bytes: int = 2) -> int:
    """Bytes read and written for the weights of one block, once a step."""
    d, d_qkv, d_ff = config.d_model, config.d_qkv, config.d_ff
    return (element_bytes + 2) * (d_qkv * d + d * d + 3 * d_ff * d)
