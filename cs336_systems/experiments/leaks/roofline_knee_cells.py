"""Options of ``roofline_knee.py``, and its points. Imports no torch."""

from dataclasses import dataclass
from typing import ClassVar

from cs336_systems.experiments.options import RunOptions, cell_of

CEILING, LAUNCH, COMPILED, EAGER = "ceiling", "launch", "compiled", "eager"
_MOST_EAGER = 16
"""Multiply-adds of the longest eager chain: it is a straight line, and more would only take longer."""

LONGEST_CHAIN = 512
"""Inductor unrolls the chain; beyond this, compiling takes minutes."""


@dataclass(frozen=True)
class Options(RunOptions):
    """How many multiply-adds per element until an elementwise kernel takes twice as long as with one?"""

    CPU_DEFAULTS: ClassVar = {"fmas": (1, 4, 16, 32, 64, 96, 128), "elements": 2**24, "samples": 5}
    fmas: tuple[int, ...] = (1, 4, 8, 16, 32, 48, 64, 96, 128, 192, 256, 384, 512)
    """Multiply-adds per element."""
    elements: int = 2**26
    """fp32 numbers; input and output should be larger than any cache."""
    samples: int = 20
    """Timed calls per point and repeat."""
    repeat: int = 2
    """How often all points are run."""


@dataclass(frozen=True)
class ChainCell:
    """One length of the chain, run one way.

    ``how`` ceiling stands for the machine's own limits, launch for the shortest compiled chain on a single number.
    """

    device: str
    how: str
    fmas: int
    elements: int
    samples: int
    repeat: int
    seed: int

    @property
    def variant(self) -> str:
        return self.how

    def __str__(self) -> str:
        return "product and copy ceilings" if self.how == CEILING else f"{self.how} {self.fmas} repeat {self.repeat}"


def make_cells(options: Options) -> list[ChainCell]:
    """The ceilings, a launch, then every point, repeat by repeat; raises ValueError for what gives no knee."""
    chains = sorted(set(options.fmas))
    if len(chains) < 4 or chains[0] != 1:
        raise ValueError(f"--fmas needs four different values or more, 1 among them, got {list(options.fmas)}")
    if chains[-1] > LONGEST_CHAIN:
        raise ValueError(f"--fmas must be at most {LONGEST_CHAIN}, got {chains[-1]}")
    if options.elements < 1:
        raise ValueError(f"--elements must be positive, got {options.elements}")
    return [
        ChainCell(options.device, CEILING, 0, 0, 0, 0, options.seed),
        cell_of(ChainCell, options, how=LAUNCH, fmas=1, elements=1, repeat=0),
        *(
            cell_of(ChainCell, options, how=how, fmas=fmas, repeat=repeat)
            for repeat in range(options.repeat)
            for fmas in chains
            for how in ((COMPILED, EAGER) if fmas <= _MOST_EAGER else (COMPILED,))
        ),
    ]
