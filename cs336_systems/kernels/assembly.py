"""Device functions in inline assembly, where Triton's own form takes more instructions or slower ones.

LOG.md counts instructions and times. Each function has a plain form for Triton's interpreter.
"""

import triton
import triton.language as tl

INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)
LOG2_E = tl.constexpr(1.4426950408889634)
CONVERT = """{{
    .reg .b16 low, high;
    cvt.rn.satfinite.{format}x2.f32 low, $2, $1;
    cvt.rn.satfinite.{format}x2.f32 high, $4, $3;
    mov.b32 $0, {{low, high}};
}}"""
E4M3, E5M2 = (tl.constexpr(CONVERT.format(format=name)) for name in ("e4m3", "e5m2"))
ROUND_PAIR = tl.constexpr("""{
    .reg .b32 pair;
    cvt.rn.bf16x2.f32 pair, $3, $2;
    shl.b32 $0, pair, 16;
    and.b32 $1, pair, 0xffff0000;
}""")


def _place(lane: int) -> str:
    """Assembly that puts four bytes, $8, each into one word, $4 to $7, as their byte ``lane``."""
    selectors = ["".join(str(4 + byte if place == lane else place) for place in (3, 2, 1, 0)) for byte in range(4)]
    return "\n".join(f"prmt.b32 ${byte}, ${4 + byte}, $8, 0x{selectors[byte]};" for byte in range(4))


PLACE = tl.constexpr(tuple(_place(lane) for lane in range(4)))


@triton.jit
def sigmoid_of(x):
    """1 / (1 + exp(-x)) of fp32 in 4 instructions; ``tl.sigmoid`` takes 12, as it sees to subnormal numbers."""
    denominator = 1.0 + tl.exp2(-LOG2_E * x)
    if INTERPRETED:
        sigmoid = 1.0 / denominator
    else:
        sigmoid = tl.inline_asm_elementwise("rcp.approx.ftz.f32 $0, $1;", "=f,f", [denominator], tl.float32, True, 1)
    return sigmoid


@triton.jit
def rounded(x, DTYPE: tl.constexpr):
    """fp32 x rounded to DTYPE, in fp32; bf16 in pairs, as a conversion of one takes a slower unit.

    The compiler joins conversions to pairs by itself in some kernels only: their SASS has F2FP then, else F2F.
    """
    if tl.bfloat16 == DTYPE and not INTERPRETED:
        y = tl.inline_asm_elementwise(ROUND_PAIR, "=r,=r,r,r", [x], tl.float32, True, 2)
    else:
        y = x.to(DTYPE).to(tl.float32)
    return y


@triton.jit
def fp8_bytes(x, DTYPE: tl.constexpr):
    """fp32 x as bytes of fp8, rounded to nearest even and saturated.

    Four conversions leave one register: ptxas 12.8 gives those wrong bytes who take a conversion's 16 bits both alone
    and joined to others, as a copy as it is and one transposed would (LOG.md).
    """
    if INTERPRETED:
        q = x.to(DTYPE).to(tl.uint8, bitcast=True)
    else:
        q = tl.inline_asm_elementwise(E4M3 if tl.float8e4nv == DTYPE else E5M2, "=r,r,r,r,r", [x], tl.uint8, True, 4)
    return q


@triton.jit
def packed(word, q, lane: tl.constexpr):
    """``word`` with the bytes q in its place of the four: those of the first row are lowest."""
    if INTERPRETED:
        word |= q.to(tl.uint32) << (8 * lane)
    else:
        word = tl.inline_asm_elementwise(PLACE[lane], "=r,=r,=r,=r,r,r,r,r,r", [word, q], tl.uint32, True, 4)
    return word
