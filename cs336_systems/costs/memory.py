"""Bytes that a training step needs: its states, and its peak.

States follow from the parameter count, activations are listed in ``costs/activations.py``. The peak is the largest of
a few moments, each the sum of what is alive then:

    forward   attention or feed-forward of a block, or the loss over the vocabulary, above the parameters
    backward  the loss (all that forward left), feed-forward or attention of a block (the gradients of later blocks
              alive, and what the checkpointing policy keeps or has recomputed), or the end (all gradients)
    step      the same above parameters and optimizer state, or the optimizer's own temporaries

On CUDA, ``torch.cuda.max_memory_allocated`` counts blocks, not tensors: the caching allocator's rounding and cuBLAS's
workspaces are part of the prediction there. Limits: eager execution; fragmentation and the CUDA context come on top
(``nvidia-smi`` shows them, ``max_memory_allocated`` does not); compiled models save less. Sizes are in bytes.
"""

from collections.abc import Callable
from dataclasses import dataclass
from math import prod

from cs336_systems.config import MODES, OPTIMIZERS, ModelConfig, Precision
from cs336_systems.costs import activations
from cs336_systems.costs.activations import WIDE, SavedTensor
from cs336_systems.costs.checkpointing import canonical_policy, kept_in_backward, make_plan
from cs336_systems.costs.fsdp import model_units

MIB = 1024**2

CUBLAS_WORKSPACE_BYTES = 32 * MIB
"""What torch allocates per cuBLAS handle on Hopper and Blackwell (8.1 MiB before); each thread has a handle, and
backward runs on a thread of its own (aten/src/ATen/cuda/CublasHandlePool.cpp)."""


def cuda_block_bytes(n_bytes: int) -> int:
    """Bytes that torch's caching allocator sets aside for a tensor, the remainder of its segment included.

    Blocks are multiples of 512 bytes, cut from segments of 2 MiB (tensors up to 1 MiB), 20 MiB (up to 10 MiB) or the
    next multiple of 2 MiB; a remainder of at most 1 MiB is not cut off but counted with the last tensor, here spread
    evenly (c10/cuda/CUDACachingAllocator.cpp: kSmallSize, kMinLargeAlloc, kLargeBuffer, kRoundLarge, should_split).
    """
    n_bytes = -(-n_bytes // 512) * 512
    if n_bytes <= MIB:
        return n_bytes
    segment = 20 * MIB if n_bytes < 10 * MIB else -(-n_bytes // (2 * MIB)) * 2 * MIB
    per_segment, remainder = divmod(segment, n_bytes)
    return n_bytes + remainder // per_segment if remainder <= MIB else n_bytes


def parameter_bytes(config: ModelConfig, precision: Precision) -> int:
    """All parameters, a tied embedding counted once; gradients take the same."""
    return config.n_parameters * precision.parameter_bytes


def adamw_traffic_bytes(config: ModelConfig, precision: Precision) -> int:
    """Least bytes that one AdamW step moves: reads parameter, gradient, both moments; writes all but the gradient."""
    return 7 * parameter_bytes(config, precision)


def rotary_bytes(config: ModelConfig) -> int:
    """The cos and sin tables."""
    return 2 * config.context_length * (config.d_head // 2) * WIDE


PARTS = (
    "parameters",
    "gathered parameters",
    "optimizer state",
    "gradients",
    "kept inputs",
    "activations",
    "loss",
    "temporaries",
    "tables and workspaces",
)
"""What is alive at a moment. Gathered are those that FSDP has whole for a while. Kept inputs are those of segments, and
results that a selective policy keeps; activations are those of blocks, autocast's copies of their matrices included;
temporaries live while one operation runs."""


@dataclass(frozen=True)
class PeakMemory:
    """The largest moment of a pass, and every moment that was considered, in bytes alive."""

    moment: str
    n_bytes: int
    moments: dict[str, int]
    parts: dict[str, int]
    """Of ``PARTS`` those that the largest moment has; they add up to it."""


def peak_memory(
    config: ModelConfig,
    batch_size: int,
    seq_len: int,
    precision: Precision,
    mode: str,
    *,
    optimizer: str = "reference",
    checkpoint: str = "none",
    device_type: str = "cuda",
    workspace_bytes: int = CUBLAS_WORKSPACE_BYTES,
) -> PeakMemory:
    """Predict the peak of allocated memory of one pass of ``mode`` of the reference model in eager execution.

    Args:
        optimizer: ``reference`` holds one temporary as large as the largest parameter; the fused ones hold none.
        checkpoint: the policy that says what is kept for backward (see ``costs/checkpointing.py``).
        device_type: ``cuda`` counts the allocator's blocks, workspaces and autocast's fp32 softmax; ``cpu`` counts
            tensors.
        workspace_bytes: cuBLAS's, per thread that multiplies; ignored on the CPU.

    Raises:
        ValueError: no such mode, optimizer, policy or device type.
    """
    for name, value, known in (
        ("mode", mode, MODES),
        ("optimizer", optimizer, OPTIMIZERS),
        ("device type", device_type, ("cuda", "cpu")),
    ):
        if value not in known:
            raise ValueError(f"unknown {name} {value!r}: known are {', '.join(known)}")
    checkpoint = canonical_policy(checkpoint)
    step = _Step((config, batch_size, seq_len, precision.on(device_type)), checkpoint, device_type)
    workspaces = workspace_bytes * (1 if mode == "forward" else 2) if device_type == "cuda" else 0
    base = {"parameters": step.parameters, "tables and workspaces": rotary_bytes(config) + workspaces}
    above = step.forward_moments() if mode == "forward" else step.backward_moments()
    if mode == "step":
        base["optimizer state"] = 2 * step.parameters
        temporary = step.largest_parameter if optimizer == "reference" else 0
        above["optimizer"] = {"gradients": step.parameters, "temporaries": temporary}
    moments = {name: sum(base.values()) + sum(parts.values()) for name, parts in above.items()}
    moment = max(moments, key=lambda name: moments[name])
    alive = base | above[moment]
    parts = {part: alive[part] for part in PARTS if alive.get(part)}
    return PeakMemory(moment, moments[moment], moments, parts)


class _Step:
    """Bytes alive above parameters and optimizer state, moment by moment."""

    def __init__(self, work: tuple[ModelConfig, int, int, Precision], checkpoint: str, device_type: str) -> None:
        config, batch_size, seq_len, precision = work
        self.config, self.precision, self.checkpoint = config, precision, checkpoint
        self.block_bytes: Callable[[int], int] = cuda_block_bytes if device_type == "cuda" else int
        self.transient = activations.transient_bytes(*work)
        units = [self._states([prod(shape) for shape in unit]) for unit in model_units(config)]
        self.parameters, self.block_parameters = sum(units), units[1]
        self.largest_parameter = self._states([max(config.vocab_size, config.d_ff) * config.d_model])
        # Whose gradients a block has when backward reaches its attention: the feed-forward's and the output projection.
        self.later_parameters = (3 * config.d_ff + config.d_model) * config.d_model * precision.parameter_bytes

        self.casts = activations.block_cast_bytes(config, precision)
        self.qkv_casts = activations.qkv_cast_bytes(config, precision)
        self.head_casts = activations.head_cast_bytes(config, precision)
        attention = self._saved(activations.attention_saved_tensors(*work))
        self.block = attention + self._saved(activations.feed_forward_saved_tensors(*work)) + self.casts
        self.attention = attention + self.qkv_casts
        self.head = self._saved(activations.head_saved_tensors(*work)) + self.head_casts
        self.fp32_logits = batch_size * seq_len * config.vocab_size * WIDE

        self.input = self.block_bytes(batch_size * seq_len * config.d_model * precision.parameter_bytes)
        selected = activations.selected_tensors(*work, checkpoint)
        self.selected = self._saved(selected)
        self.selected_after_scores = self._saved(selected[4:])
        # Recomputation stops before w2's product, whose kept result nobody fetches.
        self.unfetched = self._saved(selected[8:])

    def _states(self, sizes: list[int]) -> int:
        return sum(self.block_bytes(size * self.precision.parameter_bytes) for size in sizes)

    def _saved(self, tensors: list[SavedTensor]) -> int:
        return sum(self.block_bytes(tensor.n_bytes) for tensor in tensors)

    def forward_moments(self) -> dict[str, dict[str, int]]:
        """Without gradients."""
        casts = self.config.n_layers * self.casts + self.head_casts
        return {
            moment: {"activations": casts, "temporaries": self.transient[moment]}
            for moment in ("attention", "feed-forward", "loss")
        }

    def backward_moments(self) -> dict[str, dict[str, int]]:
        """Forward with gradients, and backward."""
        config, transient = self.config, self.transient
        head_gradient = self._states([config.vocab_size * config.d_model])
        # Embedding and head each bring a gradient for a tied matrix; torch adds them in place only if autocast made a
        # fresh copy of the head's (torch/csrc/autograd/input_buffer.cpp, accumulate).
        tied_gradients = (1 if self.precision.autocast else 2) * head_gradient if config.tie_embeddings else 0
        moments = {"end of backward": {"gradients": self.parameters + tied_gradients}}
        for kept in kept_in_backward(make_plan(self.checkpoint, config.n_layers)):
            # A block widens its input for its first norm, and keeps that; it is the input itself if that is wide.
            inputs = kept.inputs - kept.blocks if self.precision.parameter_bytes == WIDE else kept.inputs
            waiting = len(kept.inputs - {kept.block})
            left = {"kept inputs": len(inputs) * self.input + waiting * self.selected}
            blocks = len(kept.blocks) * self.block
            if kept.block is None:
                # Autocast holds every cast that it made until forward ends, also those of blocks that run again.
                cached = (config.n_layers - len(kept.blocks)) * self.casts
                if config.n_layers - 1 in kept.inputs:
                    to_come = self.input + self.selected_after_scores + self.casts - self.qkv_casts
                    moments["last block's attention"] = left | {
                        "activations": blocks + cached - to_come,
                        "temporaries": transient["attention"],
                    }
                moments["loss"] = left | {"activations": blocks + cached, "loss": self.head + self.fp32_logits}
                moments["loss backward"] = left | {
                    "activations": blocks,
                    "loss": self.head,
                    "temporaries": transient["loss backward"],
                }
            else:
                left["kept inputs"] += self.unfetched
                gradients = head_gradient + (config.n_layers - 1 - kept.block) * self.block_parameters
                moments[f"block {kept.block}, feed-forward backward"] = left | {
                    "gradients": gradients,
                    "activations": blocks,
                    "temporaries": transient["feed-forward backward"],
                }
                moments[f"block {kept.block}, attention backward"] = left | {
                    "gradients": gradients + self.later_parameters,
                    "activations": blocks - self.block + self.attention,
                    "temporaries": transient["attention backward"],
                }
        return moments
