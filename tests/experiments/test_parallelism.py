"""Every question of scripts/parallelism.py has a table and a last line of JSON; faults have a sentence."""

import json
import math

QUESTIONS = ("ring", "forms", "mesh", "accounting", "pipeline", "scaling", "failures")


def test_each_question_is_answered(ask):
    for line in (*QUESTIONS, "scaling --most-devices 1024 --context-length 4"):  # both limits lie outside
        code, out, _ = ask(line)
        said = json.loads(out.splitlines()[-1])
        assert (code, said["question"]) == (0, line.split()[0])
        assert "\n|:-" in out or "\n|--" in out, "no Markdown table"
    answer = json.loads(ask("accounting")[1].splitlines()[-1])
    assert (answer["h100"], answer["fsdp"]) == (44, 38)
    assert math.ceil(answer["tokens per device, sum, rings of n"]) == 396
    assert math.ceil(answer["tokens per device, max, rings of n"]) == 320


def test_a_schedule_that_does_not_suit_the_microbatches_leaves_the_others(ask):
    code, out, _ = ask("pipeline --microbatches 6")
    assert code == 0
    names = ["gpipe", "1f1b", "zb-h1", "zbv"]
    first, *_, last = out.splitlines()
    assert list(json.loads(last)) == ["question", *(f"{name} bubble" for name in names)]
    assert "got 6 micro-batches over 4 stages" in first and "dualpipev needs 8" in first


def test_bad_input_is_one_sentence(ask):
    for line, value in (
        *(("ring --world-size 0", "0"), ("mesh --world-size 0", "0")),
        *(("pipeline --stages 0", "0 and 8"), ("pipeline --stages 100000", "1,600,000")),
        ("scaling --most-devices 8", "8"),
        *(("accounting --tp 0", "0"), ("mesh --tokens 0", "0"), ("failures --save 0", "0.0")),
    ):
        code, _, err = ask(line)
        assert (code, err.count("\n")) == (2, 1)
        assert err.startswith(f"parallelism {line.split()[0]}: ") and err.endswith(f"got {value}\n")
