"""Options of ``train.py`` for low-rank adapters (LoRA), which are trained instead of the weights. Imports no torch."""

from dataclasses import dataclass

from cs336_systems.config import ADAPTED, Adapted, Lora
from cs336_systems.declared import option


@dataclass(frozen=True)
class LoraFields:
    """Adapters beside the matrices of blocks; embedding, head, norms and the matrices themselves are frozen."""

    lora_rank: int | None = option(
        None,
        "Train low-rank adapters (LoRA) of this rank beside the weights of --init, which are frozen; not with --keep "
        "autograd. None trains all weights.",
        sign="positive",
    )
    lora_alpha: float | None = option(
        None, "Adapters' products are multiplied by this over the rank; by default twice the rank.", sign="positive"
    )
    lora_on: tuple[Adapted, ...] = ADAPTED
    """Matrices with adapters: qkv (queries, keys and values), output (of attention), gate_up and down (of the
    feed-forward)."""

    @property
    def lora(self) -> Lora | None:
        """The adapters, if there are to be some."""
        if self.lora_rank is None:
            return None
        alpha = 2.0 * self.lora_rank if self.lora_alpha is None else self.lora_alpha
        return Lora(self.lora_rank, alpha, tuple(name for name in ADAPTED if name in self.lora_on))
