"""When does the GPU wait for the host? The size at which a chain of operations turns from host bound to device bound.

    uv run scripts/abstraction_leaks/launch_overhead.py
    uv run scripts/abstraction_leaks/launch_overhead.py --operation matmul --size 64 256 1024 4096 --out results/

A chain ``x = x @ w`` or ``x = x * 0.999`` of ``--depth`` operations is issued by the host one call at a time. While an
operation runs on the device for less than the host needs to issue one, the device waits for the host: the time per
operation is flat, whatever the size. A CUDA graph issues the whole recorded chain with one call and leaves the device's
own time, so *the turn is where the graph's time per operation equals the host's eager issue time*. It needs a GPU.

**Prediction, before measuring.** H200, torch.compile and eager alike launch through cuBLAS: about 5 us per operation by
the host (Python, dispatcher, driver), 1 to 2 us per small kernel inside a graph. A multiplication of n bf16 numbers
moves 4 n bytes; 5 us at 4 TB/s are 20 MB, so the turn is at n = 2^22 (within the 50 MB L2 it runs faster than memory,
which moves it up to about 2^23). A product takes 5 us of a rate far below peak: 2 n^3 at 200 to 400 TFLOP/s give n =
800 to 1000. Below the turn the graph wins 3 to 5 times. Compiling makes one kernel of the chain of multiplications
(time per operation falls by nearly the depth) but cannot fuse products: there it only trims the host's share.

**Method.** All ways of one operation and size run in turns within a cell, so their ratios are of neighbours. Wall time
from the first call until the device is done, by the host's clock, over the depth; *issue* is the same clock when the
last call has returned. L2 stays warm: the chain's own intermediates are what an operation finds there in a model.
"""

from cs336_systems.experiments.driver import command
from cs336_systems.experiments.launch_overhead import EXPERIMENT
from cs336_systems.report.command_line import exit_with

main = command(EXPERIMENT, __doc__)

if __name__ == "__main__":
    exit_with(EXPERIMENT.name, main)
