"""Profiles made from the golden trace, for the tests of what is written about them."""

from pathlib import Path

from cs336_systems.experiments.profile.tables import Profile
from cs336_systems.profiling.recording import Workload
from cs336_systems.profiling.traces import kineto

FIXTURES = Path(__file__).parents[2] / "profiling" / "traces" / "fixtures"

WORKLOAD = Workload(device="cuda", size="medium", optimizer="torch-fused", warmup=1, steps=2)
"""The recorded blocks are those of ``medium``; there were two of them."""


def golden_profile() -> Profile:
    """The recorded training step beside made-up times of the clock."""
    clock = {"forward": 5.5, "backward": 9.5, "optimizer": 0.5, "step": 15.5}
    annotated = {phase: 1.1 * ms for phase, ms in clock.items()}
    recorded = {phase: 1.2 * ms for phase, ms in clock.items()}
    return Profile(WORKLOAD, kineto.read(FIXTURES / "kineto.json.gz"), clock, annotated, recorded)
