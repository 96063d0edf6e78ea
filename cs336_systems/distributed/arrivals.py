"""Parameters on their way from other ranks while training continues, and who waits for them.

    arrivals = Arrivals([model.embedding, *model.layers, model.head])      # what is called, in the order of forward
    for bucket, readers in arrivals.in_order(buckets):                     # those of the modules that read one of them
        arrivals.expect(bucket.send(), readers)
    model(x)                                                               # each module waits as its forward begins
    wait_for_parameters(model)                                             # before anyone else reads them

A module is called many times for each time that its parameters arrive, and waits only once.
"""

from collections.abc import Iterable
from typing import Any
from weakref import WeakKeyDictionary

import torch.distributed as dist
from torch import Tensor, nn

from cs336_systems.distributed.shards import ParameterBucket


class Arrivals:
    """Watches modules: their forwards, and whoever reads or writes their state dicts, wait for their parameters.

    It does not keep the modules alive. A copy watches nothing: what a module was copied from is what arrives.

    Args:
        modules: that read parameters, in the order in which forward calls them; a parameter may be in several.

    Raises:
        ValueError: a module is compiled, and would have the waiting compiled with it.
    """

    def __init__(self, modules: Iterable[nn.Module] = ()) -> None:
        self._parameters = WeakKeyDictionary({module: frozenset(module.parameters()) for module in modules})
        self._under_way: WeakKeyDictionary[nn.Module, list[dist.Work]] = WeakKeyDictionary()
        self._handles: list[Any] = []
        for module in self._parameters:
            if module._compiled_call_impl is not None:
                raise ValueError(f"{type(module).__name__} is compiled: what its forward is to wait for would be, too")
        for module in self._parameters:
            self._handles.append(module.register_forward_pre_hook(self._wait_for, prepend=True))
            for part in module.modules():
                self._handles.append(part.register_state_dict_pre_hook(self._wait_for_all))
                self._handles.append(part.register_load_state_dict_pre_hook(self._wait_for_all))

    def __reduce__(self) -> tuple[type["Arrivals"], tuple[()]]:
        """Let deepcopy and pickle of modules, which bring along their hooks, take an empty one."""
        return Arrivals, ()

    def in_order(self, buckets: Iterable[ParameterBucket]) -> list[tuple[ParameterBucket, list[nn.Module]]]:
        """The buckets as forward needs them, each with the modules that read it, of which the first decides.

        A bucket with a parameter that is in no module has no readers, and comes before those that have some.
        """
        watched = frozenset[Tensor]().union(*self._parameters.values())
        placed: list[tuple[ParameterBucket, list[int]]] = []
        for bucket in buckets:
            own = bucket.parameters if watched.issuperset(bucket.parameters) else ()
            placed.append((bucket, [i for i, of in enumerate(self._parameters.values()) if not of.isdisjoint(own)]))
        placed.sort(key=lambda each: each[1][:1])
        modules = list(self._parameters)
        return [(bucket, [modules[i] for i in places]) for bucket, places in placed]

    def expect(self, works: list[dist.Work], readers: Iterable[nn.Module]) -> None:
        """Have the modules wait for these collectives."""
        for module in readers:
            self._under_way.setdefault(module, []).extend(works)

    def _wait_for(self, module: nn.Module, *_: Any) -> None:
        for work in self._under_way.pop(module, ()):
            work.wait()

    def _wait_for_all(self, *_: Any) -> None:
        self.wait()

    def wait(self) -> None:
        """Wait until everything is there for what the current stream, which must be the one that trains, does next."""
        for module in list(self._under_way):
            self._wait_for(module)

    def close(self) -> None:
        """Wait, and leave the modules alone."""
        self.wait()
        for handle in self._handles:
            handle.remove()


def wait_for_parameters(model: nn.Module) -> None:
    """Wait until all parameters of the model are there, for whatever the current stream does next."""
    for module in model.modules():
        for hook in module._forward_pre_hooks.values():
            if isinstance(arrivals := getattr(hook, "__self__", None), Arrivals):
                arrivals.wait()
