"""The tensors that one run of a block keeps for backward; ``costs/kept.py`` lists them.

saved = Saved(kept_names("products"))
y = forward(x, weights, saved, ...)
saved.tensors                          # those of costs.kept.kept_sizes
"""

from collections.abc import Iterable, Mapping

from torch import Tensor

APART = ("q", "keys_values")
"""Two projections, with results (R, H E) and (R, 2 K E), instead of ``qkv``."""


def low_rank_name(name: str) -> str:
    """The name of a matrix's adapter's h, (R, n r), which is kept besides the tensors of ``costs.kept.KEPT``."""
    return f"{name}_h"


class Saved:
    """Tensors by their names in ``costs.kept.KEPT``, in ``APART``, or as ``low_rank_name`` gives them.

    Args:
        names: the tensors to keep; none for a forward without a backward.
        places: memory for some of them, in their shapes; the others get new memory.
    """

    def __init__(self, names: Iterable[str], places: Mapping[str, Tensor] | None = None) -> None:
        self.names = frozenset(names)
        self.places = places or {}
        self.tensors: dict[str, Tensor] = {}

    @property
    def projections(self) -> tuple[str, ...]:
        """The names by which q, k and v are computed."""
        return ("qkv",) if self.names.isdisjoint(APART) else APART

    def keep(self, **tensors: Tensor) -> None:
        """Keep those tensors that are in ``names``, each in its memory from ``places`` if there is one."""
        self.tensors |= {name: self._placed(name, tensor) for name, tensor in tensors.items() if name in self.names}

    def _placed(self, name: str, tensor: Tensor) -> Tensor:
        place = self.places.get(name)
        if place is None or place.data_ptr() == tensor.data_ptr():
            return tensor
        return place.copy_(tensor.view_as(place))
