"""The time line: every range and operation of a step is drawn where it was; close up, every collective is named."""

import pandas as pd
import pytest
from matplotlib.colors import to_hex

from cs336_systems.profiling.ranges import BACKWARD, STEP
from cs336_systems.profiling.traces.kernels import CLASSES, kernel_class
from cs336_systems.profiling.traces.queries import MS
from cs336_systems.profiling.traces.tables import KERNEL, Trace, TraceError, make_trace
from cs336_systems.report.timeline import CLASS_COLOURS, draw_timeline, draw_two_blocks, two_blocks
from tests.experiments.profiles import golden_profile

PHASES = ["forward", "backward", "optimizer"]


@pytest.fixture(scope="module")
def trace():
    return golden_profile().trace


def bars(axes):
    """(start, length, colour) of every bar, in ms."""
    found = []
    for collection in axes.collections:
        colours = [to_hex(colour).upper() for colour in collection.get_facecolors()]
        for i, path in enumerate(collection.get_paths()):
            (left, _), (right, _) = path.get_extents().get_points()
            found.append((left, right - left, colours[i % len(colours)]))
    return found


def test_each_operation_is_drawn_where_it_ran_in_the_colour_of_its_class(trace, tmp_path, drawn):
    assert len(set(CLASS_COLOURS.values())) == len(CLASSES)
    draw_timeline(trace, PHASES, "a title", path := tmp_path / "step.png")
    assert path.exists()
    _, device = drawn[0].axes
    window = trace.instances(STEP).iloc[[-1]]
    ops, zero = trace.operations(window), window["start"].iloc[0]
    expected = [
        ((start - zero) / MS, (end - start) / MS, CLASS_COLOURS[kernel_class(name)])
        for name, start, end in ops[["name", "start", "end"]].itertuples(index=False)
    ]
    found = [bar for bar in bars(device) if bar[2] in CLASS_COLOURS.values()]
    assert len(found) == len(expected) > 100
    for bar, operation in zip(sorted(found), sorted(expected), strict=True):
        assert bar[:2] == pytest.approx(operation[:2], abs=1e-6)
        assert bar[2] == operation[2]
    assert device.get_xlim() == pytest.approx((0, (max(ops["end"].max(), window["end"].iloc[0]) - zero) / MS))
    legend = [text.get_text() for text in drawn[0].legends[0].get_texts()]
    assert legend == [label for label in CLASSES if label in set(ops["name"].map(kernel_class))]


def test_the_last_step_is_drawn_with_its_ranges_and_phases(trace, tmp_path, drawn):
    draw_timeline(trace, PHASES, "a title", tmp_path / "last.png")
    host, device = drawn[0].axes
    window = trace.instances(STEP).iloc[[-1]]
    shown = trace.during(trace.ranges, window)
    shown = shown[shown["depth"] < 5]
    zero = window["start"].iloc[0]
    assert [bar[0] for bar in sorted(bars(host))] == pytest.approx(sorted((shown["start"] - zero) / MS), abs=1e-6)
    rows = [label.get_text() for label in host.get_yticklabels()]
    assert rows[:2] == ["caller's thread", "depth 1"] and "autograd's thread" in rows
    assert [label.get_text() for label in device.get_yticklabels()][:2] == ["phases", "GPU 0, stream 7"]
    assert {"forward", "backward"} <= {text.get_text() for text in host.texts} & {t.get_text() for t in device.texts}
    assert drawn[0].get_suptitle() == "a title"


ALL_REDUCE = "ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)"
CALLER, AUTOGRAD, COMPUTE, SENDING = 1, 2, 7, 17


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


@pytest.mark.parametrize(("overlapped", "expected"), [(True, (62, 89)), (False, (92, 155))])
def test_two_blocks_reach_from_their_first_operation_to_the_end_of_their_collectives(overlapped, expected):
    """Two of the middle with what they send; where backward sends nothing, the last two and what follows."""
    assert two_blocks(step_of(8, overlapped=overlapped)) == tuple(ms * MS for ms in expected)


def test_close_up_every_block_and_collective_is_named(tmp_path, drawn):
    draw_two_blocks(step_of(8, overlapped=True), "a title", path := tmp_path / "blocks.png")
    assert path.exists()
    device = drawn[0].axes[1]
    texts = [text.get_text() for text in device.texts]
    assert texts.count("all-reduce") >= 4
    assert {"module.layers.4", "module.layers.3"} <= set(texts)
    assert device.get_xlim() == pytest.approx((62, 89))
    streams = [label.get_text() for label in device.get_yticklabels()]
    assert streams == ["phases", f"GPU 0, stream {COMPUTE}", f"GPU 0, stream {SENDING}"]


def test_what_a_trace_does_not_hold_is_refused(trace):
    with pytest.raises(TraceError, match="backward sends nothing"):
        two_blocks(trace)
    bare = Trace(trace.ops, trace.ranges[~trace.ranges["name"].str.contains("layers")], trace.source)
    with pytest.raises(TraceError, match="no backward of two blocks"):
        two_blocks(bare)
