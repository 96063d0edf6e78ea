"""Stages against all divisions of small models, and what they hold."""

from dataclasses import replace
from itertools import product

import pytest

from cs336_systems.config import resolve_size
from cs336_systems.costs.fsdp import model_units
from cs336_systems.costs.parallelism import stages
from cs336_systems.costs.parallelism.schedules import make_schedule, places_of
from cs336_systems.costs.parallelism.stages import Stage, divide, end_blocks, stages_of

TINY = resolve_size("tiny")


@pytest.fixture
def ends(monkeypatch):
    """Sets the work of embedding and head, in blocks."""

    def to(embedding, head):
        stages.blocks_of_parts.cache_clear()
        stages.stages_of.cache_clear()
        monkeypatch.setattr(stages, "end_blocks", lambda _: (embedding, head))

    yield to
    stages.blocks_of_parts.cache_clear()
    stages.stages_of.cache_clear()


@pytest.mark.parametrize(("embedding", "head"), [(0.0, 0.0), (0.1, 1.2), (0.4, 2.6)])
@pytest.mark.parametrize(("schedule", "n_stages"), [("1f1b", 2), ("1f1b", 4), ("zbv", 2), ("zbv", 3)])
def test_no_division_has_a_faster_slowest_stage(ends, schedule, n_stages, embedding, head):
    ends(embedding, head)
    places = places_of(schedule, n_stages)

    def slowest(counts):
        loads = [0.0] * n_stages
        for (stage, _), count in zip(places, counts, strict=True):
            loads[stage] += count
        loads[places[0][0]] += embedding
        loads[places[-1][0]] += head
        return max(loads)

    for n_layers in range(len(places), 11):
        config = replace(TINY, n_layers=n_layers)
        blocks = divide(make_schedule(schedule, n_stages, 8), config)
        assert [i for each in blocks for i in range(each.start, each.stop)] == list(range(n_layers))
        every = product(range(1, n_layers + 1), repeat=len(places) - 1)
        whole = [(*each, n_layers - sum(each)) for each in every if sum(each) < n_layers]
        assert slowest([each.stop - each.start for each in blocks]) == pytest.approx(min(map(slowest, whole)))
        found = stages_of(config, config.context_length, n_stages, schedule)
        loads = [stage.n_layers + stage.embedding * embedding + stage.head * head for stage in found]
        assert max(loads) == pytest.approx(min(map(slowest, whole)))


def test_a_head_takes_the_place_of_blocks(ends):
    ends(0.0, 1.2)
    config = replace(TINY, n_layers=80)
    assert [stage.n_layers for stage in stages_of(config, 128, 4)] == [20, 20, 21, 19]
    assert stages_of(config, 128, 1) == (Stage(80, True, True),)
    few = replace(TINY, n_layers=8)
    assert [stage.n_layers for stage in stages_of(few, 128, 9)] == [1] * 8 + [0]
    with pytest.raises(ValueError, match="8 blocks do not make 9 parts of a pipeline, 1 on each of 9 stages of 1f1b"):
        divide(make_schedule("1f1b", 9, 9), few)
    with pytest.raises(ValueError, match="8 blocks are too few for 11 parts of a pipeline of 1f1b"):
        stages_of(few, 128, 11)


def test_ends_may_be_parts_of_their_own():
    """Llama 3.1 405B on 16 stages of 8 chunks: 126 blocks and the two ends (Llama team 2024, section 3.3.2)."""
    found = stages_of(resolve_size("llama3.1-405b"), 8192, 16, "interleaved", 8)
    assert [stage.n_layers for stage in found] == [7, *[8] * 14, 7]


def test_v_schedules_have_both_ends_on_the_first_stage():
    """Of Qwen2.5 1.5B, whose head takes as long as four blocks, on eight stages."""
    config = resolve_size("qwen2.5-1.5b")
    first, *others = stages_of(config, 4096, 8, "zbv")
    assert first == Stage(2, True, True) and sum(stage.n_layers for stage in others) == 26
    assert not any(stage.embedding or stage.head for stage in others)
    embedding, head = end_blocks(config.at_context(4096))
    assert 2 + embedding + head > max(stage.n_layers for stage in others)


@pytest.mark.parametrize("size", ["llama3-8b", "qwen2.5-1.5b"])
def test_stages_hold_the_parameters_of_the_model(size):
    """A tied head is on the last stage, too."""
    config = resolve_size(size)
    tied = config.vocab_size * config.d_model if config.tie_embeddings else 0
    for schedule, twice in (("1f1b", True), ("zbv", False)):
        found = stages_of(config, 4096, 4, schedule)
        assert sum(stage.n_parameters(config) for stage in found) == config.n_parameters + tied * twice
        assert sum(len(stage.units(config)) for stage in found) == len(model_units(config)) + (bool(tied) and twice)
    assert Stage(config.n_layers, True, True).n_parameters(config) == config.n_parameters
    assert Stage(config.n_layers, True, True).units(config) == model_units(config)
