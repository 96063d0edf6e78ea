"""Runs of one model with several optimizers: in what share of AdamW's steps does Muon reach AdamW's held-out loss?

The loss to reach is the lowest final loss of AdamW over its learning rates. A fair comparison needs a Muon run whose
schedule ends after fewer steps: in the middle of a longer run the learning rate is still high.
"""

from collections.abc import Mapping
from typing import Any

import pandas as pd
from matplotlib.figure import Figure

from cs336_systems.pretraining.run_log import Run
from cs336_systems.pretraining.run_records import Session
from cs336_systems.report.figures import OKABE_ITO, dress
from cs336_systems.report.results import MISSING
from cs336_systems.report.tables import Table

_MUON = "Muon"
_DASHES = ("-", "--", ":", "-.")
_SHOWN = 1.0
"""The figure's y axis ends this many nats above the loss to be reached."""


def _how(run: Run) -> tuple[str, int, float]:
    """Return a run's optimizer, number of steps and highest learning rate."""
    session = run.last(Session)
    assert session is not None, run.path
    name = _MUON if session.options["optimizer"] == "muon" else "AdamW"
    return name, session.n_steps, float(session.options["learning_rate"])


def _ended(run: Run) -> float:
    """Return the held-out loss at the end of a run, in nats per token."""
    return float(run.evaluations["loss"].iloc[-1])


def best_of_adamw(runs: Mapping[str, Run]) -> Run:
    """Return the AdamW run with the lowest final held-out loss; raises ValueError if there is no AdamW run."""
    found = [run for run in runs.values() if _how(run)[0] != _MUON]
    if not found:
        raise ValueError(f"no run of AdamW among {', '.join(runs) or 'no runs'}")
    return min(found, key=_ended)


def reached_after(run: Run, loss: float) -> int | None:
    """Return the step of the first evaluation with at most this held-out loss, or None."""
    there = run.evaluations.loc[run.evaluations["loss"] <= loss, "step"]
    return None if there.empty else int(there.iloc[0])


def share_of_steps(runs: Mapping[str, Run]) -> float | None:
    """Return Muon's fewest steps to the loss of AdamW's best run, divided by that run's steps; None if never."""
    best = best_of_adamw(runs)
    after = [reached_after(run, _ended(best)) for run in runs.values() if _how(run)[0] == _MUON]
    return min((steps / _how(best)[1] for steps in after if steps is not None), default=None)


def optimizers_table(runs: Mapping[str, Run]) -> Table:
    """Return a table with a line per run: final held-out loss, and the step at which it reached AdamW's best."""
    best, lines = best_of_adamw(runs), []
    for run in sorted(runs.values(), key=_how):
        name, n_steps, rate = _how(run)
        after = reached_after(run, _ended(best))
        line = {"optimizer": name, "steps": str(n_steps), "learning rate": f"{rate:g}"}
        line["held-out loss"] = f"{_ended(run):.4f}"
        line["reached AdamW's best after"] = MISSING if after is None else f"{after} steps"
        lines.append(line)
    return Table("Held-out loss in nats per token at the end.", pd.DataFrame(lines))


def optimizers_figure(names: tuple[str, ...], *runs: Run) -> Figure:
    """Draw held-out loss over steps for every run, with a horizontal line at the final loss of AdamW's best run."""
    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.subplots()
    kinds: dict[tuple[str, int], int] = {}
    for run in sorted(runs, key=_how):
        name, n_steps, rate = _how(run)
        number = kinds.get((name, n_steps), 0)
        kinds[name, n_steps] = number + 1
        colour = OKABE_ITO[list(kinds).index((name, n_steps)) % len(OKABE_ITO)]
        later = run.evaluations[run.evaluations["step"] > 0]
        style: dict[str, Any] = {"color": colour, "linestyle": _DASHES[number % len(_DASHES)]}
        axes.plot(later["step"], later["loss"], label=f"{name}, {n_steps} steps, rate {rate:g}", **style)
    loss = _ended(best_of_adamw(dict(zip(names, runs, strict=True))))
    axes.axhline(loss, color="0.5", linewidth=0.8)
    axes.set(xlabel="step", ylabel="held-out loss, nats per token", ylim=(None, loss + _SHOWN))
    dress(axes)
    axes.legend(frameon=False, fontsize=8)
    return figure
