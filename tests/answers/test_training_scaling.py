"""Runs on several ranks beside one: of the same command alone, and every command that has both."""

import pandas as pd
import pytest

from cs336_systems.answers.committed import NotMeasured
from cs336_systems.answers.training_scaling import scaling_table
from cs336_systems.experiments.training.scaling import ranks_figure


def rows(*runs):
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
        rows(
            *(("a", "e4m3", 1, 1, "collectives", "off", 100.0), ("a", "e4m3", 4, 1, "collectives", "on", 400.0)),
            *(("a", "e4m3", 4, 3, "copies", "off", 370.0), ("a", "e4m3", 4, 1, "collectives", "off", 390.0)),
            *(("b", "e4m3", 1, 1, "collectives", "off", 200.0), ("b", "e4m3", 2, 3, "collectives", "off", 350.0)),
            ("c", "e4m3", 4, 1, "collectives", "off", 500.0),  # beside no rank alone
            *(("d", "e4m3", 1, 3, "collectives", "off", 90.0), ("d", "e4m3", 4, 3, "copies", "off", 370.0)),  # nor this
        )
    )
    assert table.frame.to_dict("records") == [
        {
            **{"size": "qwen2.5-7b", "products": "e4m3", "ranks": 2, "ZeRO-1": "–", "ZeRO-3, collectives": "1.750"},
            **{"ZeRO-3, copies": "–", "ranks apart": "–", "ZeRO-1 over apart": "–", "commit": "bbbbbbb"},
        },
        {
            **{"size": "qwen2.5-7b", "products": "e4m3", "ranks": 4, "ZeRO-1": "3.900", "ZeRO-3, collectives": "–"},
            **{"ZeRO-3, copies": "3.700", "ranks apart": "4.000", "ZeRO-1 over apart": "0.975", "commit": "aaaaaaa"},
        },
    ]


def test_without_one_rank_there_is_nothing_to_say():
    alone = rows(("c", "stored", 4, 1, "collectives", "off", 500.0))
    with pytest.raises(NotMeasured, match="beside one"):
        scaling_table(alone)
    assert ranks_figure(alone, 97.5) is None


def test_a_mark_for_each_way_and_a_number_for_what_lies_outside():
    figure = ranks_figure(
        rows(
            *(("a", "stored", 1, 1, "collectives", "off", 100.0), ("a", "stored", 4, 1, "collectives", "off", 390.0)),
            *(("a", "stored", 4, 3, "copies", "off", 260.0), ("a", "stored", 4, 1, "collectives", "on", 400.0)),
        ),
        97.5,
    )
    (axes,) = figure.axes
    drawn = {
        str(marks.get_label()): [tuple(place) for place in marks.get_offsets() if place[0] >= axes.get_xlim()[0]]
        for marks in axes.collections
    }
    assert drawn == {
        **{"ZeRO-1": [(97.5, 0)], "ranks apart": [(100, 0)]},
        **{"ZeRO-3, collectives": [], "ZeRO-3, copies": []},
    }
    assert [text.get_text() for text in axes.texts] == ["← 65"]
    assert [label.get_text() for label in axes.get_yticklabels()] == ["qwen2.5-7b, bf16, 4 ranks (aaaaaaa)"]
