"""Options from file and command line, and what follows from them."""

from dataclasses import replace
from pathlib import Path

import pytest

from cs336_systems.config import resolve_size
from cs336_systems.pretraining.options import TrainOptions
from cs336_systems.ranks import Parallel
from cs336_systems.refusals import refusal as step_refusal

PLAIN = TrainOptions.default("cpu")


@pytest.fixture
def parse(load_script, monkeypatch):
    monkeypatch.setattr("cs336_systems.report.command_line.n_gpus", lambda: 0)
    return load_script("scripts/train.py").parse


@pytest.fixture
def to_toml(load_script):
    return load_script("scripts/train.py").to_toml


def test_the_command_line_is_over_the_file_and_the_file_over_the_defaults(parse, tmp_path):
    file = tmp_path / "run.toml"
    file.write_text(
        '\ufefflearning-rate = 1\nbetas = [0.8, 0.9]\nzero = 1\ninit = "Qwen"\nclip = "none"\ntensorboard = true',
        encoding="utf-8",
    )
    for arguments in (["--config", str(file), "--zero", "3"], ["--zero", "3", f"--config={file}"]):
        options = parse(arguments)
        assert (options.zero, options.betas, options.learning_rate) == (3, (0.8, 0.9), 1.0)
        assert (options.init, options.clip, options.tensorboard) == (Path("Qwen"), None, True)
        assert options.size == "tiny"
    assert parse(["--config", str(file), "--no-tensorboard"]).tensorboard is False
    assert parse(["--lr", "2e-3"]).learning_rate == 2e-3
    assert parse(["--micro-batches", "4"]).accumulate == 4
    assert parse(["--evaluate-every", "None"]).evaluate_every is None
    assert parse(["--device", "cuda", "--no-choose-fastest"]) == TrainOptions.default("cuda")
    assert (parse([]).steps, parse(["--epochs", "2"]).steps, parse(["--epochs", "2"]).epochs) == (800, None, 2.0)
    with pytest.raises(ValueError, match="--steps 9 and --epochs 2.0: give one of them"):
        parse(["--epochs", "2", "--steps", "9"]).check()
    with pytest.raises(ValueError, match="--steps 800 and --epochs 2.0: give one of them"):
        parse(["--epochs", "2", "--steps", "800"]).check()  # the default, given
    file.write_text("steps = 200")
    overridden = parse(["--config", str(file), "--epochs", "2"])
    assert (overridden.steps, overridden.epochs) == (None, 2.0)
    assert parse(["--config", str(file), "--epochs", "None"]).steps == 200
    file.write_text('device = "cuda"')
    assert parse(["--config", str(file)]) == replace(TrainOptions.default("cuda"), choose_fastest=True)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_a_printed_config_says_the_same(device, tmp_path, parse, to_toml):
    changes = {"data": Path('a "folder"\\'), "eps": 1e-9, "clip": None, "seed": 7, "offload": ("m", "v")}
    asked = replace(TrainOptions.default(device), **changes)
    (tmp_path / "run.toml").write_text(to_toml(asked))
    assert parse(["--config", str(tmp_path / "run.toml")]) == asked


def test_what_a_file_cannot_say(tmp_path, parse, capsys):
    file = tmp_path / "run.toml"
    for content, fault in (
        ("learning-rat = 1", "'learning-rat': did you mean learning-rate?"),
        ("lr = 1", "'lr': did you mean learning-rate?"),
        ("size = tiny", "run.toml is not TOML"),
        ("size = true", "size cannot be true or false, got true"),
        ('deterministic = "yes"', 'deterministic is not true or false, got "yes"'),
        ("[model]\nsize = 3", "'model'"),
        ("learning-rate = 1\nlearning_rate = 2", "learning-rate is there twice"),
    ):
        file.write_text(content)
        with pytest.raises(ValueError) as refusal:
            parse(["--config", str(file)])
        assert "run.toml" in str(refusal.value) and fault in str(refusal.value)
    for line in ("steps = 1.5", "betas = [0.9]", "zero = 4"):
        file.write_text(line)
        with pytest.raises(SystemExit) as stop:
            parse(["--config", str(file)])
        assert stop.value.code == 2
        said = capsys.readouterr().err
        assert f"--{line.split()[0]}" in said and said.endswith("train: that may stand in the file of --config\n")
    file.write_text("seed = 1")
    for arguments in (["--config"], ["--config", str(file), "--seed", "2", "--config=other.toml"]):
        with pytest.raises(ValueError, match="--config"):
            parse(arguments)
    with pytest.raises(FileNotFoundError):
        parse(["--config", str(tmp_path / "nowhere.toml")])


QUANTIZED = {"matmul_dtype": "e4m3"}
CAPS = {"device_gib": 0.5, "host_gib": 2.0}
AGREE = {"agree": "every-step", "replicas": 2}


@pytest.mark.parametrize(
    ("changes", "value"),
    [
        ({"size": "tinny"}, "'tinny': did you mean tiny"),
        ({"batch_size": 0}, "--batch-size must be positive, got 0"),
        ({"clip": 0.0}, "--clip must be positive, got 0.0"),
        ({"learning_rate": float("nan")}, "--learning-rate must be finite, got nan"),
        ({"final_fraction": float("nan")}, "--final-fraction must be finite, got nan"),
        ({"seed": 2**32}, "--seed"),
        ({"betas": (0.9, 1.0)}, "--betas must lie in [0, 1), got 0.9 1.0"),
        ({"epochs": 2.0}, "--steps 800 and --epochs 2.0"),
        ({"total_batch_tokens": 1024, "accumulate": 2}, "--total-batch-tokens 1024 and --accumulate 2"),
        ({"total_batch_tokens": 1000}, "--total-batch-tokens 1,000 is no multiple of 1,024"),
        ({"moments": "bf16"}, "--moments bf16 is for --optimizer fused, got torch-fused"),
        ({"optimizer": "muon", "moments": "fp32"}, "--moments fp32 is for --optimizer fused, got muon"),
        ({"z_loss": 1e-4}, "--z-loss 0.0001 "),
        ({"deterministic": True, "attention": "hopper", "keep": "autograd"}, "--deterministic and --attention hopper"),
        ({"gather_by": "copies", "zero": 2}, "--zero 2"),
        ({"replicas": 2, "zero": 1}, "--replicas 2 is for --zero 3, got --zero 1"),
        ({"tensor_by": "copies"}, "--tensor-by copies is for --tensor of 2"),
        ({"context_order": "ring"}, "--context-order ring is for --context of 2"),
        ({"pipeline_chunks": 3}, "--pipeline-chunks 3 is for --pipeline of 2 or more, got 1"),
        ({"pipeline_by": "copies"}, "--pipeline-by copies is for --pipeline of 2 or more, got 1"),
        ({"pipeline": 2, "pipeline_by": "torch"}, "'torch'"),
        ({"pipeline": 2, "pipeline_chunks": 2}, "2 is for --pipeline-schedule interleaved, got 1f1b"),
        (
            {"pipeline": 2, "accumulate": 4, "pipeline_schedule": "zbv", "pipeline_chunks": 2},
            "2 is for --pipeline-schedule interleaved, got zbv",
        ),
        ({"context": 2, "context_order": "torch"}, "'torch'"),
        ({"save_every": None}, "--save-every None"),
        ({"init": Path("weights"), "size": "small"}, "a size of its own: leave out --size small"),
        ({"keep_best": True, "evaluate_every": None}, "--keep-best is for runs with evaluations, and --evaluate-every"),
        ({"stop_after_no_gain": 2, "evaluate_every": None}, "--stop-after-no-gain 2 is for runs with evaluations"),
        ({"keep_best": True, "save_every": None, "export": False}, "--keep-best is for runs with checkpoints"),
        ({"packing": True, "attention": "sdpa-flash"}, "--packing needs --attention reference, flash or hopper, which"),
        ({"packing": True, "chunk": 64} | CAPS, "--packing needs --chunk of whole sequences of 128 tokens, got 64"),
        ({"lighthouse": "http://node0:1"} | AGREE, "go together: give both or none, got http://node0:1 and None"),
        ({"fail": "kill 2 at 1"} | AGREE, "names a replica that is not there"),
        ({"fail": "burn 1 at 1"} | AGREE, "got 'burn 1 at 1'"),
        ({"fail": "kill 1 at 9", "steps": 9} | AGREE, "names a step that is not there: --steps 9 are counted from 0"),
        (
            {"ranks_per_replica": 3, "tensor": 2, "keep": "products"} | AGREE,
            "2 ranks, got 3; --ranks-per-replica N",
        ),
        ({"keep_best": True} | AGREE, "not with --keep-best"),
        ({"agree_every": 5}, "--agree-every 5 is for --agree diloco, got --agree None"),
        (AGREE | {"agree": "diloco", "agree_every": 0}, "--agree-every must be positive, got 0"),
        (AGREE | {"agree": "diloco", "agree_every": 3, "agree_fragments": 2}, "no multiple of --agree-fragments 2"),
        (AGREE | {"agree": "diloco", "outer_momentum": 1.0}, "--outer-momentum must lie in [0, 1), got 1"),
        ({"keep": "autograd-inpu"}, "did you mean autograd-input"),
        ({"keep": "autograd-input"} | QUANTIZED, "e4m3 with keep autograd"),
        ({"fp8_skip_last": 1}, "--fp8-skip-last 1 is for quantized matmuls"),
    ],
)
def test_what_does_not_go_is_said(changes, value):
    with pytest.raises(ValueError) as refusal:
        replace(PLAIN, **changes).check()
    assert value in str(refusal.value)
    assert "\n" not in str(refusal.value)


def test_steps_and_micro_batches_follow_from_tokens():
    options = replace(PLAIN, steps=None, total_batch_tokens=8192)
    assert [options.micro_batches(ranks) for ranks in (1, 2, 8)] == [8, 4, 1]
    assert options.tokens_per_step(2) == 8192
    assert [replace(options, epochs=epochs).n_steps(640, 2) for epochs in (None, 0.5, 2.0)] == [10, 5, 20]
    assert replace(PLAIN, steps=7).n_steps(640, 2) == 7
    replicas = replace(options, zero=3, replicas=2)
    replicas.check()
    assert replicas.micro_batches(4) == 2


@pytest.mark.parametrize(
    ("zero", "world_size", "parallel"),
    [
        (0, 1, Parallel()),
        (1, 1, Parallel()),
        (3, 1, Parallel()),
        (0, 2, Parallel("bucketed")),
        (1, 2, Parallel(optimizer_state="scattered")),
        (3, 2, Parallel("fsdp")),
    ],
)
def test_how_ranks_divide_a_step(zero, world_size, parallel):
    case = replace(PLAIN, zero=zero).training_case(resolve_size("tiny"), world_size)
    assert case.parallel == replace(parallel, pipeline_by="auto")
    assert case.config.context_length == 128


def test_a_stage_of_the_schedule_interleaved_has_two_chunks_unless_said():
    interleaved = replace(PLAIN, pipeline=2, pipeline_schedule="interleaved", accumulate=4, keep="products")
    for asked, chunks in ((None, 2), (2, 2), (3, 3)):
        case = replace(interleaved, pipeline_chunks=asked).training_case(resolve_size("tiny"), 2)
        assert case.parallel.pipeline_chunks == chunks


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_the_defaults_are_sound_and_a_tenth_of_the_steps_warms_up(device):
    options = TrainOptions.default(device)
    options.check()
    for n_steps, warmup_steps in ((5, 0), (20, 2), (800, 80), (5000, 100)):
        assert options.rate_of(n_steps).warmup_steps == warmup_steps
        assert replace(options, warmup_steps=3).rate_of(n_steps).warmup_steps == 3


def test_tensor_ranks_alone_may_have_a_cuda_graph():
    alone = replace(TrainOptions.default("cuda"), tensor=2, cuda_graph="on", keep="all")
    assert step_refusal(alone.training_case(resolve_size("tiny"), 2)) is None
    assert "one rank, or tensor ranks" in step_refusal(alone.training_case(resolve_size("tiny"), 4))
