"""Where the time of a block's products goes, by recipe, as PNG."""

import pandas as pd
from matplotlib.figure import Figure

from cs336_systems.experiments.fp8.table import PRODUCT_TABLE
from cs336_systems.report.figures import OKABE_ITO, dress
from cs336_systems.report.results import Line

_PHASES = {
    "forward": ("forward", OKABE_ITO[0]),
    "backward": ("backward", OKABE_ITO[5]),
    "quantize_x": ("quantize x", OKABE_ITO[1]),
    "quantize_dy": ("quantize dy", OKABE_ITO[4]),
}


def products_figure(rows: pd.DataFrame) -> Figure | None:
    """A panel for each product: milliseconds of its phases, one bar for each way; None without products."""
    lines = PRODUCT_TABLE.lines(rows[(rows["status"] == "ok") & (rows["part"] == "product")])
    by_product: dict[tuple[str, str], list[Line]] = {}
    for line in lines:
        by_product.setdefault((_shape(line), line.settings["product"]), []).append(line)
    if not by_product:
        return None
    figure = Figure(figsize=(4 * len(by_product), 0.4 * max(map(len, by_product.values())) + 1.6), layout="constrained")
    panels = figure.subplots(1, len(by_product), squeeze=False)[0]
    for axes, own in zip(panels, by_product.values(), strict=True):
        names = [str(line.settings["how"]) for line in own]
        left = [0.0] * len(own)
        for phase, (label, colour) in _PHASES.items():
            ms = [line.median(phase) or 0.0 for line in own]
            axes.barh(names, ms, left=left, color=colour, label=label, height=0.7)
            left = [sum(pair) for pair in zip(left, ms, strict=True)]
        axes.invert_yaxis()
        axes.set_xlabel("ms")
        axes.set_title(f"{own[0].settings['product']} of {_shape(own[0])}", fontsize=10)
        dress(axes)
    panels[0].figure.legend(*panels[0].get_legend_handles_labels(), loc="outside lower center", ncols=4, frameon=False)
    figure.suptitle(f"Products of a block on {lines[0].settings.get('gpu', lines[0].settings['device'])}", fontsize=11)
    return figure


def _shape(line: Line) -> str:
    tokens = int(line.settings["batch_size"]) * int(line.settings["context_length"])
    return f"{line.settings['size']}, {tokens:,} tokens"
