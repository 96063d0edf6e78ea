"""A training step that is captured as CUDA graphs and replayed, for shapes whose device waits for launches.

A small model at a small batch launches a thousand kernels of a few microseconds each, and the host takes about as long
to launch one. A graph holds all launches of a step and takes one call.

    step = assemble(TrainingCase("cuda", "small", batch_size=1, optimizer="fused", cuda_graph="on"))
    loss = step(*batch)          # as TrainStep, to the bit; the fourth call captures

The first steps (``case.UNCAPTURED_STEPS``) run uncaptured on a separate stream: they compile kernels, and allocate
optimizer states and workspaces. The next step is captured, then replayed. No extra work is run for capturing: every
call is one step of training on its batch, which is copied into the graph's input.

There are two graphs, because of the gradients. The first has forward and backward of all micro-batches; in it the first
backward allocates the gradients, which keep their addresses from then on and are detached from the parameters between
steps. The second has the optimizer, captured after it has run once on these gradients: the table of their addresses
(``kernels/tensor_table.py``) is on the device by then, and is not copied again. Only ``FusedAdamW`` is captured: it
reads scheduled values from device memory, into which they are copied before a replay. Torch's optimizers take these as
launch arguments, so they run uncaptured.

Capturing allocates the same memory as a step, in the same order, from a separate pool; memory cached by the uncaptured
steps is released before.

Logits are computed for every row, also with ignored targets, because a varying number of rows would change shapes.
``TrainStep`` skips such rows if targets are on the CPU, and then the bits differ.

Limits: one rank, or tensor ranks by collectives, which the graphs contain; whole steps; batches of one shape;
parameters must keep their memory. Synchronization with the device and copies from pageable memory cannot be captured.
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
        """The optimizer's states at capture; loading a state dict replaces them."""

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
        """Run forward and backward of all micro-batches; loss and gradients have their final addresses."""
        self._inputs = tuple(tensor.clone() for tensor in batch)
        passes = super().phases("step", *self._inputs)
        del passes["optimizer"]
        self._weights_changed()  # values computed from them are recomputed in every step
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
        """Step the optimizer on the captured gradients, then capture its graph for later steps if possible."""
        if self._update_graph is not None:
            self._stream.synchronize()  # its last replay may still be running
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
    """Capture the work that ``launch`` enqueues, without running it.

    Raises:
        Unsupported: something cannot be captured; one sentence.
        torch.OutOfMemoryError: there is no room for its memory.
    """
    graph, pool = torch.cuda.CUDAGraph(), torch.cuda.graph_pool_handle()
    cause: Exception | None = None
    try:
        # A loader's thread may pin memory meanwhile, which is not part of the step.
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
