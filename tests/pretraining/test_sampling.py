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
ON_GPU = (pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"))
DEVICES = ["cpu", pytest.param("cuda", marks=ON_GPU)]


def cached_logits(model, ids, parts):
    """Logits of (B, S) ids that are read in parts of these lengths."""
    cached = CachedModel(model, len(ids), N_TOKENS)
    read = [cached.logits(cached.hidden(part)) for part in ids.split(parts, dim=1)]
    assert cached.length == N_TOKENS
    return torch.cat(read, dim=1).double()


@pytest.mark.parametrize("parts", [[1] * N_TOKENS, [17, 1, 1, 20, 1]], ids=["one by one", "parts"])
@pytest.mark.parametrize("family", ["scaled", "qwen"])
@pytest.mark.parametrize("device", DEVICES)
@torch.no_grad()
def test_cached_logits_are_the_models_at_every_position(device, family, parts):
    ids = torch.randint(257, (3, N_TOKENS), generator=torch.Generator().manual_seed(1)).to(device)
    for dtype in (torch.float32, torch.bfloat16):
        narrow = model_of(FAMILIES[family], dtype).to(device)
        exact = TransformerLM(narrow.config, device=device, dtype=torch.float64)
        exact.load_state_dict(narrow.state_dict())
        oracle = exact(ids)
        assert (cached_logits(exact, ids, parts) - oracle).abs().max() < 1e-12 * oracle.abs().max()
        theirs = (narrow(ids).double() - oracle).abs().amax()
        ours = (cached_logits(narrow, ids, parts) - oracle).abs().amax((0, 2))
        assert (ours <= 2 * theirs).all()


def test_greedy_takes_the_likeliest_token_of_the_whole_text():
    model, ids = model_of(LLAMA), [10, 200, 3, 77, 5]
    steps = list(generate(model, ids, temperature=0, max_tokens=25, n_samples=2))
    with torch.no_grad():
        for step in steps:
            likeliest = model(torch.tensor([ids]))[0, -1].argmax().item()
            assert step == [likeliest] * 2
            ids.append(likeliest)


def test_a_sample_ends_where_its_text_does():
    model, prompt = model_of(LLAMA), [1, 2, 3]
    free = [ids[0] for ids in generate(model, prompt, temperature=0, max_tokens=20)]
    assert len(free) == 20
    eos_id = free[5]
    ended = [ids[0] for ids in generate(model, prompt, temperature=0, max_tokens=20, eos_ids=[eos_id])]
    assert ended == free[: free.index(eos_id) + 1]
    seen = list(generate(model, prompt, temperature=2.0, max_tokens=40, n_samples=8, eos_ids=[65], n_ids=70))
    samples = list(zip(*seen, strict=True))
    lengths = [ids.index(65) + 1 if 65 in ids else len(seen) for ids in samples]
    assert len(set(lengths)) > 2
    for ids, length in zip(samples, lengths, strict=True):
        assert None not in ids[:length]
        assert set(ids[length:]) <= {None}
        assert max(ids[:length]) < 70


@pytest.mark.parametrize("device", DEVICES)
def test_the_seed_decides_and_the_parts_of_a_prompt_do_not(device, monkeypatch):
    model, prompt = model_of(LLAMA).to(device), list(range(30))

    def samples(seed):
        return list(generate(model, prompt, top_p=0.9, max_tokens=15, n_samples=3, seed=seed))

    first = samples(0)
    assert first == samples(0) != samples(1)
    assert len(set(zip(*first, strict=True))) == 3
    monkeypatch.setattr(sampling, "_PROMPT_PART", 7)
    assert samples(0) == first


def test_the_context_is_used_to_its_end():
    model = model_of(LLAMA)
    context = LLAMA.context_length
    for n_prompt in (1, 40, context):
        steps = list(generate(model, list(range(n_prompt)), temperature=0, max_tokens=1000))
        assert len(steps) == context - n_prompt + 1


LOGITS = [2.0, 1.5, 1.0, 0.9, 0.0, -1.0, -1.0, -9.0]


def expected(temperature, top_p=None):
    """By hand: in their order keep those with less than p before, and divide by their sum."""
    weights = [math.exp(logit / temperature) for logit in LOGITS]
    ordered = sorted(range(len(LOGITS)), key=lambda i: -weights[i])
    before = [0.0, *itertools.accumulate(weights[i] / sum(weights) for i in ordered)]
    kept = [i for i, sum_before in zip(ordered, before, strict=False) if top_p is None or sum_before < top_p]
    total = sum(weights[i] for i in kept)
    return [weights[i] / total if i in kept else 0.0 for i in range(len(LOGITS))]


@pytest.mark.parametrize(
    "options",
    [(0.5,), (2.0, 0.8), (1.0, 0.01)],
    ids=str,
)
def test_tokens_are_drawn_as_likely_as_they_should_be(options, monkeypatch):
    constant = torch.tensor(LOGITS)
    monkeypatch.setattr(CachedModel, "logits", lambda self, hidden: constant.expand(*hidden.shape[:-1], -1))
    p = expected(*options)
    logits = torch.tensor([LOGITS], dtype=torch.float64)
    assert probabilities(logits, *options)[0].tolist() == pytest.approx(p, abs=1e-12)
    n = 20_000
    how = dict(zip(("temperature", "top_p"), options, strict=False))
    (drawn,) = generate(model_of(replace(LLAMA, vocab_size=8)), [0], **how, max_tokens=1, n_samples=n)
    counts = torch.bincount(torch.tensor(drawn), minlength=len(LOGITS)).tolist()
    assert [count for count, share in zip(counts, p, strict=True) if share == 0] == [0] * p.count(0.0)
    likely = [(count, n * share) for count, share in zip(counts, p, strict=True) if share > 0]
    chi_square = sum((count - mean) ** 2 / mean for count, mean in likely)
    # Laurent & Massart (2000), lemma 1: with d degrees of freedom above this once in e^14 times, about a million.
    d, x = len(likely) - 1, 14.0
    assert chi_square <= d + 2 * math.sqrt(d * x) + 2 * x


def test_equal_logits_and_small_temperatures():
    assert probabilities(torch.tensor([[1e4, 0.0, 1.0]]), 1e-30)[0].tolist() == [1, 0, 0]
    for options in ({"temperature": 1e-46}, {"top_p": 1e-46}, {"temperature": 5e-324, "top_p": 5e-324}):
        for dtype in (torch.bfloat16, torch.float32, torch.float64):
            assert probabilities(torch.tensor([[0.0, 2.0, 1.0]], dtype=dtype), **options)[0].tolist() == [0, 1, 0]
    assert probabilities(torch.zeros(1, 4, dtype=torch.bfloat16)).dtype == torch.float32


def test_what_cannot_be_continued():
    model = model_of(replace(LLAMA, vocab_size=20))
    for changed, value in (
        *(({"prompt": prompt}, "20") for prompt in ([], [20], [-1])),
        ({"prompt": [0] * 49}, "49 tokens, .* 48"),
        *(({"temperature": value}, f"got {value:g}") for value in (-1.0, math.nan)),
        *(({"top_p": value}, f"got {value:g}") for value in (0.0, 1.5)),
        ({"max_tokens": 0}, "got 0 and 1"),
    ):
        with pytest.raises(ValueError, match=value):
            next(generate(model, **{"prompt": [1], "max_tokens": 5} | changed))
    with torch.no_grad():
        model.ln_final.weight[3] = math.nan
    with pytest.raises(ValueError, match="2 tokens are not finite"):
        next(generate(model, [1, 2], max_tokens=sys.maxsize // 2))
