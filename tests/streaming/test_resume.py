"""A streamed run that is taken up from a checkpoint, under other caps, is the run that was not interrupted."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from cs336_systems.blocks import REFERENCE, block_products
from cs336_systems.costs.streaming import MASTER_MOMENTS, MOMENTS
from cs336_systems.distributed.checkpoint import find_checkpoint, load_checkpoint, load_whole_model, save_checkpoint
from cs336_systems.distributed.process_group import joined
from cs336_systems.model import TransformerLM
from cs336_systems.streaming.build import build
from cs336_systems.streaming.plan import Plan
from cs336_systems.streaming.run import StreamedStep
from tests.streaming.plans import random_plan, roomy
from tests.streaming.test_run import batches, load, model_of


def step_of(plan: Plan) -> StreamedStep:
    products = block_products("reference", plan.work.recipe)
    return StreamedStep(plan, build(plan), REFERENCE, torch.device("cpu"), products=products)


def whole_state(step: StreamedStep) -> dict[str, Tensor]:
    model = step.model()
    state, names = step.optimizer_state(model).state, {p: name for name, p in model.named_parameters()}
    return dict(model.named_parameters()) | {
        f"{names[parameter]} {key}": value for parameter, kept in state.items() for key, value in kept.items()
    }


@pytest.mark.slow
@pytest.mark.parametrize("seed", [3, 10])
def test_resumed_under_other_caps(tmp_path, seed):
    plan, _ = random_plan(seed)
    straight, data = step_of(plan), batches(plan, 4)
    load(straight, model_of(plan))
    with joined("cpu"):
        for i, batch in enumerate(data):
            straight(*batch)
            if i == 1:
                model = straight.model()
                save_checkpoint(tmp_path, model, straight.optimizer_state(model), 2)
        resumed = step_of(roomy(plan))
        resumed.reset_parameters()
        model = resumed.model()
        assert load_checkpoint(tmp_path, model, resumed.optimizer_state(model)) == 2
        for batch in data[2:]:
            resumed(*batch)
    expected, got = whole_state(straight), whole_state(resumed)
    assert expected.keys() == got.keys()
    assert len(expected) > 3 * len(list(straight.model().parameters()))
    assert [name for name, tensor in expected.items() if not torch.equal(got[name], tensor)] == []
    stored, _ = find_checkpoint(tmp_path)
    weights = load_whole_model(stored, dict(TransformerLM(plan.work.config, device="meta").named_parameters()))
    assert weights.keys() == dict(straight.model().named_parameters()).keys()


def test_what_another_optimizer_keeps_is_refused(tmp_path):
    plan = next(plan for plan, _ in map(random_plan, range(100)) if dict(plan.work.moments) == MOMENTS)
    plan, work = roomy(plan), replace(plan.work, moments=tuple(MASTER_MOMENTS.items()))
    bf16, masters = step_of(plan), step_of(replace(plan, work=work))
    with joined("cpu"):
        for first, second, message in (
            (bf16, masters, "k_proj.weight/master is absent there, .* [0-9]+ more"),
            (masters, bf16, "k_proj.weight/master is .* there, absent here; .* [0-9]+ more"),
        ):
            model, other = first.model(), second.model()
            save_checkpoint(tmp_path, model, first.optimizer_state(model), 1)
            with pytest.raises(ValueError, match=message):
                load_checkpoint(tmp_path, other, second.optimizer_state(other))
