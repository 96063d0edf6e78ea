"""The closed form of a rank's peak beside dry runs, and by reasoning where no dry run goes."""

from dataclasses import dataclass

import pytest

from cs336_systems.case import TrainingCase
from cs336_systems.config import PRECISIONS, resolve_size
from cs336_systems.costs.kept import bytes_kept
from cs336_systems.costs.parallelism.layout import Layout
from cs336_systems.costs.parallelism.rank_memory import rank_peak
from cs336_systems.costs.parallelism.stages import stages_of
from cs336_systems.costs.streaming import LEVELS, MOMENTS
from cs336_systems.ranks import Parallel
from cs336_systems.training.dry_run import dry_run

CLOSE, CLOSE_OF_STAGES = 0.05, 0.03
ALONE = Layout()
LLAMA = resolve_size("llama3-8b")
STAGED = [
    *({"pipeline": 2, "n_micro_batches": 4, "schedule": name} for name in ("gpipe", "interleaved", "zbv", "dualpipev")),
    *({"pipeline": 4, "n_micro_batches": 8, "schedule": name, "keep": "input"} for name in ("zb-h1", "zbv")),
    {"pipeline": 2, "n_micro_batches": 4, "schedule": "1f1b", "tensor": 2},
    {"pipeline": 2, "n_micro_batches": 4, "schedule": "zbv", "zero": 3, "shards": 2},
]


@dataclass(frozen=True)
class Ranked(TrainingCase):
    """A step of a layout."""

    layout: Layout = ALONE

    @property
    def parallel(self) -> Parallel:
        layout, alone = self.layout, self.layout.n_ranks == self.layout.tensor * self.layout.pipeline
        wrapper = "none" if alone else {0: "bucketed", 3: "fsdp"}[layout.zero]
        replicas = layout.replicas if layout.zero else 1
        mesh = {name: getattr(layout, name) for name in ("tensor", "context", "pipeline")}
        return Parallel(wrapper, replicas=replicas, pipeline_schedule=layout.schedule, **mesh)


def dry_bytes(size, length, layout, master):
    case = Ranked(
        device="cuda",
        size=size,
        context_length=length,
        batch_size=layout.micro_batch,
        accumulate=layout.n_micro_batches,
        dtype="bf16",
        kernels="fused",
        attention="hopper",
        optimizer="fused",
        keep=layout.keep,
        master=master,
        layout=layout,
    )
    return dry_run(case, world_size=layout.n_ranks).n_bytes


@pytest.mark.slow
@pytest.mark.parametrize(
    ("size", "length", "how"),
    [
        ("llama3-8b", 8192, {"keep": "input"}),
        ("llama3-8b", 8192, {"keep": "products", "n_micro_batches": 2, "tensor": 4, "replicas": 2}),
        ("llama3-8b", 8192, {"keep": "all", "n_micro_batches": 2, "tensor": 4}),
        ("llama3-8b", 8192, {"keep": "all", "context": 2, "tensor": 2, "micro_batch": 2}),
        *(("llama3-8b", 8192, {"keep": keep, "zero": 3, "shards": 8, "micro_batch": 2}) for keep in LEVELS),
        ("llama3-8b", 8192, {"keep": "attention", "zero": 3, "shards": 2, "replicas": 2, "context": 2, "tensor": 2}),
        ("llama3-70b", 8192, {"keep": "input", "zero": 3, "shards": 8, "tensor": 8, "master": "fp32"}),
        ("llama3-70b", 8192, {"keep": "products", "zero": 3, "shards": 64, "master": "fp32"}),
        ("qwen2.5-1.5b", 4096, {"keep": "input", "zero": 3, "shards": 4, "micro_batch": 4}),  # tied, with biases
        ("qwen3-4b", 4096, {"keep": "attention", "zero": 3, "shards": 2, "tensor": 2}),  # tied, heads normed
        *(("llama3-8b", 4096, how) for how in STAGED),
        ("qwen3-4b", 4096, {"pipeline": 4, "n_micro_batches": 8, "schedule": "1f1b"}),  # tied, on two stages
        ("qwen3-4b", 4096, {"pipeline": 2, "n_micro_batches": 4, "schedule": "dualpipev"}),  # and on one
    ],
)
def test_it_is_close_to_a_dry_run(size, length, how):
    how = dict(how)
    master = how.pop("master", "none")
    layout = Layout(**how, chunks=2 if how.get("schedule") == "interleaved" else 1)
    moments = MOMENTS | ({"master": 4} if master == "fp32" else {})
    found = rank_peak(resolve_size(size), length, layout, moments=tuple(moments.items())).n_bytes
    dry = dry_bytes(size, length, layout, master)
    print(f"{size}, {layout}: closed form {found / 2**30:.2f}, dry run {dry / 2**30:.2f} GiB, {found / dry - 1:+.1%}")
    assert found == pytest.approx(dry, rel=CLOSE if layout.pipeline == 1 else CLOSE_OF_STAGES)


@pytest.mark.parametrize(
    ("schedule", "n_stages", "n_micro_batches", "measured_gib"),
    [
        *(("gpipe", 2, 4, 50.667), ("interleaved", 2, 4, 47.490), ("1f1b", 2, 8, 44.080)),
        *(("1f1b", 4, 16, 28.733), ("zb-h1", 4, 8, 32.513)),
    ],
)
def test_stages_take_what_h200s_reported(schedule, n_stages, n_micro_batches, measured_gib):
    """Within 3 %: ``peak_memory`` in rows of mesh-pipeline, -added and -four whose lists and division are today's.

    Those of zbv and dualpipev are not: by the lists of their commit the form is within 0.6 % of them, too.
    """
    chunks = 2 if schedule == "interleaved" else 1
    how = {"pipeline": n_stages, "schedule": schedule, "n_micro_batches": n_micro_batches, "chunks": chunks}
    found = rank_peak(LLAMA, 4096, Layout(**how)).n_bytes
    assert found / 2**30 == pytest.approx(measured_gib, rel=CLOSE_OF_STAGES)


def peak(config=LLAMA, **how):
    return rank_peak(config, 8192, Layout(**how))


def test_each_zero_level_divides_more():
    """Of 8 billion parameters 14.96 GiB each of weights and gradients, twice that of moments."""
    peaks = [peak(zero=zero, shards=8 if zero else 1, replicas=1 if zero else 8, keep="input") for zero in range(4)]
    parts = [each.parts for each in peaks]
    whole = parts[0]["parameters"]
    assert whole == 2 * LLAMA.n_parameters
    assert [each["optimizer state"] for each in parts] == [2 * whole, *[whole // 4] * 3]
    assert [each["parameters"] for each in parts] == [whole, whole, whole, whole // 8]
    assert parts[2]["gradients"] < parts[1]["gradients"] == pytest.approx(whole, rel=0.1)
    n_bytes = [each.n_bytes for each in peaks]
    assert n_bytes == sorted(n_bytes, reverse=True)


def test_parts_add_up_to_the_largest_moment():
    found = peak(zero=3, shards=4, tensor=2)
    assert found.n_bytes == max(found.moments.values())
    assert sum(found.parts.values()) == pytest.approx(found.n_bytes, abs=10)


def test_stages_keep_as_many_micro_batches_as_their_schedule():
    """The first of four stages keeps four micro-batches in 1F1B, all twelve in GPipe."""
    one = bytes_kept(LLAMA, 1, 8192, PRECISIONS["bf16"], "products")
    kept = {}
    for schedule in ("1f1b", "gpipe"):
        kept[schedule] = peak(pipeline=4, n_micro_batches=12, schedule=schedule).parts["activations"]
    n_layers = [stage.n_layers for stage in stages_of(LLAMA, 8192, 4)]
    assert n_layers == [8, 8, 9, 7]
    stream = 8192 * LLAMA.d_model * 2  # of a message that comes, and one that goes
    assert kept["1f1b"] == pytest.approx(4 * n_layers[0] * one + 2 * stream, rel=1e-3)
    assert kept["gpipe"] == pytest.approx(12 * n_layers[2] * one + 2 * stream, rel=1e-3)


def test_the_longest_kept_of_a_micro_batch_grows_with_its_sequences():
    first, second = (peak(zero=3, shards=8, micro_batch=n).parts["activations"] for n in (1, 2))
    assert second == pytest.approx(2 * first, rel=1e-6)
