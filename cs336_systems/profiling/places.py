"""Where memory comes from: places in code, nodes of autograd's graph, and addresses of storages.

    short_place("/home/me/a clone/cs336_systems/model/ops.py:29 linear")    # "cs336_systems/model/ops.py:29 linear"
    own_place("/home/me/a clone/cs336_systems/model/ops.py:29 linear")      # "model/ops.py:29 linear"

A place is written ``file:line function`` and shown without the folders that differ between machines. A clone may have
any name, also one with spaces, and a clone named ``cs336_systems`` may hold a virtual environment whose packages are
not this one. The last known folder of a path therefore decides whose code it is.
"""

import re
from collections.abc import Iterator
from typing import Any

from torch import Tensor

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


def graph_nodes(output: Tensor) -> Iterator[Any]:
    """Every node (``torch.autograd.graph.Node``) of the graph that made ``output``, each once."""
    seen: set[Any] = set()
    frontier = [output.grad_fn]
    while frontier:
        node = frontier.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        frontier += [function for function, _ in node.next_functions]
        yield node


def storage_address(tensor: Tensor) -> int:
    """The address at which the storage of ``tensor`` begins, which its views share."""
    return tensor.untyped_storage().data_ptr()
