"""Two blocks' backward, close up: which are shown, and that every collective of them is there with its name."""

import pandas as pd
import pytest

from cs336_systems.profiling.ranges import BACKWARD
from cs336_systems.profiling.traces.tables import KERNEL, Trace, TraceError, make_trace
from cs336_systems.report.block_timeline import draw_two_blocks, spread, two_blocks
from tests.experiments.profiles import golden_profile

ALL_REDUCE = "ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)"
CALLER, AUTOGRAD, COMPUTE, SENDING = 1, 2, 7, 17
MS = 1_000_000


def step_of(n_blocks: int, *, overlapped: bool) -> Trace:
    """Backward of blocks of 10 ms, launched 30 ms before; each has two all-reduces of 3 ms, then or after them all."""
    ops, ranges = [], [("step", 0, 400, CALLER), ("backward", 1, 390, CALLER)]
    for i in range(n_blocks):
        at = 10 * i + 2
        ranges.append((f"module.layers.{n_blocks - 1 - i}{BACKWARD}", at, at + 8, AUTOGRAD))
        ops.append(("gemm", at + 30, at + 40, COMPUTE, at + 1))
        for k in range(2):
            launched = at + 3 + k if overlapped else 10 * n_blocks + 50 + 2 * i + k
            ran = at + 41 + 3 * k if overlapped else launched + 10 + 6 * i + 3 * k
            ops.append((ALL_REDUCE, ran, ran + 3, SENDING, launched))
    columns = ["name", "start", "end", "stream", "launch_start"]
    made = pd.DataFrame(ops, columns=columns).assign(kind=KERNEL, pid=1, device=0, launch_tid=AUTOGRAD, correlation=0)
    ranged = pd.DataFrame(ranges, columns=["name", "start", "end", "tid"]).assign(pid=1)
    for frame, times in ((made, ["start", "end", "launch_start"]), (ranged, ["start", "end"])):
        frame[times] *= MS
    return make_trace(made, ranged, golden_profile().trace.source)


def test_two_blocks_of_the_middle_with_the_collectives_they_launch():
    found = two_blocks(step_of(8, overlapped=True))
    assert list(found.blocks["name"]) == ["layers.4", "layers.3", "layers.2"], "the third runs beside the last send"
    assert len(found.collectives) == 4
    assert (found.start, found.end) == (62 * MS, 89 * MS), "from the first product to the end of the last all-reduce"


def test_where_backward_sends_nothing_the_last_two_and_what_follows():
    found = two_blocks(step_of(8, overlapped=False))
    assert list(found.blocks["name"]) == ["layers.1", "layers.0"]
    assert len(found.collectives) == 4
    assert found.collectives["start"].min() > found.blocks["end"].max()
    assert found.end == found.collectives["end"].max()


@pytest.mark.parametrize("overlapped", [True, False])
def test_every_collective_of_the_two_is_named(tmp_path, drawn, overlapped):
    draw_two_blocks(step_of(8, overlapped=overlapped), "a title", path := tmp_path / "blocks.png")
    assert path.exists()
    (axes,) = drawn[0].axes
    texts = [text.get_text() for text in axes.texts]
    assert texts.count("all-reduce 3.00 ms") == 4
    assert {"layers.4", "layers.3"} <= set(texts) or {"layers.1", "layers.0"} <= set(texts)
    streams = [label.get_text() for label in axes.get_yticklabels()]
    assert streams == ["backward of", f"GPU 0, stream {COMPUTE}", f"GPU 0, stream {SENDING}"]


def test_labels_keep_their_order_and_their_distance():
    places = spread(pd.Series([1.0, 1.0, 1.1, 5.0, 9.9, 10.0]).to_numpy(), 0.5, 10.0)
    assert list(places) == pytest.approx([1.0, 1.5, 2.0, 5.0, 9.5, 10.0])


def test_a_trace_without_collectives_or_blocks_is_refused():
    trace = golden_profile().trace
    with pytest.raises(TraceError, match="backward sends nothing"):
        two_blocks(trace)
    bare = Trace(trace.ops, trace.ranges[~trace.ranges["name"].str.contains("layers")], trace.source)
    with pytest.raises(TraceError, match="no backward of two blocks"):
        two_blocks(bare)
