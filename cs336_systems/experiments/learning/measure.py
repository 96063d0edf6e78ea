"""A run of train.py's trainer to its end: its speed, its loss on held-out tokens, its gradients against those of fp32.

Runs of one seed begin with the same weights and see the same tokens in the same order. At a run's end the gradients of
a few held-out sequences, of each parameter, are compared with those of the same weights in fp32, by plain PyTorch.
"""

import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from cs336_systems.distributed.process_group import Rank, joined
from cs336_systems.experiments.learning.cells import LearningCell
from cs336_systems.harness.record import Metric
from cs336_systems.pretraining.loader import evaluation_batches
from cs336_systems.pretraining.preparation import Prepared, prepare
from cs336_systems.pretraining.run_records import Evaluation, Record, Step
from cs336_systems.pretraining.trainer import run_prepared
from cs336_systems.training.assemble import assemble
from cs336_systems.training.step import TrainStep

_COMPARED_SEQUENCES = 4
"""Of a micro-batch, at most, on which gradients are compared."""
_EXACT: dict[str, Any] = {
    **{"dtype": "fp32", "kernels": "reference", "attention": "reference", "keep": "autograd", "matmul_dtype": "same"},
    **{"gradient_dtype": "e4m3", "scaling": "tensor", "optimizer": "reference", "cuda_graph": "off"},
}
"""The step that others are compared with."""


class _Records(list[Record]):
    """A sink that keeps every record."""

    write = list.append

    def close(self) -> None:
        pass


def measure(cell: LearningCell) -> list[Metric]:
    """Seconds and tokens per second of each step after the first few, the loss of all, held-out loss, and cosines.

    Raises:
        Unsupported: the device cannot do it.
        ValueError: there are no such data, or nothing of them is held out.
    """
    with tempfile.TemporaryDirectory() as name, joined(cell.device) as rank:
        prepared, said = prepare(replace(cell.train_options, out=Path(name)), rank), _Records()
        run_prepared(prepared, rank, said)
        steps = [record for record in said if isinstance(record, Step)]
        (evaluation,) = (record for record in said if isinstance(record, Evaluation))
        cosines = list(_cosines(prepared, rank).values())
        steady = steps[cell.warmup :]
        return [
            Metric("step", "ms", [1000 * step.seconds for step in steady]),
            Metric("tokens_per_s", "1/s", [step.tokens / step.seconds for step in steady]),
            Metric("learned_tokens", "tokens", [sum(step.tokens for step in steps)]),
            Metric("loss", "nats", [step.loss for step in steps]),
            Metric("evaluation_loss", "nats", [evaluation.loss]),
            Metric("cosine", "cosine", cosines),
            Metric("least_cosine", "cosine", [min(cosines)]),
            Metric("mean_cosine", "cosine", [sum(cosines) / len(cosines)]),
        ]


def _cosines(prepared: Prepared, rank: Rank) -> dict[str, float]:
    """Of each parameter's gradient with that of fp32, at the weights that the run has come to."""
    step, options = prepared.step, prepared.options
    assert prepared.evaluation is not None and isinstance(step, TrainStep)
    n_sequences = step.accumulate * min(options.batch_size, _COMPARED_SEQUENCES)
    shape: dict[str, Any] = {"context_length": options.context_length, "batch_size": n_sequences, "device": rank.device}
    token_ids, targets, _ = next(evaluation_batches(prepared.evaluation, **shape))
    exact = assemble(replace(prepared.case, **_EXACT), rank)
    exact.model.load_state_dict(step.model.state_dict())
    own, reference = _gradients(step, token_ids, targets), _gradients(exact, token_ids, targets)
    similarity = nn.functional.cosine_similarity
    return {name: similarity(own[name].flatten(), reference[name].flatten(), 0).item() for name in reference}


def _gradients(step: TrainStep, token_ids: Tensor, targets: Tensor) -> dict[str, Tensor]:
    """In fp64, by the parameter's name; the step changes nothing."""
    passes = TrainStep.phases(step, "step", token_ids, targets)  # not as a CUDA graph
    del passes["optimizer"]
    for run in passes.values():
        run()
    found = {name: p.grad.double() for name, p in step.model.named_parameters() if p.grad is not None}
    step.optimizer.zero_grad(set_to_none=True)
    return found
