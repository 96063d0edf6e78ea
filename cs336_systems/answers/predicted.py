"""Predictions held against steps that others published: which tenth an engine's shares are fitted on, and what is left.

An engine's kernels are not this suite's, so its ``Sustained`` shares are its own, the same for all its cards but for
what a card is known to differ in. They are fitted on a named tenth of each card's steps, the tenth with the smallest
SHA-256 of their names, by least absolute errors in the logarithm of tokens/s. Errors are shown of the other nine.

    uv run scripts/parallelism.py cards                          # errors by engine and card
    uv run scripts/parallelism.py cards --without rtx3090        # with shares that know nothing of its steps
    uv run scripts/parallelism.py cards --cells a100.csv         # of other cells, in the columns of ml_dataflow.csv
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cs336_systems.answers import llmq, ml_dataflow
from cs336_systems.answers.own_steps import OwnStep, own_steps
from cs336_systems.config import did_you_mean
from cs336_systems.costs.rates import OURS, Sustained
from cs336_systems.experiments.parallelism import Answer
from cs336_systems.report.tables import Table

if TYPE_CHECKING:
    import numpy as np
    from matplotlib.figure import Figure

OWN_SECONDS, OWN_PEAK = 0.05, 0.03
"""The errors that predictions of this suite's own steps and peaks should stay below."""

_ROUNDS, _CHANGE, _DAMPED, _LEAST, _RIDGE = 12, 0.02, 0.7, 0.01, 0.005
"""Parameters of the fit: rounds of weighted least squares, the step of finite differences, the damping of each round,
the error above which absolute errors count, and the weight of the starting point (ridge)."""


def named_tenth(names: Sequence[str]) -> set[str]:
    """The tenth of so many names that constants are fitted on, at least two."""
    by_hash = sorted(set(names), key=lambda name: sha256(name.encode()).hexdigest())
    return set(by_hash[: max(2, round(len(by_hash) / 10))])


Steps = Sequence[Any]
"""Steps of one engine, each with ``name``, ``card``, published ``tokens_per_s``, predicted ``rate`` and ``fits``."""


def fitted_and_rest(steps: Steps) -> tuple[Steps, Steps]:
    """(the tenth to fit, the rest)"""
    tenth = named_tenth([step.name for step in steps])
    return [step for step in steps if step.name in tenth], [step for step in steps if step.name not in tenth]


def relative_errors(steps: Steps, shares: Sustained) -> "np.ndarray":
    """Predicted over published tokens/s, less 1."""
    import numpy as np

    return np.array([step.rate(shares) / step.tokens_per_s - 1 for step in steps])


def fit(published: Sequence[Steps], start: Sustained, names: Sequence[str]) -> Sustained:
    """The shares with these names that fit the steps, each card's as much as another's; the others stay as they are."""
    import numpy as np

    def shares(logs: np.ndarray) -> Sustained:
        return replace(start, **{n: getattr(start, n) * float(np.exp(x)) for n, x in zip(names, logs, strict=True)})

    def missed(logs: np.ndarray) -> np.ndarray:
        return np.log1p(np.concatenate([relative_errors(each, shares(logs)) for each in published]))

    logs = np.zeros(len(names))
    even = np.concatenate([np.full(len(each), 1 / len(each)) for each in published])
    for _ in range(_ROUNDS):
        now = missed(logs)
        slopes = np.stack([(missed(logs + _CHANGE * unit) - now) / _CHANGE for unit in np.eye(len(names))], axis=1)
        weights = even / np.maximum(np.abs(now), _LEAST)
        left = slopes.T @ (weights[:, None] * slopes) + _RIDGE * len(published) * np.eye(len(names))
        logs = logs - _DAMPED * np.linalg.solve(left, slopes.T @ (weights * now) + _RIDGE * len(published) * logs)
    return shares(logs)


@dataclass(frozen=True)
class Engine:
    """A program whose steps were published, and its shares of a card's rates."""

    name: str
    cards: Mapping[str, Steps]
    """Its steps that are predicted to fit, by card."""
    shares: Sustained
    fitted: tuple[str, ...]
    feasible: dict[str, tuple[int, int]]
    """By card: configurations of which it is predicted rightly whether they fit, and all."""

    def without(self, card: str) -> Sustained:
        """The shares that the tenths of all other cards give, of this engine.

        Raises:
            ValueError: it has no other card.
        """
        others = [fitted_and_rest(each)[0] for name, each in self.cards.items() if name != card]
        if not others:
            raise ValueError(f"--without {card}: {self.name} has no other card")
        return fit(others, self.unfitted, self.fitted)

    @property
    def unfitted(self) -> Sustained:
        """The shares with which a fit begins: where it fits, this suite's."""
        return replace(self.shares, **{name: getattr(OURS, name) for name in self.fitted})


def _engine(name: str, shares: Sustained, fitted: tuple[str, ...], ran: Steps, failed: Steps = ()) -> Engine:
    """An engine, from its steps that ran and that failed. A step that is predicted not to fit counts in no error."""
    cards, feasible = {}, {}
    for card in dict.fromkeys(step.card for step in ran):
        own, missing = ([step for step in steps if step.card == card] for steps in (ran, failed))
        cards[card] = [step for step in own if step.fits]
        feasible[card] = len(cards[card]) + sum(not step.fits for step in missing), len(own) + len(missing)
    return Engine(name, cards, shares, fitted, feasible)


def ml_dataflow_engine(path: Path = ml_dataflow.CELLS) -> Engine:
    cells = ml_dataflow.read_cells(path)
    failed = list(ml_dataflow.failed_cells(cells))
    return _engine("ml_dataflow", ml_dataflow.SHARES, ml_dataflow.FITTED, cells, failed)


def llmq_engine(path: Path = llmq.ROWS) -> Engine:
    return _engine("llm.q", llmq.SHARES, llmq.FITTED, llmq.read_rows(path))


@dataclass(frozen=True)
class Cards:
    """Steps that others published on many cards, beside what the predictor says of them."""

    cells: Path = ml_dataflow.CELLS
    """A file in the columns of ml_dataflow.csv."""
    rows: Path = llmq.ROWS
    """A file in the columns of llmq.csv."""
    without: str | None = None
    """A card whose steps nothing is fitted on; all of them are shown."""

    def answer(self) -> Answer:
        engines = ml_dataflow_engine(self.cells), llmq_engine(self.rows)
        known = [card for engine in engines for card in engine.cards]
        if self.without is not None and self.without not in known:
            raise ValueError(
                f"--without {self.without}: {did_you_mean(self.without, known)}known are {', '.join(known)}"
            )
        lines, summary = [], dict[str, Any]()
        for engine in engines:
            for card in engine.cards if self.without is None else {self.without} & engine.cards.keys():
                for group, errors, n_fitted in errors_of(engine, card, known=self.without is None):
                    right, of = engine.feasible[card]
                    found = {
                        "steps": len(errors),
                        "fitted on": n_fitted,
                        **_percents(errors),
                        "fits, right %": 100 * right / of,
                    }
                    summary[f"{engine.name} {group}"] = found
                    shown = [n if isinstance(n, int) else f"{n:.1f}" for n in found.values()]
                    lines.append((engine.name, group, *shown))
        how = f"nothing fitted on {self.without}" if self.without else "fitted on a named tenth, shown for the others"
        caption = f"Predicted tokens/s beside published ones, error without its sign: {how}"
        columns = ("engine", "card", *next(iter(summary.values())))
        own, of_own = own_table()
        return [Table.of(caption, columns, lines), own], summary | of_own


def unknown_table() -> Table:
    """Errors where nothing is fitted on a card: an engine's shares are those that its other cards' tenths give."""
    lines = []
    for engine in (ml_dataflow_engine(), llmq_engine()):
        for card in engine.cards:
            for group, errors, _ in errors_of(engine, card, known=False):
                shown = (f"{percent:.1f}" for percent in _percents(errors).values())
                lines.append((engine.name, group, len(errors), *shown))
    columns = ("engine", "card", "steps", "median %", "nine of ten %", "largest %")
    return Table.of("The same, with nothing fitted on the card", columns, lines)


def own_table() -> tuple[Table, dict[str, Any]]:
    """Errors of this suite's own committed steps and peaks, by card, and the same for a program."""
    import numpy as np

    groups: dict[str, list[OwnStep]] = {}
    for step in own_steps():
        groups.setdefault(step.group, []).append(step)
    lines, summary = [], dict[str, Any]()
    for group, steps in groups.items():
        seconds = np.array([step.seconds_error for step in steps])
        peaks = np.array([error for step in steps if (error := step.memory_error) is not None])
        found = {
            "steps": len(steps),
            "median %": _percents(seconds)["median %"],
            "within 5 %": int((np.abs(seconds) <= OWN_SECONDS).sum()),
            "largest %": _percents(seconds)["largest %"],
            "peaks": len(peaks),
            "within 3 %": int((np.abs(peaks) <= OWN_PEAK).sum()),
            "largest of peaks %": _percents(peaks)["largest %"] if len(peaks) else None,
        }
        summary[f"ours {group}"] = found
        lines.append((group, *("" if n is None else n if isinstance(n, int) else f"{n:.1f}" for n in found.values())))
    columns = ("card", *next(iter(summary.values())))
    return Table.of("This suite's own steps and peaks; rates are fitted on those of one H200", columns, lines), summary


def errors_of(engine: Engine, card: str, *, known: bool = True) -> list[tuple[str, "np.ndarray", int]]:
    """(card and number of GPUs, errors, steps that were fitted on) of the steps that nothing was fitted on.

    A file of other cards than those that the shares were fitted on has none that was.

    Args:
        known: whether the engine's shares may know the card's named tenth; else all steps count.
    """
    steps, shares, n_fitted = engine.cards[card], engine.shares, 0
    if known and card in _FITTED_CARDS[engine.name]:
        fitted, steps = fitted_and_rest(steps)
        n_fitted = len(fitted)
    elif not known:
        shares = engine.without(card)
    found = relative_errors(steps, shares)
    if engine.name != "llm.q":
        return [(card, found, n_fitted)]
    several = [step.n_gpus > 1 for step in steps]
    groups = {f"{card}, one": [not each for each in several], f"{card}, several": several}
    return [(name, found[chosen], n_fitted) for name, chosen in groups.items() if any(chosen)]


_FITTED_CARDS = {"ml_dataflow": ("h100", "rtx3090"), "llm.q": ("H100", "Pro6000")}


def _percents(errors: "np.ndarray") -> dict[str, float]:
    """Quantiles of the errors' absolute values, in percent."""
    import numpy as np

    shares = {"median %": 0.5, "nine of ten %": 0.9, "largest %": 1.0}
    return {name: 100 * float(np.quantile(np.abs(errors), share)) for name, share in shares.items()}


def predicted_steps() -> int:
    """The number of published steps that nothing was fitted on and that are predicted to fit."""
    return sum(map(len, points().values()))


Points = dict[str, list[tuple[float, float]]]
"""(published, predicted) tokens/s by engine and card."""


@cache
def points() -> Points:
    """Every step that nothing was fitted on and that is predicted to fit, to four digits."""
    found: Points = {}
    for engine in (ml_dataflow_engine(), llmq_engine()):
        for card, steps in engine.cards.items():
            found[f"{engine.name}, {card}"] = [
                (float(f"{step.tokens_per_s:.4g}"), float(f"{step.rate(engine.shares):.4g}"))
                for step in fitted_and_rest(steps)[1]
            ]
    return found


def scatter_figure(found: Points) -> "Figure":
    """Predicted over published tokens/s of each step, by engine and card, with lines ten percent above and below."""
    from cs336_systems.report.figures import OKABE_ITO, panels

    figure, (panel,) = panels(1, 1, 7.0, 4.0)
    for colour, (name, pairs) in zip(OKABE_ITO, found.items(), strict=False):
        rates, ratios = zip(*((published, predicted / published) for published, predicted in pairs), strict=True)
        panel.scatter(rates, ratios, s=8, color=colour, label=name, alpha=0.6, linewidths=0)
    for ratio in (0.9, 1.0, 1.1):
        panel.axhline(ratio, color="0.4", linewidth=0.8, linestyle="-" if ratio == 1.0 else ":")
    panel.set_xscale("log")
    panel.set(xlabel="published tokens/s", ylabel="predicted / published")
    figure.legend(loc="outside lower center", ncols=4, frameon=False, fontsize=9)
    return figure
