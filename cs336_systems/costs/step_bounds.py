"""The least time that each kind of work in a training step can take, phase by phase, at a device's published peaks.

    least = least_ms(config, 1, 32_768, PRECISIONS["bf16"], find_hardware("NVIDIA H200"), n_shards=2)
    least["backward", "attention"]

Of a written-out step, whose head takes its gradients in forward. Kinds are those of ``profiling/communication.py``:

    products        every matrix product once, at the dtype's dense peak
    attention       scores and values, 2 products in forward and 5 in backward, the causal half
    elementwise     what lies between them, at memory's rate: each tensor read and written once by fused kernels
    optimizer       parameter, gradient and moments read, all but the gradient written, of this rank's shard

Communication and idling need not be, and are not listed. What a step runs again because it was not kept is above the
bound. Statistics, gains and tables of angles are left out, as is what comes with overlapping kinds: a product leaves
memory nearly idle, so the sum of all parts is no bound of the step.
"""

from cs336_systems.config import ModelConfig, Precision
from cs336_systems.costs.flops import forward_flops
from cs336_systems.hardware import Hardware

MS = 1e3


def least_ms(
    config: ModelConfig, batch_size: int, seq_len: int, precision: Precision, hardware: Hardware, *, n_shards: int = 1
) -> dict[tuple[str, str], float]:
    """Milliseconds by phase and kind, of one rank.

    Raises:
        ValueError: the device's peaks are not published.
    """
    flops_per_s, bytes_per_s = hardware.peaks(precision.matmul_dtype)
    flops, width, tokens = forward_flops(config, batch_size, seq_len), precision.parameter_bytes, batch_size * seq_len
    blocks, stream, inner = flops.projections + flops.feed_forward, config.d_model, config.d_ff
    rotated, words = config.d_query + config.d_kv, config.vocab_size
    forward = config.n_layers * (2 * stream + 2 * rotated + 4 * stream + 3 * inner)  # norm, rotation, norm, SwiGLU
    forward += 2 * stream + 2 * stream + 2 * words  # embedding, final norm, rows of logits
    backward = config.n_layers * (5 * inner + 4 * stream + 2 * rotated + 4 * stream) + 3 * stream + stream
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
    least = {part: MS * n / flops_per_s for part, n in multiplied.items()}
    return least | {(phase, kinds[phase]): MS * width * n / bytes_per_s for phase, n in moved.items()}
