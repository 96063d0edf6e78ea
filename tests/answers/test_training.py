"""Rates of training in documents: the fastest of ours by size, others beside, and what was not measured left out."""

import pandas as pd
import pytest

from cs336_systems.answers.committed import NotMeasured
from cs336_systems.answers.figures import _as_in_tables
from cs336_systems.answers.training import (
    fp8_rates_table,
    llmq_rates,
    llmq_table,
    llmq_ways,
    of_bf16_commands,
    outside,
    outside_table,
    scaling_table,
    training_rates_table,
)
from cs336_systems.experiments.training import TORCHAO, rates_figure

CELL = {
    **{"gpu": "NVIDIA H200", "device": "cuda", "context_length": 1024, "dtype": "bf16", "world_size": 1, "zero": 0},
    **{"attention": "hopper", "cuda_graph": "off", "data": "random tokens", "warmup": 2},
    **{"seconds": 12.0, "recipe": "stored", "library": "", "status": "ok", "argv": "a", "commit": "b", "host": "c"},
    "timestamp": "2026-11-22T00:00:00",
}


def rows():
    runs = [
        # size, how, batch, kernels, tokens/s, world size
        ("qwen2.5-7b", "ours", 8, "fused", 14_000.0, 1),
        ("qwen2.5-0.5b", "ours", 32, "fused", 159_000.0, 1),
        ("qwen2.5-0.5b", "ours", 64, "fused-products", 165_000.0, 1),
        ("qwen2.5-0.5b", "ours", 32, "fused", 310_000.0, 2),
        ("qwen2.5-0.5b", "transformers-liger", 32, "", 132_000.0, 1),
    ]
    found = []
    for size, how, batch, kernels, rate, world_size in runs:
        ours = {"speed_of_light": 50.0, "predicted_peak_memory": 39.0} if how == "ours" else {}
        for metric, median in {"tokens_per_s": rate, "peak_memory": 40.0, **ours}.items():
            cell = CELL | {"size": size, "how": how, "batch_size": batch, "total_batch_tokens": 2**19, "keep": "all"}
            found.append(cell | {"kernels": kernels, "world_size": world_size, "metric": metric, "median": median})
    return pd.DataFrame(found)


def test_the_fastest_of_ours_and_others_beside():
    table = training_rates_table(rows())
    assert "NVIDIA H200, bf16" in table.caption
    small, large = table.frame.to_dict("records")
    assert (small["size"], small["tokens/s"], small["batch"]) == ("qwen2.5-0.5b", "165,000", "64")
    assert small["transformers, Liger"] == "132,000 (1.25)"
    assert (large["size"], large["transformers, Liger"]) == ("qwen2.5-7b", "–")
    assert "transformers" not in table.frame  # not measured at any size


def ways_in(figure):
    return [label.get_text() for label in figure.axes[0].get_yticklabels()]


def test_the_figure_has_the_rates_of_the_table():
    """Also where a command that quantizes ran faster in bf16: the figure leaves it out as the table does."""
    faster = rows().query("how == 'ours' and world_size == 1").assign(argv="b")
    faster.loc[faster["metric"] == "tokens_per_s", "median"] *= 2
    both = pd.concat([rows(), faster, faster.assign(recipe="e4m3")])
    bars = [bar.get_width() for bar in rates_figure(_as_in_tables(both), {}).axes[0].patches]
    shown = training_rates_table(both).frame["tokens/s"].iloc[0]
    assert (shown, bars[0]) == ("165,000", 165.0)
    assert ways_in(rates_figure(rows(), {"llm.q": llmq_rates()})) == ["ours", "transformers-liger", "llm.q"]
    assert rates_figure(rows().assign(status="oom"), {}) is None


def in_fp8(rate, command, stored_rate=None):
    """A run in fp8 at 0.5B and, perhaps, one of stored products of the same command."""
    alone = rows().query("size == 'qwen2.5-0.5b' and kernels == 'fused-products'").assign(argv=command, keep="products")
    rates = {"e4m3": rate} if stored_rate is None else {"e4m3": rate, "stored": stored_rate}
    runs = [alone.assign(recipe=recipe) for recipe in rates]
    for run, each in zip(runs, rates.values(), strict=True):
        run.loc[run["metric"] == "tokens_per_s", "median"] = each
    return pd.concat(runs)


def test_fp8_stands_beside_bf16_of_the_same_command_and_never_for_it():
    peer = rows().query("how == 'transformers-liger'").assign(argv="b", keep="products")
    both = pd.concat([rows(), peer, in_fp8(190_000.0, "b", 160_000.0)])
    faster = pd.concat([rows(), peer, in_fp8(190_000.0, "b", 170_000.0)])
    assert {*of_bf16_commands(both)["argv"]} == {"a"}
    for found in (both, faster):
        assert training_rates_table(found).frame.equals(training_rates_table(rows()).frame)
    (line,) = fp8_rates_table(both).frame.to_dict("records")
    assert (line["products"], line["tokens/s"]) == ("e4m3", "190,000")
    assert line["bf16"] == "160,000 (1.19)"  # not the 165,000 of another command
    alone = fp8_rates_table(pd.concat([rows(), in_fp8(180_000.0, "c")]))
    assert "bf16" not in alone.frame
    with pytest.raises(NotMeasured, match="fp8"):
        fp8_rates_table(rows())
    ways = [*llmq_ways()]
    assert ways_in(rates_figure(both, llmq_ways())) == ["ours", "transformers-liger", "ours, e4m3", *ways]


def test_the_fastest_run_of_a_size_beside_llmqs_and_its_goal():
    added = {"offload": "none", "matmul_kernels": "library"}
    unknown = rows().assign(size="llama3-8b")
    found = pd.concat([rows(), in_fp8(190_000.0, "b", 160_000.0), unknown]).assign(**added)
    table = llmq_table(found).frame[["size", "matmuls", "tokens/s", "llm.q, published", "goal", "of the goal %"]]
    assert table.to_numpy().tolist() == [
        ["qwen2.5-0.5b", "bf16", "165,000", "150,000 (1.10)", "160,000", "103.1"],
        ["qwen2.5-7b", "bf16", "14,000", "13,900 (1.01)", "14,500", "96.6"],
        ["qwen2.5-0.5b", "e4m3", "190,000", "164,000 (1.16)", "192,000", "99.0"],
    ]


def test_fp8_stands_beside_torchaos_of_a_command_that_has_both():
    ours, how = in_fp8(180_000.0, "d").assign(total_batch_tokens=2**17), "torchao-rowwise"
    torchaos = ours.assign(how=how, recipe=TORCHAO[how], library="torchao 0.18", kernels="", keep="")
    torchaos.loc[torchaos["metric"] == "tokens_per_s", "median"] = 150_000.0
    both = pd.concat([rows(), in_fp8(190_000.0, "b", 160_000.0), ours, torchaos])
    (line,) = fp8_rates_table(both).frame.to_dict("records")
    assert (line["tokens/s"], line["bf16"]) == ("190,000", "160,000 (1.19)")
    assert line["torchao, rowwise"] == "150,000 (1.20)", "over its command's 180,000"
    assert "torchao, tensorwise" not in line
    assert ways_in(rates_figure(both, {}))[-1] == "torchao-rowwise, e4m3-row"


def ranked(*runs):
    found = []
    for commit, recipe, ranks, zero, gather_by, apart, rate in runs:
        cell = {"size": "qwen2.5-7b", "recipe": recipe, "world_size": ranks, "zero": zero, "gather_by": gather_by}
        run = {"apart": apart, "argv": "a", "commit": commit * 40, "host": "c", "status": "ok"}
        found += [
            cell | run | {"metric": "tokens_per_s", "median": rate},
            cell | run | {"metric": "loss", "median": 12.0},
        ]
    return pd.DataFrame(found)


def test_each_command_beside_its_own_rank():
    table = scaling_table(
        ranked(
            *(("a", "e4m3", 1, 1, "collectives", "off", 100.0), ("a", "e4m3", 4, 1, "collectives", "on", 400.0)),
            *(("a", "e4m3", 4, 3, "copies", "off", 370.0), ("a", "e4m3", 4, 1, "collectives", "off", 390.0)),
            ("c", "e4m3", 4, 1, "collectives", "off", 500.0),  # beside no rank alone
        )
    )
    (line,) = table.frame.to_dict("records")
    assert (line["ZeRO-1"], line["ZeRO-3, copies"], line["ranks apart"]) == ("3.900", "3.700", "4.000")
    assert (line["ZeRO-3, collectives"], line["ZeRO-1 over apart"], line["commit"]) == ("–", "0.975", "aaaaaaa")


def test_without_one_rank_there_is_nothing_to_say():
    alone = ranked(("c", "stored", 4, 1, "collectives", "off", 500.0))
    with pytest.raises(NotMeasured, match="beside one"):
        scaling_table(alone)


def test_what_others_say_has_a_source_and_a_date():
    assert llmq_rates()["qwen2.5-1.5b"] == pytest.approx(59_200) and outside("class record").endswith(" s")
    assert (outside_table().frame[["source", "date"]] != "").all(axis=None)
    with pytest.raises(LookupError, match="'guess'"):
        outside("guess")
