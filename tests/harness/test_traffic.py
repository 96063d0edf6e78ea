"""What is watched runs as it runs unwatched."""

import torch
from torch import Tensor, nn

from cs336_systems.harness.traffic import Traffic


def test_compiled_code_stays_compiled() -> None:
    """Run eagerly it would need other memory, and send what it sends in another order."""
    compiled_calls = []

    def backend(graph: nn.Module, inputs: list[Tensor]) -> object:
        def call(*arguments: Tensor) -> object:
            compiled_calls.append(len(arguments))
            return graph(*arguments)

        return call

    double = torch.compile(lambda x: 2 * x, backend=backend, fullgraph=True)
    double(torch.ones(3))
    with Traffic():
        double(torch.ones(3))
    assert len(compiled_calls) == 2
