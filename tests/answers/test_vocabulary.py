"""What templates may ask of several GPUs, experiments and calculators: predicted without rows, measured with them."""

from dataclasses import asdict

import pandas as pd
import pytest

from cs336_systems.answers import vocabulary as words
from cs336_systems.answers.committed import Committed
from cs336_systems.answers.rendering import PENDING, Pages
from cs336_systems.answers.vocabulary import NUMBERS, TABLES, vocabulary
from cs336_systems.config import MODEL_SIZES
from cs336_systems.experiments.fully_sharded import FullyShardedCell
from cs336_systems.experiments.leaks.findings import Findings
from cs336_systems.harness.record import Metric, schema_columns
from cs336_systems.harness.sweep import cell_columns
from cs336_systems.report.tables import Table
from tests.report.rows import make_cell, make_frame, ms

GIB = 2**30
XL = 4 * MODEL_SIZES["xl"].n_parameters
DDP = ("device", "size", "world_size", "dtype", "compile", "communication_dtype", "ddp", "bucket_size_mb")
WITHOUT_ROWS = ("sums_table", "toy_table", "residuals_table", "account_table")


def render(profiles, text):
    names = vocabulary(Committed(profiles, "h200"))
    return Pages({"page.md": f"# T\n{text}"}, names).render("page.md").split("\n", 2)[2]


def write_ddp(tmp_path, *kinds):
    """A row per metric of each (rung, bucket size, ranks)."""
    cell = {"size": "2.7b", "dtype": "fp32", "compile": "off", "communication_dtype": "same", "status": "ok"}
    cell |= {"gpu": "NVIDIA H200", "device": "cuda", "commit": "abc", "argv": "x", "torch": "2.11", "timestamp": "now"}
    cell |= {"schema_version": 1, "benchmark": "benchmark_ddp"}
    rows = [
        cell | {"ddp": rung, "bucket_size_mb": mb, "world_size": ranks} | Metric(name, "ms", [5.0 + i]).statistics()
        for i, (rung, mb, ranks) in enumerate(kinds)
        for name in ("step", "exposed", "tokens_per_s")
    ]
    path = tmp_path / "results" / "h200" / "ddp" / "benchmark_ddp.csv"
    path.parent.mkdir(parents=True)
    pd.DataFrame(rows).reindex(columns=schema_columns(DDP)).to_csv(path, index=False)


def test_without_rows_every_table_says_so(tmp_path):
    names = vocabulary(Committed(tmp_path, "h200"))
    for table in TABLES:
        if table.__name__ not in WITHOUT_ROWS:
            sentence = names[table.__name__](names["rows"]("grid"))
            assert str(sentence) == "**Not measured yet:** the rows of `results/h200/grid` are missing.", table


@pytest.mark.parametrize(
    "expression",
    [
        'ddp("exposed", "naive")',
        'sharded("step", "owned") / sharded("step", "replicated") - 1',
        'fsdp("state", "ours")',
        'leaderboard_turns("step", "torch", "full") / leaderboard_turns("step", "ours", "none")',
        'leaderboard_losses("loss_error") | fixed(3)',
        'leaderboard_masters("step") | fixed',
        'leaderboard_fp8("peak_memory")',
        'leaderboard_one_gpu("step", "residual") | fixed',
        'collective("busbw", "all_reduce", 2, 1)',
        '1e6 * link_of(rows("collectives"), 2).alpha_s',
        'leak(rows("leaks/roofline_knee")).knee["measured product"]',
        'flash_speedups(rows("attention-flash-bf16")) | max | fixed',
    ],
)
def test_without_rows_measured_numbers_are_pending(tmp_path, expression):
    assert render(tmp_path, f"{{{{ {expression} }}}}") == PENDING


@pytest.mark.parametrize(
    ("expression", "value"),
    [
        ('4 * resolve_size("xl").n_parameters / GIB', XL / GIB),
        ('predicted_exposed("naive")', 1e3 * XL / 450e9),
        ('link_bytes_per_step("owned", 4 * resolve_size("xl").n_parameters, 2) / GIB', 2 * XL / GIB),
        ('link_bytes_per_step("scattered", 4 * resolve_size("xl").n_parameters, 2) / GIB', XL / GIB),
        ('state_bytes(model_units(resolve_size("xl")), 2).total / GIB', 2 * XL / GIB),
        ("WORKLOAD.n_sequences", 512),
        ("job(2048).mtbf_s / 3600", 100 * 24 / 2048),
    ],
)
def test_predicted_numbers_need_no_rows(tmp_path, expression, value):
    shown = render(tmp_path, f"{{{{ ({expression}) | fixed(9) }}}}")
    assert float(shown.replace(",", "")) == pytest.approx(value, rel=1e-3)


def test_measured_numbers_are_those_of_the_rows(tmp_path):
    write_ddp(tmp_path, ("bucketed", 1, 2), ("bucketed", 25, 2))
    assert render(tmp_path, '{{ ddp("step", "bucketed", bucket_size_mb=25) }}') == "6.00"
    assert render(tmp_path, '{{ ddp("step", "naive") }}') == PENDING


def write_leaderboard(tmp_path, part, *cells):
    """Rows of ``benchmark_fsdp``, for each cell its fields and its metrics."""
    shared = {"schema_version": 1, "benchmark": "benchmark_fsdp", "status": "ok", "gpu": "NVIDIA H200", "message": ""}
    shared |= {"commit": "abc", "argv": "x", "timestamp": "now"}
    rows = []
    for fields, metrics in cells:
        cell = FullyShardedCell("cuda", "leaderboard-8b", 1, 32_768, "bf16", world_size=2, **fields)
        said = shared | asdict(cell) | {"variant": cell.variant}
        rows += [said | metric.statistics() for metric in metrics]
    path = tmp_path / "results" / "h200" / part / "benchmark_fsdp.csv"
    path.parent.mkdir(parents=True)
    columns = schema_columns(cell_columns(FullyShardedCell))
    pd.DataFrame(rows).reindex(columns=columns).to_csv(path, index=False)


def test_the_leaderboards_step_beside_fsdp2_and_its_losses_beside_fp32(tmp_path):
    ours = {"kernels": "fused", "keep": "products", "prefetch": 1, "update": "under-backward"}
    step, times = Metric("step", "ms", [4300.0, 4310.0, 4290.0]), Metric("warmup_step", "ms", [16e3, 4350.0])
    peers = [
        ({"fsdp": "torch", "compile": "on", "checkpoint": policy}, [Metric("step", "ms", [ms])])
        for policy, ms in (("full", 5805.0), ("keep-attention", 5160.0))
    ]
    write_leaderboard(tmp_path, "leaderboard-turns", (ours, [step, times]), *peers)
    losses = [Metric("loss", "nats", [12.0] * 20), Metric("loss_error", "%", [0.125])]
    write_leaderboard(tmp_path, "leaderboard-losses", (ours | {"losses": 20}, losses))

    def told(expression):
        return render(tmp_path, f"{{{{ {expression} }}}}")

    own = 'leaderboard_turns("step", "ours", "none")'
    assert told(f'(leaderboard_turns("step", "torch", "full") / {own}) | fixed(3)') == "1.350"
    assert told(f'(leaderboard_turns("step", "torch", "keep-attention") / {own}) | fixed(3)') == "1.200"
    assert told('leaderboard_turns("step", "ours", "none", statistic="n") | fixed') == "3"
    assert told('leaderboard_turns("warmup_step", "ours", "none", statistic="n") | fixed') == "2"
    assert told('leaderboard_losses("loss", statistic="n") | fixed') == "20"
    assert told('leaderboard_losses("loss_error") | fixed(3)') == "0.125"
    table = told('fully_sharded_table(rows("leaderboard-turns"))')
    assert "losses" not in table and "1.350" in table and "1.200" in table
    assert "loss off %" in told('fully_sharded_table(rows("leaderboard-losses"))')


def test_the_ladder_and_the_buckets_are_the_handouts_setting(tmp_path):
    write_ddp(tmp_path, ("naive", "", 2), ("bucketed", 100, 2), ("bucketed", 25, 2), ("bucketed", 25, 4))

    def lines(rows):
        return [
            line for line in render(tmp_path, f"{{{{ data_parallel_table({rows}) }}}}").splitlines() if " 2.7b " in line
        ]

    assert len(lines('rows("ddp", world_size=2, bucket_size_mb=["", 25])')) == 2
    assert len(lines('rows("ddp")')) == 4
    buckets = lines('rows("ddp", world_size=2, ddp="bucketed").by("bucket_size_mb")')
    assert [" 25 " in line for line in buckets] == [True, False]


def analyse(rows: pd.DataFrame) -> Findings:
    median = float(rows["median"].sum())
    tables = [Table("One.", pd.DataFrame({"ms": [median]})), Table("Two.", pd.DataFrame({"ms": [0.0]}))]
    return Findings(tables, {"knee": {"measured product": median}}, lambda axes: axes.plot([0, 1], [0, median]), "T")


def test_tables_and_numbers_of_an_experiment_are_its_own_analysis(tmp_path, monkeypatch):
    path = tmp_path / "results" / "h200" / "leaks" / "roofline_knee.csv"
    path.parent.mkdir(parents=True)
    failed = make_cell(status="error", message="no", gpu="NVIDIA H200")
    rows = make_frame(make_cell(ms("time", 46.0), gpu="NVIDIA H200"), failed).assign(samples="")
    rows.assign(benchmark="roofline_knee").to_csv(path, index=False)
    monkeypatch.setitem(words.LEAKS, "roofline_knee", analyse)
    text = render(tmp_path, '{{ leak_tables(rows("leaks/roofline_knee")) }}')
    assert text.index("One.") < text.index("Two.")
    assert render(tmp_path, '{{ leak(rows("leaks/roofline_knee")).knee["measured product"] }}') == "46.0"


def test_questions_about_parallelism_answer_with_their_tables(tmp_path):
    text = render(tmp_path, '{{ parallelism("ring")[0] }}\n{{ parallelism("accounting")[2] }}')
    assert "alternate all-reduce" in text
    assert "How to reduce the batch" in text


def test_no_name_has_two_meanings() -> None:
    names = [function.__name__ for function in (*NUMBERS, *TABLES)]
    assert sorted(set(names)) == sorted(names)
