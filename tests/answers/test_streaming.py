"""Goals of steps under caps in documents: what kernels alone would reach, what took the time beyond a simulation."""

import pandas as pd
import pytest

from cs336_systems.answers.streaming import (
    GOALS,
    beyond_simulation_table,
    by_hand_table,
    goals_table,
    kernels_table,
)
from cs336_systems.answers.streaming_by_hand import ByHand, LongByHand, streamed_work, sustained
from cs336_systems.config import resolve_size
from cs336_systems.hardware import GIB

LAYERS = resolve_size("llama3-8b").n_layers
CHUNK = 8192


def rows(missing: str = "") -> pd.DataFrame:
    """Each cell of a goal with steps of two chunks, all but ``missing``; measured 1 ms more in each of forward."""
    found = []
    for n, goal in enumerate(GOALS):
        kernels = {"embed": 1.0, "forward": 7.0, "head": 36.0, "backward": 14.0, "embed_backward": 3.0}
        metrics = {f"{kind}_operation": ms for kind, ms in kernels.items()}
        metrics |= {f"simulated_{name}": ms - (name == "forward_operation") for name, ms in metrics.items()}
        metrics |= {"step": 2000.0, "simulated_step": 1900.0, "recompute": 5.0, "simulated_recompute": 5.0}
        metrics |= {"compute_idle": 2.0, "simulated_compute_idle": 1.0, "planned_tokens_per_step": 2 * CHUNK}
        metrics |= {"planned_chunk": CHUNK, "tokens_per_s": 10_000.0 - 1000 * n, "simulated_tokens_per_s": 10_100.0}
        cell = {"size": "llama3-8b", "context_length": goal.context_length, "status": "ok"}
        cell |= {"device_gib": float(goal.device_gib), "host_gib": float(goal.host_gib)}
        found += [cell | {"metric": name, "median": float(v)} for name, v in metrics.items() if name != missing]
    return pd.DataFrame(found)


def test_a_goal_stands_beside_what_was_measured_and_as_a_share_of_the_speed_without_caps() -> None:
    frame = goals_table(rows()).frame.set_index("goal")
    assert frame.loc["10,600", "measured"] == "9,000"
    assert frame.loc["10,600", "goal, of uncapped"] == "0.86"
    assert frame.loc["10,600", "measured, of uncapped"] == "0.900"
    assert frame.loc["12,400", "measured, of uncapped"] == "–"
    assert frame.loc["11,400", "device / host GiB"] == "24 / 115, goal for 24 / 120"


def test_kernels_alone_are_a_chunk_without_anything_beside_them() -> None:
    line = kernels_table(rows()).frame.iloc[0]
    alone = CHUNK / (LAYERS * 21 + 40) * 1e3
    assert line["kernels alone, measured"] == f"{alone:,.0f}"
    assert line["kernels alone, simulated"] == f"{CHUNK / (LAYERS * 20 + 40) * 1e3:,.0f}"
    assert line["beside them % of the step"] == f"{100 * (1 - 10_000 / alone):.1f}"
    assert float(line["goal / measured"]) == 1.24


def test_time_beyond_the_simulation_adds_up() -> None:
    frame = beyond_simulation_table(rows()).frame
    assert len(frame) == len(GOALS)
    line = frame.iloc[0]
    assert line["beyond, ms"] == "+100"
    assert line["forward"] == f"+{2 * LAYERS}"  # a millisecond in each pair of layer and chunk
    assert line["again"] == "+5"  # 5 % of the 100 ms
    assert line["no kernel"] == "+21"
    assert line["rest"] == f"+{100 - 2 * LAYERS - 5 - 21}"


def test_what_was_not_measured_is_named() -> None:
    with pytest.raises(LookupError, match="simulated_head_operation"):
        kernels_table(rows(missing="simulated_head_operation"))


def test_by_hand_memory_or_the_link_decides_what_is_computed_again() -> None:
    work = streamed_work("llama3-8b", 8192, CHUNK)
    tight, more, most = (ByHand(work, 2, 24, host) for host in (75, 76, 115))
    assert tight.at_products == tight.by_memory < tight.by_link
    assert more.by_memory - tight.by_memory == pytest.approx(GIB / tight.products_bytes)
    assert more.again_share < tight.again_share
    assert most.at_products == most.by_link == tight.by_link < most.by_memory
    assert tight.tokens_per_s(2**19) < most.tokens_per_s(2**19) < 2 * CHUNK / tight.round_seconds
    everything = ByHand(work, 2, 132, 75)
    assert everything.again_share == 0
    steps = 2**19 / (2 * CHUNK) * everything.round_seconds + everything.optimizer_seconds
    assert everything.tokens_per_s(2**19) == pytest.approx(2**19 / steps)


def test_a_long_sequence_by_hand_restores_x_where_attention_would_run_again() -> None:
    """Groups of four, of which the topmost restores 3 + 2 + 1 times, the next 3 + 1, the others 3 each; all with less
    room for what is kept, as rings have more weights.
    """
    work = streamed_work("llama3-8b", 2**19, 2 * CHUNK)
    plain, fourth = (LongByHand(work, 130, 120, every) for every in (1, 4))
    assert (plain.restored, fourth.restored) == (0, 6 + 4 + 6 * 3)
    assert fourth.kept_room == plain.kept_room - 3 * work.layer_bytes
    assert plain.input_bytes + plain.attention_bytes > plain.kept_room
    assert fourth.input_bytes / 4 + fourth.attention_bytes <= fourth.kept_room
    slower = 2**19 / fourth.tokens_per_s - 2**19 / plain.tokens_per_s
    assert slower == pytest.approx(32 * 28 * work.seconds("restore", 0, "", sustained()))


def test_by_hand_stands_beside_each_simulation_that_its_sums_are_for() -> None:
    """Not where even `attention` of all pairs has no room."""
    metrics = {"planned_tokens_per_step": 2**19, "planned_chunk": CHUNK, "planned_rounds": 32}
    metrics |= {"simulated_tokens_per_s": 10_000.0, "simulated_recompute": 8.0}
    cell = {"size": "llama3-8b", "context_length": 8192, "status": "ok", "device_gib": 24.0}
    found = [cell | {"host_gib": host, "metric": m, "median": v} for host in (50.0, 75.0) for m, v in metrics.items()]
    (line,) = by_hand_table(pd.DataFrame(found)).frame.to_dict("records")
    assert (line["device / host GiB"], line["chunks"]) == ("24 / 75", 2)
    assert line["again %, simulated"] == "8.0"
    by_hand = ByHand(streamed_work("llama3-8b", 8192, CHUNK), 2, 24, 75).tokens_per_s(2**19)
    assert line["by hand / simulated"] == f"{by_hand / 10_000:.3f}"
