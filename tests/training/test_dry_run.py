"""Peaks that a dry run predicts, against steps that really run on a CPU, arithmetic and, on a GPU, measurements."""

import gc
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile

from cs336_systems.case import TrainingCase, Unsupported
from cs336_systems.config import MODEL_SIZES, ModelConfig, resolve_size
from cs336_systems.costs.kept import LEVELS, bytes_kept
from cs336_systems.costs.memory import PARTS
from cs336_systems.hardware import GIB
from cs336_systems.harness.memory import cublas_workspace_bytes, predicted_bytes, predicted_states
from cs336_systems.kernels.allocating import computes
from cs336_systems.ranks import Parallel
from cs336_systems.training import assemble, random_batch
from cs336_systems.training.dry_run import dry_run
from tests.live_bytes import LiveBytes
from tests.training.shared import Shared

SMALL = ModelConfig("small", d_model=128, d_ff=352, n_layers=3, n_heads=4, n_kv_heads=2, vocab_size=512, qkv_bias=True)
SMALL = SMALL.at_context(64)
QWEN3 = replace(SMALL, qkv_bias=False, qk_norm=True, head_dim=64)
FUSED = {"dtype": "bf16", "attention": "hopper", "optimizer": "fused", "kernels": "fused"}


SHARDED = Parallel("fsdp")


def fused(config: ModelConfig = SMALL, **how) -> TrainingCase:
    """A case of a CPU, where every byte counts and no workspace does."""
    shape = {"size": config, "context_length": config.context_length, "batch_size": 2, "keep": "all"}
    return Shared(**(FUSED | shape | how))


# ---- steps that really run


def alive_at_peak(case: TrainingCase, mode: str) -> int:
    """Most bytes alive in the second of two steps on a CPU, by every storage that operators made."""
    with LiveBytes() as live:
        step = assemble(case)
        live.add([list(step.model.parameters()), list(step.model.buffers())])
        batch = random_batch(case)
        for _ in range(2):
            live.peak = live.now
            step_of(step, mode, *batch)
    return live.peak


def step_of(step, mode: str, *batch) -> None:
    for phase in step.phases(mode, *batch).values():
        phase()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("how", "mode"),
    [
        ({"dtype": "autocast-bf16", "checkpoint": "recursive", "accumulate": 3}, "step"),
        ({"checkpoint": "keep-matmuls-1"}, "backward"),
        ({"keep": "products-residual", "accumulate": 2}, "step"),
    ],
)
def test_a_step_that_runs_on_a_cpu_has_the_predicted_peak(how, mode):
    """Within 2 %: the live bytes are followed under a dispatch mode, where autograd adds no gradient in place."""
    case = TrainingCase.of(SMALL, batch_size=2, **how)
    assert dry_run(case, mode).n_bytes == pytest.approx(alive_at_peak(case, mode), rel=0.02)


@pytest.mark.parametrize(("tied", "precision"), [(True, "autocast-bf16"), (False, "fp32")])
def test_gradients_meet_as_the_allocator_sees_them(tied, precision):
    """Of few tokens and many words: those of a tied embedding are added in place if nothing else has their memory."""
    config = replace(MODEL_SIZES["tiny"], vocab_size=10_000, tie_embeddings=tied).at_context(4)
    case = TrainingCase.of(config, batch_size=1, dtype=precision)
    step = assemble(case)
    batch = random_batch(case)
    step(*batch)
    states = [*step.model.parameters(), *step.model.buffers(), *batch]
    allocated = peak = sum(tensor.nbytes for tensor in states)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True) as profiled:
        step_of(step, "backward", *batch)
    events = [event for event in profiled.profiler.kineto_results.events() if event.name() == "[memory]"]
    for event in sorted(events, key=lambda event: event.start_ns()):
        allocated += event.nbytes()
        peak = max(peak, allocated)
    assert dry_run(case, "backward").n_bytes == pytest.approx(peak, rel=2e-3)


# ---- arithmetic


@pytest.mark.slow
@pytest.mark.parametrize(
    ("size", "context_length", "precision", "mode", "measured_gib"),
    [
        ("small", 512, "fp32", "backward", 3.26),
        ("small", 512, "bf16", "step", 2.39),
        ("small", 512, "autocast-bf16", "step", 4.09),
    ],
)
def test_plain_steps_take_what_an_h200_reported(size, context_length, precision, mode, measured_gib):
    """Within 3 %: ``max_memory_allocated`` of the handout's small model at batch 4, torch 2.11."""
    case = TrainingCase("cuda", size, 4, context_length, precision)
    assert dry_run(case, mode).n_bytes / GIB == pytest.approx(measured_gib, rel=0.03)


@pytest.mark.parametrize(("config", "recipe"), [(SMALL, {"matmul_dtype": "e4m3"}), (QWEN3, {})], ids=["fp8", "qk-norm"])
def test_levels_differ_by_what_they_keep(config, recipe):
    """All blocks keep theirs when the loss is computed."""
    at_loss = {}
    for keep in (*LEVELS, "products-residual", "1xall+products"):
        case = fused(config, keep=keep, **recipe)
        at_loss[keep] = dry_run(case, "backward").moments["loss"]
    kept = {keep: bytes_kept(*case.work, case.precision, keep, case.recipe) for keep in at_loss if "+" not in keep}
    for keep, n_bytes in kept.items():
        assert at_loss[keep] - at_loss["input"] == config.n_layers * (n_bytes - kept["input"])
    assert at_loss["1xall+products"] - at_loss["products"] == kept["all"] - kept["products"]


@pytest.mark.parametrize(
    ("case", "mode"),
    [(fused(device="cuda"), "step"), (fused(how=SHARDED), "backward")],
)
def test_the_parts_of_a_peak_add_up_and_it_is_the_largest_moment(case, mode):
    peak = dry_run(case, mode, world_size=2)
    assert peak.n_bytes == max(peak.moments.values()) == sum(peak.parts.values())
    assert list(peak.parts) == [part for part in PARTS if part in peak.parts]
    share = 2 if case.parallel.wrapper == "fsdp" else 1
    assert peak.parts["parameters"] >= SMALL.n_parameters * case.precision.parameter_bytes // share


def test_states_take_their_bytes_on_the_device_or_none():
    n = SMALL.n_parameters

    def states(**how) -> int:
        return dry_run(fused(**how)).parts.get("optimizer state", 0)

    assert states() == pytest.approx(4 * n, rel=0.03)
    assert states(optimizer="torch-fused") == states()
    assert states(master="fp32") - states() == 4 * n
    assert states(offload="m-v") < 0.1 * n
    n_second = n - SMALL.n_layers * SMALL.n_block_matrices  # of AdamW's part
    assert states(optimizer="muon") == pytest.approx(2 * (n + n_second), rel=0.03)
    muon = predicted_states(fused(optimizer="muon"), 1)
    assert (muon["m"], muon["v"]) == (2 * n, 2 * n_second)
    assert states(master="fp32", offload="master-m") == pytest.approx(2 * n, rel=0.06)


@pytest.mark.slow
def test_gradients_and_inputs_on_the_host_leave_the_device():
    config = replace(SMALL, n_layers=6)
    whole = dry_run(fused(config, keep="input", accumulate=2), "backward")
    assert whole.parts["gradients"] >= 2 * config.n_parameters
    stream = 2 * 64 * config.d_model * 2
    here, away = (dry_run(fused(config, keep="input", offload=of), "backward") for of in ("none", "residual"))
    assert here.moments["loss"] - away.moments["loss"] == 5 * stream
    wide = resolve_size("llama3-8b")
    fewer = replace(wide, n_layers=8, vocab_size=512, context_length=512)
    left = dry_run(fused(fewer, keep="input", offload="m-v-gradients"))
    assert left.parts.get("gradients", 0) + left.parts.get("temporaries", 0) < 3 * GIB < 2 * fewer.n_parameters


@pytest.mark.slow
def test_half_of_the_states_on_each_of_two_ranks():
    """What is whole for a while is at most two units' weights."""
    config, recipe = replace(SMALL, n_layers=5), {"matmul_dtype": "e4m3"}
    peaks = {n: dry_run(fused(config, how=SHARDED, keep="input", **recipe), world_size=n) for n in (2, 4)}
    assert peaks[2].parts["optimizer state"] == pytest.approx(2 * peaks[4].parts["optimizer state"], rel=0.05)
    units = 2 * max(config.n_block_parameters, config.vocab_size * config.d_model)
    assert 0 < peaks[2].parts["gathered parameters"] <= 2 * units + 4096
    under = replace(SHARDED, update="under-backward")
    early = dry_run(fused(config, how=under, keep="input", **recipe), world_size=2)
    assert early.n_bytes < peaks[2].n_bytes


@pytest.mark.parametrize("by", ["collectives", "copies"])
def test_tensor_ranks_keep_norms_of_all_rows_in_eight_bits(by):
    """The transposes of both norms and of SwiGLU's product, with a scale each."""
    case = fused(how=Parallel(tensor=2, tensor_by=by), matmul_dtype="e4m3")
    at_loss = {keep: dry_run(replace(case, keep=keep), world_size=2).moments["loss"] for keep in ("all", "products")}
    n_rows = case.batch_size * case.context_length
    assert at_loss["all"] - at_loss["products"] == SMALL.n_layers * (
        2 * n_rows * SMALL.d_model + n_rows * SMALL.d_ff // 2 + 3 * 4
    )


def test_nothing_is_left_behind():
    """A process group that was joined stays the default one, and kernels compute again."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        dry_run(fused(how=SHARDED), world_size=4)
        assert dist.get_world_size() == 1 and computes()
        with pytest.raises(ValueError, match="unknown mode 'train'"):
            dry_run(fused(how=SHARDED), "train", world_size=4)
        ones = torch.ones(1)
        dist.all_reduce(ones)
        assert ones.item() == 1 and computes()
    finally:
        dist.destroy_process_group()


# ---- on a GPU


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("size", "n_layers", "context_length", "how"),
    [
        *(("qwen2.5-0.5b", 12, 4096, {"attention": "flash", "keep": keep}) for keep in (*LEVELS, "all-attention-ffn")),
        ("qwen2.5-0.5b", 12, 2048, {"attention": "flash", "keep": "products-residual", "accumulate": 3}),
        ("llama3-8b", 4, 8192, {"keep": "products"}),
        ("llama3-8b", 4, 8192, {"matmul_dtype": "e4m3"}),
    ],
)
def test_peak_is_what_a_gpu_allocates(size, n_layers, context_length, how):
    """Within 3 %, of a step that finds its states in place."""
    config = replace(resolve_size(size), n_layers=n_layers).at_context(context_length)
    case, device = fused(config, device="cuda", **how), torch.device("cuda")
    gc.collect()
    before = torch.cuda.memory_allocated() - cublas_workspace_bytes(device)  # what other tests have left
    try:
        step, batch = assemble(case), random_batch(case)
    except Unsupported as reason:
        pytest.skip(str(reason))
    for _ in range(2):
        torch.cuda.reset_peak_memory_stats()
        step(*batch)
    measured = torch.cuda.max_memory_allocated() - max(before, 0)
    assert predicted_bytes(case) == pytest.approx(measured, rel=0.03)
