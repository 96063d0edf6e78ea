"""Predictions of communication as documents ask for them, against what the formulas give by hand."""

from dataclasses import replace

import pytest

from cs336_systems.answers.calculations import (
    DATASHEET,
    MIB,
    best_bucket_mib,
    bucket_overhead_ms,
    collectives_predictions,
    ddp_predictions,
    exposed_ms,
    gradient_sizes,
    link_of,
    rung_messages,
)
from cs336_systems.answers.committed import NotMeasured
from cs336_systems.costs.communication import Link, cost
from cs336_systems.experiments.collectives import CollectiveCell
from cs336_systems.experiments.data_parallel import DataParallelCell
from tests.report.rows import rows_of

LINK = Link(10e-6, 1 / 300e9)


@pytest.fixture
def collectives():
    """All-reduces of two and four ranks by ``LINK``; of four ranks they are a tenth slower than its ring."""
    cells, times = [], []
    for world_size, slower in ((2, 1.0), (4, 1.1)):
        for size_mb in (1.0, 10.0, 1000.0):
            total = int(size_mb * 1e6)
            cells.append(CollectiveCell("cuda", world_size, "fp32", "all_reduce", size_mb, total))
            times.append({"time": 1e3 * slower * LINK.seconds(cost("all_reduce", world_size, total))})
    return rows_of(cells, times)


def test_a_link_is_fitted_to_one_world_only(collectives):
    link = link_of(collectives, 2)
    assert (link.alpha_s, link.bytes_per_s) == pytest.approx((LINK.alpha_s, LINK.bytes_per_s), rel=1e-4)
    for wrong in ((collectives, 8), (collectives.assign(device="cpu"), 2)):
        with pytest.raises(NotMeasured):
            link_of(*wrong)


def test_the_smallest_world_predicts_the_larger_one(collectives):
    lines = collectives_predictions(collectives).frame
    assert list(lines["ring's error %"]) == ["+0"] * 3 + ["-9"] * 3
    slow = 100 * (DATASHEET.beta_s_per_byte / LINK.beta_s_per_byte - 1)
    assert float(lines["its error %"].iloc[2]) == pytest.approx(slow, abs=1)


def test_the_best_bucket_has_the_least_overhead(collectives):
    n_bytes = sum(gradient_sizes("small"))
    best = n_bytes / (best_bucket_mib(collectives, "small", 2) * MIB)
    overhead = [bucket_overhead_ms(collectives, "small", 2, n) for n in (0.9 * best, best, 1.1 * best)]
    assert overhead[1] == min(overhead)
    last, calls = cost("all_reduce", 2, n_bytes / best), 2 * LINK.alpha_s * (best - 1)
    assert overhead[1] == pytest.approx(1e3 * (LINK.seconds(last) + calls), rel=1e-3)


def test_messages_of_each_rung():
    sizes = [5 * MIB, MIB, 2 * MIB, 30 * MIB]
    assert rung_messages("naive", sizes, None) == sizes[::-1] == rung_messages("overlapped", sizes, None)
    assert rung_messages("flat", sizes, None) == [38 * MIB]
    assert rung_messages("bucketed", sizes, 3) == [30 * MIB, 3 * MIB, 5 * MIB]
    assert rung_messages("torch", sizes, 1000) == [38 * MIB]


def test_exposed_time_is_what_backward_cannot_hide():
    messages = [300_000_000, 3_000_000]
    both = sum(1e3 * LINK.seconds(cost("all_reduce", 2, n)) for n in messages)
    last = 1e3 * LINK.seconds(cost("all_reduce", 2, messages[-1]))
    assert exposed_ms("naive", messages, 2, LINK, backward_ms=100) == pytest.approx(both)
    assert exposed_ms("overlapped", messages, 2, LINK, backward_ms=100) == pytest.approx(last)
    assert exposed_ms("overlapped", messages, 2, LINK, backward_ms=0.1) == pytest.approx(both - 0.1)


def test_data_parallel_rows_stand_beside_their_prediction(collectives):
    sizes = gradient_sizes("small")
    two = DataParallelCell(size="small", dtype="fp32", world_size=2, bucket_size_mb=None)
    cells = [two, replace(two, ddp="bucketed", bucket_size_mb=25.0)]
    exposed = 1e3 * sum(LINK.seconds(cost("all_reduce", 2, n)) for n in sizes)
    found = [{"exposed": each, "local_backward": 32.0} for each in (exposed, 1.0)]
    lines = ddp_predictions(rows_of(cells, found), collectives).frame
    assert lines["ring less measured ms"].iloc[0] == "+0.00"
    assert float(lines["fitted ring ms"].iloc[1]) < float(lines["fitted ring ms"].iloc[0])
