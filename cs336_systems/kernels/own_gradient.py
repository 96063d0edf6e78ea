"""Gradients of parameters to which a backward adds where they are, in place of a second tensor that autograd adds."""

import torch
from torch import Tensor


def own_gradient(parameter: Tensor) -> Tensor | None:
    """The gradient that a parameter has, if autograd, given none, leaves the same as if it was given what is added.

    Hooks that run after accumulation do so, too, where autograd is given none; hooks on gradients have nothing to see.
    """
    if parameter.grad is None or not parameter.is_leaf or parameter._backward_hooks:
        return None
    return parameter.grad


def adds_to(parameter: Tensor) -> bool:
    """Whether the backward that runs adds to the parameter's gradient; ``torch.autograd.grad`` leaves it as it is."""
    node = torch.autograd.graph.get_gradient_edge(parameter).node
    try:
        adds: bool = torch._C._will_engine_execute_node(node)
    except RuntimeError:  # which it raises of parameters if torch.autograd.grad runs
        return False
    return adds
