"""The reference model beside every cell: in turns, at its own defaults, and the ratio that the table tells."""

from cs336_systems.experiments.model import Options, make_cells, step_table
from tests.report.rows import make_cell, make_frame, ms


def test_a_peer_follows_the_cells_of_a_turn_and_leads_the_next():
    options = Options(
        kernels=("fused",),
        keep=("all", "products"),
        attention=("hopper",),
        dtype=("bf16",),
        optimizer=("fused",),
        offload=("m-v",),
        mode=("backward",),
        peer_compile=("on",),
        repeat=2,
    )
    cells = make_cells(options)
    ours = [("fused", "all", "off", "m-v"), ("fused", "products", "off", "m-v")]
    turn = [*ours, ("reference", "autograd", "on", "none")]
    assert [(cell.kernels, cell.keep, cell.compile, cell.offload) for cell in cells] == [*turn, *turn[::-1]]
    assert [cell.repeat for cell in cells] == [0, 0, 0, 1, 1, 1]


def test_the_ratio_is_of_one_turn_and_told_of_written_out_blocks():
    def cell(step, repeat, **values):
        settings = {"gpu": "NVIDIA H200", "device": "cuda", "size": "qwen2.5-0.5b", "variant": "", "commit": "abc"}
        settings |= {"compile": "off", "argv": "here", "repeat": repeat}
        return make_cell(ms("step", step), **(settings | values))

    ours, theirs = {"kernels": "fused", "keep": "all"}, {"kernels": "reference", "keep": "autograd", "compile": "on"}
    both = [cell(180.0, 0, **ours), cell(200.0, 0, **theirs), cell(220.0, 1, **theirs), cell(209.0, 1, **ours)]
    eager = cell(300.0, 0, kernels="reference", keep="autograd")
    table = step_table(make_frame(*both, eager)).frame
    assert table["/ compiled"].tolist() == ["0.925 (0.900–0.950)", "–", "–"]
    assert "/ compiled" not in step_table(make_frame(both[1])).frame
