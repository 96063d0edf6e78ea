"""The activations that a block with a hand-written backward saves in forward, their bytes, and the recompute they save.

``KEPT`` is the one table. A block always keeps its input. Whatever else it keeps costs memory and saves recomputation.
Each of the four levels keeps everything of the level before, and adds:

    input      the input and the statistics of both norms: backward recomputes the whole forward
    attention  attention's output and log-sum-exp: attention, which alone is quadratic in the sequence, runs once
    products   the results of matmuls: backward recomputes only norms and SwiGLU, which are cheap
    all        the outputs of norms and of SwiGLU: backward recomputes nothing

q, k and v are kept from the third level on: they take up to three times the bytes of attention's output and save one
matmul, whereas the second level saves all of attention. A switch drops the tensors of one part of the block:
``all-norm-swiglu`` is ``products``, and ``products-residual`` recomputes the output projection. Gradients are
bit-identical at every level and with every switch.

Blocks may differ: ``8xall+products`` is ``all`` in the first eight blocks and ``products`` in the rest
(``keep_of_blocks``).

    kept_names("products-ffn")                                # names of the kept tensors
    bytes_kept(config, 1, 8192, PRECISIONS["bf16"], "products")
    recomputed(config, 1, 8192, PRECISIONS["bf16"], "products").seconds(hardware, "bf16")

Backward recomputes every tensor that is not kept, once. Matmuls cost FLOPs, the rest costs memory traffic; divided by a
device's peaks, both are seconds: a lower bound, used to rank choices.

Sizes: B batch, S sequence, R = B S tokens, D d_model, H heads, K key/value heads, E d_head, Q = H E the width of q,
P = (H + 2 K) E that of q | k | v, F d_ff.
"""

import re
from dataclasses import dataclass
from math import prod

from cs336_systems.config import ModelConfig, Precision, Recipe, check_known
from cs336_systems.costs.memory import WIDE
from cs336_systems.hardware import Hardware

STORED = Recipe()
"""The recipe of matmuls that are not quantized."""
SCALED_BLOCK = 128
"""Elements per scale in blockwise scaling."""
SLOPES_BLOCK = 8, 256
"""Rows and columns of SwiGLU's output that share a slope."""

LEVELS = ("input", "attention", "products", "all")

SWITCHES = ("norm", "qkv", "attention", "residual", "ffn", "swiglu")
"""Each switch, written after a level with a hyphen, drops, in this order: the outputs of both norms; q, k and v;
attention's output and log-sum-exp; the residual stream between attention and feed-forward; everything of the
feed-forward; SwiGLU's output."""


@dataclass(frozen=True)
class KeptTensor:
    """A row of the table."""

    name: str
    shape: tuple[str, ...]
    """Letters of the legend above."""
    level: str
    """The lowest level that keeps it."""
    switches: tuple[str, ...]
    """Switches that drop it."""
    product: tuple[str, ...] = ()
    """Sizes (m, k, n) of the matmul that recomputes it, if any; attention's two are counted elsewhere."""
    statistic: bool = False
    """Whether it is kept in at least fp32, whatever the block's dtype."""
    operand: bool = False
    """Whether only matmuls read it. If these are quantized, it is kept in the form in which they read it: transposed,
    one byte per element, with its scale."""


KEPT = (
    KeptTensor("x", ("B", "S", "D"), "input", ()),
    KeptTensor("rstd1", ("R",), "input", (), statistic=True),
    KeptTensor("rstd2", ("R",), "input", (), statistic=True),
    KeptTensor("attended", ("R", "Q"), "attention", ("attention",)),
    KeptTensor("lse", ("B", "H", "S"), "attention", ("attention",), statistic=True),
    KeptTensor("qkv", ("R", "P"), "products", ("qkv",), ("R", "D", "P")),
    KeptTensor("residual", ("R", "D"), "products", ("residual",), ("R", "Q", "D")),
    KeptTensor("gate_up", ("R", "2F"), "products", ("ffn",), ("R", "D", "2F")),
    KeptTensor("normed1", ("R", "D"), "all", ("norm",), operand=True),
    KeptTensor("normed2", ("R", "D"), "all", ("norm",), operand=True),
    KeptTensor("product", ("R", "F"), "all", ("swiglu", "ffn"), operand=True),
)
"""The rows in the order of their levels."""
OPERANDS = tuple(row.name for row in KEPT if row.operand)
"""Names of the rows that nothing but matmuls loads."""


def kept_names(keep: str, *, quantized: bool = False) -> tuple[str, ...]:
    """The names in ``KEPT`` that a block keeps, for a level and any switches, such as ``all-norm-swiglu``.

    Args:
        quantized: whether the block's matmuls are quantized. The names then include each kept operand's scale
            (``normed1_scale``) and, at every level, ``absmax`` of forward's operands and SwiGLU's ``slopes``.

    Raises:
        ValueError: there is no such level or switch; the message suggests the nearest names.
    """
    level, *switches = keep.split("-")
    if level == "autograd" and switches:
        raise ValueError(f"keep {keep!r}: a case names what autograd recomputes as checkpoint, keep is autograd alone")
    check_known("level", level, LEVELS, f" in what to keep, {keep!r}")
    for switch in switches:
        check_known("switch", switch, SWITCHES, f" in what to keep, {keep!r}")
    levels = LEVELS[: LEVELS.index(level) + 1]
    rows = [row for row in KEPT if row.level in levels and not set(row.switches) & set(switches)]
    scales = [f"{row.name}_scale" for row in rows if row.operand and quantized]
    return (*(row.name for row in rows), *scales, *(["absmax", "slopes"] if quantized else []))


_COUNTED = re.compile(r"([1-9]\d{0,8})x(.*)")


def keep_of_blocks(keep: str, n_layers: int) -> tuple[str, ...]:
    """The level of each block, in order; ``8xall+4xproducts+attention`` has a count in every part but the last.

    Raises:
        ValueError: no such level or switch, a part without a count, or no block left for the last part.
    """
    *counted, rest = keep.split("+")
    found: list[str] = []
    for part in counted:
        match = _COUNTED.fullmatch(part)
        if match is None:
            raise ValueError(f"{part!r} in what to keep, {keep!r}, must say of how many blocks: 8xall+products")
        kept_names(match[2])
        found += [match[2]] * int(match[1])
    kept_names(rest)
    if counted and len(found) >= n_layers:
        raise ValueError(f"what to keep, {keep!r}, leaves none of {n_layers} blocks for {rest}")
    return (*found, *[rest] * (n_layers - len(found)))


def default_keep(kernels: str, matmul_dtype: str) -> str:
    """The default level: ``products`` for blocks with a hand-written backward, else what autograd keeps."""
    return "autograd" if (kernels, matmul_dtype) == ("reference", "same") else "products"


def _sizes(config: ModelConfig, batch_size: int, seq_len: int) -> dict[str, int]:
    return {
        "B": batch_size,
        "S": seq_len,
        "R": batch_size * seq_len,
        "D": config.d_model,
        "P": config.d_qkv,
        "Q": config.d_query,
        "H": config.n_heads,
        "F": config.d_ff,
        "2F": 2 * config.d_ff,
    }


def recomputed_flops(config: ModelConfig, batch_size: int, seq_len: int, keep: str, attention: int) -> int:
    """FLOPs of the matmuls and attention that one block's backward recomputes.

    Args:
        attention: FLOPs of attention's forward.

    Raises:
        ValueError: no such level or switch.
    """
    sizes, names = _sizes(config, batch_size, seq_len), kept_names(keep)
    dropped = [row for row in KEPT if row.name not in names and row.product]
    products = sum(2 * prod(sizes[letter] for letter in row.product) for row in dropped)
    return products + (attention if "attended" not in names else 0)


def kept_sizes(
    config: ModelConfig, batch_size: int, seq_len: int, precision: Precision, keep: str, recipe: Recipe = STORED
) -> dict[str, int]:
    """Bytes of each tensor that one block keeps, by name.

    Args:
        recipe: quantization of its matmuls; ``STORED`` for a block that a recipe leaves unquantized.

    Raises:
        ValueError: no such level or switch, or a precision with autocast, which these blocks do not support.
    """
    if precision.autocast:
        raise ValueError(f"blocks with a hand-written backward run in one dtype: {precision.name} is not served")
    sizes = _sizes(config, batch_size, seq_len)
    names, narrow = kept_names(keep), precision.parameter_bytes
    found = {"absmax": 4 * WIDE} if recipe.scaling == "tensor" and recipe.quantized else {}
    for row in (row for row in KEPT if row.name in names):
        shape = [sizes[letter] for letter in row.shape]
        if row.operand and recipe.quantized:
            tokens, width = shape
            scales = {"tensor": 1, "row": width, "block": width * -(-tokens // SCALED_BLOCK)}[recipe.scaling]
            found |= {row.name: tokens * width, f"{row.name}_scale": scales * WIDE}
        else:
            found[row.name] = prod(shape) * (max(narrow, WIDE) if row.statistic else narrow)
    return found


def maxima_shapes(config: ModelConfig, tokens: int, recipe: Recipe) -> dict[str, tuple[int, ...]]:
    """Shapes, by name, of the fp32 maxima that a block keeps at every level if its recipe has one scale per tensor."""
    if not recipe.quantized or recipe.scaling != "tensor":
        return {}
    rows, columns = SLOPES_BLOCK
    return {"absmax": (4,), "slopes": (-(-tokens // rows), -(-config.d_ff // columns))}


def bytes_kept(
    config: ModelConfig, batch_size: int, seq_len: int, precision: Precision, keep: str, recipe: Recipe = STORED
) -> int:
    """Bytes that one block keeps; arguments and errors are those of ``kept_sizes``."""
    return sum(kept_sizes(config, batch_size, seq_len, precision, keep, recipe).values())


@dataclass(frozen=True)
class Recomputed:
    """The part of one block's forward that its backward recomputes."""

    flops: int
    """FLOPs of matmuls and attention, causal."""
    traffic_bytes: int
    """Bytes that norms, rotation and SwiGLU move."""

    def seconds(self, hardware: Hardware, matmul_dtype: str) -> float:
        """Seconds at the device's published peaks.

        Raises:
            ValueError: the peaks are not published.
        """
        flops_per_s, bytes_per_s = hardware.peaks(matmul_dtype)
        return self.flops / flops_per_s + self.traffic_bytes / bytes_per_s


def recomputed(config: ModelConfig, batch_size: int, seq_len: int, precision: Precision, keep: str) -> Recomputed:
    """The part of one block's forward that its backward recomputes.

    Raises:
        ValueError: no such level or switch.
    """
    kept = kept_names(keep)
    tokens, width = batch_size * seq_len, precision.parameter_bytes
    stream = tokens * config.d_model * width
    traffic = {
        "normed1": 2 * stream,
        "qkv": 2 * tokens * (config.d_query + config.d_kv) * width,  # rotated in place
        "residual": 4 * stream,  # and its norm
        "normed2": 2 * stream if "residual" in kept else 0,
        "product": tokens * config.d_ff * width,  # written in the pass of SwiGLU's backward
    }
    attention = 2 * tokens * seq_len * config.d_query
    flops = recomputed_flops(config, batch_size, seq_len, keep, attention)
    return Recomputed(flops, sum(n_bytes for name, n_bytes in traffic.items() if name not in kept))
