"""A run chooses micro-batch, keep and offload for its GPU: what is given wins, a step keeps its tokens."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from cs336_systems.config import resolve_size
from cs336_systems.hardware import GIB
from cs336_systems.pretraining import choice, preparation, run_refusals
from cs336_systems.pretraining.card_plan import CardPlan, NothingFits
from cs336_systems.pretraining.choice import Choice, attention_on, choose_fastest
from cs336_systems.pretraining.options import TrainOptions
from cs336_systems.pretraining.run_log import LOG, read_run
from cs336_systems.pretraining.run_records import Message, Session
from cs336_systems.pretraining.trainer import train
from tests.pretraining.trained import losses_and_norms, options, write_dataset


@pytest.fixture
def card(monkeypatch):
    """An H100 with 79 GiB free, and 200 GiB of the host."""
    free = {"cuda": 79 * GIB, "cpu": 200 * GIB}
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H100 80GB HBM3")
    monkeypatch.setattr(choice, "free_bytes", lambda device: free[device.type])
    return free


def chosen(size="qwen2.5-7b", world_size=1, origin=None, **given):
    asked = TrainOptions(size=size, choose_fastest=True, **given)
    asked.check()
    found = choose_fastest(asked, resolve_size(asked.size), torch.device("cuda"), world_size, origin)
    return found if isinstance(found, str) else found.of(asked)


def test_the_choice_follows_the_card_and_leaves_the_tokens_of_a_step(card):
    """7B in fp8 takes moments on the host, as measured: 21.1k tokens/s, for 18.5k with what the card alone holds."""
    fp8 = {"matmul_dtype": "e4m3", "total_batch_tokens": 524_288}
    found = chosen(**fp8)
    assert (found.batch_size, found.keep, found.offload) == (8, "all", ("m", "v"))
    assert found.tokens_per_step(1) == 524_288 and found.matmul_dtype == "e4m3"
    card["cpu"] = 16 * GIB
    assert chosen(**fp8).offload == () and chosen(**fp8).batch_size == 4
    assert chosen(**fp8, epochs=2.0).batch_size == 4
    by_default = chosen("qwen2.5-0.5b")
    assert by_default.tokens_per_step(1) == TrainOptions(size="qwen2.5-0.5b").tokens_per_step(1) == 16_384
    eight = chosen("llama3-8b", 8, zero=3, accumulate=4)
    assert eight.tokens_per_step(8) == 4 * 8 * 16_384 and eight.zero == 3
    card["cuda"] = 10 * GIB
    with pytest.raises(NothingFits, match="qwen2.5-7b at 1,024 tokens does not fit 1 x H100 SXM"):
        chosen(**fp8)


def test_the_memory_of_a_host_is_that_of_its_own_ranks(card, monkeypatch):
    """Of sixteen ranks on two hosts each has as much as one of eight on one host; of sixteen on one half of that."""
    asked = choice.Asked
    given = {}

    def ranks(n, local):
        monkeypatch.setenv("LOCAL_WORLD_SIZE", str(local))
        monkeypatch.setattr(choice, "Asked", lambda *made, **more: given.setdefault((n, local), asked(*made, **more)))
        chosen("qwen2.5-7b", n, zero=3, total_batch_tokens=524_288)
        plan = CardPlan.of(TrainOptions(size="qwen2.5-7b"), given[n, local])
        return plan.host_bytes

    assert [ranks(16, 8), 2 * ranks(16, 16)] == pytest.approx([ranks(8, 8)] * 2)
    assert ranks(8, 8) > 20 * GIB


def test_a_choice_that_does_not_fit_any_more_is_made_anew_and_said(card, monkeypatch):
    """Of the card's memory or of the host's."""
    fp8 = {"matmul_dtype": "e4m3", "total_batch_tokens": 524_288}
    saved = {"batch_size": 8, "keep": "all", "offload": ["m", "v"], "total_batch_tokens": 524_288}
    stored = SimpleNamespace(extra={"chosen": saved})
    monkeypatch.setattr(choice, "survey", lambda origin: ([stored], []))
    asked = TrainOptions(size="qwen2.5-7b", choose_fastest=True, **fp8)

    def found():
        return choose_fastest(asked, resolve_size(asked.size), torch.device("cuda"), 1, Path("run"))

    assert found().said == "as the run began" and found().batch_size == 8
    card["cpu"] = 16 * GIB
    assert found().offload == ()
    assert "; that of the run's beginning, --batch-size 8 --keep all --offload m v, needs " in found().said
    assert found().said.endswith(" GiB of the host for 13.0 free")
    card.update(cpu=200 * GIB, cuda=50 * GIB)
    assert found().of(asked).keep != "all" and found().said.endswith(" GiB for 50.0 free")


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ({"dtype": "fp32", "optimizer": "torch-fused"}, "plans steps in bf16"),
        ({"lora_rank": 8, "save_every": None, "export": False}, "not --lora-rank 8"),
        ({"context": 2}, "data and tensor ranks"),
        ({"kernels": "reference"}, "plans steps of --kernels fused"),
    ],
)
def test_what_is_not_planned_keeps_its_defaults_and_says_why(card, given, why):
    assert why in chosen(world_size=given.get("context", 1), **given)


def test_an_unknown_card_keeps_the_defaults(card, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA RTX 9090")
    assert chosen() == "no peaks are on record for NVIDIA RTX 9090"


def test_an_option_that_is_given_is_not_chosen(load_script, tmp_path, monkeypatch):
    parse, to_toml = (getattr(load_script("scripts/train.py"), name) for name in ("parse", "to_toml"))
    gpu = ["--device", "cuda"]
    assert parse(gpu).choose_fastest and not parse(["--device", "cpu"]).choose_fastest
    for given in ("--batch-size=4", "--batch_size 4", "--keep input", "--offload m v", "--no-choose-fastest"):
        assert not parse([*gpu, *given.split()]).choose_fastest, given
    assert not parse([*gpu, "--device-gib", "24", "--host-gib", "64"]).choose_fastest
    assert not parse([*gpu, "--replicas", "2", "--agree", "every-step"]).choose_fastest
    with pytest.raises(ValueError, match="--choose-fastest chooses --keep: give one of them"):
        parse([*gpu, "--choose-fastest", "--keep", "input"])
    with pytest.raises(ValueError, match="--choose-fastest is for --device cuda, got cpu"):
        parse(["--device", "cpu", "--choose-fastest"]).check()
    (tmp_path / "run.toml").write_text(to_toml(parse(gpu)))
    assert parse(["--config", str(tmp_path / "run.toml")]) == parse(gpu)


def test_a_run_that_resumes_keeps_its_choice(alone, tmp_path, monkeypatch):
    """A CPU's, with a choice put in place of a plan's: the steps are those of a run with these options."""
    write_dataset(tmp_path / "data")
    monkeypatch.setattr(run_refusals, "REFUSALS", ())  # --choose-fastest needs a GPU
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "a CPU")
    made = Choice(2, "products", (), 128, "for this test")
    plain = options(tmp_path, out=tmp_path / "plain", batch_size=2, keep="products", total_batch_tokens=128)
    train(replace(plain, schedule="constant", save_every=None, export=False), alone)
    with monkeypatch.context() as first:
        first.setattr(preparation, "choose_fastest", lambda *asked: made)
        train(options(tmp_path, choose_fastest=True, steps=5, schedule="constant"), alone)
    train(options(tmp_path, choose_fastest=True, schedule="constant"), alone)
    train(options(tmp_path, out=tmp_path / "other", save_every=5, steps=5), alone)
    train(options(tmp_path, out=tmp_path / "other", choose_fastest=True), alone)
    run = read_run(tmp_path / "run" / LOG)
    assert [each.options["batch_size"] for each in run.all(Session)][-1] == 2
    said = [message.text for message in run.all(Message) if "chosen" in message.text]
    assert "--batch-size 2 --keep products, as the run began" in said[-1]
    assert losses_and_norms(tmp_path / "run") == losses_and_norms(tmp_path / "plain")
    other = read_run(tmp_path / "other" / LOG)
    assert any("the run did not begin with a choice" in message.text for message in other.all(Message))
    assert other.last(Session).options["batch_size"] == 8


@pytest.mark.parametrize(
    ("capability", "given", "taken"),
    [
        ((9, 0), {}, "hopper"),
        ((9, 0), {"dtype": "autocast-bf16", "keep": "autograd", "kernels": "reference"}, "hopper"),
        ((9, 0), {"deterministic": True}, "flash"),
        ((9, 0), {"dtype": "fp32", "optimizer": "torch-fused"}, "flash"),
        ((9, 0), {"attention": "flash"}, "flash"),
        ((8, 9), {}, "flash"),
        ((10, 0), {}, "flash"),
        ((8, 9), {"attention": "hopper"}, "hopper"),  # which the step refuses there
    ],
)
def test_attention_is_the_fastest_of_the_gpu(monkeypatch, capability, given, taken):
    asked = TrainOptions(**given)
    asked.check()
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    with FakeTensorMode():
        assert attention_on(torch.device("cuda"), asked, resolve_size(asked.size)) == taken


def test_attention_on_a_cpu_and_where_the_device_is_not_known():
    assert attention_on(torch.device("cpu"), TrainOptions(), resolve_size("tiny")) == "reference"
    assert TrainOptions().training_case(resolve_size("tiny"), 1).attention == "flash"
    own = TrainOptions(device="cpu", **TrainOptions.CPU_DEFAULTS | {"attention": "fastest"})
    own.check()
    assert own.training_case(resolve_size("tiny"), 1).attention == "reference"


def test_a_run_has_the_attention_of_its_device_and_says_so(alone, tmp_path, monkeypatch):
    write_dataset(tmp_path / "data")
    monkeypatch.setattr(preparation, "attention_on", lambda device, options, config: "tiled")
    asked = options(tmp_path, attention="fastest", keep="autograd", save_every=None, export=False)
    prepared = preparation.prepare(asked, alone)
    assert prepared.case.attention == "tiled" and prepared.options == asked
    said = [record.text for record in preparation.introduction(prepared, alone) if isinstance(record, Message)]
    assert "--attention fastest is tiled here" in said
