"""What quantizing to fp8 moves, by arithmetic, as a table: of a token in a block, by tensor."""

import pandas as pd

from cs336_systems.config import resolve_size
from cs336_systems.costs.quantizing import quantizing_bytes, quantizing_weights_bytes
from cs336_systems.hardware import find_hardware
from cs336_systems.report.tables import Table

_KEEPS = ("products", "all")


def quantizing_table(size: str, device: str = "NVIDIA H200") -> Table:
    """A line for each tensor that products read and for their sum, a column for each choice of what is kept."""
    config, hardware = resolve_size(size), find_hardware(device)
    assert hardware is not None and hardware.memory_bytes_per_s is not None
    moved = {f"keep {keep}": quantizing_bytes(config, keep) for keep in _KEEPS}
    frame = pd.DataFrame(moved)
    frame.loc["sum"] = frame.sum()
    least_us = frame.loc["sum"] * config.n_layers / hardware.memory_bytes_per_s * 1e6
    weights_gb = config.n_layers * quantizing_weights_bytes(config) / 1e9
    said = (
        f"{size}: bytes that are read and written for a token in one block, beyond those of a block in bf16 that keeps "
        f"the same. At the {hardware.memory_bytes_per_s / 1e12:.1f} TB/s of {hardware.name} all blocks take at least "
        f"{' and '.join(f'{us:.2f}' for us in least_us)} us for a token. Weights: {weights_gb:.1f} GB once a step."
    )
    shown = frame.map(lambda n_bytes: f"{n_bytes:,.0f}")
    return Table(said, shown.rename_axis("tensor").reset_index())
