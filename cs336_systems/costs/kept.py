"""What a block with a written-out backward keeps from forward to backward: a choice, and its exact bytes.

``KEPT`` is the one table. A block keeps its input always. What else it keeps is spent memory that saves backward from
computing it again. Four levels, each holding all of the one before it:

    input      the input and the statistics of both norms: backward runs the whole forward again
    attention  and attention's output with its log-sum-exp: attention, alone quadratic in the sequence, runs once
    products   and the results of matrix products: none is computed twice; norms and SwiGLU, which are cheap, are
    all        and the outputs of norms and of SwiGLU: nothing is computed twice

q, k and v come with the third level: keeping them costs up to three times the bytes of attention's output, and saves
one product where the second level saves all of attention. A switch drops what its part of the block would keep:
``all-norm-swiglu`` is ``products``, and ``products-residual`` computes the output projection again. The gradients are
the same bits at each level and switch.

Blocks may differ: ``8xall+products`` keeps all of the first eight and products of the rest (``keep_of_blocks``).

    kept_names("products-ffn")                                # what is kept
    bytes_kept(config, 1, 8192, PRECISIONS["bf16"], "products")

Sizes: B batch, S sequence, R = B S tokens, D d_model, H heads, K key/value heads, E d_head, Q = H E the width of q,
P = (H + 2 K) E that of q | k | v, F d_ff.
"""

import re
from dataclasses import dataclass
from math import prod

from cs336_systems.config import ModelConfig, Precision, Recipe, did_you_mean
from cs336_systems.costs.activations import WIDE, SavedTensor, total_bytes

STORED = Recipe()
"""Products of tensors as they are stored."""
SCALED_BLOCK = 128
"""Numbers that share a scale by block."""
SLOPES_BLOCK = (8, 256)
"""Tokens and columns of SwiGLU's result of which the steepest slope is kept (``kernels/swiglu.py``)."""

LEVELS = ("input", "attention", "products", "all")

SWITCHES = {
    "norm": "the outputs of both norms",
    "qkv": "queries, keys and values",
    "attention": "attention's output and its log-sum-exp",
    "residual": "the stream between attention and feed-forward",
    "ffn": "all of the feed-forward",
    "swiglu": "SwiGLU's output",
}
"""What each drops; by hyphens after a level."""


@dataclass(frozen=True)
class KeptTensor:
    """A row of the table."""

    name: str
    shape: tuple[str, ...]
    """Letters of the legend above."""
    level: str
    """The lowest that keeps it."""
    switches: tuple[str, ...]
    """Those that drop it."""
    again: str
    """How backward has it where it is not kept."""
    product: tuple[str, ...] = ()
    """Sizes (m, k, n) of the matrix product that this takes, if any; attention's two are counted elsewhere."""
    statistic: bool = False
    """At least fp32, whatever the block's dtype."""
    operand: bool = False
    """Read by products alone: where these are quantized, kept as they read it, transposed, a byte each, and its scale
    beside it."""


KEPT = (
    KeptTensor("x", ("B", "S", "D"), "input", (), "never: the block's input"),
    KeptTensor("rstd1", ("R",), "input", (), "norm of x, where that was computed again", statistic=True),
    KeptTensor("rstd2", ("R",), "input", (), "norm of residual, where x was computed again", statistic=True),
    KeptTensor("attended", ("R", "Q"), "attention", ("attention",), "attention of qkv"),
    KeptTensor("lse", ("B", "H", "S"), "attention", ("attention",), "attention of qkv", statistic=True),
    KeptTensor("qkv", ("R", "P"), "products", ("qkv",), "product of normed1", ("R", "D", "P")),
    KeptTensor("residual", ("R", "D"), "products", ("residual",), "x and the product of attended", ("R", "Q", "D")),
    KeptTensor("gate_up", ("R", "2F"), "products", ("ffn",), "product of normed2", ("R", "D", "2F")),
    KeptTensor("normed1", ("R", "D"), "all", ("norm",), "norm of x", operand=True),
    KeptTensor("normed2", ("R", "D"), "all", ("norm",), "norm of residual", operand=True),
    KeptTensor(
        *("product", ("R", "F"), "all", ("swiglu", "ffn"), "SwiGLU of gate_up, in the pass of its backward"),
        operand=True,
    ),
)
"""In the order of their levels."""
OPERANDS = tuple(row.name for row in KEPT if row.operand)
"""Of what a block may keep, those that nothing but products reads."""


def kept_names(keep: str, *, quantized: bool = False) -> tuple[str, ...]:
    """The names in ``KEPT`` that a block keeps, for a level with any switches after it: ``all-norm-swiglu``.

    Args:
        quantized: whether the block's products are; with an operand they keep its scale, ``normed1_scale``, and always,
            small as they are, ``absmax`` of all that they read in forward and SwiGLU's ``slopes``.

    Raises:
        ValueError: no such level or switch; the message has the nearest names.
    """
    level, *switches = keep.split("-")
    check_known("level", level, LEVELS, f" in what to keep, {keep!r}")
    for switch in switches:
        check_known("switch", switch, tuple(SWITCHES), f" in what to keep, {keep!r}")
    levels = LEVELS[: LEVELS.index(level) + 1]
    rows = [row for row in KEPT if row.level in levels and not set(row.switches) & set(switches)]
    scales = [f"{row.name}_scale" for row in rows if row.operand and quantized]
    return (*(row.name for row in rows), *scales, *(["absmax", "slopes"] if quantized else []))


_COUNTED = re.compile(r"([1-9]\d{0,8})x(.*)")


def keep_of_blocks(keep: str, n_layers: int) -> tuple[str, ...]:
    """What each block keeps, the first one first: ``8xall+4xproducts+attention`` counts all but the last part.

    Raises:
        ValueError: no such level or switch, a part without its number, or none of the blocks left for the last.
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


def check_known(what: str, value: str, known: tuple[str, ...], where: str = "") -> None:
    """Raise ValueError, with the nearest of the known, for a value that is none of them."""
    if value not in known:
        hint = did_you_mean(value, known, show=repr)
        raise ValueError(f"unknown {what} {value!r}{where}: {hint}known are {', '.join(known)}")


def default_keep(kernels: str, matmul_dtype: str) -> str:
    """What is kept unless it is said: products, where blocks must be written out."""
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


def flops_again(config: ModelConfig, batch_size: int, seq_len: int, keep: str, attention: int) -> int:
    """Matrix-product operations that one block's backward runs a second time; ``attention`` are those of attention.

    Raises:
        ValueError: no such level or switch.
    """
    sizes, names = _sizes(config, batch_size, seq_len), kept_names(keep)
    dropped = [row for row in KEPT if row.name not in names and row.product]
    products = sum(2 * prod(sizes[letter] for letter in row.product) for row in dropped)
    return products + (attention if "attended" not in names else 0)


def kept_tensors(
    config: ModelConfig,
    batch_size: int,
    seq_len: int,
    precision: Precision,
    keep: str,
    recipe: Recipe = STORED,
    *,
    fused: bool = False,
) -> list[SavedTensor]:
    """What one block keeps, with shapes and bytes.

    Args:
        recipe: of its products; one of a block that the recipe skips is without.
        fused: whether its kernels are: with a scale for each tensor, these keep SwiGLU's slopes.

    Raises:
        ValueError: no such level or switch, or a precision with autocast, in which these blocks do not run.
    """
    if precision.autocast:
        raise ValueError(f"blocks with a written backward run in one dtype: {precision.name} is not served")
    sizes = _sizes(config, batch_size, seq_len)
    names, narrow = kept_names(keep), precision.parameter_bytes
    found = []
    if recipe.scaling == "tensor" and recipe.quantized:
        found.append(SavedTensor("absmax", "input", (4,), WIDE))
        if fused:
            blocks = tuple(-(-sizes[letter] // n) for letter, n in zip("RF", SLOPES_BLOCK, strict=True))
            found.append(SavedTensor("slopes", "input", blocks, WIDE))
    for row in (row for row in KEPT if row.name in names):
        shape = tuple(sizes[letter] for letter in row.shape)
        if not (row.operand and recipe.quantized):
            n_bytes = max(narrow, WIDE) if row.statistic else narrow
            found.append(SavedTensor(row.name, row.level, shape, n_bytes))
            continue
        tokens, width = shape
        scale = {"tensor": (), "row": (width, 1), "block": (width, -(-tokens // SCALED_BLOCK))}[recipe.scaling]
        found.append(SavedTensor(row.name, row.level, (width, tokens), 1))
        found.append(SavedTensor(f"{row.name}_scale", row.level, scale, WIDE))
    return found


def bytes_kept(
    config: ModelConfig, batch_size: int, seq_len: int, precision: Precision, keep: str, recipe: Recipe = STORED
) -> int:
    """Bytes that one block keeps; arguments and errors as of ``kept_tensors``."""
    return total_bytes(kept_tensors(config, batch_size, seq_len, precision, keep, recipe))
