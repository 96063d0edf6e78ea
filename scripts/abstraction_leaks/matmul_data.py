"""Does a matrix product's speed depend on its data? Speed, power and clock on seven kinds of data.

    uv run scripts/abstraction_leaks/matmul_data.py                        # bf16 on a GPU, fp32 on a CPU
    uv run scripts/abstraction_leaks/matmul_data.py --data zeros normal --size 4096 8192 --out results/

The abstraction says no: 2 n^3 operations, whatever the numbers. It leaks through the power limit. A transistor costs
energy when it switches; multiplying zeros switches next to nothing, multiplying random numbers switches about every
second wire each cycle. A GPU whose large products already sit at the power limit pays for that with its clock
(H. He 2024, "Strangely, Matrix Multiplications on GPUs Run Faster When Given Predictable Data").

**Prediction, before measuring.** On a GPU at its limit, for n = 8192: the fewer bits flip, the higher the clock, so
zeros >= ones > sparse-bits and integers > uniform > normal, and *watts do not differ while MHz do*. Zeros: 13 % above
normal data, the one figure known from an H200 before (894 against 788 TFLOP/s). Below the limit (a small n, a GPU with
a generous limit) the speeds agree and the watts differ instead. On a CPU nothing differs, as its clock follows the
instructions (vector width) and not the operands; except subnormal numbers, which many x86 cores multiply by microcode:
anything from no difference to a hundred times slower, by vendor and by whether the library flushes them to zero.

**Method.** Products run back to back for ``--seconds``, after ``--warmup-seconds`` of the same (NVML's power is an
average over a second); a thread reads power and clock meanwhile. The kinds alternate, the order turning round each
repeat, and a kind's ratio is against normal data *of the same repeat*. The L2 cache is not flushed between products:
flushing would write zeros and rest the multipliers. Both matrices are of the kind; a CPU reports no watts.
"""

from cs336_systems.experiments.driver import command
from cs336_systems.experiments.matmul_data import EXPERIMENT
from cs336_systems.report.command_line import exit_with

main = command(EXPERIMENT, __doc__)

if __name__ == "__main__":
    exit_with(EXPERIMENT.name, main)
