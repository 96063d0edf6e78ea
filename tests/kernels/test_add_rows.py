"""Rows added by name against fp64: frequent words, words that nobody names, and what must be refused."""

import pytest
import torch

from cs336_systems.kernels.add_rows import add_rows_

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPES = [torch.float32] if DEVICE == "cpu" else [torch.float32, torch.bfloat16]


def words(n: int, n_words: int) -> torch.Tensor:
    """Half of them are one word, and the last word never comes."""
    generator = torch.Generator().manual_seed(n)
    ids = torch.randint(n_words - 1, (n,), generator=generator)
    return torch.where(torch.rand(n, generator=generator) < 0.5, n_words // 2, ids)


@pytest.mark.parametrize(("n", "n_words", "d"), [(1, 3, 1), (40, 7, 5), (16, 3, 300), (0, 4, 8)])
def test_values(n: int, n_words: int, d: int) -> None:
    for dtype in DTYPES:
        generator = torch.Generator().manual_seed(1)
        x, before = (torch.randn(rows, d, generator=generator).to(dtype) for rows in (n, n_words))
        ids = words(n, n_words)
        gradient = before.to(DEVICE, copy=True)
        add_rows_(gradient, ids.to(DEVICE), x.to(DEVICE))
        exact = before.double().index_add_(0, ids, x.double())
        wide = before.double().abs().index_add_(0, ids, x.double().abs()) * torch.finfo(torch.float32).eps * 8
        assert ((gradient.cpu().double() - exact).abs() <= wide + exact.abs() * torch.finfo(dtype).eps / 2).all()
        assert torch.equal(gradient[-1].cpu(), before[-1])
        again = before.to(DEVICE, copy=True)
        add_rows_(again, ids.to(DEVICE), x.to(DEVICE))
        assert torch.equal(again, gradient)


def test_refusals() -> None:
    gradient, ids, x = torch.zeros(4, 6), torch.zeros(3, dtype=torch.int64), torch.zeros(3, 6)
    for wrong, message in (
        ((gradient, ids, x[:2]), r"x \(2, 6\) is not \(3, D\) for a gradient \(4, 6\)"),
        ((gradient, ids.int(), x), "takes no rows of torch.float32 by ids of torch.int32"),
        ((gradient.bfloat16(), ids, x), "a gradient of torch.bfloat16 takes no rows of torch.float32"),
        ((torch.zeros(6, 4).t(), ids, x), "gradient must be contiguous"),
    ):
        with pytest.raises(ValueError, match=message):
            add_rows_(*wrong)


@pytest.mark.gpu
def test_a_frequent_word_is_rounded_once_on_a_gpu() -> None:
    n, d = 8192, 256
    ids = torch.zeros(n, dtype=torch.int64, device="cuda")
    x = torch.full((n, d), 0.01, dtype=torch.bfloat16, device="cuda")
    gradient = torch.zeros(3, d, dtype=torch.bfloat16, device="cuda")
    add_rows_(gradient, ids, x)
    expected = (n * x[0].double()).bfloat16()
    assert torch.equal(gradient[0], expected)
    assert not gradient[1:].any()
