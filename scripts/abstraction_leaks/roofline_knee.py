"""How much arithmetic is free in an elementwise kernel, beside its traffic to memory?

    uv run scripts/abstraction_leaks/roofline_knee.py
    uv run scripts/abstraction_leaks/roofline_knee.py --fmas 1 8 32 64 128 256 --out results/

``out = f(x)`` reads and writes 8 bytes per fp32 element however much f computes. The roofline says: the time is the
larger of bytes over bandwidth and operations over their rate, so arithmetic is free up to the *knee*, where both are
equal: k = 4 rate / bandwidth multiply-adds (2 operations each, 8 bytes). The kernel takes twice as long where the
arithmetic alone does, at 2 k, if the two overlap perfectly; if they did not overlap at all it would be at k + 1.

**Prediction, before measuring.** H200: 66.9 TFLOP/s (datasheet, fp32 off the tensor cores) over 4.3 TB/s (copy) puts
the knee at 62 multiply-adds, 15.6 operations per byte, and twice the time between 63 and 125, near the upper end since
thousands of threads hide each other's latencies; from a measured fp32 product (51 TFLOP/s) it is 47. A CPU core is
fast beside its share of the memory, but a chain is the worst case for it: each step waits 4 cycles for the last, and a
core overlaps only the few vectors that fit its reordering window. Its knee should lie at 8 to 32, well *below* the one
predicted from a matrix product, whose sums are independent. Eagerly each multiplication and addition is a kernel that
reads and writes everything: 2 k times the flat time, a straight line without a knee. Fusing buys that factor.

**Method.** torch.compile makes one kernel of the chain (C++ on a CPU, Triton on a GPU), with contraction of a * b + c
into one instruction allowed on a CPU, where Inductor forbids it by default. ``out`` is given: no page faults are
timed. The knee is where the highest bandwidth of all chains meets their highest rate of arithmetic: no peak enters.
The prediction beside it uses a matmul and a copy measured in the same run.
"""

from cs336_systems.experiments.driver import command
from cs336_systems.experiments.roofline_knee import EXPERIMENT
from cs336_systems.report.command_line import exit_with

main = command(EXPERIMENT, __doc__)

if __name__ == "__main__":
    exit_with(EXPERIMENT.name, main)
