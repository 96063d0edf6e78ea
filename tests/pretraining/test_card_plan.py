"""Plans for cards that are not here: what fits, what is fastest, that better cards are never slower, faults, time."""

import json
import random
import re
import shlex
import time
from dataclasses import replace
from pathlib import Path

import pytest

from cs336_systems.case import RECIPE
from cs336_systems.config import resolve_size
from cs336_systems.costs.parallelism.layout import Layout
from cs336_systems.costs.parallelism.seconds import by_class, step_seconds
from cs336_systems.hardware import GIB, KINDS, hardware_described, hardware_named
from cs336_systems.pretraining.card_plan import AS_FAST, RECIPES, CardPlan, NothingFits
from cs336_systems.pretraining.options import TrainOptions
from cs336_systems.pretraining.plan_options import Asked
from cs336_systems.report.card_plan import (
    attention_assumed,
    fp8_pays,
    launcher,
    run_cost,
    run_tokens,
    seconds_by_class,
    sentences,
    train_arguments,
    ways_table,
)


def plan(size="qwen2.5-1.5b", length=1024, options=None, **asked):
    run = TrainOptions(size=size, context_length=length, **(options or {}))
    return CardPlan.of(run, Asked(**{"gpu": "h100", **asked}))


def test_the_best_way_fits_and_no_other_is_faster():
    found = plan()
    for dtype, way in found.best.items():
        assert way.device_bytes <= found.device_bytes
        for keep in ("all", "products-ffn", "input"):
            for micro_batch in (1, 16, 64):
                other = replace(way.layout, keep=keep, micro_batch=micro_batch, n_micro_batches=512 // micro_batch)
                tried = found.way(other, frozenset(), RECIPES[dtype])
                assert tried.device_bytes > found.device_bytes or tried.tokens_per_s <= way.tokens_per_s
    assert sum(seconds_by_class(found, found.fastest).values()) == pytest.approx(found.fastest.seconds.total)


def test_our_own_run_is_predicted_as_it_was_measured():
    """58,905 tokens/s on an H100 (training-2), on which nothing was fitted."""
    assert plan().best["bf16"].tokens_per_s == pytest.approx(58_905, rel=0.06)


def test_seven_billion_in_fp8_is_planned_as_measured():
    """On one H100: 21.1k tokens/s with moments on the host, eight sequences and everything kept, 18.5k with four.

    One sequence, which the card alone holds with everything kept, made 8.9k: it reads and writes all gradients in each
    micro-batch, and the host launches too late.
    """
    found = plan("qwen2.5-7b", host_gib=200)
    way = found.best["fp8"]
    assert (way.layout.micro_batch, way.layout.keep, way.offload) == (8, "all", {"m", "v"})
    assert way.tokens_per_s == pytest.approx(21_100, rel=0.05)
    alone = plan("qwen2.5-7b").best["fp8"]
    assert alone.layout.micro_batch == 4 and alone.tokens_per_s == pytest.approx(18_500, rel=0.05)
    one = found.way(replace(way.layout, micro_batch=1, n_micro_batches=512), frozenset(), RECIPES["fp8"])
    assert one.tokens_per_s == pytest.approx(8_900, rel=0.1)


def test_what_does_not_fit_says_by_how_much():
    least = r"the least, --keep input --batch-size 1, needs 6\d\.\d GiB a card, 4\d\.\d more"
    with pytest.raises(NothingFits, match=rf"llama3-8b at 8,192 tokens does not fit 1 x RTX 4090: {least}"):
        _ = plan("llama3-8b", 8192, gpu="rtx-4090").best
    streamed = plan("llama3-8b", 8192, gpu="rtx-4090", host_gib=64).best["streamed"]
    assert streamed.device_bytes <= 24 * GIB and streamed.host_bytes <= 64 * GIB
    assert 1000 < streamed.tokens_per_s < 2600 and "a step" in str(streamed)
    with pytest.raises(NothingFits, match=r"the host is \d+(\.\d)? GiB short"):
        _ = plan("llama3-70b", 8192, gpu="rtx-4090", host_gib=64).best


def test_layers_do_not_stream_with_options_that_exclude_it():
    with pytest.raises(NothingFits, match=r"--z-loss 0\.0001 does not go together with --device-gib"):
        _ = plan("llama3-8b", 8192, {"z_loss": 1e-4}, gpu="rtx-4090", host_gib=75).best


def test_a_plan_says_that_layers_that_stream_were_not_tried():
    told = sentences(plan(gpu="rtx-4090", host_gib=60))
    assert told[0].startswith("Fastest without streaming: ")
    assert told[1].startswith("train.py --device-gib 22.8 with --host-gib")
    assert sentences(plan(gpu="rtx-4090"))[0].startswith("Fastest: ")


def test_small_steps_are_planned_without_a_batch_size(load_script, capsys):
    arguments = "--print-plan --gpu rtx-4090 --size qwen2.5-0.5b --total-batch-tokens 3072"
    assert load_script("scripts/train.py").main(arguments.split()) == 0
    assert "3,072 tokens a step" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("length", "gpus", "sequences"), [(1536, 1, 320), (3072, 1, 160), (1024, 6, 80), (1024, 7, 64), (5120, 2, 48)]
)
def test_a_step_has_whole_micro_batches_of_many_sizes_by_default(length, gpus, sequences):
    """Steps of 523,776 tokens had 341 sequences of 1,536, which only micro-batches of one divide: a quarter as fast."""
    tokens = plan("qwen2.5-0.5b", length, gpus=gpus).tokens_per_step
    assert tokens == sequences * length * gpus and 7 / 8 * 524_288 <= tokens <= 524_288


def test_fp8_is_left_out_where_it_does_not_take_the_length():
    found = plan("small", 1000)
    assert list(found.best) == ["bf16"] and "not 1,000 tokens" in fp8_pays(found)


def test_a_recipe_that_is_given_is_the_one_that_is_planned():
    asked = {"matmul_dtype": "e4m3", "fp8_skip_first": 20}
    found, usual = plan("qwen2.5-0.5b", options=asked), plan("qwen2.5-0.5b")
    assert found.best["fp8"].recipe.n_skipped == 20
    assert usual.best["bf16"].tokens_per_s < found.best["fp8"].tokens_per_s < 0.9 * usual.best["fp8"].tokens_per_s
    assert found.best["bf16"].tokens_per_s == usual.best["bf16"].tokens_per_s


def test_each_rank_takes_its_libraries_from_the_host():
    one, eight = plan(host_gib=80), plan(host_gib=80, gpus=8)
    assert one.host_bytes == 77 * GIB and eight.host_bytes == 7 * GIB


def test_layers_stream_in_both_dtypes_within_limits():
    limits = {"device_gib": 24, "host_gib": 75, "total_batch_tokens": 262_144}
    found = plan("llama3-8b", 8192, limits, gpu="h200")
    assert list(found.best) == ["streamed", "streamed fp8"] and found.as_asked is None
    for way, measured in zip(found.best.values(), (10_392, 13_997), strict=True):  # results/h200/streaming-fp8
        assert way.device_bytes <= 24 * GIB and way.host_bytes <= 75 * GIB
        assert way.tokens_per_s == pytest.approx(measured, rel=0.03)
    assert "pays here: 1.3" in fp8_pays(found)


def test_the_commands_of_streamed_ways_are_taken(load_script, capsys):
    found = plan("tiny", 8192, {"device_gib": 1.6, "host_gib": 6, "master_weights": "fp32", "steps": 9}, gpu="h200")
    n_tokens = 9 * found.fastest.streamed.plan.tokens
    assert run_tokens(found) == n_tokens
    settings = f"sequences of 8,192, 9 steps, {n_tokens:.3g} tokens in all"
    assert ways_table(found).caption == f"tiny on H200, {settings}: predicted, nothing was run"
    main = load_script("scripts/train.py").main
    commands = {name: train_arguments(found, way) for name, way in found.best.items()}
    assert [name for name, command in commands.items() if "--matmul-dtype e4m3" in command] == ["streamed fp8"]
    for command in commands.values():
        assert "--steps 9 --master-weights fp32" in command
        assert main(["--device", "cuda", "--print-memory", *command.split()]) == 0
        assert "in all on the host" in capsys.readouterr().out


def test_the_command_of_a_plan_has_all_options_that_were_given(load_script):
    given = {"gradient_dtype": "e5m2", "fp8_skip_last": 1, "matmul_dtype": "e4m3"}
    given |= {
        "data": (Path("data/a b=0.3"), Path("data/b=0.7")),
        "betas": (0.8, 0.9),
        "seed": 7,
        "export": False,
        "deterministic": True,
    }
    given |= {"save_every": None, "evaluate_every": None, "moments": "bf16", "attention": "flash"}
    found = plan("qwen2.5-0.5b", 2048, given, gpu="h200", gpus=4)
    for way in found.best.values():
        run = load_script("scripts/train.py").parse(["--device", "cuda", *shlex.split(train_arguments(found, way))])
        layout = way.layout
        chosen = {"batch_size": layout.micro_batch, "keep": layout.keep, "tensor": layout.tensor, "zero": layout.zero}
        chosen |= {"tensor_by": layout.tensor_by, "total_batch_tokens": found.tokens_per_step}
        recipe = {name: given[name] for name in ("gradient_dtype", "fp8_skip_last") if way.recipe.quantized}
        others = {name: value for name, value in given.items() if name not in RECIPE} | recipe
        assert run == TrainOptions(
            size="qwen2.5-0.5b", context_length=2048, matmul_dtype=way.recipe.matmul, **others, **chosen
        )


def test_a_command_of_several_gpus_is_of_what_they_can_run():
    """A CUDA graph is for one rank, or tensor ranks by collectives alone."""
    for way in plan("small", options={"cuda_graph": "on"}, gpus=4).best.values():
        assert way.layout.tensor == 4 and way.layout.tensor_by == "collectives"


def test_a_graph_waits_for_no_launches():
    launched, graphed = (plan("qwen2.5-0.5b", options={"cuda_graph": how}) for how in ("off", "on"))
    one = (replace(Layout(), n_micro_batches=512), frozenset(), RECIPES["fp8"])
    assert launched.way(*one).seconds.late > 0 == graphed.way(*one).seconds.late


def test_a_file_of_all_options_holds_a_plan_to_none_of_the_defaults(load_script, tmp_path, capsys):
    main = load_script("scripts/train.py").main
    assert main(["--print-config", "--device", "cuda", "--size", "qwen2.5-1.5b"]) == 0
    (tmp_path / "run.toml").write_text(capsys.readouterr().out)
    words = ["--print-plan", "--gpu", "h100", "--gpus", "4", "--host-gib", "200"]
    found = []
    for given in (["--size", "qwen2.5-1.5b"], ["--config", str(tmp_path / "run.toml")]):
        assert main([*words, *given]) == 0
        found.append(json.loads(capsys.readouterr().out.splitlines()[-1])["qwen2.5-1.5b"])
    assert found[0] == found[1]


def test_the_command_starts_a_rank_on_each_gpu():
    assert launcher(1) == "uv run scripts/train.py"
    assert launcher(8) == "uv run torchrun --nproc-per-node 8 scripts/train.py"
    assert "NNODES=3 " in launcher(24) and "scripts/launch/multi_node.sh scripts/train.py" in launcher(24)


@pytest.mark.parametrize(
    ("gpu", "given", "told"),
    [
        ("h200", {}, None),
        ("h100-pcie", {"attention": "hopper"}, None),
        ("rtx-4090", {}, None),
        ("a100-sxm-80gb", {}, None),
        ("h100", {"attention": "flash"}, "hopper, and this run has --attention flash."),
        ("h200", {"deterministic": True}, "hopper, and this run has --attention flash."),
        ("h200", {"deterministic": True, "attention": "hopper"}, "without --deterministic, which takes longer."),
        ("b200", {}, "which runs on H100 and H200 only, as if B200 had a kernel as good."),
        ("peak=800,bandwidth=4000,memory=96,class=data centre", {}, "class=data centre had a kernel as good."),
    ],
)
def test_a_plan_says_which_attention_it_assumes(gpu, given, told):
    found = " ".join(attention_assumed(plan("qwen2.5-0.5b", 1024, given, gpu=gpu)))
    assert told in found if told else not found


def test_what_does_not_fit_names_all_of_the_least_way_which_needs_as_much():
    found = plan("llama3-70b", 8192, gpu="rtx-4090", gpus=8, host_gib=2000)
    with pytest.raises(NothingFits, match="does not fit 8 x RTX 4090") as refusal:
        _ = found.best
    words = re.search(r"the least, (.*), needs (\d+\.\d) GiB a card", str(refusal.value))
    assert words is not None and "--tensor 8" in words[1] and "--offload m residual v" in words[1]
    layout = Layout(tensor=8, keep="input", n_micro_batches=64)
    least = found.way(layout, frozenset({"m", "v", "residual"}), RECIPES["bf16"])
    assert str(least) == words[1] and f"{least.device_bytes / GIB:.1f}" == words[2]


def test_a_batch_that_does_not_divide_and_options_that_exclude_all_ways_are_named(monkeypatch):
    with pytest.raises(NothingFits, match="steps of 3,072 tokens of .* do not divide among 4 x H100"):
        _ = plan(gpus=4, options={"total_batch_tokens": 3 * 1024}).best
    monkeypatch.setattr(TrainOptions, "check", lambda self: (_ for _ in ()).throw(ValueError("--size is odd")))
    with pytest.raises(NothingFits, match="fits 1 x H100 SXM, but not with these options: --size is odd"):
        _ = plan().best


def test_offload_needs_a_host_and_ranks_divide():
    alone, several = plan("llama3-70b", 8192, gpus=8), plan("llama3-70b", 8192, gpus=8, host_gib=1024)
    assert all(not way.offload and way.host_bytes == 0 for way in alone.best.values())
    assert several.fastest.tokens_per_s >= alone.fastest.tokens_per_s
    for way in (*alone.best.values(), *several.best.values()):
        assert way.layout.n_ranks == 8 and several.fault(way) is None
        assert 8 * way.host_bytes <= 1024 * GIB


def test_fp8_pays_where_products_decide():
    assert "pays here" in fp8_pays(plan("qwen2.5-7b", gpu="rtx-pro-6000"))
    assert fp8_pays(plan(gpu="a100-sxm-80gb")) == "fp8: A100 SXM 80GB has no products in fp8."
    slow = "peak=100,fp8=100,bandwidth=600,memory=80,watts=400"
    assert "does not pay here" in fp8_pays(plan(gpu=slow))


def test_time_energy_and_price_follow_from_tokens():
    found = plan(gpus=4, run_tokens=1e10, price_per_gpu_hour=2.5)
    way = found.fastest
    hours = 1e10 / way.tokens_per_s / 3600
    cost = {"hours": hours, "kwh": 4 * 0.7 * hours, "price": 2.5 * 4 * hours}
    assert run_cost(found, way) == pytest.approx(cost)
    assert run_tokens(plan(options={"steps": 100})) == 100 * 524_288
    assert run_cost(plan(), way)["price"] is None


@pytest.mark.parametrize(
    ("words", "kept"),
    [
        ("--batch-size 3", "--batch-size 3"),
        ("--config {plan}", "--keep input --batch-size 4"),
        ("--offload m --host-gib 64", "--offload m"),
        ("--gpus 2 --tensor 1 --zero=2", "--zero 2"),
        ("--gpus 8 --zero 3", "--zero 3"),
    ],
)
def test_what_was_given_stays_in_every_way(load_script, tmp_path, capsys, words, kept):
    (plan := tmp_path / "plan.toml").write_text('keep = "input"\nbatch_size = 4\n')
    arguments = f"--print-plan --gpu h100 --size qwen2.5-0.5b {words.format(plan=plan)}".split()
    assert load_script("scripts/train.py").main(arguments) == 0
    ways = json.loads(capsys.readouterr().out.splitlines()[-1])["qwen2.5-0.5b"]
    assert len(ways) == 2
    for way in ways.values():
        assert kept in way["how"] and "--tensor" not in way["how"]


def test_the_plan_of_a_run_from_weights_is_for_their_model(load_script, tmp_path, capsys):
    shape = {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 3, "num_attention_heads": 16}
    shape |= {"model_type": "llama", "vocab_size": 32_000, "max_position_embeddings": 512, "rms_norm_eps": 1e-5}
    (tmp_path / "config.json").write_text(json.dumps(shape))
    main, on = load_script("scripts/train.py").main, f"--print-plan --gpu h100 --init {tmp_path}".split()
    assert main(on) == 0
    out = capsys.readouterr().out
    assert f"Fastest: uv run scripts/train.py --init {tmp_path} --context-length 1024 " in out
    state = re.search(r"\| optimizer state +\| +([\d.]+) \|", out)
    assert state is not None and float(state[1]) == pytest.approx(332.4e6 * 2 * 2 / GIB, rel=0.01)


def _random_card(rng):
    figures = {"peak": rng.uniform(20, 2500), "bandwidth": rng.uniform(200, 8000), "memory": rng.uniform(40, 192)}
    figures |= {"host": rng.uniform(8, 128), "watts": rng.uniform(70, 1200), "nvlink": rng.uniform(20, 900)}
    figures["fp8"] = figures["peak"] * rng.uniform(1, 2)
    said = ",".join(f"{name}={value:.4g}" for name, value in figures.items())
    return hardware_described(f"{said},class={rng.choice(list(KINDS))}")


def _better(card, rng):
    """The card with one of its figures raised."""
    name = rng.choice(["peak", "fp8", "memory_bytes_per_s", "host_link_bytes_per_s", "link_bytes_per_s", "watts"])
    factor = rng.choice([1.001, 1.1, 3])
    if name in ("peak", "fp8"):
        dtype = "bf16" if name == "peak" else "fp8"
        return replace(card, peak_flops={**card.peak_flops, dtype: factor * card.peak_flops[dtype]})
    return replace(card, **{name: factor * getattr(card, name)})


def test_better_cards_are_never_slower():
    """Over a thousand random cards, of which one figure is raised, and random layouts."""
    rng, config = random.Random(0), resolve_size("qwen2.5-0.5b")
    for _ in range(1000):
        card = _random_card(rng)
        layout = rng.choice(
            [
                Layout(micro_batch=8, n_micro_batches=2, keep=rng.choice(["all", "input"])),
                Layout(shards=8, zero=rng.choice([1, 3]), n_micro_batches=rng.choice([1, 4])),
                Layout(tensor=2, replicas=2, tensor_by=rng.choice(["collectives", "copies"])),
            ]
        )
        how = {
            "recipe": rng.choice(list(RECIPES.values())),
            "offload": rng.choice([frozenset(), frozenset({"m", "v"})]),
        }
        how["offload"] |= rng.choice([frozenset(), frozenset({"residual"})])
        better = _better(card, rng)
        before, after = (step_seconds(config, 1024, layout, each, **how).total for each in (card, better))
        assert after <= before * (1 + 1e-12), (card.name, better, layout, how)


def test_plans_of_better_cards_are_never_slower():
    """With more memory, too, which nothing but the choice among what fits depends on; as fast counts as equal."""
    rng, said = random.Random(1), []
    for _ in range(20):
        card = _random_card(rng)
        better = replace(card, memory_bytes=int(1.3 * card.memory_bytes)) if rng.random() < 0.5 else _better(card, rng)
        found = [replace(plan(gpus=2, host_gib=256), hardware=each) for each in (card, better)]
        for dtype in found[0].best:
            rates = [each.best[dtype].tokens_per_s for each in found]
            assert rates[1] >= rates[0] * (1 - AS_FAST), (card.name, dtype)
            said.append(rates[1] > rates[0])
    assert any(said)


@pytest.mark.parametrize("card", ["h100", "a100", "rtx-pro-6000", "rtx-4090"])
def test_classes_of_kernels_sum_up_to_the_step(card):
    hardware = hardware_named(card)
    for layout in (Layout(), Layout(shards=4, zero=3, n_micro_batches=2)):
        recipe = RECIPES["fp8" if card == "h100" else "bf16"]
        seconds = by_class(resolve_size("llama3-8b"), 8192, layout, hardware, recipe=recipe)
        total = step_seconds(resolve_size("llama3-8b"), 8192, layout, hardware, recipe=recipe)
        assert sum(seconds.values()) == pytest.approx(total.total)
        assert min(seconds.values()) >= 0 and seconds["products"] > seconds["attention"] > 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--gpu rtx-9090", "--gpu rtx-9090: did you mean rtx-"),
        ("--gpu peak=100,bandwidth=900", "say memory, too"),
        ("--gpu peak=100,bandwidth=900,memory=-2", "memory must be a number above 0, got '-2'"),
        ("--gpu peak=100,bandwidth=900,memory=24,speed=2", "'speed' is none of peak"),
        ("--gpu h100 --price-per-gpu-hour -1", "--price-per-gpu-hour must not be negative, got -1"),
        ("--gpu h100 --gpus 0", "--gpus must be positive"),
        ("--gpu h100 --gpus 3 --tensor 2", "--gpus 3 cannot be divided into groups of --tensor 2"),
        ("--gpu h100 --gpus 2 --pipeline 2 --accumulate 2", "plans data and tensor ranks, not --context, --pipeline"),
        ("--gpu h100 --init nowhere", "nowhere"),
        ("--gpu h100 --keep autograd --kernels reference", "a hand-written backward, not --keep autograd"),
        ("--gpu h100 --keep 2xall+products", "plans blocks that all keep the same, not --keep 2xall+products"),
        ("--gpu h100 --offload m v", "with --keep input --batch-size 1 --offload m v needs --host-gib 4.9 or more"),
        (
            "--gpu h100 --device-gib 24",
            "--device-gib and --host-gib go together: give both or none, got 24.0 and None",
        ),
        ("--gpu h100 --device-gib 24 --host-gib 75 --gpus 2", "layers that stream through one GPU, got --gpus 2"),
        ("--gpu h100 --device-gib 81 --host-gib 75", "--device-gib 81 is more than H100 SXM has, 80.0 GiB"),
        (
            "--gpu h100 --device-gib 24 --host-gib 75 --keep input",
            "--keep input does not go together with --device-gib",
        ),
        ("--gpu h100 --device-gib 24 --host-gib 75 --z-loss 1e-4", "--z-loss 0.0001 does not go together with"),
        ("--gpu h100 --host-gib nan", "--host-gib must be finite, got nan"),
        ("--gpu h100 --run-tokens many", "--run-tokens: say a number of tokens, such as 100B or 15T, got 'many'"),
        ("--gpu h100 --run-tokens 1KB", "got '1KB'"),
        ("--gpu h100 --steps 5 --run-tokens 1B", "--steps and --run-tokens both say how long the run is: give one"),
        ("--gpu h100 --dtype fp32 --optimizer torch-fused", "plans steps in bf16 and fp8, and --dtype is fp32"),
        ("--gpu h100 --device cpu", "plans steps on GPUs, not --device cpu"),
        ("--gpu h100 --optimizer muon", "knows the time and the moments of AdamW, and --optimizer is muon"),
        ("--gpu h100 --epochs 2", "reads no data: say --run-tokens or --steps instead of --epochs"),
        ("--gpu h100 --kernels reference", "plans steps of --kernels fused, and --kernels is reference"),
        (
            "--gpu h100 --gpus 4 --zero 3 --replicas 2",
            "plans data and tensor ranks, not --context, --pipeline, --replicas",
        ),
        ("--gpu h100 --gpus 12", "--gpus 12 is no multiple of 8, the GPUs of a host"),
        ("--gpu h100 --accumulate 4", "tries micro-batches: say --total-batch-tokens instead of --accumulate"),
        (
            "--gpu rtx-4090 --gpus 2 --tensor 2 --tensor-by copies",
            "--tensor-by copies: 2 x RTX 4090 cannot write each other's memory",
        ),
        ("--gpu h100 --gpus 8 --size small --cuda-graph on --zero 1", "cuda_graph on is for one rank"),
        ("--gpu l40s --attention hopper", "--attention hopper runs on H100 and H200 only, not on L40S"),
        ("--gpu a100 --matmul-dtype e4m3", "--matmul-dtype e4m3: A100 40GB has no products in fp8"),
        ("--gpu h100 --picture plan.jpg", "a picture must end in .png, got plan.jpg"),
        ("", "--print-plan needs --gpu"),
    ],
)
def test_faults_are_one_sentence(load_script, monkeypatch, capsys, arguments, message):
    monkeypatch.setattr("cs336_systems.report.card_plan.n_gpus", lambda: 0)
    assert load_script("scripts/train.py").main(["--print-plan", *arguments.split()]) == 2
    err = capsys.readouterr().err
    assert message in err and err.count("\n") == 1


@pytest.mark.parametrize("script", ["scripts/train.py", "benchmarks/benchmark_training.py"])
def test_the_commands_print_a_plan_soon(load_script, tmp_path, capsys, script):
    start = time.process_time()
    picture = tmp_path / "plan.png"
    words = f"--print-plan --gpu rtx-pro-6000 --size qwen2.5-7b --run-tokens 1B --picture {picture}"
    assert load_script(script).main(words.split()) == 0
    assert time.process_time() - start < 15  # mostly two
    out = capsys.readouterr().out
    assert "fp8 pays here" in out and picture.stat().st_size > 5000
    figures = json.loads(out.splitlines()[-1])["qwen2.5-7b"]
    assert figures["fp8"]["tokens_per_s"] > figures["bf16"]["tokens_per_s"]
    assert figures["bf16"]["hours"] == pytest.approx(1e9 / figures["bf16"]["tokens_per_s"] / 3600)
