"""What the FSDP benchmark's grid chooses itself."""

from dataclasses import replace

import pytest

from cs336_systems.experiments.fully_sharded import experiment
from cs336_systems.experiments.fully_sharded.cells import Options, make_cells
from cs336_systems.harness.fit import predicted_states

LEADERBOARD = Options(
    size=("leaderboard-8b",),
    context_length=(32_768,),
    batch_size=(1,),
    dtype=("bf16",),
    attention=("hopper",),
    optimizer=("fused",),
    kernels=("fused",),
    fsdp=("ours",),
    world_size=(2,),
)


def test_a_budget_decides_what_blocks_keep_and_says_why(monkeypatch, capsys):
    monkeypatch.setattr(experiment, "cublas_workspace_bytes", lambda device: 2**25)
    (cell,) = experiment.make_cells(replace(LEADERBOARD, memory_budget_gib=133.0, peer_checkpoint=()))
    assert cell.keep.endswith("+products")
    told = capsys.readouterr().err
    assert f"within 133 GiB, least recomputation: keep {cell.keep}: predicted peak 13" in told
    assert "SwiGLU run again" in told
    (alone, peer) = experiment.make_cells(replace(LEADERBOARD, memory_budget_gib=60.0, peer_checkpoint=("full",)))
    assert (peer.keep, peer.checkpoint) == ("autograd", "full")
    assert alone.keep != cell.keep


def test_masters_are_among_the_states_that_are_predicted(monkeypatch, capsys):
    monkeypatch.setattr(experiment, "cublas_workspace_bytes", lambda device: 2**25)
    for update in ("after-backward", "under-backward"):
        plain, masters = (
            make_cells(replace(LEADERBOARD, keep=("products",), update=(update,), master_weights=(master,)))[0]
            for master in ("none", "fp32")
        )
        more = predicted_states(masters, 2) - predicted_states(plain, 2)
        assert more == pytest.approx(4 * plain.config.n_parameters / 2, rel=1e-3)
    (alone,) = experiment.make_cells(replace(LEADERBOARD, memory_budget_gib=133.0, master_weights=("fp32",)))
    assert alone.keep != experiment.make_cells(replace(LEADERBOARD, memory_budget_gib=133.0))[0].keep
    assert "fused kernels masters in fp32 within 133 GiB" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ({"memory_budget_gib": float("inf")}, "--memory-budget-gib must be positive and finite, got inf"),
        ({"memory_budget_gib": 100.0, "keep": ("all",)}, "--memory-budget-gib chooses what blocks of --kernels fused"),
        ({"memory_budget_gib": 10.0}, "nothing that blocks may keep fits 10 GiB for leaderboard-8b"),
    ],
)
def test_budgets_that_cannot_be_met_are_told(fault, message, monkeypatch):
    monkeypatch.setattr(experiment, "cublas_workspace_bytes", lambda device: 2**25)
    with pytest.raises(ValueError, match=message):
        experiment.make_cells(replace(LEADERBOARD, **fault))


@pytest.mark.parametrize(
    "own",
    [{"prefetch": (2,)}, {"update": ("under-backward",)}, {"gather_by": ("copies",)}],
    ids=lambda own: next(iter(own)),
)
def test_what_is_ours_alone_is_refused_without_ours(own):
    name = next(iter(own)).replace("_", "-")
    with pytest.raises(ValueError, match=f"--{name} is of --fsdp ours, which is not among torch, ddp"):
        make_cells(replace(Options.default("cpu"), fsdp=("torch", "ddp"), **own))


def test_weights_that_are_cast_are_not_copied():
    copied = replace(Options.default("cpu"), world_size=(2,), gather_by=("collectives", "copies"))
    found = [(cell.fsdp, cell.gather_by) for cell in make_cells(copied)]
    assert found == [("ours", "collectives"), ("ours", "copies"), ("torch", "collectives"), ("ddp", "collectives")]
    assert [cell.parallel.gather_by for cell in make_cells(copied)] == [gather_by for _, gather_by in found]
    message = "--gather-by copies is for weights as they are stored, and --dtype bf16-compute casts them"
    with pytest.raises(ValueError, match=message):
        make_cells(replace(copied, dtype=("bf16-compute",)))
