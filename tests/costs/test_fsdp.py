"""FSDP's arithmetic on shapes that can be added up by hand, and on the model; tests/distributed compares it to FSDP."""

from cs336_systems.config import MODEL_SIZES
from cs336_systems.costs.fsdp import held_elements, model_units, shard_elements, step_traffic


def test_a_step_by_hand():
    assert [shard_elements((5, 3), world_size) for world_size in (1, 2, 4, 8)] == [15, 9, 6, 3], "rows are rounded up"
    assert shard_elements((7,), 2) == shard_elements((), 2) * 7 == 7, "vectors are whole"
    units = [[(4, 2)], [(3, 2), (5,)], [(2, 2)]]
    traffic = step_traffic(units, 2, compute_bytes=2)
    assert traffic.counts == {"all-gather": 5, "reduce-scatter": 3, "all-reduce": 1}
    assert traffic.messages == {
        "all-gather": 2 * (2 * (8 + 8) + 4),
        "reduce-scatter": 4 * 20,
        "all-reduce": 4 * (5 + 4),
    }
    assert traffic.sent_per_rank == 0.5 * (72 + 80 + 2 * 36)
    quantized = step_traffic(units, 2, compute_bytes=2, quantized=(1,))
    assert quantized.messages["all-gather"] == 2 * (2 * 8 + 4) + 2 * 8
    assert quantized.messages["all-reduce"] - traffic.messages["all-reduce"] == 4 * 4
    assert quantized.counts == {"all-gather": 5, "reduce-scatter": 3, "all-reduce": 2}
    assert held_elements(units, 2) == 4 + 4 + 5 + 2


def test_the_model_has_a_share_of_its_states_and_sends_half_as_much_again_as_data_parallelism():
    config = MODEL_SIZES["2.7b"]
    units = model_units(config)
    assert held_elements(units, 1) == config.n_parameters
    assert 1 <= 4 * held_elements(units, 4) / config.n_parameters < 1.001
    all_reduce = 2 * 0.5 * 4 * config.n_parameters
    assert 1.48 < step_traffic(units, 2).sent_per_rank / all_reduce < 1.5
