"""Places in code as they are shown: ``file:line function``, without the folders that differ between machines.

    short_place("/home/me/a clone/cs336_systems/model/ops.py:29 linear")    # "cs336_systems/model/ops.py:29 linear"
    own_place("/home/me/a clone/cs336_systems/model/ops.py:29 linear")      # "model/ops.py:29 linear"

A folder may be called anything: it may hold spaces, and a clone named ``cs336_systems`` may hold a virtual environment,
whose packages are not this one. So the last folder that is known decides.
"""

import re

_PACKAGE = "cs336_systems/"
_KNOWN = re.compile(rf".*(?:^|/)((?:{_PACKAGE}|site-packages/|dist-packages/|torchinductor_\w+/).*)")


def short_place(place: str) -> str:
    """``place`` from the last of the known folders on: this package, installed ones, compiled code; else its file."""
    known = _KNOWN.fullmatch(place)
    return known[1] if known else place.rpartition("/")[2]


def own_place(place: str) -> str:
    """``place`` below this package, or nothing if it lies elsewhere."""
    short = short_place(place)
    return short.removeprefix(_PACKAGE) if short.startswith(_PACKAGE) else ""
