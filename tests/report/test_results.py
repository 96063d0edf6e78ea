"""The declarative table: settings, metrics, what is computed from other lines, and dates."""

from cs336_systems.report.results import Column, ResultTable
from tests.report.rows import make_cell, make_frame, ms

TABLE = ResultTable(
    settings=("gpu", "size", "dtype", "batch_size"),
    columns=(
        Column("step ms", "step", spread=True),
        Column("tokens/s", "tokens_per_s", ",.0f", note="of all ranks"),
        Column("/ fp32", lambda line: line.over("step", line.peer(dtype="fp32")), ".2f", optional=True),
        Column("of each repeat", lambda line: line.repeats_over("step", line.peer(dtype="fp32")), ".1f", optional=True),
        Column("late", "late_gathers", optional=True, note="waited for"),
    ),
    labels={"batch_size": "batch per rank"},
)
LATER = {"timestamp": "2026-01-02T03:04:05+00:00", "argv": "the same again"}


def column(header: str, *cells) -> list[str]:
    return TABLE.of(make_frame(*cells)).frame[header].tolist()


def test_what_is_little_is_shown_as_nothing_only_where_it_is_nothing_to_the_reader():
    for little, value, shown in ((True, 0.00123456, "0.00123"), (True, 0.06, "0.1"), (False, 0.00123456, "0.0")):
        table = ResultTable(settings=("size",), columns=(Column("GiB", "step", ".1f", little=little),))
        assert table.of(make_frame(make_cell(ms("step", value)))).frame["GiB"].tolist() == [shown]


def test_a_column_may_be_a_ratio_to_another_line():
    fp32 = [make_cell(ms("step", x), repeat=i) for i, x in enumerate((2.0, 8.0, 9.0))]
    bf16 = [make_cell(ms("step", x), repeat=i, dtype="bf16") for i, x in enumerate((1.0, 2.0, 9.0))]
    failed = make_cell(status="oom", message="no room", size="xl")
    table = TABLE.of(make_frame(*fp32, *bf16, failed)).frame
    assert table["/ fp32"].tolist() == ["1.00", "0.25", "–"]
    assert table["of each repeat"].tolist() == ["1.0", "0.5 (0.2–1.0)", "–"]
    assert table["status"].tolist() == ["ok", "ok", "oom: no room"]


def test_a_ratio_within_repeats_is_of_one_command_on_one_host_even_if_the_peer_was_measured_again():
    peer, other = make_cell(ms("step", 2.0)), make_cell(ms("step", 1.0), dtype="bf16")
    for elsewhere in ({"host": "another CPU, 2 cores"}, {"argv": "another command"}, {"commit": "b"}):
        assert column("of each repeat", peer, [row | elsewhere for row in other]) == ["1.0", "–"]
    again = make_cell(ms("step", 4.0), **LATER)
    assert column("of each repeat", peer, other, again) == ["1.0", "0.5"]
    assert column("/ fp32", peer, other, again) == ["1.00", "0.25"], "of what is shown"
    failed = make_cell(status="oom", message="no room", **LATER)
    assert column("of each repeat", peer, other, failed) == ["–", "0.5"]


def test_lines_of_several_commands_carry_the_minute_in_which_theirs_began():
    minute = {"timestamp": "2026-01-02T03:09:00+00:00", "argv": "the same again"}
    first = make_cell(ms("step", 1.0), argv="a command")
    second, third = (make_cell(ms("step", 1.0), size=size, **when) for size, when in (("xl", LATER), ("10b", minute)))
    assert "date" not in TABLE.of(make_frame(second, third)).frame
    assert column("date", first, second, third) == ["2026-01-01 00:00", "2026-01-02 03:04", "2026-01-02 03:04"]
    killed = make_cell(status="timeout", message="killed", size="xl", argv="")
    assert "date" not in TABLE.of(make_frame(make_cell(ms("step", 1.0), argv="a command"), killed)).frame


def test_a_setting_is_shown_and_told_apart_by_its_value():
    table = ResultTable(settings=("bucket",), always=("bucket",), columns=(Column("step ms", "step"),))
    rows = make_frame(make_cell(ms("step", 1.0)), make_cell(ms("step", 2.0)))
    for value in (25.0, "25.0", "25"):
        assert table.of(rows.assign(bucket=[value, float("nan")])).frame["bucket"].tolist() == ["25", ""]
        assert table.of(rows.assign(bucket=[value, "25"])).frame["step ms"].tolist() == ["2.00"]
