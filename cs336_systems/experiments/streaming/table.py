"""The table of ``benchmark_streaming``."""

from collections.abc import Callable

from cs336_systems.report.results import MAIN, Column, Line, ResultTable


def _share(metric: str) -> Callable[[Line], float | None]:
    """As measured, else as simulated."""

    def value(line: Line) -> float | None:
        found = line.median(metric)
        return line.median(f"simulated_{metric}") if found is None else found

    return value


STREAMING_TABLE = ResultTable(
    settings=(
        *("gpu", "device", "simulated_device", "size", "context_length", "device_gib", "host_gib", "order", "chunk"),
        *("tokens_per_step", "clipping", "master", "peer", "warmup", "steps"),
    ),
    always=("size", "context_length", "device_gib", "host_gib"),
    labels={
        "device_gib": "device GiB",
        "host_gib": "host GiB",
        "simulated_device": "simulated device",
        "context_length": "length",
    },
    columns=(
        Column("tokens/s", "tokens_per_s", ",.0f", rank=MAIN, optional=True),
        Column("simulated", "simulated_tokens_per_s", ",.0f", rank=MAIN, note="tokens/s"),
        Column("sim / measured", "simulated_over_measured", ".3f", note="time of a step", optional=True),
        Column("TFLOP/s", "model_tflops", rank=2, optional=True),
        Column("MFU %", "mfu", ".1f", optional=True),
        Column("HFU %", "hfu", ".1f", optional=True),
        Column("sim MFU %", "simulated_mfu", ".1f", rank=2),
        Column("sim HFU %", "simulated_hfu", ".1f", rank=2),
        Column("in %", _share("link_in"), ".0f", rank=2, note="of the step, the link to the device is busy"),
        Column("out %", _share("link_out"), ".0f", rank=2, note="the same, from the device"),
        Column("idle %", _share("compute_idle"), ".1f", rank=2, note="of the step, no kernel runs"),
        Column("again %", _share("recompute"), ".1f", rank=2, note="of the step, spent on recomputation"),
        Column("in use GiB", "device_in_use", ".2f", note="of the device", optional=True, little=True),
        Column("on the host GiB", "host_in_use", ".2f", rank=2, note="of the process", optional=True, little=True),
        Column("tokens a step", "planned_tokens_per_step", ",.0f", rank=3),
        Column("step ms", "step", rank=3, optional=True),
    ),
)
