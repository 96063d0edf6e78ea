"""The memory that operations of blocks take besides slots, followed on ``meta``, beside the formula of plans."""

from dataclasses import replace

import pytest
import torch

from cs336_systems.blocks import block_ops, block_products
from cs336_systems.config import MODEL_SIZES, Recipe
from cs336_systems.costs.kept import STORED
from cs336_systems.costs.streaming import StreamedWork
from cs336_systems.kernels.allocating import only_allocating
from cs336_systems.streaming.plan import Keep, Plan
from cs336_systems.streaming.run import StreamedStep
from cs336_systems.streaming.schedule import Kind
from cs336_systems.training.dry_run import META, LiveStorages
from tests.streaming.plans import LORA, resident


def most_temporaries(plan: Plan) -> int:
    """The most bytes that one operation of a block allocates besides slots, with the kernels of a GPU."""
    live = LiveStorages(int)
    ops, products = block_ops("fused", "hopper"), block_products("fused", plan.work.recipe)
    with only_allocating(live.leave_out), torch.no_grad(), live:
        step = StreamedStep(plan, resident(plan), ops, META, products=products, optimizer=lambda *state: None)
        ids = torch.zeros(plan.n_sequences, plan.work.context_length, dtype=torch.int64, device=META)
        step.passes.begin(ids, ids)
        found = []
        for operation in step.schedule.operations:
            if operation.kind in (Kind.FORWARD, Kind.RECOMPUTE, Kind.BACKWARD):
                start, n_bytes = len(live.changes), [0]
                step.passes.run(operation)
                for _, _, change in live.changes[start:]:
                    n_bytes.append(n_bytes[-1] + change)
                found.append(max(n_bytes))
    return max(found)


@pytest.mark.parametrize("size", ["llama3-8b", "qwen3-0.6b", "qwen2.5-14b"])
@pytest.mark.parametrize("lora", [None, LORA], ids=["weights", "adapters"])
@pytest.mark.parametrize("recipe", [STORED, Recipe("e4m3")], ids=["stored", "e4m3"])
@pytest.mark.parametrize(("length", "chunk"), [(1024, 1024), (8192, 8192), (32_768, 8192)])
def test_no_operation_of_a_block_takes_more_than_plans_leave_free(size, lora, recipe, length, chunk):
    config = replace(MODEL_SIZES[size], n_layers=1, vocab_size=256, max_context_length=None).at_context(length)
    work = StreamedWork(config, length, chunk, recipe=recipe, lora=lora)
    chunks = work.chunks_per_sequence
    least, most = (
        most_temporaries(Plan(work, chunks, 1, "sequential", keep)) for keep in (Keep(0, 0), Keep(chunks, chunks))
    )
    assert 0.8 * work.temporary_bytes < max(least, most) < 1.01 * work.temporary_bytes
