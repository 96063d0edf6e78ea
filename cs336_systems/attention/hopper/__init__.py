"""FlashAttention for Hopper GPUs (H100, H200) in Gluon: forward and backward with specialised warps.

Why not Triton alone: on Hopper, Triton waits for every wgmma before it continues, so softmax and matmuls of a program
do not overlap. For a 64 x 128 tile of scores at head dim 64, the two matmuls take 512 clocks of an SM's tensor cores
and the exponentials take 512 clocks of its exponential units, so running them one after the other halves the speed.
Gluon exposes what Triton hides, so that these can overlap: copies (TMA), asynchronous matmuls (wgmma), barriers in
shared memory, and warps with different programs (``warp_specialize``).

    o = HopperFlashAttention.apply(q, k, v, True)     # or attention(q, k, v, causal=True, impl="hopper")

The formulas are those of ``attention/flash`` (Dao 2023); the schedule follows FlashAttention-3 (Shah et al. 2024). Each
SM runs one program. Its *producer* is one warp that fetches tiles. Its *consumers* are warpgroups (four warps each)
that compute 64 rows each and write the results. ``schedules.py`` holds the sizes.

FORWARD. A consumer owns 64 queries and visits the key tiles from the last (the diagonal, if causal) to the first. Time
runs downwards; "full" and "empty" are the barriers of a ring slot (``kernels.copy_engine.Ring``).

    producer                        consumer c (2 or 3 of them, each at its own pace)
    --------                        ------------------------------------------------------------------
    await Q_c empty; copy Q_c  ---> release K and V tiles that it does not see, as they arrive;  await Q_c full
    await K empty; copy K_0    ---> await K_0 full;  S_0 = Q K_0^T;  release K_0;  P_0 = softmax step
    await V empty; copy V_0         await K_1 full;  for i = 1, 2, ...
    await K empty; copy K_1    --->     start S_i = Q K_i^T                            \\ both in flight:
    await V empty; copy V_1    --->     await V_i-1 full;  start O += P_i-1 V_i-1      / S_i comes first
    ...                                 await S_i;         release K_i
       (empty needs the                 softmax step on S_i     <- overlaps this consumer's P V product and
        release of all                                             the other consumers' products
        consumers)                      await K_i+1 full
                                        await O;           release V_i-1;  rescale O
                                    release Q_c;  last P V;  store lse;  o -> shared memory -> copied out

The work of the threads must be shorter than the matmuls that it overlaps. The exponentials of a tile alone take as long
as both matmuls at head dim 64, and half as long at 128. Three measures reduce the rest:

* A row's maximum is updated only when P would exceed 2^8, as in FlashAttention-4 (Zadouri et al. 2026), and a warp that
  updates no maximum does not rescale O.
* Each thread keeps partial row sums until the end.
* P stays in registers: S arrives in the layout in which the next matmul takes P.

Masks are applied in the first tile that a consumer sees, and otherwise only in tiles that the diagonal crosses.

Query tiles are ordered (``plans.QueryPlan``) by sections of heads that fit the L2 cache, and within a section from the
longest tile to the shortest. When the producer has fetched everything for a tile, it draws the next from a counter in
global memory and sends its number to the consumers through a ring. Q has two slots per consumer, so that the next
tile's queries, keys and values arrive while the current tile is being finished.

BACKWARD. A program owns 128 keys at a time, 64 per consumer, drawn from a counter as above, and visits the query tiles
that see them. It computes five products:

    S^T = K Q^T     dP^T = V dO^T     dV += P^T dO     dK += dS^T Q     dQ = dS K

S^T and dP^T are computed in transposed form, so that P^T and dS^T can stay in registers as left operands. Only dQ sums
over keys, and so over both consumers: dS^T is therefore also written to shared memory, and the copy engine adds dQ to
fp32 sums in global memory. The tensor cores also subtract lse / scale from S^T and delta from dP^T, by a product over
16 more columns. When threads read these statistics from shared memory instead, which the matmuls keep busy, they waited
for a tenth of the time at head dim 128 (profiles/log/2026-11-30.md, third).

There are three kernels. ``preprocess`` computes each query's lse / scale and delta = rowsum(o dO), splits each into
three bf16 or fp16 parts whose weighted sum has fp32's precision, and zeroes the sums. The main kernel is in
``backward_kernel.py``. ``postprocess`` scales and rounds dQ; for blocks, it also rotates dQ and dK back.

The left column is step i of consumer c, the right column what the tensor cores do meanwhile; S, P, dP and dS stand for
their transposes:

    wait for S(i) - lse / scale              start dP(i) - delta
    mask, P = exp(scale (S - lse / scale))   overlaps dP(i)
                                             start dV += P dO(i)
    wait for dP(i) - delta
    dS = P (dP - delta) -> dS slot i % 2     overlaps dV
    arrive at dS_full[i % 2]                 start dK += dS Q(i)
    wait there for the other consumer        start dQ(i) = dS K: half of its columns, over all 128 keys
    wait for dV, dK; release Q(i), dO(i)     await Q(i + 1), dO(i + 1) full; start S(i + 1)
    wait for dQ(i); dQ -> add to global      overlaps S(i + 1)

With ``late_dq``, dQ(i - 1) starts together with dP(i): exp2 then overlaps two products, and a consumer needs the
other's dS one step after it was written, so the two may run at different paces. With ``left_in_registers`` a consumer
keeps its K and V in registers for all steps, instead of reading them from shared memory in each. Both options need
registers that are free only at head dim 64. With ``statistics_last`` lse / scale and delta are subtracted after the
product.

Why there is no deadlock and no slot is overwritten early:

* Every wait on a ring is for one use ("turn") of a slot. Both sides count turns by steps that they compute from the
  same numbers. The producer's turn t of a slot needs t complete phases of ``empty``, of which consumers complete one
  per turn. A consumer's turn t needs t + 1 complete phases of ``full``, of which the producer completes one per turn.
  A barrier can be at most one phase ahead of a waiter, because the next phase needs the waiter's own arrival first, so
  one parity bit distinguishes the phases.
* The producer copies Q, K_0, V_0, K_1, V_1, ... In forward, a consumer that waits for K_i+1 still holds V_i-1, and V_i
  comes before K_i+1, so at least two slots are needed. The tile for which the slowest consumer waits always goes into a
  slot that all consumers have released, so that consumer proceeds, and then the next slowest. Key tiles are skipped at
  the start of an item, when no slot is held.
* In backward, consumers wait for each other at ``dS_full``; both arrive there once per step, before they wait. Two dS
  slots are enough: a consumer writes slot i % 2 again at step i + 2, after it has passed the barrier of step i + 1,
  where the other consumer arrived after its dQ(i) was done.
* The warps that start copies to global memory wait for them before the copies' shared memory is written again.
* The matmul that prefetches S^T beyond the last step waits for nothing, and its result is not read, whatever the slot
  holds by then. The same is true of the dQ of ``late_dq`` in the first step.
* ``take_turns``: a consumer starts block j (S_j+1 and P_j V_j) after its left neighbour has started block j; the first
  consumer starts it after the last one has started block j - 1. A consumer that skips tile j passes turn j on. Turn j
  needs no tile after K_j+1. When the producer waits for the slot of K_n or V_n, the consumer that holds the slot needs
  at most turn n - 2, and everything that turns up to n - 2 need has been copied.
* ``deterministic``: key tile t adds to a dQ tile after key tile t + 1 has. Work is drawn in an order in which the key
  tiles of a head come from the last to the first, so the tile waited for is done or in progress. The launch is
  cooperative: it starts only when all its programs fit on the GPU, whatever other streams run.

PACKED documents (``starts``). Forward's producer loads no key tile before the document of an item's first query. A
consumer at once releases tiles, at either end, that its own queries do not see, and passes turns on as above. Backward
ends with the last query tile that sees the 128 keys. The key tiles that add to one dQ tile are consecutive and end at
the diagonal, so ``deterministic`` counts additions as it does without documents. Tiles in which a document begins or
ends are masked, too. Without documents ``starts`` is None, a constant, so that none of this is compiled.

Precision is as in ``attention/flash``: fp32 sums and softmax, P and dS rounded to the inputs' dtype. For large scores
backward's P is less exact than forward's: at a magnitude of 1,500 by about 3e-4 at head dim 128, and by at most half of
that at head dim 64 (emulated). The order in which key tiles add to dQ varies, so the last bits of dQ vary from run to
run unless ``deterministic``.

Limits: compute capability 9.0; bf16 and fp16; head dims 16 to 128 in steps of 8 (the copy engine pads to 64 or 128).
Other GPUs, dtypes and head dims raise an error that names implementations that support them.
"""

from cs336_systems.attention.hopper.function import HopperFlashAttention

__all__ = ["HopperFlashAttention"]
