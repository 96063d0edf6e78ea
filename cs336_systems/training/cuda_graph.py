"""A training step that is captured as CUDA graphs and replayed, for shapes whose device waits for launches.

A small model at a small batch launches a thousand kernels of a few microseconds each, and the host takes about as long
to launch one. A graph holds all launches of a step and takes one call.

    step = assemble(TrainingCase("cuda", "small", batch_size=1, optimizer="fused", cuda_graph="on"))
    loss = step(*batch)          # as TrainStep, to the bit; the fourth call captures

The first steps (``case.UNCAPTURED_STEPS``) run uncaptured on a stream of their own: they compile kernels, and allocate
optimizer states and workspaces. The next is captured, then replayed. Nothing is run for capturing alone: every call is
one step of training on its batch, which is copied to where the graph reads it.

Two graphs, because of the gradients. Forward and backward of all micro-batches are the first; in it the first backward
makes the gradients, which stay where they are from then on, hidden from the parameters between steps. The optimizer is
the second, captured after it has run once on these gradients: the table of their addresses
(``kernels/tensor_table.py``) is on the device by then, and is not copied again. Only ``FusedAdamW`` is captured: it
reads what a schedule changes from device memory, to which that is copied before a replay. Torch's optimizers pass these
as launch arguments, so they run uncaptured.

Capturing allocates what a step does, in the same order, from a pool of its own; what the uncaptured steps had cached
for that is given back before.

Every row has logits, also rows with ignored targets, because their number would change shapes. ``TrainStep`` leaves
such rows out if targets are on the CPU, and then the bits differ.

Limits: one rank, or tensor ranks by collectives, which the graphs hold; whole steps; batches of one shape; parameters
must stay where they are. What synchronizes with the device or copies from pageable memory cannot be captured.
"""

from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor

from cs336_systems.case import UNCAPTURED_STEPS, Unsupported
from cs336_systems.distributed.process_group import captured
from cs336_systems.training.step import Phase, TrainStep


class CapturedStep(TrainStep):
    """A ``TrainStep`` on a CUDA device whose steps are replayed; arguments as there.

    The optimizer must count its steps on the device.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._stream = torch.cuda.Stream(self.device)
        self._n_steps = 0
        self._passes_graph: torch.cuda.CUDAGraph | None = None
        self._update_graph: torch.cuda.CUDAGraph | None = None
        self._inputs: tuple[Tensor, ...] = ()
        self._gradients: list[tuple[Tensor, Tensor]] = []
        self._states: Any = None
        """The optimizer's states when it was captured, of which loading makes others."""

    def phases(self, mode: str, token_ids: Tensor, targets: Tensor) -> dict[str, Phase]:
        """The one phase ``step``.

        Raises:
            Unsupported: another mode; in the step, something cannot be captured.
            ValueError: no such mode; in the step, the batch has another shape than the captured one.
        """
        targets = targets.to(self.device, non_blocking=True)
        phases = super().phases(mode, token_ids, targets)
        if mode != "step":
            raise Unsupported(f"a CUDA graph holds whole steps, mode step, got mode {mode}")

        def step() -> None:
            caller = torch.cuda.current_stream(self.device)
            self._stream.wait_stream(caller)
            with torch.cuda.stream(self._stream):
                if self._n_steps < UNCAPTURED_STEPS:
                    for phase in phases.values():
                        phase()
                else:
                    self._replay(token_ids, targets)
            caller.wait_stream(self._stream)
            self._n_steps += 1

        return {"step": step}

    def _replay(self, *batch: Tensor) -> None:
        if self._passes_graph is None:
            self._passes_graph = self._capture_passes(batch)
        for static, given in zip(self._inputs, batch, strict=True):
            if given.shape != static.shape:
                shapes = f"{tuple(static.shape)}, got {tuple(given.shape)}"
                raise ValueError(f"the captured step takes token ids and targets of shape {shapes}")
            static.copy_(given)
        self._passes_graph.replay()
        self.loss = self._captured_loss
        if self._update_graph is None or self._states is not self.optimizer.state:
            self._update_uncaptured()
        else:
            self.optimizer.upload_hyperparameters()  # type: ignore[attr-defined]
            self._update_graph.replay()
            self._weights_changed()
        self.loss = self._captured_loss.clone()

    def _capture_passes(self, batch: Sequence[Tensor]) -> torch.cuda.CUDAGraph:
        """Forward and backward of all micro-batches; the loss and the gradients are where they will always be."""
        self._inputs = tuple(tensor.clone() for tensor in batch)
        passes = super().phases("step", *self._inputs)
        del passes["optimizer"]
        self._weights_changed()  # what is made of them is part of every step
        try:
            graph = _captured(lambda: [phase() for phase in passes.values()], self._stream)
            parameters = (parameter for group in self.optimizer.param_groups for parameter in group["params"])
            self._gradients = [(parameter, parameter.grad) for parameter in parameters if parameter.grad is not None]
        finally:
            self.optimizer.zero_grad(set_to_none=True)
        assert self.loss is not None
        self._captured_loss = self.loss
        return graph

    def _update_uncaptured(self) -> None:
        """The optimizer's step on the captured gradients, and if it can be captured its graph for the steps to come."""
        if self._update_graph is not None:
            self._stream.synchronize()  # its last replay may be under way
            self._update_graph = None
        for parameter, gradient in self._gradients:
            parameter.grad = gradient
        try:
            self._optimize()
            if hasattr(self.optimizer, "upload_hyperparameters"):
                self._states, self._update_graph = self.optimizer.state, _captured(self._optimize, self._stream)
        finally:
            self.optimizer.zero_grad(set_to_none=True)


def _captured(launch: Callable[[], object], stream: torch.cuda.Stream) -> torch.cuda.CUDAGraph:
    """The graph of what ``launch`` gives to the device, of which nothing runs.

    Raises:
        Unsupported: something cannot be captured; one sentence.
        torch.OutOfMemoryError: there is no room for its memory.
    """
    graph, pool = torch.cuda.CUDAGraph(), torch.cuda.graph_pool_handle()
    cause: Exception | None = None
    try:
        # A loader's thread may pin memory meanwhile, which is no part of the step.
        with torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode="thread_local"):
            try:
                launch()
            except Exception as error:
                cause = error  # ending the capture fails then, too, and says less
                raise
    except RuntimeError as error:
        cause = cause or error
        with suppress(RuntimeError):  # where ending has failed, the allocator still serves the capture
            torch._C._cuda_endAllocateToPool(stream.device_index, pool)
            torch._C._cuda_releasePool(stream.device_index, pool)
        if isinstance(cause, torch.OutOfMemoryError) or not isinstance(cause, RuntimeError):
            raise cause from None
        raise Unsupported(f"the step cannot be captured as a CUDA graph: {str(cause).splitlines()[0]}") from cause
    captured.add(graph)
    return graph
