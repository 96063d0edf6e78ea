"""What a module refers to instead of its parameter: the shard, the whole, or a stand-in that refuses to compute."""

from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from cs336_systems.distributed.fsdp_parameters import ManagedParameter


class Elsewhere(Tensor):
    """Stands for a sharded parameter, in a forward, where no unit that has it whole is running.

    Dtype, device and shape are those of the whole, for code that asks for no more; what would compute is refused.
    ``nn.TransformerEncoderLayer`` reads no weights of its children that are not plain tensors, and so calls them.
    """

    _is_param = True
    _name: str

    @staticmethod
    def __new__(cls, parameter: ManagedParameter) -> "Elsewhere":
        whole = parameter.unsharded_param
        guard: Elsewhere = Tensor._make_wrapper_subclass(
            cls, parameter.shape, dtype=whole.dtype, device=whole.device, requires_grad=whole.requires_grad
        )
        guard._name = parameter.names[0]
        return guard

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        """Whatever would compute with it.

        Raises:
            RuntimeError: always.
        """
        guard = next(leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, cls))
        raise RuntimeError(
            f"{guard._name} is read outside of its own module's call, where a rank has only a part of it: name the "
            "module that reads it in FSDP's units=, so that it gathers what is inside it"
        )


@dataclass(eq=False)
class ParameterSlot:
    """An attribute of a module that refers to a parameter; units that have the module in common share it."""

    module: nn.Module
    attribute: str
    parameter: ManagedParameter
    resting: Tensor = field(init=False)
    """What the module refers to while no unit needs the parameter unsharded."""
    users: int = 0
    """Units that need it at this moment."""

    def __post_init__(self) -> None:
        self.resting = self.parameter.sharded_param

    def check(self) -> None:
        """Before the parameter is needed.

        Raises:
            RuntimeError: the user has registered another one in the module.
        """
        registered = self.module._parameters.get(self.attribute)
        if registered is not self.resting and registered is not self.parameter.unsharded_param:
            raise RuntimeError(f"{self.parameter.names[0]} was replaced under FSDP: copy values into it instead")

    def rest(self, tensor: Tensor) -> None:
        """Let the module refer to the tensor whenever no unit needs the parameter unsharded."""
        self.resting = tensor
        if not self.users:
            self.register(tensor)

    def register(self, tensor: Tensor) -> None:
        """Let the module refer to the tensor."""
        if type(self.module).__setattr__ is nn.Module.__setattr__:
            self.module._parameters[self.attribute] = tensor  # type: ignore[assignment]  # a tenth of setattr's time
        else:
            setattr(self.module, self.attribute, tensor)
