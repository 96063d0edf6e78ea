"""AdamW in one pass over parameters, gradients and moments, for any number of tensors at once, bf16 or fp32.

Formula (Loshchilov & Hutter 2019, algorithm 2, as in ``training/optimizer.py``), at a tensor's step t:

    g = scale grad
    m = beta1 m + (1 - beta1) g
    v = beta2 v + (1 - beta2) g^2
    p = (1 - lr weight_decay) p - lr / (1 - beta1^t)  m / (sqrt(v / (1 - beta2^t)) + eps)

in fp32, whatever the tensors' dtypes; p is updated with m and v before these are rounded. If a bf16 parameter has an
fp32 master, the master is read and updated, and the parameter becomes the rounded master.

Rounding to bf16. Neighbouring bf16 numbers differ by 1/256 to 1/128 of their size. A smaller update than half of that
is always lost by rounding to nearest, and v can never fall: 1 - beta2 = 0.001 is less than half of 1/256. So bf16
weights without masters and bf16 moments are rounded stochastically: up with a probability equal to the position between
the two neighbours, so that the mean is right (Gupta et al. 2015; for Adam's weights Ozkara et al. 2025, arXiv
2502.20566; moving averages rounded to nearest stop moving: Topollai & Choromanska 2026, arXiv 2603.16731). Adding 16
random bits to the low half of the fp32 number and truncating does exactly this, and does not change numbers that are
already bf16. fp32 tensors are never rounded this way.

Random bits. Philox-4x32 (Salmon et al. 2011) with 7 rounds, the fewest that pass BigCrush there; key: the seed;
counter: (element's pair, 64 bits; step; tensor's number). Its 128 bits are used for the three roundings of two
elements. Elements are counted in the whole tensor, also if this one is a shard that begins at ``offset``: so no bit
depends on sharding, alignment, chunks or the order of programs.

How. Two launches, for any number of tensors of one combination of dtypes (``tensor_table.py``). The first, one lane per
tensor, counts the step and computes its coefficients in fp64: steps are counted on the device, because only the device
knows whether one is skipped. Hyperparameters are in device memory too, and are updated in place, so a CUDA graph may
contain both launches while a schedule changes the learning rate. In the second launch each program updates a chunk of
one tensor; it begins while the first still runs, and waits for its end (``gdc_wait``) before it reads its results.
Whole blocks of aligned tensors are read in 16 bytes per thread; ends, and tensors that are not aligned, element by
element, each with as many Philox bits as two elements use otherwise.

A scale that is not finite skips the step: p, m, v and t stay. The host never waits.

Traffic per element: reads p, m, v, g and writes p, m, v: 14 bytes if all are bf16, 28 if all are fp32. A master adds 6:
it is read and written instead of p, and p is written, too. A whole block of bf16 takes 66 instructions per element
(counted in SASS), 35 of them for random bits and rounding; in the time of 16 bytes at 4.3 TB/s an H200 can issue about
110.

Limits: dense tensors, whose moments and gradients have the same memory layout; tensors must not overlap. ``sqrt`` and
the division are the hardware's approximate ones, within 2 ulp, and flush fp32 denormals.
"""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from cs336_systems.kernels.launching import ceil_div, launch, needs_other_device, overlaps
from cs336_systems.kernels.tensor_table import ADAMW_CHUNK as CHUNK
from cs336_systems.kernels.tensor_table import (
    COEFFICIENTS,
    HYPERPARAMETERS,
    TRITON_DTYPES,
    Update,
    UpdateTable,
    check_updates,
)

BLOCK, WARPS = 512, 2
"""8 elements for each of 64 threads: 16 bytes of bf16. For 2^28 elements an H200 reaches 95 % of the copy ceiling, with
blocks of 1,024 by 4 warps in chunks of 8,192 it reaches 92, with 2,048 by 8 warps 83 (LOG.md)."""
ADVANCE_BLOCK = 32
"""One warp's lanes."""

# A row of the table of tensors, int64, as ``tensor_table.py`` writes it.
COLUMNS = tl.constexpr(13)
NUMEL = tl.constexpr(0)
FIRST_CHUNK = tl.constexpr(1)
PARAMETER = tl.constexpr(2)
GRADIENT = tl.constexpr(3)
FIRST_MOMENT = tl.constexpr(4)
SECOND_MOMENT = tl.constexpr(5)
STEP = tl.constexpr(6)
NUMBER = tl.constexpr(7)
OFFSET = tl.constexpr(8)
SEED = tl.constexpr(9)
ALIGNED = tl.constexpr(10)
STEP_NOW = tl.constexpr(11)  # written by the first launch
MASTER = tl.constexpr(12)  # the parameter itself, if it has none

PHILOX_ROUNDS = tl.constexpr(7)
NAN_BITS = tl.constexpr(0x7FC00000)


@triton.jit
def is_finite(x):
    return tl.abs(x) < float("inf")


@triton.jit
def advance_kernel(rows, hyperparameters, scale, coefficients, n_tensors, BLOCK: tl.constexpr, OVERLAP: tl.constexpr):
    """Count the step of each tensor, unless it is skipped, and compute its coefficients; a lane per tensor."""
    if OVERLAP:
        gdc_launch_dependents()
    tensor = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = tensor < n_tensors
    row = rows + tensor * COLUMNS
    step_at = tl.load(row + STEP, mask=inside, other=0).to(tl.pointer_type(tl.int64))
    own = hyperparameters + tensor * HYPERPARAMETERS
    lr = tl.load(own, mask=inside, other=0.0)
    beta1 = tl.load(own + 1, mask=inside, other=0.0)
    beta2 = tl.load(own + 2, mask=inside, other=0.0)
    eps = tl.load(own + 3, mask=inside, other=0.0)
    weight_decay = tl.load(own + 4, mask=inside, other=0.0)
    taken = is_finite(tl.load(scale).to(tl.float32))
    step = tl.load(step_at, mask=inside, other=0) + taken.to(tl.int64)

    power1, power2 = tl.full((BLOCK,), 1.0, tl.float64), tl.full((BLOCK,), 1.0, tl.float64)
    square1, square2, bits = beta1, beta2, tl.maximum(step, 1)  # a first step that is skipped has no correction
    left = tl.max(bits, axis=0)
    while left > 0:  # beta^t by squaring, a bit of t at a time; unrolled it would be code to fetch, from cold caches
        power1 = tl.where(bits & 1 != 0, power1 * square1, power1)
        power2 = tl.where(bits & 1 != 0, power2 * square2, power2)
        square1, square2, bits = square1 * square1, square2 * square2, bits >> 1
        left = left >> 1

    out = coefficients + tensor * COEFFICIENTS
    tl.store(out, beta1.to(tl.float32), mask=inside)
    tl.store(out + 1, (1.0 - beta1).to(tl.float32), mask=inside)
    tl.store(out + 2, beta2.to(tl.float32), mask=inside)
    tl.store(out + 3, (1.0 - beta2).to(tl.float32), mask=inside)
    tl.store(out + 4, (1.0 / tl.sqrt(1.0 - power2)).to(tl.float32), mask=inside)
    tl.store(out + 5, eps.to(tl.float32), mask=inside)
    tl.store(out + 6, (1.0 - lr * weight_decay).to(tl.float32), mask=inside)
    tl.store(out + 7, (lr / (1.0 - power1)).to(tl.float32), mask=inside)
    tl.store(step_at, step, mask=inside)
    tl.store(row + STEP_NOW, step, mask=inside)


@triton.jit
def random_words(pair, seed, step, number):
    """Four blocks of 32 random bits for a block of pairs of elements (int64)."""
    low, high = pair.to(tl.uint32), (pair >> 32).to(tl.uint32)
    return tl.philox(seed, low, high, low * 0 + step.to(tl.uint32), low * 0 + number.to(tl.uint32), PHILOX_ROUNDS)


@triton.jit
def rounded(x, noise, DTYPE: tl.constexpr):
    """fp32 x in DTYPE; if that is bf16, up or down by the low 16 bits of ``noise`` (uint32)."""
    if tl.bfloat16 == DTYPE:
        bits = x.to(tl.uint32, bitcast=True) + (noise & 0xFFFF)
        bits = tl.where(x == x, bits, NAN_BITS)  # the sum may carry a NaN over into a number; inf has no low bits
        result = (bits >> 16).to(tl.uint16).to(tl.bfloat16, bitcast=True)
    else:
        result = x.to(DTYPE)
    return result


@triton.jit
def update_block(
    p_at, g_at, m_at, v_at, master_at, inside, noise_pm, noise_v, scale, own, HAS_MASTER: tl.constexpr,
):  # fmt: skip
    """Update the elements at blocks of pointers.

    noise_pm: 16 bits for p below 16 for m; noise_v: 16 for v.
    """
    beta1, rest1, beta2, rest2, root_correction, eps, decay, step_size = own
    g = tl.load(g_at, mask=inside).to(tl.float32) * scale
    # An FMA leaves one of the two products unrounded; the compiler might choose another one in blocks than in ends.
    m = tl.fma(tl.load(m_at, mask=inside).to(tl.float32), beta1, g * rest1)
    v = tl.fma(tl.load(v_at, mask=inside).to(tl.float32), beta2, g * g * rest2)
    change = step_size * (m / tl.fma(tl.sqrt(v), root_correction, eps))
    p = tl.fma(tl.load(master_at, mask=inside).to(tl.float32), decay, -change)
    if HAS_MASTER:
        tl.store(master_at, p, mask=inside)
        p = p.to(p_at.dtype.element_ty)
    else:
        p = rounded(p, noise_pm, p_at.dtype.element_ty)
    tl.store(p_at, p, mask=inside)
    tl.store(m_at, rounded(m, noise_pm >> 16, m_at.dtype.element_ty), mask=inside)
    tl.store(v_at, rounded(v, noise_v, v_at.dtype.element_ty), mask=inside)


@triton.jit
def update_kernel(
    rows, owners, coefficients, scale,
    P: tl.constexpr, G: tl.constexpr, M: tl.constexpr, STOCHASTIC: tl.constexpr, CHUNK: tl.constexpr,
    BLOCK: tl.constexpr, HAS_MASTER: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """One chunk of one tensor; P, G and M are the dtypes of parameter, gradient and moments."""
    program = tl.program_id(0)
    tensor = tl.load(owners + program)
    row, at_own = rows + tensor * COLUMNS, coefficients + tensor * COEFFICIENTS
    begin = (program - tl.load(row + FIRST_CHUNK)) * CHUNK
    n = tl.minimum(tl.load(row + NUMEL) - begin, CHUNK).to(tl.int32)
    n_whole = tl.where(tl.load(row + ALIGNED) != 0, n // BLOCK * BLOCK, 0)
    p = tl.load(row + PARAMETER).to(tl.pointer_type(P)) + begin
    g = tl.load(row + GRADIENT).to(tl.pointer_type(G)) + begin
    m = tl.load(row + FIRST_MOMENT).to(tl.pointer_type(M)) + begin
    v = tl.load(row + SECOND_MOMENT).to(tl.pointer_type(M)) + begin
    master = tl.load(row + MASTER).to(tl.pointer_type(tl.float32 if HAS_MASTER else P)) + begin
    seed, number = tl.load(row + SEED), tl.load(row + NUMBER)
    first = tl.load(row + OFFSET) + begin  # the chunk's first element in the whole tensor
    factor = tl.load(scale).to(tl.float32)
    lanes = tl.arange(0, BLOCK)
    if OVERLAP:
        gdc_wait()  # the first launch's results
    step = tl.load(row + STEP_NOW)
    own = (
        tl.load(at_own), tl.load(at_own + 1), tl.load(at_own + 2), tl.load(at_own + 3),
        tl.load(at_own + 4), tl.load(at_own + 5), tl.load(at_own + 6), tl.load(at_own + 7),
    )  # fmt: skip
    if is_finite(factor):
        for start in range(0, n_whole, BLOCK):
            at = tl.multiple_of(start, BLOCK) + lanes
            noise_pm, noise_v = at.to(tl.uint32), at.to(tl.uint32)
            if STOCHASTIC:
                pairs = ((first + start) >> 1) + tl.arange(0, BLOCK // 2)
                even, odd, both, _ = random_words(pairs, seed, step, number)
                noise_pm, noise_v = tl.interleave(even, odd), tl.interleave(both, both >> 16)
            update_block(
                tl.multiple_of(p, 16) + at, tl.multiple_of(g, 16) + at, tl.multiple_of(m, 16) + at,
                tl.multiple_of(v, 16) + at, tl.multiple_of(master, 16) + at,
                None, noise_pm, noise_v, factor, own, HAS_MASTER,
            )  # fmt: skip
        for start in range(n_whole, n, BLOCK):
            at = start + lanes
            noise_pm, noise_v = at.to(tl.uint32), at.to(tl.uint32)
            if STOCHASTIC:
                elements = first + at
                even, odd, both, _ = random_words(elements >> 1, seed, step, number)
                is_odd = elements & 1 != 0
                noise_pm, noise_v = tl.where(is_odd, odd, even), tl.where(is_odd, both >> 16, both)
            update_block(
                p + at, g + at, m + at, v + at, master + at, at < n,
                noise_pm, noise_v, factor, own, HAS_MASTER,
            )  # fmt: skip


def adamw_(updates: Sequence[Update], scale: Tensor | None = None, *, table: UpdateTable | None = None) -> None:
    """One step of AdamW in place: parameters, moments and steps.

    Args:
        updates: tensors with the same combination of dtypes; two launches for all of them.
        scale: one element of fp32 or bf16 on the device, by which gradients are multiplied; if it is not finite,
            nothing is updated and no step is counted; 1 if None.
        table: kept between calls by callers that pass the same tensors again.

    Raises:
        ValueError: dtypes differ among updates or are neither bf16 nor fp32, layouts or devices differ within one, the
            scale is not one element there, or Triton does not run there; the message names the tensor's number.
        RuntimeError: the table's contents changed while a CUDA graph is captured.
    """
    if not updates:
        return
    device, dtypes = updates[0].parameter.device, updates[0].dtypes
    if needs_other_device(update_kernel, device):
        raise ValueError(f"AdamW in one pass needs tensors on a CUDA device, got {device}")
    if scale is not None and (scale.numel() != 1 or scale.device != device or scale.dtype not in TRITON_DTYPES):
        got = f"{scale.dtype} of shape {tuple(scale.shape)} on {scale.device}"
        raise ValueError(f"the scale of gradients must be one bf16 or fp32 element on {device}, got {got}")
    check_updates(updates, device)
    table = table or UpdateTable()
    has_master = updates[0].master is not None
    narrow = torch.bfloat16 in (dtypes[2:3] if has_master else (dtypes[0], dtypes[2]))
    with torch.cuda.device_of(updates[0].step):  # Triton launches on the current device, which may be another
        table.describe(updates, device)
        scale = table.unit if scale is None else scale
        rows, n_tensors = table.tensors.rows, len(updates)
        grid, overlap = (ceil_div(n_tensors, ADVANCE_BLOCK),), overlaps(update_kernel)
        launch(
            advance_kernel,
            grid,
            *(rows, table.hyperparameters, scale, table.coefficients, n_tensors),
            BLOCK=ADVANCE_BLOCK,
            OVERLAP=overlap,
            num_warps=1,
        )
        if table.tensors.n_chunks:
            launch(
                update_kernel,
                (table.tensors.n_chunks,),
                *(rows, table.tensors.owners, table.coefficients, scale),
                P=TRITON_DTYPES[dtypes[0]],
                G=TRITON_DTYPES[dtypes[1]],
                M=TRITON_DTYPES[dtypes[2]],
                STOCHASTIC=narrow,
                CHUNK=CHUNK,
                BLOCK=BLOCK,
                HAS_MASTER=has_master,
                OVERLAP=overlap,
                num_warps=WARPS,
                launch_pdl=overlap,
            )
