"""A profile made from the golden trace, for the tests of what is written and drawn about it."""

from pathlib import Path

from cs336_systems.experiments.profile_digest import Profile
from cs336_systems.profiling.recording import Workload
from cs336_systems.profiling.traces import kineto

TRACE = Path(__file__).parents[1] / "profiling" / "traces" / "fixtures" / "kineto.json.gz"


def golden_profile() -> Profile:
    """The recorded training step beside made-up times of the clock; two blocks of ``medium`` were recorded."""
    workload = Workload(device="cuda", size="medium", optimizer="torch-fused", warmup=1, steps=2)
    clock = {"forward": 5.5, "backward": 9.5, "optimizer": 0.5, "step": 15.5}
    slower = ({phase: factor * ms for phase, ms in clock.items()} for factor in (1.1, 1.2))
    return Profile(workload, kineto.read(TRACE), clock, *slower)
