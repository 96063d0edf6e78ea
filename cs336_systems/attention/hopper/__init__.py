"""FlashAttention for Hopper GPUs (H100, H200) in Gluon: forward and backward with specialised warps.

Why not Triton alone: on Hopper it waits for every wgmma before it goes on, so that inside a program softmax and matmuls
take turns. The tensor cores of an SM need 512 clocks for the two products of a 64 x 128 tile of scores at head dim 64,
and its exponential units need 512 clocks for the same tile: taking turns halves the speed. Gluon names the parts that
Triton hides, so that they can overlap: copies (TMA), matmuls in flight (wgmma), barriers in shared memory, and warps
with different programs (``warp_specialize``).

    o = HopperFlashAttention.apply(q, k, v, True)     # or attention(q, k, v, causal=True, impl="hopper")

The formulas are those of ``attention/flash`` (Dao 2023); what is new is who does what and when, after FlashAttention-3
(Shah et al. 2024). One program per SM, of one *producer* warp that fetches, and *consumers* of four warps that compute,
each on 64 rows, and write the results. ``schedules.py`` holds the sizes.

FORWARD. A consumer owns 64 queries and walks over the keys from the last tile (the diagonal, if causal) to the first.
Time runs downwards; "full" and "empty" are the barriers of a ring slot (``kernels.copy_engine.Ring``).

    producer                        consumer c (2 or 3 of them, each at its own pace)
    --------                        ------------------------------------------------------------------
    await Q_c empty; copy Q_c  ---> let go K and V that it does not see, as they come;  await Q_c full
    await K empty; copy K_0    ---> await K_0 full;  S_0 = Q K_0^T;  let K_0 go;  P_0 = softmax step
    await V empty; copy V_0         await K_1 full;  for i = 1, 2, ...
    await K empty; copy K_1    --->     start S_i = Q K_i^T                            \\ both in flight:
    await V empty; copy V_1    --->     await V_i-1 full;  start O += P_i-1 V_i-1      / S_i comes first
    ...                                 await S_i;         let K_i go
       (empty needs all                 softmax step on S_i     <- under the P V product, and under the
        consumers' letting go)                                     products of the other consumers
                                        await K_i+1 full
                                        await O;           let V_i-1 go;  rescale O
                                    let Q_c go;  last P V;  store lse;  o -> shared memory -> copied out

The threads' own work must fit under the products: exp2 of a tile takes as long as both at head dim 64 and half as long
at 128, and the rest comes on top. So a row's maximum moves only when P would exceed 2^8, as in FlashAttention-4
(Zadouri et al. 2026), and a warp whose rows keep theirs does not rescale O; sums of rows stay in each thread until the
end. P never leaves the registers: the layout in which S arrives is the one in which the next product takes it. Scores
are masked in the first tile that a consumer sees, and in others only where the diagonal crosses them. The order of the
query tiles (``plans.QueryPlan``): heads in sections that fit the L2 cache; inside a section longest tiles first. A
program takes one after another: when the producer has fetched all of a tile, it draws the next from a counter in memory
and announces it to the consumers through a ring of numbers. Q has two slots per consumer, so that the next tile's
queries, keys and values arrive while this one is being finished.

BACKWARD. A program owns 128 keys at a time, 64 per consumer, drawn from a counter as above, and walks over the query
tiles that see them. Five products:

    S^T = K Q^T     dP^T = V dO^T     dV += P^T dO     dK += dS^T Q     dQ = dS K

The transposes are computed directly, so that P^T and dS^T are left operands where they are, in registers. Only dQ sums
over keys, across both consumers, so dS^T also goes to shared memory, and dQ to fp32 sums in global memory, added there
by the copy engine. The tensor cores also subtract lse / scale from S^T and delta from dP^T, by a product over 16 more
columns: when threads read them from shared memory, which the products keep busy, they waited for a tenth of the time at
head dim 128 (profiles/log/2026-11-30.md, third). Three kernels: ``preprocess`` (each query's lse / scale and delta =
rowsum(o dO), each split into three bf16 or fp16 parts whose weighted sum has fp32's precision; zeroed sums), the one in
``backward_kernel.py``, and ``postprocess`` (scale and round dQ; for blocks, rotate dQ and dK back, too). One step i of
consumer c, with what the tensor cores have meanwhile; S, P, dP and dS stand for their transposes:

    wait for S(i) - lse / scale              start dP(i) - delta
    mask, P = exp(scale (S - lse / scale))   under dP(i)
                                             start dV += P dO(i)
    wait for dP(i) - delta
    dS = P (dP - delta) -> dS slot i % 2     under dV
    arrive at dS_full[i % 2]                 start dK += dS Q(i)
    wait there for the other consumer        start dQ(i) = dS K: half of it, over all 128 keys
    wait for dV, dK; let Q(i), dO(i) go      await Q(i + 1), dO(i + 1) full; start S(i + 1)
    wait for dQ(i); dQ -> add to global      under S(i + 1)

With ``late_dq``, dQ(i - 1) starts beside dP(i) instead: exp2 then runs under two products, and a consumer asks for
dS of the other a step after it was written, so that the two can drift apart. With ``left_in_registers`` a consumer
keeps its K and V in registers for all steps, instead of reading them from shared memory in each. Both need registers
that only head dim 64 has free. With ``statistics_last`` lse / scale and delta are subtracted after the product.

Why no wait is forever (and no slot is overwritten early):

* Every wait on a ring is for a turn of a slot, and turns are counted by steps that both sides compute from the same
  numbers. Producer: turn t of a slot needs t complete phases of ``empty``; consumers complete one per turn. Consumers:
  turn t needs t + 1 complete phases of ``full``; the producer completes one per turn. A barrier can be at most one
  phase ahead of a waiter, because the next phase needs the waiter's own arrival first: one bit of parity tells them
  apart.
* The producer copies Q, K_0, V_0, K_1, V_1, ... Forward, a consumer that waits for K_i+1 still holds V_i-1, and V_i
  comes before K_i+1: two slots are the least. What the slowest consumer waits for is always in a slot that all have let
  go, so it moves, and then the next slowest. Key tiles are skipped at the start of an item, when nothing is held.
* Backward, consumers wait for each other at ``dS_full``: both arrive there once per step, before they wait. Two slots
  are enough: a consumer writes slot i % 2 again at step i + 2, after it has passed the barrier of step i + 1; the other
  one arrived there after its dQ(i) was done.
* Copies to global memory are awaited by the warps that started them, before their shared memory is written again.
* The matmul that prefetches S^T beyond the last step waits for nothing, and its result is not read, whatever the slot
  holds by then. So does the dQ of ``late_dq`` in the first step.
* ``take_turns``: consumer c starts block j (S_j+1 and P_j V_j) when its left neighbour has, the first consumer when the
  last one has started j - 1; who skips tile j passes turn j on. Turn j needs no tile after K_j+1. When the producer
  waits for the slot of K_n or V_n, it is for somebody who may want turn n - 2 or an earlier one, and what those turns
  need has been copied.
* ``deterministic``: key tile t adds to a dQ tile after t + 1 has. Positions are taken in an order in which the key
  tiles of a head come from the last to the first, so the one waited for is done or being worked on: the launch is
  cooperative, that is, it starts when all its programs fit on the GPU, whatever other streams run.

PACKED documents (``starts``). Forward's producer loads no key tile before the document of an item's first query. A
consumer releases at once the tiles, at either end, that its own queries do not see, and passes turns on as above.
Backward ends with the last query tile that sees the 128 keys. The key tiles that add to a tile of dq are neighbours, up
to the diagonal, so ``deterministic`` counts adds as without documents. Tiles in which a document begins or ends are
masked, too. Without documents ``starts`` is None, a constant, so that none of this is compiled.

Precision as in ``attention/flash``: fp32 sums and softmax, P and dS rounded to the inputs' dtype. Where scores are
large, backward's P is less exact than forward's: at a magnitude of 1,500 and head dim 128 by about 3e-4, at head dim 64
by half of that or less (emulated). dQ is summed over key tiles in the order in which they come to it, so its last bits
vary from run to run unless ``deterministic``.

Limits: compute capability 9.0; bf16 and fp16; head dims 16 to 128 in steps of 8 (the copy engine pads to 64 or 128).
Other GPUs, dtypes and head dims raise and name what takes them.
"""

from cs336_systems.attention.hopper.function import HopperFlashAttention

__all__ = ["HopperFlashAttention"]
