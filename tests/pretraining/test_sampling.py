"""Sampling: the cache changes no logits beyond rounding, tokens are drawn as likely as they should be, ends are kept.

Logits are judged as everywhere here: in fp64 both ways agree but for fp64 rounding; in a narrower dtype the cached ones
may be no further from the fp64 answer than twice the uncached ones are anywhere, as sums of other orders may be.
"""

import itertools
import math
import sys
from dataclasses import replace

import pytest
import torch

from cs336_systems.model import TransformerLM
from cs336_systems.pretraining import sampling
from cs336_systems.pretraining.sampling import CachedModel, generate, probabilities
from tests.pretraining.checkpointed import FAMILIES, LLAMA, model_of

N_TOKENS = 40
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def cached_logits(model, ids, parts):
    """Logits of (1, S) ids that are read in parts of these lengths."""
    cached = CachedModel(model, N_TOKENS)
    read = [cached.logits(cached.hidden(part)) for part in ids.split(parts, dim=1)]
    assert cached.length == N_TOKENS
    return torch.cat(read, dim=1).double()


@pytest.mark.parametrize("parts", [[1] * N_TOKENS, [17, 1, 1, 20, 1]], ids=["one by one", "parts"])
@pytest.mark.parametrize("family", ["scaled", "qwen"])
@pytest.mark.parametrize("device", DEVICES)
@torch.no_grad()
def test_cached_logits_are_the_models_at_every_position(device, family, parts):
    ids = torch.randint(257, (1, N_TOKENS), generator=torch.Generator().manual_seed(1)).to(device)
    for dtype in (torch.float32, torch.bfloat16):
        narrow = model_of(FAMILIES[family], dtype).to(device)
        exact = TransformerLM(narrow.config, device=device, dtype=torch.float64)
        exact.load_state_dict(narrow.state_dict())
        oracle = exact(ids)
        assert (cached_logits(exact, ids, parts) - oracle).abs().max() < 1e-12 * oracle.abs().max()
        theirs = (narrow(ids).double() - oracle).abs().amax()
        ours = (cached_logits(narrow, ids, parts) - oracle).abs().amax((0, 2))
        assert (ours <= 2 * theirs).all()


def test_greedy_takes_the_likeliest_token_of_the_whole_text_and_ends_where_it_does():
    model, prompt = model_of(LLAMA), [10, 200, 3, 77, 5]
    ids = list(generate(model, prompt, temperature=0, max_tokens=25))
    with torch.no_grad():
        for i, token_id in enumerate(ids):
            assert token_id == model(torch.tensor([prompt + ids[:i]]))[0, -1].argmax().item()
    ended = list(generate(model, prompt, temperature=0, max_tokens=25, eos_ids=[ids[5]]))
    assert ended == ids[: ids.index(ids[5]) + 1]
    assert max(generate(model, prompt, temperature=2.0, max_tokens=40, n_ids=70)) < 70
    context = LLAMA.context_length
    for n_prompt in (1, 40, context):
        assert len(list(generate(model, list(range(n_prompt)), max_tokens=1000))) == context - n_prompt + 1


@pytest.mark.parametrize("device", DEVICES)
def test_the_seed_decides_and_the_parts_of_a_prompt_do_not(device, monkeypatch):
    model, prompt = model_of(LLAMA).to(device), list(range(30))

    def sample(seed):
        return list(generate(model, prompt, top_p=0.9, max_tokens=15, seed=seed))

    first = sample(0)
    assert first == sample(0) != sample(1)
    monkeypatch.setattr(sampling, "_PROMPT_PART", 7)
    assert sample(0) == first


LOGITS = [2.0, 1.5, 1.0, 0.9, 0.0, -1.0, -1.0, -9.0]


def expected(temperature, top_p=None):
    """By hand: in their order keep those with less than p before, and divide by their sum."""
    weights = [math.exp(logit / temperature) for logit in LOGITS]
    ordered = sorted(range(len(LOGITS)), key=lambda i: -weights[i])
    before = [0.0, *itertools.accumulate(weights[i] / sum(weights) for i in ordered)]
    kept = [i for i, sum_before in zip(ordered, before, strict=False) if top_p is None or sum_before < top_p]
    total = sum(weights[i] for i in kept)
    return [weights[i] / total if i in kept else 0.0 for i in range(len(LOGITS))]


@pytest.mark.parametrize("options", [(0.5,), (2.0, 0.8), (1.0, 0.01)], ids=str)
def test_tokens_are_as_likely_as_they_should_be(options):
    found = probabilities(torch.tensor(LOGITS, dtype=torch.float64), *options)
    assert found.tolist() == pytest.approx(expected(*options), abs=1e-12)


def test_equal_logits_and_small_temperatures():
    assert probabilities(torch.tensor([1e4, 0.0, 1.0]), 1e-30).tolist() == [1, 0, 0]
    for options in ({"temperature": 1e-46}, {"top_p": 1e-46}, {"temperature": 5e-324, "top_p": 5e-324}):
        for dtype in (torch.bfloat16, torch.float32, torch.float64):
            assert probabilities(torch.tensor([0.0, 2.0, 1.0], dtype=dtype), **options).tolist() == [0, 1, 0]
    assert probabilities(torch.zeros(4, dtype=torch.bfloat16)).dtype == torch.float32


def test_what_cannot_be_continued():
    model = model_of(replace(LLAMA, vocab_size=20))
    for changed, value in (
        *(({"prompt": prompt}, "20") for prompt in ([], [20], [-1])),
        ({"prompt": [0] * 49}, "49 tokens, .* 48"),
        *(({"temperature": value}, f"got {value:g}") for value in (-1.0, math.nan)),
        *(({"top_p": value}, f"got {value:g}") for value in (0.0, 1.5)),
        ({"max_tokens": 0}, "got 0"),
    ):
        with pytest.raises(ValueError, match=value):
            next(generate(model, **{"prompt": [1], "max_tokens": 5} | changed))
    with torch.no_grad():
        model.ln_final.weight[3] = math.nan
    with pytest.raises(ValueError, match="2 tokens are not finite"):
        next(generate(model, [1, 2], max_tokens=sys.maxsize // 2))
