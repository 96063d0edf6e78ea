"""Where are the FLOPs, and where does the time go? Shares of FLOPs against shares of time of a training step.

    uv run scripts/abstraction_leaks/flops_against_time.py                       # eager and compiled; on a CPU eager
    uv run scripts/abstraction_leaks/flops_against_time.py --size medium --context-length 1024 --out results/

The abstraction: FLOPs are the cost of a model, and products are nearly all of them. It leaks because a product reuses
each number it has read some hundred times and everything else uses it once: norms, softmax, gates and the optimizer
run at the speed of memory, at one thousandth of the matrix units' rate per byte (Ivanov et al. 2020, "Data Movement Is
All You Need": 0.2 % of a BERT layer's FLOPs are in operators that take 40 % of its time).

**Prediction, before measuring.** Products hold over 99 % of the FLOPs of every named size but the tiniest. On an H200,
small in bf16 at batch 4 and context 512: eagerly they take only 30 to 40 % of the time, elementwise kernels as much
again (masks, rotary, casts to fp32 and back), softmax about 10 % and AdamW's dozen passes another 10 %. Compiling cuts
the elementwise and norm kernels to a third of their time, leaves products and the uncompiled optimizer as they were,
and so moves the products' share to 50 % or more. On a CPU memory is slow too, but arithmetic is far slower: products
take most of the time at once, and the gap between the shares is small; with the tiny model each operator costs a few
microseconds whatever it computes, and shares of time follow the *number* of operators.

**Method.** One step is recorded with torch.profiler after warm-up and read through the package's traces. What the
``optimizer`` phase launches is optimizer; else the kernel's class decides (``traces/kernels.py``), with whatever runs
inside an RMSNorm's range, forward or backward, counted as normalisation. In a compiled block there are no ranges: a
fused reduction counts as normalisation, or as softmax if it has one, with its elementwise neighbours inside. On a CPU
steps are eager alone, as its traces do not name fused kernels. FLOPs by ``costs/flops.py``. Shares are of the
operators' summed time; time when none runs is reported beside (from a step without profiler).
"""

from cs336_systems.experiments.driver import command
from cs336_systems.experiments.flops_against_time import EXPERIMENT
from cs336_systems.report.command_line import exit_with

main = command(EXPERIMENT, __doc__)

if __name__ == "__main__":
    exit_with(EXPERIMENT.name, main)
