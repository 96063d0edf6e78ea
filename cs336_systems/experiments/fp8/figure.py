"""Where the time of blocks and of their products goes, by way, as PNG."""

import pandas as pd
from matplotlib.figure import Figure

from cs336_systems.experiments.fp8.table import BLOCK_TABLE, PRODUCT_TABLE
from cs336_systems.report.figures import OKABE_ITO, dress
from cs336_systems.report.results import Line

_PHASES = {
    "forward": ("forward", OKABE_ITO[0]),
    "backward": ("backward", OKABE_ITO[5]),
    "quantize_x": ("quantize x", OKABE_ITO[1]),
    "quantize_dy": ("quantize dy", OKABE_ITO[4]),
}
"""Of a block quantization is inside forward and backward."""


def time_figure(rows: pd.DataFrame) -> Figure | None:
    """A panel for each block and each product: milliseconds of its phases, a bar for each way; None without rows."""
    ok = rows[rows["status"] == "ok"]
    panels: dict[str, list[Line]] = {}
    for part, table in (("block", BLOCK_TABLE), ("product", PRODUCT_TABLE)):
        of_part = ok[ok["part"] == part]
        for line in [] if of_part.empty else table.lines(of_part):
            panels.setdefault(f"{line.settings.get('product', part)}\n{_shape(line)}", []).append(line)
    if not panels:
        return None
    longest = max(map(len, panels.values()))
    figure = Figure(figsize=(2 + 2.6 * len(panels), 0.4 * longest + 1.6), layout="constrained")
    labelled = {}
    every = figure.subplots(1, len(panels), sharey=True, squeeze=False)[0]
    for axes, (title, own) in zip(every, panels.items(), strict=True):
        names, left = [str(line.settings["how"]) for line in own], [0.0] * len(own)
        for phase, (label, colour) in _PHASES.items():
            ms = [line.median(phase) or 0.0 for line in own]
            if any(ms):
                labelled[label] = axes.barh(names, ms, left=left, color=colour, height=0.7)
                left = [sum(pair) for pair in zip(left, ms, strict=True)]
        axes.set_xlabel("ms")
        axes.set_title(title, fontsize=10)
        dress(axes)
        axes.set_axisbelow(True)
    every[0].invert_yaxis()
    figure.legend(labelled.values(), labelled.keys(), loc="outside lower center", ncols=4, frameon=False)
    first = next(iter(panels.values()))[0].settings
    figure.suptitle(f"On {first.get('gpu', first['device'])}", fontsize=11)
    return figure


def _shape(line: Line) -> str:
    tokens = int(line.settings["batch_size"]) * int(line.settings["context_length"])
    return f"{line.settings['size']}, {tokens:,} tokens"
