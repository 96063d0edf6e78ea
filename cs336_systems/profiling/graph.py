"""Autograd's graph and storages, as profiling walks and names them."""

from collections.abc import Iterator
from typing import Any

from torch import Tensor


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
    """Where the storage of ``tensor`` begins, which its views share."""
    return tensor.untyped_storage().data_ptr()
