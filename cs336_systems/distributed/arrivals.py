"""Parameters on their way from other ranks while training goes on, and who waits for them.

    arrivals = Arrivals([model.embedding, *model.layers, model.head])      # what is called, in the order of forward
    readers = arrivals.readers(bucket.parameters)                          # those of the modules that read one of them
    arrivals.come_by(bucket.send(), readers)
    model(x)                                                               # each module waits as its forward begins
    arrivals.wait()                                                        # before anyone else reads them

A module is called many times for each time that its parameters arrive, and waits only once.
"""

from collections.abc import Collection, Iterable
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn


class Arrivals:
    """Watches modules: their forwards, and whoever reads or writes their state dicts, wait for their parameters.

    A forward waits where its module is called, so not inside compiled code. A copy watches nothing: what a module was
    copied from is what arrives.

    Args:
        modules: that read parameters, in the order in which forward calls them; a parameter may be in several.
    """

    def __init__(self, modules: Iterable[nn.Module] = ()) -> None:
        self._parameters = {module: frozenset(module.parameters()) for module in modules}
        self._under_way: dict[nn.Module, list[dist.Work]] = {}
        self._handles: list[Any] = []
        for module in self._parameters:
            self._handles += [
                module.register_forward_pre_hook(self._begins),
                module.register_state_dict_pre_hook(self._is_exchanged),
                module.register_load_state_dict_pre_hook(self._is_exchanged),
            ]

    def __reduce__(self) -> tuple[type["Arrivals"], tuple[()]]:
        """For deepcopy and pickle of modules, which bring along their hooks."""
        return Arrivals, ()

    def readers(self, parameters: Collection[Tensor]) -> list[nn.Module]:
        """The modules that read one of the parameters, in order; none if one of these is in no module."""
        if not frozenset().union(*self._parameters.values()).issuperset(parameters):
            return []
        return [module for module, own in self._parameters.items() if not own.isdisjoint(parameters)]

    def place(self, module: nn.Module) -> int:
        """In the order of forward, from 0."""
        return list(self._parameters).index(module)

    def come_by(self, works: list[dist.Work], readers: Iterable[nn.Module]) -> None:
        """Have the modules wait for these collectives."""
        for module in readers:
            self._under_way.setdefault(module, []).extend(works)

    def _begins(self, module: nn.Module, *_: Any) -> None:
        for work in self._under_way.pop(module, ()):
            work.wait()

    def _is_exchanged(self, *_: Any) -> None:
        self.wait()

    def wait(self) -> None:
        """Until everything is there for whatever the current stream does next."""
        for module in list(self._under_way):
            self._begins(module)

    def close(self) -> None:
        """Wait, and leave the modules alone."""
        self.wait()
        for handle in self._handles:
            handle.remove()
