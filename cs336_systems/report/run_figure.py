"""Training runs as one picture: loss, gradient norm, learning rate, tokens/s, share of the speed of light, GPU.

Each run has a colour. Values of single steps are pale under their running median, and evaluations are dots. A cross at
the bottom marks a step that was not finite, a dotted line where a run was resumed. The panel of a quantity that no log
has says so; runs without a GPU have no GPU panels. Drawn without pyplot, so importing this touches no display. The
module also reads runs by name, and summarises a run in a few numbers.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import LogLocator, MaxNLocator, NullFormatter
from matplotlib.typing import HashableList

from cs336_systems.hardware import GIB
from cs336_systems.pretraining.run_log import LOG, Run, read_run
from cs336_systems.pretraining.run_records import Device, End, Model, Session
from cs336_systems.report.figures import OKABE_ITO, WITH_COMMAS, dress

XAxis = Literal["step", "tokens", "hours"]
MOST_RUNS = len(OKABE_ITO)

_X_LABELS: dict[XAxis, str] = {"step": "step", "tokens": "tokens seen, millions", "hours": "hours of training steps"}
_LAYOUT: list[HashableList[str]] = [
    ["loss", "loss", "norm"],
    ["loss", "loss", "learning_rate"],
    ["tokens_per_s", "speed_of_light", "memory_used_bytes"],
    ["sm_mhz", "power_w", "temperature_c"],
]
_WITHOUT_GPU: list[HashableList[str]] = [*_LAYOUT[:2], ["tokens_per_s", "tokens_per_s", "tokens_per_s"]]
_SMOOTHED_SHARE = 0.02
"""The share of the longest run's steps that the running median spans."""
_DECADE = 10
"""If the ends of an axis differ by more than this factor, its ticks are at 1, 2 and 5 times powers of ten."""
_FEW = 40
"""The most points that get markers, as a line through few points may be too short to be seen."""
_RECENT = 100
"""Number of last steps whose medians are a run's recent speed."""
_GREY = "#666666"
_MARKS: dict[str, dict[str, Any]] = {
    "each step": {"linewidth": 0.8, "alpha": 0.5},
    "running median": {"linewidth": 1.6},
    "evaluation": {"linewidth": 0.8, "linestyle": "--", "marker": "o", "markersize": 5},
    "not finite": {"marker": "x", "linestyle": ""},
    "resumed": {"linewidth": 0.8, "linestyle": ":"},
}


@dataclass(frozen=True)
class _Panel:
    """A column's label, its factor to the shown unit, whether it is smoothed or begins at zero, and its table."""

    label: str
    unit: float = 1.0
    smooth: bool = False
    from_zero: bool = False
    source: Literal["steps", "gpu"] = "steps"

    def frame(self, run: Run) -> pd.DataFrame:
        """Return the run's table that has the column."""
        return run.steps if self.source == "steps" else run.gpu


_PANELS: dict[str, _Panel] = {
    "loss": _Panel("loss, nats per token", smooth=True),
    "norm": _Panel("gradient norm", smooth=True),
    "learning_rate": _Panel("learning rate, 10⁻³", 1000),
    "tokens_per_s": _Panel("tokens/s", smooth=True, from_zero=True),
    "speed_of_light": _Panel("% of the speed of light", 100, smooth=True, from_zero=True),
    "memory_used_bytes": _Panel("GPU memory in use, GiB", 1 / GIB, from_zero=True, source="gpu"),
    "sm_mhz": _Panel("GPU clock, MHz", source="gpu"),
    "power_w": _Panel("GPU power, W", source="gpu"),
    "temperature_c": _Panel("GPU temperature, °C", source="gpu"),
}


def run_figure(runs: Mapping[str, Run], x: XAxis = "step") -> Figure:
    """Draw one figure of runs by their names.

    Args:
        x: the quantity of the x axis.

    Raises:
        ValueError: there is no run, or there are more runs than colours.
    """
    if not 0 < len(runs) <= MOST_RUNS:
        raise ValueError(f"a picture has 1 to {MOST_RUNS} runs, got {len(runs)}")
    smooth = max(1, round(_SMOOTHED_SHARE * max(len(run.steps) for run in runs.values())))
    layout = _LAYOUT if any(map(_has_gpu, runs.values())) else _WITHOUT_GPU
    figure = Figure(figsize=(13, 2.75 * len(layout)), layout="constrained")
    panels = figure.subplot_mosaic(layout)
    coloured = list(zip(runs.values(), OKABE_ITO, strict=False))
    end = max(_places(run, pd.Series([_steps_made(run)]), x)[0] for run in runs.values())
    for column, axes in panels.items():
        panel = _PANELS[column]
        drawn = [_draw(axes, run, colour, column, panel, x, smooth) for run, colour in coloured]
        axes.set_ylabel(panel.label)
        dress(axes)
        if any(drawn):
            axes.set_xlabel(_X_LABELS[x])
            axes.set_xlim(-0.02 * end, 1.02 * end)
            axes.xaxis.set_major_locator(MaxNLocator(6, integer=x == "step"))
            axes.xaxis.set_major_formatter(WITH_COMMAS)
            _scale(axes, column, panel)
        else:
            axes.text(0.5, 0.5, "not in the log", transform=axes.transAxes, ha="center", va="center", color=_GREY)
            axes.set(xticks=[], yticks=[])
    marked = {"each step", "running median"} if smooth > 1 else {"each step"}
    for run, colour in coloured:
        marked |= _mark(panels["loss"], panels["norm"], run, colour, x)
    handles = [Line2D([], [], color=_GREY, label=name, **style) for name, style in _MARKS.items() if name in marked]
    panels["loss"].legend(handles=handles, loc="upper right", frameon=False, fontsize=9)
    models = dict.fromkeys(model.name for run in runs.values() if (model := run.last(Model)))
    devices = dict.fromkeys(f"{each.count} x {each.name}" for run in runs.values() if (each := run.last(Device)))
    what = next(iter(runs)) if len(runs) == 1 else f"{len(runs)} runs"
    figure.suptitle("; ".join([what, *models, *devices]), fontsize=11)
    if len(runs) > 1:
        lines = [Line2D([], [], color=colour, label=name) for name, colour in zip(runs, OKABE_ITO, strict=False)]
        figure.legend(handles=lines, loc="outside lower center", ncols=min(4, len(lines)), frameon=False, fontsize=9)
    return figure


def _has_gpu(run: Run) -> bool:
    """Return whether the run has a GPU, or may have one because its log does not say yet."""
    device = run.last(Device)
    return device is None or device.memory_bytes is not None


def _places(run: Run, steps: "pd.Series[int]", x: XAxis) -> np.ndarray:
    """Return positions on the x axis after ``steps`` steps."""
    if x == "step" or run.steps.empty:
        return steps.to_numpy(float)
    spent = run.steps["tokens"] / 1e6 if x == "tokens" else run.steps["seconds"] / 3600
    made = np.append(run.steps["step"], run.steps["step"].iloc[-1] + 1)
    return np.interp(steps, made, np.append(0, spent.cumsum()))


def _steps_made(run: Run) -> int:
    return int(run.steps["step"].iloc[-1]) + 1 if len(run.steps) else 1


def _scale(axes: Axes, column: str, panel: _Panel) -> None:
    """Give losses and norms a logarithmic axis, as they fall by large factors; start rates and shares at zero."""
    low, high = axes.get_ylim()
    if column in ("loss", "norm") and low > 0:
        axes.set_yscale("log")
        wide = column == "norm" and high > _DECADE * low
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)) if wide else MaxNLocator(10 if column == "loss" else 6))
        axes.yaxis.set_minor_formatter(NullFormatter())
    axes.yaxis.set_major_formatter(WITH_COMMAS)
    if panel.from_zero:
        axes.set_ylim(0, 1.08 * axes.get_ylim()[1])


def _draw(axes: Axes, run: Run, colour: str, column: str, panel: _Panel, x: XAxis, smooth: int) -> bool:
    """Draw a column of a run; return whether it has values."""
    frame = panel.frame(run)
    values = (frame[column] * panel.unit).where(np.isfinite(frame[column]))
    if values.isna().all():
        return False
    places = _places(run, frame["step"], x)
    marker = "." if values.count() <= _FEW else ""
    pale = panel.smooth and smooth > 1
    axes.plot(places, values, color=colour, linewidth=0.8, marker=marker, alpha=0.25 if pale else 1)
    if pale:
        axes.plot(places, values.rolling(smooth, min_periods=1, center=True).median(), color=colour, linewidth=1.6)
    return True


def _mark(loss: Axes, norm: Axes, run: Run, colour: str, x: XAxis) -> set[str]:
    """Mark evaluations, steps that are not finite, and resumptions; return the names of the marks drawn."""
    resumed = [session.first_step for session in run.all(Session) if session.first_step]
    broken = {axes: run.steps["step"][~np.isfinite(run.steps[name])] for axes, name in ((loss, "loss"), (norm, "norm"))}
    loss.plot(_places(run, run.evaluations["step"], x), run.evaluations["loss"], color=colour, **_MARKS["evaluation"])
    for axes, steps in broken.items():
        foot = [0.02] * len(steps)
        axes.plot(_places(run, steps, x), foot, "x", color=colour, transform=axes.get_xaxis_transform())
    for place in _places(run, pd.Series(resumed, dtype=int), x):
        loss.axvline(place, color=colour, **_MARKS["resumed"])
    has = {"evaluation": len(run.evaluations), "not finite": any(map(len, broken.values())), "resumed": resumed}
    return {name for name, there in has.items() if there}


def read_runs(paths: Sequence[Path]) -> dict[str, Run]:
    """Read logs, or folders that have one, by the folder's or file's name, or by the path if names collide.

    Raises:
        ValueError: a path is named twice, or no log of a run.
        OSError: a log cannot be read.
    """
    logs = [path / LOG if path.is_dir() else path for path in paths]
    short = [log.resolve().parent.name if log.name == LOG else log.stem for log in logs]
    runs: dict[str, Run] = {}
    for log, name in zip(logs, short, strict=True):
        name = name if short.count(name) == 1 else str(log)
        name = name.encode(errors="replace").decode()  # a name that is not UTF-8 cannot be drawn
        if name in runs:
            raise ValueError(f"{log} is named twice")
        runs[name] = read_run(log)
    return runs


def summary(run: Run) -> dict[str, Any]:
    """Return a run's progress: steps, newest losses, recent speed; None for values unknown or not finite."""
    steps, evaluations, end, options = run.steps, run.evaluations, run.last(End), run.last(Session)
    recent = steps.tail(_RECENT)[["tokens_per_s", "speed_of_light"]].median()
    return {
        "steps": int(steps["step"].iloc[-1]) + 1 if len(steps) else 0,
        "n_steps": options.n_steps if options else None,
        "loss": _finite(steps["loss"].iloc[-1]) if len(steps) else None,
        "evaluation_loss": _finite(evaluations["loss"].iloc[-1]) if len(evaluations) else None,
        "evaluation_step": int(evaluations["step"].iloc[-1]) if len(evaluations) else None,
        "tokens_per_s": _finite(recent["tokens_per_s"]),
        "speed_of_light_percent": _finite(100 * recent["speed_of_light"]),
        "ended": end.reason if end is not None and run.records[-1] is end else None,
    }


def _finite(value: float) -> float | None:
    return float(f"{value:.6g}") if math.isfinite(value) else None
