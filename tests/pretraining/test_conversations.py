"""Training on conversations: rows hold each once, and losses and gradients are those of each conversation by itself."""

import sys
from dataclasses import replace

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM, Qwen3Config, Qwen3ForCausalLM

from cs336_systems.kernels.linear_cross_entropy import IGNORED
from cs336_systems.model.hf_weights import save_hf_weights
from cs336_systems.pretraining.conversations import Conversations, packed
from cs336_systems.pretraining.dataset import Dataset
from cs336_systems.pretraining.preparation import prepare
from cs336_systems.pretraining.run_log import LOG, read_run
from cs336_systems.pretraining.run_records import Evaluation
from cs336_systems.pretraining.trainer import train
from cs336_systems.ranks import CONTEXT_ORDERS
from tests.distributed.checks import spawn
from tests.pretraining.test_capped import smallest_caps
from tests.pretraining.trained import (
    LENGTHS,
    losses_and_norms,
    options,
    said_by,
    train_each,
    write_chat,
    write_dataset,
)
from tests.training.shared import passes

SHAPE = {"vocab_size": 288, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "head_dim": 16}
SHAPE |= {"num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 64}
SHAPE |= {"rope_parameters": {"rope_type": "default", "rope_theta": 100.0}}
MODELS = {
    "llama": (LlamaConfig, LlamaForCausalLM),
    "qwen2": (Qwen2Config, Qwen2ForCausalLM),
    "qwen3": (Qwen3Config, Qwen3ForCausalLM),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("chat")
    write_chat(folder / "data")
    return folder


def rows_of(folder, **how):
    return Conversations(Dataset.open(folder / "data").train, 16, 257, **how)


def conversations(folder):
    """(ids, targets) of each, cut to 17 tokens."""
    dataset = Dataset.open(folder / "data")
    ids, marks = np.empty(sum(LENGTHS), np.int64), np.empty(sum(LENGTHS), np.uint8)
    dataset.train.copy(0, ids)
    dataset.train.copy(0, marks, marks=True)
    for end, n in zip(np.cumsum(LENGTHS), LENGTHS, strict=True):
        own, of = ids[end - n : end][:17], marks[end - n : end][:17]
        targets = np.where(of & 1, own, IGNORED)[1:]
        if (targets != IGNORED).any():
            yield own[:-1], targets


def test_marks_that_are_torn_are_refused(tmp_path):
    write_chat(tmp_path / "data")
    marks = tmp_path / "data" / "train-00000.marks"
    for n_bytes in (sum(LENGTHS) - 1, 0):
        marks.write_bytes(bytes(n_bytes))
        with pytest.raises(ValueError, match=rf"train-00000.marks is torn: {n_bytes} bytes for {sum(LENGTHS)} tokens"):
            Dataset.open(tmp_path / "data")


def test_packed_rows_hold_each_conversation_once_and_whole(folder):
    rows = rows_of(folder, packing=True)
    inputs, targets = rows.send(rows.read(range(len(rows))))
    found = []
    for row, answers in zip(inputs, targets, strict=True):
        for start in row[:, 1].unique().tolist():
            own = row[:, 1] == start
            assert own.nonzero()[0] == start and own.sum() == own.nonzero()[-1] - start + 1
            if (answers[own] != IGNORED).any():  # the rest is padding
                found.append((row[own, 0].tolist(), answers[own].tolist()))
    assert sorted(found) == sorted((a.tolist(), b.tolist()) for a, b in conversations(folder))
    assert len(rows) < len(rows_of(folder))
    assert "1 beyond the context are cut" in rows.said


@pytest.mark.parametrize("packing", [False, True])
def test_targets_stay_on_the_host(folder, packing):
    rows = rows_of(folder, packing=packing, device="meta")
    inputs, targets = rows.send(rows.read([0, 1]))
    assert inputs.is_meta and torch.equal(targets, rows.read([0, 1])[1])


def test_a_long_conversation_is_dropped_if_asked_and_one_cut_before_its_answer_always(folder, tmp_path):
    assert len(rows_of(folder, long="drop")) == len(LENGTHS) - 1
    write_chat(tmp_path / "data", lengths=(40, 9))  # half of 40 are answers, and the context ends before
    rows = rows_of(tmp_path)
    assert len(rows) == 1 and rows.said.endswith(
        "1 beyond the context are cut; 1 have no answer within it and are dropped"
    )
    write_chat(tmp_path / "none" / "data", lengths=(40,))
    with pytest.raises(ValueError, match="has no conversation with an answer within 16 tokens"):
        rows_of(tmp_path / "none")


def test_packing_loses_nothing_and_wastes_little():
    sizes = np.random.RandomState(0).randint(1, 101, 3000)
    rows = packed(sizes, 100)
    assert sorted(i for row in rows for i in row) == list(range(3000))
    filled = np.array([sizes[row].sum() for row in rows])
    assert filled.max() <= 100 and filled.mean() > 99


@pytest.fixture(scope="module", params=MODELS)
def by_transformers(request, folder, tmp_path_factory):
    """Folder of a model, and the loss and gradients of transformers' model on each conversation by itself."""
    config, kind = MODELS[request.param]
    torch.manual_seed(0)
    model = kind(config(**SHAPE, tie_word_embeddings=request.param == "qwen2"))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.normal_(1.0 if "norm" in name else 0.0, 0.15)
    saved = tmp_path_factory.mktemp(request.param)
    model.save_pretrained(saved)
    total = torch.zeros(())
    every = list(conversations(folder))
    n_targets = sum((targets != IGNORED).sum() for _, targets in every)
    for ids, targets in every:
        logits = model(torch.tensor(ids)[None]).logits[0]
        total = total + torch.nn.functional.cross_entropy(logits, torch.tensor(targets), reduction="sum") / n_targets
    total.backward()
    return saved, total.item(), {name: parameter.grad for name, parameter in model.named_parameters()}


@pytest.mark.parametrize(
    "how",
    [
        {"packing": True, "keep": "autograd"},
        {"packing": True, "keep": "products"},
        {"packing": True, "keep": "input", "attention": "flash"},
        {"packing": False, "keep": "autograd"},
        {"packing": False, "keep": "products"},
    ],
    ids=lambda how: "-".join(map(str, how.values())),
)
def test_loss_and_gradients_are_those_of_transformers_on_each_conversation_alone(
    how, by_transformers, folder, alone, tmp_path, monkeypatch
):
    saved, loss, gradients = by_transformers
    if how.get("attention") == "flash":  # which Triton's interpreter runs here
        monkeypatch.setattr(sys.modules["cs336_systems.training.assemble"], "attention_reason", lambda *_, **__: None)
    n_rows = len(rows_of(folder, packing=how["packing"]))
    options_ = options(folder, out=tmp_path / "run", init=saved, batch_size=1, evaluate_every=None, **how)
    step = prepare(replace(options_, total_batch_tokens=16 * n_rows), alone).step  # a row is a micro-batch
    rows = rows_of(folder, packing=how["packing"])
    passes(step, rows.send(rows.read(range(n_rows))))
    assert step.loss.item() == pytest.approx(loss, rel=1e-5)
    ours = {name: parameter.grad for name, parameter in step.model.named_parameters()}
    save_hf_weights(ours, tmp_path)
    found = load_file(tmp_path / "model.safetensors")
    assert found.keys() == gradients.keys() - {"lm_head.weight"} | ({"lm_head.weight"} & found.keys())
    for name, gradient in found.items():
        torch.testing.assert_close(gradient, gradients[name], rtol=1e-3, atol=2e-5 * gradients[name].abs().max().item())


def test_micro_batches_and_ranks_do_not_change_the_loss(folder, alone, tmp_path):
    def of(name, **changes):
        rows = {"batch_size": 4, "total_batch_tokens": 64, "steps": 6, "save_every": 3}
        return options(folder, out=tmp_path / name, **rows | changes)

    train(of("whole"), alone)
    train(of("single", batch_size=1), alone)
    train(of("packed", packing=True), alone)
    train(of("packed-single", packing=True, batch_size=1), alone)
    two = [of(f"two-{zero}", batch_size=1, zero=zero) for zero in (0, 1, 2, 3)]
    two += [of("packed-two", packing=True, batch_size=2, zero=3, keep="products")]
    two += [of("packed-autograd", packing=True, batch_size=2, zero=0, keep="autograd")]
    shared = {"batch_size": 2, "keep": "products"}
    two += [of(name, **{name: 2}, **shared) for name in ("tensor", "context", "pipeline")]
    two += [of(f"packed-{name}", packing=True, **{name: 2}, **shared) for name in ("tensor", "pipeline")]
    two += [of(f"packed-{order}", packing=True, context=2, context_order=order, **shared) for order in CONTEXT_ORDERS]
    spawn(train_each, 2, two)
    for name in ("single", *(f"two-{zero}" for zero in (0, 1, 2, 3)), "tensor", "context", "pipeline"):
        assert_same_course(tmp_path / "whole", tmp_path / name)
    for name in ("single", "two", "autograd", "tensor", "pipeline", *CONTEXT_ORDERS):
        assert_same_course(tmp_path / "packed", tmp_path / f"packed-{name}")


def of_a_step(rank, options_, ids, targets):
    """This rank's loss, and the gradients of a step by name."""
    prepared = prepare(options_, rank)
    passes(prepared.step, (prepared.own(ids), prepared.own(targets)))
    model = getattr(prepared.step.model, "module", prepared.step.model)
    return prepared.step.loss, {name: parameter.grad for name, parameter in model.named_parameters()}


def test_targets_of_packed_rows_weigh_the_same_on_whatever_context_rank(folder, alone, tmp_path):
    """Of the first two rows one rank has all targets, of the others the ranks have one and many."""
    shape = {"packing": True, "keep": "products", "batch_size": 2, "total_batch_tokens": 64, "evaluate_every": None}
    rows = rows_of(folder, packing=True)
    ids, targets = rows.send(rows.read(range(4)))
    early, late = slice(4, 12), [*range(4), *range(12, 16)]  # of rank 1 and of rank 0
    targets[:2, early] = IGNORED
    targets[2:, late] = IGNORED
    targets[2, 0] = 7
    counts = [
        (targets[rows_of_step] != IGNORED)[:, own].sum()
        for rows_of_step in (slice(2), slice(2, 4))
        for own in (early, late)
    ]
    assert counts[0] == 0 < counts[1] and counts[2] > counts[3] == 1
    loss, expected = of_a_step(alone, options(folder, out=tmp_path / "one", **shape), ids, targets)
    shared = options(folder, out=tmp_path / "two", context=2, context_order="gathered", **shape)
    found = spawn(of_a_step, 2, shared, ids, targets)
    torch.testing.assert_close(torch.stack([one for one, _ in found]).mean(), loss, rtol=1e-6, atol=0)
    for _, gradients in found:
        for name, gradient in expected.items():
            limit = 1e-5 * gradient.abs().max().item()
            torch.testing.assert_close(gradients[name], gradient, rtol=0, atol=limit, msg=name)


def test_caps_on_memory_do_not_change_the_loss(folder, alone, tmp_path):
    """Under the smallest caps layers are recomputed and streamed."""

    def of(name, **changes):
        rows = {"batch_size": 2, "total_batch_tokens": 64, "steps": 4, "save_every": 2, "evaluate_every": 2}
        return options(folder, out=tmp_path / name, **rows | changes)

    for packing in (False, True):
        plain = of(f"plain-{packing}", packing=packing)
        train(plain, alone)
        roomy = of(f"roomy-{packing}", packing=packing, device_gib=0.5, host_gib=2)
        for one in (roomy, replace(roomy, out=tmp_path / f"tight-{packing}", **smallest_caps(roomy, alone))):
            train(one, alone)
            assert_same_course(plain.out, one.out)
        assert not any("none stream" in text for text in said_by(one.out))


def assert_same_course(one, other):
    values = [torch.tensor(losses_and_norms(each), dtype=torch.float64) for each in (one, other)]
    torch.testing.assert_close(*values, rtol=2e-4, atol=0)
    evaluated = [[each.loss for each in read_run(run / LOG).all(Evaluation)] for run in (one, other)]
    assert evaluated[0] == pytest.approx(evaluated[1], rel=2e-4) and evaluated[0]
    tokens = [[each.tokens for each in read_run(run / LOG).all(Evaluation)] for run in (one, other)]
    assert tokens[0] == tokens[1]


def test_a_run_says_what_its_rows_hold_and_resumes_only_with_the_same(folder, alone, tmp_path):
    run = options(folder, out=tmp_path / "run", packing=True, steps=4, save_every=2, batch_size=2, evaluate_every=4)
    train(replace(run, walltime=1e-9, save_every=1), alone)
    said = said_by(run.out)
    assert any(text.startswith("to learn: 11 conversations in ") for text in said), said
    assert any(text.startswith("held out: 3 conversations in 2 rows of 16 tokens: ") for text in said), said
    with pytest.raises(ValueError, match="^packing: 1 in the data of the saved run, 0 in this one's; "):
        train(replace(run, packing=False), alone)
    with pytest.raises(ValueError, match="^long_dropped: 0 in the data of the saved run, 1 in this one's; "):
        train(replace(run, long_conversations="drop"), alone)
    train(run, alone)
    train(replace(run, out=tmp_path / "straight"), alone)
    assert losses_and_norms(run.out) == losses_and_norms(tmp_path / "straight")


def test_plain_data_cannot_be_packed(alone, tmp_path):
    write_dataset(tmp_path / "data")
    with pytest.raises(ValueError, match="--packing is for conversations, and .*data was made without --chat"):
        prepare(options(tmp_path, packing=True), alone)
    with pytest.raises(ValueError, match="--long-conversations is for conversations"):
        prepare(options(tmp_path, long_conversations="drop"), alone)
