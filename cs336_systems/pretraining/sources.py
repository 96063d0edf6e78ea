"""The sources of ``--data``: a folder, or several with their shares of the sequences, as in ``web=0.7 code=0.3``."""

from collections.abc import Sequence
from fractions import Fraction
from pathlib import Path
from typing import NamedTuple

_MOST_DIGITS = 6
"""The most decimal places of a share, so that its numerator times any number of sequences fits into 64 bits."""


class Source(NamedTuple):
    """A folder of ``tokenize_data.py`` and its exact share of the sequences."""

    folder: Path
    share: Fraction


def sources_of(data: Path | Sequence[Path] | None) -> list[Source]:
    """Parse the sources that an option names; empty for None.

    Raises:
        ValueError: a share is missing, no number or not positive, all do not add up to 1, or a folder is named twice.
    """
    named = [data] if isinstance(data, Path) else list(data or ())
    if len(named) == 1 and (named[0].exists() or "=" not in str(named[0])):
        return [Source(named[0], Fraction(1))]
    found = []
    for one in named:
        folder, _, share = str(one).rpartition("=")
        try:
            exact = Fraction(share)
        except (ValueError, ZeroDivisionError):
            exact = Fraction(0)
        if not folder or exact <= 0 or exact.denominator > 10**_MOST_DIGITS:
            raise ValueError(f"--data {one}: of several sources each has a share above 0, as in web=0.7 code=0.3")
        found.append(Source(Path(folder), exact))
    if found and (total := sum(one.share for one in found)) != 1:
        raise ValueError(f"--data {' '.join(map(str, named))}: the shares add up to {float(total):g}, not to 1")
    if len({one.folder for one in found}) < len(found):
        raise ValueError(f"--data {' '.join(map(str, named))}: a folder is named twice")
    return found
