"""A streamed step's ranges: one of its kind for each operation, and what it computes is the same."""

import ctypes
from collections import Counter
from types import SimpleNamespace

import torch

from cs336_systems.blocks import REFERENCE
from cs336_systems.experiments.streaming_measure import kinds
from cs336_systems.profiling.ranges import STEP, ranged
from cs336_systems.profiling.streamed import RangedStreams, kind_of, name_streams
from cs336_systems.profiling.traces import kineto
from cs336_systems.streaming.run import StreamedStep
from tests.streaming.plans import random_plan

CPU = torch.device("cpu")


class OnACpu(RangedStreams):
    """One operation after the other, on no stream."""

    def __init__(self):
        pass

    def run(self, schedule, compute, copy):
        for operation in schedule.operations:
            self.enqueue(operation, None, compute, copy)


def test_every_operation_is_in_a_range_of_its_kind(tmp_path):
    plan, schedule = random_plan(3)
    losses = []
    for lanes in (None, OnACpu()):
        step = StreamedStep(plan, schedule, REFERENCE, CPU, max_norm=1.0, lanes=lanes)
        torch.manual_seed(0)
        step.reset_parameters()
        ids, targets = torch.randint(plan.work.config.vocab_size, (2, plan.n_sequences, plan.work.context_length))
        with kineto.recording(tmp_path / "step.json", CPU), ranged(STEP):
            losses.append(step(ids, targets))
    assert torch.equal(*losses)
    trace = kineto.read(tmp_path / "step.json")
    expected = Counter(kind_of(operation) for operation in schedule.operations)
    assert {"forward", "backward", "optimizer", "fetch weights"} <= expected.keys()
    found = Counter(trace.ranges["name"])
    assert {name: found[name] for name in expected} == expected
    assert found["layer 0, round 0, chunk 0"] > 2
    assert kinds(trace).keys() == expected.keys()
    assert min(kinds(trace).values()) > 0


def test_streams_are_named_where_nvtx_is_installed(monkeypatch):
    named = {}
    library = SimpleNamespace(nvtxNameCudaStreamA=lambda handle, name: named.update({handle.value: name}))
    with monkeypatch.context() as context:
        context.setattr(ctypes, "CDLL", lambda name: library)
        name_streams({"in": SimpleNamespace(cuda_stream=7)})
    assert named == {7: b"in"}
    monkeypatch.setattr("cs336_systems.profiling.streamed._NVTX", "libnowhere.so")
    name_streams({"in": SimpleNamespace(cuda_stream=7)})
