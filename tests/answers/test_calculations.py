"""Numbers of the calculators as documents ask for them, against what the handouts' formulas give by hand."""

import math

import pandas as pd
import pytest

from cs336_systems.answers.calculations import (
    DATASHEET,
    H100,
    LAYER,
    TPU,
    XXL,
    Mesh,
    collectives_predictions,
    ddp_predictions,
    exposed_ms,
    gradient_sizes,
    h100s_that_hide,
    job,
    link_of,
    ring_ratio,
    rung_messages,
    schedule,
    xxl_remedies,
    xxl_threshold,
)
from cs336_systems.answers.committed import NotMeasured
from cs336_systems.config import MODEL_SIZES
from cs336_systems.costs.communication import Link, cost
from cs336_systems.costs.parallelism.forms import least_tokens_per_device
from cs336_systems.harness.record import Metric, parse_samples


def test_the_alternate_ring_sends_half_of_n_times_more():
    assert [ring_ratio(n) for n in (2, 4, 8)] == pytest.approx([1, 2, 4])


def test_the_accounting_question():
    parameters = 126 * 2 * 16_384 * 53_248
    assert XXL.state_bytes == 16 * parameters
    assert XXL.least_devices(TPU.memory_bytes, 0) == math.ceil(16 * parameters / 95e9)
    half = 4096 * 126 * 2 * (16_384 + 53_248) / 2
    assert XXL.least_devices(TPU.memory_bytes, 4096) == math.ceil((16 * parameters + half) / (95e9 - half))
    a, t = 2 * 1.8e11 / 4.6e14, 53_248 * 1.8e11 / 4.6e14
    assert math.ceil(xxl_threshold(overlapping=False).tokens_per_device) == math.ceil(16 / a / (1 - 4 / t) / 64)
    assert math.ceil(xxl_threshold(overlapping=True).tokens_per_device) == math.ceil(16 / a / 64)
    assert min(xxl_remedies()) < xxl_threshold(overlapping=False).tokens_per_device


def test_forms_of_parallelism():
    c_over_w = 989.4e12 / 450e9
    assert least_tokens_per_device(LAYER, H100.flops_per_s, H100.egress(8)) == pytest.approx(c_over_w, rel=1e-3)
    assert h100s_that_hide("fsdp", "forward", 32_768) == pytest.approx(1 + 32_768 / c_over_w, rel=1e-3)
    tensor_parallel = h100s_that_hide("tensor-parallel", "backward", 1)
    assert tensor_parallel == pytest.approx(1 + 3 * 28_672 / c_over_w, rel=1e-3)


def test_the_mesh_uses_all_devices_and_gains_from_axes_that_overlap():
    for mesh in (Mesh(True), Mesh(False)):
        assert mesh.best.fsdp * mesh.best.tp == pytest.approx(256)
        assert mesh.whole.fsdp * mesh.whole.tp == 256
    assert Mesh(True).largest > Mesh(False).largest


def test_lecture_questions():
    assert schedule("gpipe", 4, 8).bubble_fraction == pytest.approx(3 / 11)
    assert job(2048).mtbf_s == pytest.approx(100 * 86_400 / 2048)


LINK = Link(10e-6, 1 / 300e9)
MIB = 2**20
GPU = {"gpu": "NVIDIA H200", "host": "a host", "device": "cuda", "status": "ok", "message": ""}


def frame(lines, metrics):
    """One row per metric of each line's settings."""
    rows = [
        GPU | settings | Metric(name, "", [value]).statistics()
        for settings, found in zip(lines, metrics, strict=True)
        for name, value in found.items()
    ]
    return parse_samples(pd.DataFrame(rows))


@pytest.fixture
def collectives():
    """All-reduces of two and four ranks by ``LINK``; of four ranks they are a tenth slower than its ring."""
    cells, times = [], []
    for world_size, slower in ((2, 1.0), (4, 1.1)):
        for size_mb in (1.0, 10.0, 1000.0):
            total = int(size_mb * 1e6)
            settings = {"variant": "nccl", "world_size": world_size, "dtype": "fp32", "calls": 5}
            cells.append(settings | {"collective": "all_reduce", "size_mb": size_mb, "total_bytes": total})
            times.append({"time": 1e3 * slower * LINK.seconds(cost("all_reduce", world_size, total))})
    return frame(cells, times)


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


def test_gradients_are_those_of_the_model():
    torch = pytest.importorskip("torch")
    from cs336_systems.model import TransformerLM

    model = TransformerLM(MODEL_SIZES["tiny"], device=torch.device("meta"))
    assert gradient_sizes("tiny") == [4 * parameter.numel() for parameter in model.parameters()]


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
    cells = [
        {"size": "small", "dtype": "fp32", "world_size": 2, "ddp": rung, "bucket_size_mb": mb}
        for rung, mb in (("naive", ""), ("bucketed", 25.0))
    ]
    exposed = 1e3 * sum(LINK.seconds(cost("all_reduce", 2, n)) for n in sizes)
    found = [{"exposed": each, "local_backward": 32.0} for each in (exposed, 1.0)]
    lines = ddp_predictions(frame(cells, found), collectives).frame
    assert lines["ring less measured ms"].iloc[0] == "+0.00"
    assert float(lines["fitted ring ms"].iloc[1]) < float(lines["fitted ring ms"].iloc[0])
