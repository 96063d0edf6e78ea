"""Hand-made rows of ``benchmark_model``, for tests of what is made from them."""

import pandas as pd

from cs336_systems.harness.record import Metric, Row, parse_samples, schema_columns

SETTINGS = {
    "device": "cpu",
    "size": "tiny",
    "batch_size": 1,
    "context_length": 128,
    "dtype": "fp32",
    "attention": "reference",
    "compile": "off",
    "checkpoint": "none",
    "kernels": "reference",
    "keep": "autograd",
    "optimizer": "reference",
    "accumulate": 1,
    "master": "none",
    "offload": "none",
    "matmul_dtype": "same",
    "matmul_kernels": "library",
    "gradient_dtype": "e4m3",
    "scaling": "tensor",
    "fp8_skip_first": 0,
    "fp8_skip_last": 0,
    "cuda_graph": "off",
    "mode": "step",
    "warmup": 1,
    "steps": 3,
    "repeat": 0,
}

PROVENANCE = {
    "gpu": "",
    "host": "a CPU, 2 cores",
    "driver": "",
    "cuda": "",
    "torch": "2.11.0",
    "triton": "3.6.0",
    "argv": "",
}


def ms(name: str, *samples: float) -> Metric:
    """A timed metric."""
    return Metric(name, "ms", samples)


def rate(name: str, value: float) -> Metric:
    """A metric that follows from another."""
    return Metric(name, "", [value], derived=True)


def make_cell(
    *metrics: Metric, status: str = "ok", message: str = "", variant: str = "eager", **values: object
) -> list[Row]:
    """The rows of one outcome; ``values`` overrides settings, provenance or the timestamp."""
    shared: Row = {"schema_version": 1, "benchmark": "benchmark_model", "variant": variant, **SETTINGS, **PROVENANCE}
    shared |= {"status": status, "message": message, "timestamp": "2026-01-01T00:00:00+00:00"} | values
    return [shared | metric.statistics() for metric in metrics] or [shared]


def make_frame(*cells: list[Row]) -> pd.DataFrame:
    """The cells' rows as ``read_rows`` would return them."""
    frame = pd.DataFrame([row for cell in cells for row in cell])
    return parse_samples(frame.reindex(columns=schema_columns(SETTINGS)))


def ceiling() -> list[Row]:
    """Rows of the machine's ceilings."""
    blank = {"size": "", "batch_size": 0, "context_length": 0, "mode": "", "compile": "", "optimizer": ""}
    blank |= {"accumulate": 0, "cuda_graph": ""}
    return make_cell(Metric("matmul_ceiling", "TFLOP/s", [777.0]), variant="ceiling", warmup=0, steps=0, **blank)
