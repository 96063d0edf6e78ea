"""How often should a large job save? Time between failures, goodput against checkpoint interval, and the optimum.

Nodes fail independently at a constant rate, so the times between failures of a job on n nodes are exponential with mean
M = 1 / (rate n): at 10 failures per 1000 node-days one node runs 100 days between failures, a thousand nodes 2.4 hours.
A job works for ``interval`` seconds, then saves for ``save`` seconds; after a failure it takes ``restart`` seconds to
continue from the last checkpoint. Such a segment takes on average (Daly 2006; failures may also occur while saving and
restarting)

    E = M exp(restart / M) (exp((interval + save) / M) - 1)        goodput = interval / E

Alternatively, when a replica fails, the others drop that step and train on without it. With ``step`` seconds per step
and ``stop`` seconds from a failure until the others train again, a step takes on average

    E = (M + stop) (exp(step / M) - 1)        goodput = step / E / (1 + away / (n M))

since one of n replicas is missing for ``away`` seconds more (failures while training is stopped are left out).

Optima: Young (1974) takes sqrt(2 save M), valid if save and interval are short compared with M. Daly's higher-order
form multiplies it by 1 + 1/3 sqrt(save / 2M) + save / 18 M and subtracts ``save``; from save = 2 M on it is M. The
exact optimum solves exp((interval + save) / M) (1 - interval / M) = 1, by bisection; it does not depend on the restart.

Sources: J. W. Young, "A first order approximation to the optimum checkpoint interval", 1974; J. T. Daly, "A higher
order estimate of the optimum checkpoint interval for restart dumps", 2006. The rate is of the order that clusters
report: 6.5 and 2.3 failures per 1000 node-days on two of Meta's (Kokolis et al., "Revisiting reliability in large-scale
machine learning research clusters", 2024). Assumptions: a saved checkpoint is valid, saving blocks training, and a
spare node is available. All times are in seconds.
"""

import math
from dataclasses import dataclass

DAY = 86_400.0
FAILURES_PER_1000_NODE_DAYS = 10.0


def mean_time_between_failures(n_nodes: int, per_1000_node_days: float = FAILURES_PER_1000_NODE_DAYS) -> float:
    """Seconds between failures of a job on ``n_nodes``; ValueError for no nodes, or no failures."""
    if n_nodes < 1:
        raise ValueError(f"number of nodes must be positive, got {n_nodes}")
    if not per_1000_node_days > 0:
        raise ValueError(f"failures per 1000 node-days must be positive, got {per_1000_node_days}")
    return 1000 / (per_1000_node_days * n_nodes) * DAY


@dataclass(frozen=True)
class Job:
    """The costs of failures and checkpoints for a job, in seconds.

    Raises:
        ValueError: a time is not positive, or the restart negative.
    """

    mtbf_s: float
    save_s: float
    """Seconds for which training stops at each checkpoint."""
    restart_s: float = 0.0
    """Seconds from a failure until training runs again, without the work that is repeated."""

    def __post_init__(self) -> None:
        if not self.mtbf_s > 0:
            raise ValueError(f"mean time between failures must be positive, got {self.mtbf_s}")
        if not self.save_s > 0:
            raise ValueError(f"time to save must be positive, got {self.save_s}")
        if self.restart_s < 0:
            raise ValueError(f"time to restart must not be negative, got {self.restart_s}")

    def expected_segment_s(self, interval_s: float) -> float:
        """Seconds that ``interval_s`` of work and its checkpoint take on average; infinite on overflow.

        Raises:
            ValueError: the interval is not positive.
        """
        if not interval_s > 0:
            raise ValueError(f"checkpoint interval must be positive, got {interval_s}")
        try:
            return self.mtbf_s * math.exp(self.restart_s / self.mtbf_s) * math.expm1(self._segment(interval_s))
        except OverflowError:
            return math.inf

    def _segment(self, interval_s: float) -> float:
        return (interval_s + self.save_s) / self.mtbf_s

    def goodput(self, interval_s: float) -> float:
        """The share of time spent on work that is not lost; raises ValueError as ``expected_segment_s``."""
        return interval_s / self.expected_segment_s(interval_s)

    @property
    def young_s(self) -> float:
        """Young's first-order optimum."""
        return math.sqrt(2 * self.save_s * self.mtbf_s)

    @property
    def daly_s(self) -> float:
        """Daly's higher-order optimum."""
        if self.save_s >= 2 * self.mtbf_s:
            return self.mtbf_s
        part = self.save_s / (2 * self.mtbf_s)
        return self.young_s * (1 + math.sqrt(part) / 3 + part / 9) - self.save_s

    @property
    def optimal_s(self) -> float:
        """The interval of highest goodput, between 0 and M: the root of goodput's derivative."""
        low, high = 0.0, self.mtbf_s
        for _ in range(200):
            middle = (low + high) / 2
            if self._segment(middle) + math.log1p(-middle / self.mtbf_s) > 0:
                low = middle
            else:
                high = middle
            if high - low <= 1e-12 * high:
                break
        return (low + high) / 2


@dataclass(frozen=True)
class ReplicatedJob:
    """The costs of failures for replicas that average gradients in every step, in seconds.

    Raises:
        ValueError: a time is not positive or negative, or there are fewer than two replicas.
    """

    mtbf_s: float
    """Seconds of training between failures of any of the replicas."""
    n_replicas: int
    step_s: float
    stop_s: float
    """Seconds from a failure until the others begin the step again."""
    back_s: float
    """Seconds from a failure until the dead replica trains again."""

    def __post_init__(self) -> None:
        if self.n_replicas < 2:
            raise ValueError(f"replicas that go on without one must be at least 2, got {self.n_replicas}")
        if not (self.mtbf_s > 0 and self.step_s > 0):
            raise ValueError(f"time between failures and step must be positive, got {self.mtbf_s} and {self.step_s}")
        if self.stop_s < 0 or self.back_s < 0:
            raise ValueError(f"times after a failure must not be negative, got {self.stop_s} and {self.back_s}")

    @property
    def goodput(self) -> float:
        """The share of all replicas' time spent on steps that are not lost."""
        try:
            expected_s = (self.mtbf_s + self.stop_s) * math.expm1(self.step_s / self.mtbf_s)
        except OverflowError:
            return 0.0
        away_s = max(0.0, self.back_s - self.stop_s)
        return self.step_s / expected_s / (1 + away_s / (self.n_replicas * self.mtbf_s))
