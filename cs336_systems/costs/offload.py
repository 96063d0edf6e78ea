"""The states that a training step offloads: it keeps them in host memory instead of on the device.

    m, v          AdamW's moments
    master        its fp32 weights of bf16 parameters, if it has them (``TrainingCase.master``)
    gradients     of the step so far: each leaves as backward makes it, and micro-batches add up there
    residual      each block's input, from its forward to its backward

``m-v-residual`` names several. No choice changes a bit of what is computed.

On an H200 Qwen2.5-14B (two micro-batches of 16 sequences of 1,024, ``keep`` input) trains at 4,595 tokens/s in 66.1 GiB
with m and v on the host. Gradients on the host have passed their tests there (``profiles/gpu_tests.md``).
"""

from collections.abc import Iterable
from fractions import Fraction

from cs336_systems.case import TrainingCase
from cs336_systems.config import check_known
from cs336_systems.costs.memory import WIDE

STATES = {"m": "exp_avg", "v": "exp_avg_sq", "master": "master"}
"""Names of offloaded states, each with the optimizer's key for it."""
OFFLOADS = (*STATES, "gradients", "residual")

BATCH_ELEMENTS = 2**25
"""Elements that the optimizer fetches together: 64 MiB of bf16 state take 1.2 ms at 55 GB/s, a hundred launches."""
IN_FLIGHT_BYTES = 2**30
"""Bytes of gradients that may be in flight to the host: a block of 14B has 0.5 GiB, all made at once."""


def state_keys(names: Iterable[str]) -> set[str]:
    """The optimizer's keys for those of ``OFFLOADS`` that are its states."""
    return {STATES[name] for name in names if name in STATES}


def offloaded(case: TrainingCase) -> frozenset[str]:
    """The names, of ``OFFLOADS``, of what the case has in host memory.

    Raises:
        ValueError: a name is unknown; the message has the nearest.
    """
    names = frozenset() if case.offload == "none" else frozenset(case.offload.split("-"))
    for name in names:
        check_known("offload", name, OFFLOADS, f" in {case.offload!r}")
    return names


def state_bytes_per_parameter(case: TrainingCase) -> dict[str, Fraction]:
    """Bytes that each of the optimizer's states takes for a parameter, by name: the mean over the model.

    Muon keeps no second moment of the matrices of blocks.
    """
    config, has_second = case.config, Fraction(1)
    if case.optimizer == "muon":
        has_second -= Fraction(config.n_layers * config.n_block_matrices, config.n_parameters)
    moments = {"m": Fraction(case.moment_bytes), "v": case.moment_bytes * has_second}
    return moments if case.master == "none" else moments | {"master": Fraction(WIDE)}
