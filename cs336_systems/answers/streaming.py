"""A step under memory caps, for prose: its parts by arithmetic, and cells as measured, simulated and published."""

from dataclasses import replace

import pandas as pd

from cs336_systems.answers.outside import outside
from cs336_systems.config import resolve_size
from cs336_systems.costs.streaming import Rates, StreamedWork
from cs336_systems.experiments.streaming.cells import hardware_named
from cs336_systems.report.results import MISSING
from cs336_systems.report.tables import Table

PEER = "ml_dataflow"
"""Of whose cells ``outside.csv`` holds tokens per second: ``ml_dataflow 8192 24/75``."""


def streamed_work(size: str, context_length: int, chunk: int) -> StreamedWork:
    """A model's pieces on sequences of a length in chunks of so many tokens."""
    config = replace(resolve_size(size), max_context_length=None).at_context(context_length)
    return StreamedWork(config, context_length, chunk)


def sustained(device: str = "h200") -> Rates:
    """What a device sustains, as the simulation has it."""
    return Rates.of(hardware_named(device))


def beside_peer_table(rows: pd.DataFrame) -> Table:
    """A line for each measured cell of llama3-8b that the peer publishes too, and ours without caps."""
    lines = []
    capped = rows[(rows["size"] == "llama3-8b") & (rows["device_gib"] > 0)]
    measured = capped[capped["metric"] == "tokens_per_s"]
    for _, row in measured.drop_duplicates(["context_length", "device_gib", "host_gib"], keep="last").iterrows():
        caps = f"{row['device_gib']:g}/{row['host_gib']:g}"
        try:
            theirs = outside(f"{PEER} {int(row['context_length'])} {caps}")
        except LookupError:
            theirs = MISSING
        lines.append(
            {
                "length": f"{int(row['context_length']):,}",
                "device / host GiB": caps.replace("/", " / "),
                "tokens/s": f"{row['median']:,.0f}",
                f"{PEER} on an H100": theirs,
            }
        )
    return Table("llama3-8b, tokens per second; the peer's as it publishes them, of another GPU.", pd.DataFrame(lines))
