"""Numbers that are computed, not measured: rings, forms of parallelism, the 4D accounting, pipelines, failures.

Answers come from ``costs/``; this module only fixes what the documents ask about: the scaling book's shape of a 70B
model's feed-forward, a batch of 4M tokens, H100s, and the accounting question's TPUs.
"""

from dataclasses import dataclass

from cs336_systems.costs.parallelism import ring as rings
from cs336_systems.costs.parallelism.failures import Job, mean_time_between_failures
from cs336_systems.costs.parallelism.forms import FeedForward, Form, Pass, find_device, largest_world
from cs336_systems.costs.parallelism.mesh import (
    XXL,
    MeshThreshold,
    Network,
    Split,
    best_whole_split,
    largest_mesh,
    optimal_split,
    smaller_batches,
    thresholds,
    torus_network,
)
from cs336_systems.costs.parallelism.pipeline import Timeline, simulate
from cs336_systems.costs.parallelism.scaling import LLAMA3_70B, Workload

LAYER = FeedForward(8192, 28_672, 3)
WORKLOAD = Workload(LLAMA3_70B.n_parameters, 2**22, 8192)
H100, TPU = find_device("h100"), find_device("tpu-v5p")
SAVE_S, RESTART_S = 60.0, 300.0


def ring_ratio(n_ranks: int) -> float:
    """Bytes that a rank sends in the alternate all-reduce, over those of the ring; both played."""
    total = 1024 * n_ranks
    runs = (rings.alternate_all_reduce(n_ranks, total), rings.all_reduce(n_ranks, total))
    return max(runs[0].bytes_per_link) / max(runs[1].bytes_per_link)


def h100s_that_hide(form: Form, which: Pass, tokens: float) -> float:
    """H100s up to which a form hides its communication, at so many tokens in the batch."""
    return largest_world(form, LAYER, tokens, which, H100.flops_per_s, H100.egress(8))


@dataclass(frozen=True)
class Mesh:
    """FSDP and tensor parallelism of 2**20 tokens over 256 H100s, whose axes overlap or share the network."""

    overlapping: bool

    @property
    def _network(self) -> Network:
        egress = H100.egress(256)
        return Network(H100.flops_per_s, egress, egress, self.overlapping)

    @property
    def best(self) -> Split:
        return optimal_split(LAYER, 2**20, 256, self._network)

    @property
    def whole(self) -> Split:
        """The best split into whole numbers."""
        return best_whole_split(LAYER, 2**20, 256, self._network)

    @property
    def largest(self) -> float:
        """Devices up to which some split hides its communication."""
        x, y = largest_mesh(LAYER, 2**20, self._network)
        return x * y


def xxl_threshold(*, overlapping: bool, large_rings: bool = True) -> MeshThreshold:
    """Tokens from which forward of the accounting question's stack on 16 x 4 TPUs is bound by compute."""
    network = torus_network(TPU, 2, 1, overlapping=overlapping, large_rings=large_rings)
    return next(t for t in thresholds(XXL.layer, 64, network) if (t.fsdp, t.tp) == (16, 4))


def xxl_remedies() -> list[float]:
    """Tokens per device after each remedy, in the order of ``smaller_batches``."""
    network = torus_network(TPU, 2, 1, overlapping=False, large_rings=True)
    return [tokens for _, tokens in smaller_batches(XXL.layer, 16, 4, network)]


def schedule(name: str, stages: int, microbatches: int) -> Timeline:
    """A pipeline schedule, played; interleaved has two chunks per stage."""
    return simulate(name, stages, microbatches, chunks=2 if name == "interleaved" else 1)


def job(n_nodes: int) -> Job:
    """A run on so many nodes that takes a minute to save and five to restart."""
    return Job(mean_time_between_failures(n_nodes), SAVE_S, RESTART_S)
