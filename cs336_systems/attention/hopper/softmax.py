"""Forward's online softmax on Hopper: a row's maximum and sums, and rescaling of earlier results.

A consumer's 64 rows have the layout of a matmul's result: a row in four threads, two rows in each thread.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from cs336_systems.attention.hopper.primitives import NEVER

SLACK = gl.constexpr(8.0)
"""The most by which scores times log2(e) may exceed the running maximum: P is at most 256, also in fp16."""


@gluon.jit
def by_thread(scores):
    """Scores (ROWS, BLOCK_K) as (ROWS, BLOCK_K / 8, 4, 2): a row lies in four threads, of 8 columns each has 2."""
    return gl.reshape(scores, [scores.shape[0], scores.shape[1] // 8, 4, 2])


@gluon.jit
def thread_sums(p):
    """(ROWS, 4): the sum over each thread's part of a row, without communication between threads."""
    return gl.sum(gl.sum(by_thread(p), 3), 1)


@gluon.jit
def online_softmax(scores, row_max, row_sums, scale_log2):
    """Take one tile of scores (ROWS, BLOCK_K) into the running maximum and sums.

    Returns P (ROWS, BLOCK_K), ``row_max`` (ROWS,) in units of scores times log2(e), ``row_sums`` (ROWS, 4), which each
    thread has alone until the item ends, and the factor (ROWS,) of what came before; all fp32. The maximum moves only
    when it is exceeded by more than ``SLACK``: nearly all factors are then 1 (``rescaled``).
    """
    rows: gl.constexpr = gl.SliceLayout(1, scores.type.layout)
    # Neighbours first: fewer maxima wait for one another.
    tile_max = gl.max(gl.max(gl.max(by_thread(scores), 3), 1), 1) * scale_log2
    tile_max = gl.convert_layout(tile_max, rows, assert_trivial=True)
    new_max = gl.where(tile_max > row_max + SLACK, tile_max, row_max)
    # -inf - -inf is NaN: a row that has seen nothing yet subtracts 0.
    subtracted = gl.where(new_max == NEVER, 0.0, new_max)
    p = gl.exp2(scores * scale_log2 - subtracted[:, None])
    rescale = gl.exp2(row_max - subtracted)
    of_sums = gl.convert_layout(rescale, gl.SliceLayout(1, row_sums.type.layout), assert_trivial=True)
    return p, new_max, row_sums * of_sums[:, None] + thread_sums(p), rescale


@gluon.constexpr_function
def rescale_operands(n):
    """Assembly constraints: outputs, which are also the first inputs, and the factor of each."""
    return ",".join(["=f"] * n + [str(i) for i in range(n)] + ["f"] * n)


@gluon.constexpr_function
def rescale_instructions(n):
    """Multiply a thread's n numbers, alternately two of either of its rows, unless all factors in the warp are 1."""
    first, second = f"${2 * n}", f"${2 * n + 2}"
    multiply = " ".join(f"mul.f32 ${i}, ${i}, {second if i & 2 else first};" for i in range(n))
    return (
        f"{{ .reg .pred changed, any; setp.neu.f32 changed, {first}, 0f3F800000; "
        f"setp.neu.or.f32 changed, {second}, 0f3F800000, changed; vote.sync.any.pred any, changed, 0xffffffff; "
        f"@!any bra SKIP; {multiply} SKIP: }}"
    )


@gluon.jit
def rescaled(acc, rescale):
    """``acc`` (ROWS, BLOCK_D) in the layout of a matmul's result, times ``rescale`` (ROWS,); mostly a branch alone."""
    n: gl.constexpr = acc.shape[1] // 2  # numbers in each of the warpgroup's 128 threads
    return gl.inline_asm_elementwise(
        rescale_instructions(n), rescale_operands(n), [acc, rescale[:, None]], dtype=gl.float32, is_pure=False, pack=n
    )
