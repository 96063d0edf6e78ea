"""Predictions beside rows that a known link and a known model have made."""

import pandas as pd
import pytest

from cs336_systems.answers.predictions import (
    DATASHEET,
    collectives_predictions,
    ddp_predictions,
    exposed_ms,
    fitted_link,
    fsdp_predictions,
    gradient_sizes,
    rung_messages,
    sharded_predictions,
)
from cs336_systems.config import MODEL_SIZES
from cs336_systems.costs.communication import Link, cost
from cs336_systems.harness.record import Metric, parse_samples

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
    link = fitted_link(collectives, 2)
    assert link is not None
    assert (link.alpha_s, link.bytes_per_s) == pytest.approx((LINK.alpha_s, LINK.bytes_per_s), rel=1e-4)
    assert fitted_link(collectives, 8) is None
    assert fitted_link(collectives.assign(device="cpu"), 2) is None


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


def ddp_rows(communication_dtype="same"):
    sizes = gradient_sizes("small")
    settings = {"size": "small", "dtype": "fp32", "batch_size": 4, "compile": "off", "world_size": 2}
    cells = [
        settings | {"communication_dtype": communication_dtype, "ddp": rung, "bucket_size_mb": mb}
        for rung, mb in (("naive", ""), ("bucketed", 25.0))
    ]
    exposed = 1e3 * sum(LINK.seconds(cost("all_reduce", 2, n)) for n in sizes)
    found = [
        {"exposed": exposed, "local_backward": 32.0, "sent": sum(sizes) / MIB},
        {"exposed": 1.0, "local_backward": 32.0, "sent": sum(sizes) / MIB},
    ]
    return frame(cells, found)


def test_data_parallel_rows_stand_beside_their_prediction(collectives):
    lines = ddp_predictions(ddp_rows(), collectives).frame
    assert lines["error ms"].iloc[0] == "+0.00"
    assert list(lines["its error %"]) == ["+0.00", "+0.00"]
    assert lines["bucket MiB"].tolist() == ["", "25"]
    assert float(lines["fitted ring ms"].iloc[1]) < float(lines["fitted ring ms"].iloc[0])


def test_without_collectives_of_its_world_the_datasheet_predicts_alone(collectives):
    lines = ddp_predictions(ddp_rows("bf16"), collectives[collectives["world_size"] == 4]).frame
    assert "fitted ring ms" not in lines
    assert list(lines["its error %"]) == ["-50.00", "-50.00"]


def test_sharded_optimizer_rows(collectives):
    n_bytes = sum(gradient_sizes("small"))
    state = 2 * n_bytes / 2**30
    settings = {"size": "small", "dtype": "fp32", "world_size": 2, "optimizer": "torch-fused", "bucket_size_mb": 25.0}
    sending = 1e3 * LINK.seconds(cost("all_gather", 2, n_bytes))
    found = {
        "replicated": {"optimizer": 4.0, "after_step_optimizer_state": state, "predicted_optimizer_state": state},
        "scattered": {
            "optimizer": 2.0 + sending,
            "after_step_optimizer_state": state / 2,
            "predicted_optimizer_state": 0.99 * state / 2,
        },
    }
    rows = frame([settings | {"sharding": how} for how in found], found.values())
    lines = sharded_predictions(rows, collectives).frame.set_index("how")
    assert lines["its error %"].to_dict() == {"replicated": "+0", "scattered": "+0"}
    assert lines["error %"].to_dict() == {"replicated": "+0.00", "scattered": "-1.00"}


def test_fsdp_rows(collectives):
    config = MODEL_SIZES["small"]
    settings = {"size": "small", "dtype": "bf16-compute", "batch_size": 4, "context_length": 512, "attention": "flash"}
    settings |= {"checkpoint": "none", "compile": "off", "world_size": 2, "fsdp": "ours", "prefetch": 1}
    found = {"state": 1.0, "predicted_state": 1.01, "sent": 100.0, "predicted_sent": 100.0, "forward": 12.0}
    found |= {"late_gathers": 1.0, "gather_wait": 0.25}
    rows = frame([settings, settings | {"fsdp": "torch", "prefetch": ""}], [found, {"forward": 1.0}])
    lines = fsdp_predictions(rows, collectives).frame
    assert len(lines) == 1
    line = lines.iloc[0]
    gather = 1e3 * LINK.seconds(cost("all_gather", 2, 2 * config.n_block_parameters))
    assert float(line["gather of a block ms"]) == pytest.approx(gather, abs=0.006)
    assert line["forward of a block ms"] == "1.00"
    assert (line["error %"], line["sent, error %"], line["late"], line["waited ms"]) == ("+1.00", "+0.00", "1", "0.25")
