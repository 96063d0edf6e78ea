"""The commands that look at a run: what they print, where it stops, and their refusals."""

import json
import math
from dataclasses import replace

import pytest
import torch
from transformers import AutoModelForCausalLM

from cs336_systems.pretraining.checkpoint import load_trained
from cs336_systems.pretraining.sampling import generate
from tests.pretraining.checkpointed import LLAMA, model_of, save_model, write_run


@pytest.fixture(scope="module")
def trained(tmp_path_factory, alone):
    """A folder with a run of two checkpoints."""
    folder = tmp_path_factory.mktemp("trained")
    write_run(folder / "run")
    for step in (1, 2):
        save_model(folder / "run", model_of(LLAMA, seed=step), step, optimizer=False)
    return folder


@pytest.fixture(autouse=True)
def in_its_folder(trained, monkeypatch):
    monkeypatch.chdir(trained)


def test_export_says_what_it_made_and_where(command, trained):
    code, out, err = command("export", "run")
    assert (code, err) == (0, "")
    first, note, last = out.splitlines()
    assert first.startswith(f"run/hf-2: a-llama at step 2, {LLAMA.n_parameters:,} parameters in float32, ")
    assert note == "note: the tokenizer has 257 ids, the model 264: the last 7 are padding"
    said = json.loads(last)
    assert (said["out"], said["step"], said["bytes"]) == ("run/hf-2", 2, 4 * LLAMA.n_parameters)
    assert sorted([*said["files"], "export.json"]) == sorted(path.name for path in (trained / "run/hf-2").iterdir())
    origin = json.loads((trained / "run/hf-2/export.json").read_text())["origin"]
    assert origin == {"checkpoint": "run/step-00000002", "step": 2, "model": "a-llama"}
    assert json.loads(command("export", "run/step-00000001", "--out", "small")[1].splitlines()[-1])["step"] == 1


def test_export_refuses_in_one_sentence(command, trained):
    (trained / "mine").mkdir()
    (trained / "mine/config.json").write_text("{}")
    for arguments, value in (
        (["."], "run.json"),
        (["run", "--out", "run"], "run"),
        (["run", "--out", "mine"], "mine"),
        (["run", "--out", "run/run.json/x"], "Not a directory"),
    ):
        code, out, err = command("export", *arguments)
        assert (code, out, err.count("\n")) == (2, "", 1)
        assert err.startswith("export: ") and value in err
    assert command("export")[0] == 2
    assert command("export", "run", "--out", "mine", "--replace")[0] == 0


def test_sample_prints_what_the_model_says(command, trained):
    options = ["--prompt", "ab", "--max-tokens", "12", "--seed", "5", "--top-p", "0.9"]
    code, out, err = command("sample", "run", *options)
    assert (code, err) == (0, "")
    said = json.loads(out.splitlines()[-1])
    assert (said["step"], said["prompt_tokens"]) == (2, 2)
    ours = load_trained(trained / "run", device="cpu", dtype=torch.float32)
    how = {"temperature": 0.8, "top_p": 0.9, "max_tokens": 12, "seed": 5}
    ids = [i for i in generate(ours.model, [97, 98], **how, eos_ids=[256], n_ids=257) if i != 256]
    assert said["text"] == ours.tokenizer.decode(ids) and f"ab{said['text']}\n" in out
    assert command("export", "run", "--out", "hf")[0] == 0
    again = json.loads(command("sample", "hf", *options)[1].splitlines()[-1])
    assert (again["text"], again["step"]) == (said["text"], None)
    said = json.loads(command("sample", "run", "--max-tokens", "5000", "--temperature", "0")[1].splitlines()[-1])
    assert (said["prompt_tokens"], said["new_tokens"], said["stopped"]) == (1, 48, "context full")


def test_sample_stops_where_transformers_does(command, trained):
    assert command("export", "run", "--out", "ends")[0] == 0
    config, generation = (trained / "ends" / name for name in ("config.json", "generation_config.json"))
    sample = ("sample", "ends", "--prompt", "ab", "--temperature", "0", "--max-tokens", "20")
    free = AutoModelForCausalLM.from_pretrained(trained / "ends").generate(
        torch.tensor([[97, 98]]), max_new_tokens=20, do_sample=False
    )
    end = free[0, 8].item()
    for file in (generation, config):
        file.write_text(json.dumps(json.loads(file.read_text()) | {"eos_token_id": [256, end]}))
        theirs = AutoModelForCausalLM.from_pretrained(trained / "ends")
        expected = theirs.generate(torch.tensor([[97, 98]]), max_new_tokens=20, do_sample=False)[0, 2:].tolist()
        said = json.loads(command(*sample)[1].splitlines()[-1])
        assert expected[-1] == end
        assert (said["new_tokens"], said["stopped"]) == (len(expected), "end of text")
        generation.unlink(missing_ok=True)
    config.write_text(json.dumps(json.loads(config.read_text()) | {"eos_token_id": "</s>"}))
    code, _, err = command(*sample)
    assert (code, err.count("\n")) == (2, 1) and "eos_token_id is </s>" in err


def test_sample_refuses_in_one_sentence(command):
    for arguments, value in (
        (["nowhere"], "nowhere"),
        (["run", "--prompt", "x" * 49], "49"),
        (["run", "--prompt", "x", "--prompt-file", "y"], "--prompt-file"),
        (["run", "--prompt-file", "absent"], "absent"),
        (["run", "--seed", "-1"], "got -1"),
        (["run", "--device", "cuda"], "cuda"),
    ):
        code, out, err = command("sample", *arguments)
        assert (code, out, err.count("\n")) == (2, "", 1)
        assert err.startswith("sample: ") and value in err


def test_damage_is_said(command, tmp_path):
    write_run(tmp_path / "run", replace(LLAMA, name="torn"))
    for step in (1, 2):
        model = model_of(LLAMA)
        with torch.no_grad():
            model.ln_final.weight[0] = math.nan if step == 1 else 1.0
        save_model(tmp_path / "run", model, step, optimizer=False)
    (tmp_path / "run/step-00000002/rank-0.safetensors").unlink()
    code, _, err = command("export", tmp_path / "run")
    assert (code, err.count("\n")) == (0, 1) and "step-00000002 is passed over" in err
    code, _, err = command("sample", tmp_path / "run")
    assert code == 2 and "not finite" in err
