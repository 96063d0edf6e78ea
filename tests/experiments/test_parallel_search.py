"""The question ``search``: how it reads amounts, what it answers, and its refusals, each in one sentence."""

import json
from dataclasses import replace

import pytest

from cs336_systems.experiments import parallel_search
from cs336_systems.experiments.parallel_search import CASES, Search, amount, fsdp_alone, rate

EIGHT = "search --gpus 8 --size llama3-8b --batch-tokens 256K --tokens 1B"


def test_amounts_are_read_as_the_field_means_them():
    assert amount("--batch-tokens", "4M", 1024) == 4 * 2**20 == amount("--batch-tokens", "4_194_304", 1024)
    assert amount("--tokens", "15T", 1000) == 15 * 10**12
    assert amount("--tokens", "1.5B", 1000) == 1_500_000_000
    assert rate("--network", "400Gb") == rate("--network", "50GB") == rate("--network", "0.4Tb/s") == 50e9
    for text in ("4Q", "0", "-1", "0.1", "M", "1.5", ""):
        with pytest.raises(ValueError, match=f"--tokens {text}: "):
            amount("--tokens", text, 1000)
    for text in ("400", "400gb", "0Gb", "fast"):
        with pytest.raises(ValueError, match=f"--network {text}: "):
            rate("--network", text)


def test_it_answers_with_layouts_and_what_would_change(ask):
    code, out, err = ask(EIGHT)
    said = json.loads(out.splitlines()[-1])
    assert (code, err, said["question"]) == (0, "", "search")
    assert said["layouts"] >= said["fitting"] > 100
    assert said["layout"].startswith("shard 8, ZeRO 1, products")
    tokens_per_s = 256 * 1024 / said["step s"]
    assert said["days"] == pytest.approx(1e9 / tokens_per_s / 86_400)
    assert said["GPU-hours"] == pytest.approx(8 * 24 * said["days"])
    assert 0.4 < said["MFU"] < 0.7 and 30 < said["GiB"] < 76
    assert {"FSDP alone", "keep input", "twice the memory", "twice the batch"} <= set(said["gains"])
    assert said["gains"]["FSDP alone"] <= 0 <= said["gains"]["twice the memory"]
    assert said["binds"] in out and "micro-batches" in out and "FSDP alone on these GPUs" in out


def test_the_four_cases_reach_their_limits():
    limits = [list(fsdp_alone(case.job).frame.iloc[0, :2]) for case in CASES]
    assert limits == [["-", "-"], ["-", "reached"], ["reached", "-"], ["reached", "reached"]]
    assert all(f"--gpus {case.gpus}" in Search.__doc__ for case in CASES)


def test_each_case_has_the_layout_that_search_finds(ask, monkeypatch):
    small = Search(8, size="llama3-8b", batch_tokens="256K")
    monkeypatch.setattr(parallel_search, "CASES", (small, replace(small, gpus=16)))
    code, out, err = ask("cases")
    said, searched = (json.loads(text.splitlines()[-1]) for text in (out, ask(EIGHT)[1]))
    assert (code, err, said.keys()) == (0, "", {"question", "8 GPUs", "16 GPUs"})
    assert said["8 GPUs"] == {name: searched[name] for name in ("step s", "MFU", "layout")}
    assert said["16 GPUs"]["layout"] in out


def test_faults_are_one_sentence(ask):
    for line, message in (
        ("search --gpu h1000", "--gpu h1000: did you mean"),
        ("search --gpu cpu", "--gpu cpu: known are a100-40gb"),
        ("search --size llama4", "unknown model size 'llama4'"),
        ("search --batch-tokens 12 --sequence 8", "a batch of 12 tokens is no whole number of sequences of 8"),
        ("search --gpus 127", "no division of 127 GPUs divides 512 sequences and llama3-70b: the nearest"),
        ("search --gpus 127", "are 126 and 128"),
        ("search --gpus 1000000007", "and llama3-70b: at most 335544320 can be divided"),
        ("search --gpus 2 --batch-tokens 16K", "llama3-70b on 2 GPUs needs at least"),
        ("search --network slow", "--network slow: say a rate"),
        ("search --device-gib -1", "--device-gib must be positive, got -1.0"),
        ("search --gpus 0", "--gpus must be positive, got 0"),
        ("search --sequence 0", "--sequence must be positive, got 0"),
    ):
        code, out, err = ask(line)
        assert (code, out, err.count("\n")) == (2, "", 1), line
        assert err.startswith(f"parallelism search: {message}") or message in err, err
