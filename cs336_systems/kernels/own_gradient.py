"""Let a backward add to ``parameter.grad`` in place, where autograd would else add a second tensor to it."""

import torch
from torch import Tensor


def own_gradient(parameter: Tensor) -> Tensor | None:
    """Return ``parameter.grad`` if a backward may add to it and give autograd None; None if it must give its own.

    It may if the parameter is a leaf, has a gradient, and has no hooks on gradients, which would have nothing to see.
    Hooks after accumulation run all the same.
    """
    if parameter.grad is None or not parameter.is_leaf or parameter._backward_hooks:
        return None
    return parameter.grad


def adds_to(parameter: Tensor) -> bool:
    """Whether the backward that runs adds to ``parameter.grad``; ``torch.autograd.grad`` does not."""
    node = torch.autograd.graph.get_gradient_edge(parameter).node
    try:
        adds: bool = torch._C._will_engine_execute_node(node)
    except RuntimeError:  # which it raises of parameters if torch.autograd.grad runs
        return False
    return adds
