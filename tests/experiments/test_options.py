"""What options must be: each fault is one sentence that names the flag and the value."""

from dataclasses import dataclass

import pytest

from cs336_systems.experiments.options import (
    check_attention,
    check_given,
    check_not_negative,
    check_positive,
    check_seed,
    check_timeout,
    resolved_sizes,
    small_defaults_note,
)


@dataclass
class Options:
    device: str = "cpu"
    batch_size: tuple[int, ...] = (4, 8)
    bucket_size_mb: tuple[float, ...] = (25.0,)
    steps: int = 3
    limit: float | None = None


def defaults(device):
    return Options("cpu") if device == "cpu" else Options("cuda", batch_size=(16,), bucket_size_mb=(25.0,), steps=10)


@pytest.mark.parametrize(
    ("check", "message"),
    [
        (lambda: check_given(Options(batch_size=()), "steps", "batch_size"), "--batch-size needs at least one value"),
        (lambda: check_positive(Options(batch_size=(1, -2)), "batch_size"), "--batch-size must be positive, got -2"),
        (lambda: check_positive(Options(steps=0), "steps"), "--steps must be positive, got 0"),
        (
            lambda: check_positive(Options(bucket_size_mb=(float("nan"),)), "bucket_size_mb"),
            "must be positive, got nan",
        ),
        (lambda: check_not_negative(Options(steps=-1), "steps"), "--steps must not be negative, got -1"),
        (lambda: check_seed(2**31, bits=31), r"--seed must lie in 0..2\^31-1, got 2147483648"),
        (lambda: check_timeout(float("inf")), "--timeout must be positive and at most 1e\\+06 seconds, got inf"),
        (lambda: check_attention(["flash", "magic"]), "--attention magic: known are reference"),
        (lambda: resolved_sizes(["tiny", "huge"], [1]), "unknown model size 'huge'"),
        (lambda: resolved_sizes(["tiny"], [0]), "context"),
    ],
)
def test_each_fault_is_named(check, message):
    with pytest.raises(ValueError, match=message):
        check()


def test_what_is_right_passes():
    options = Options()
    check_given(options, "batch_size", "bucket_size_mb")
    check_positive(options, "batch_size", "steps", "limit")  # None: not given
    check_not_negative(Options(steps=0), "steps")
    check_seed(0)
    check_timeout(0.5)
    assert resolved_sizes(["xl-2026"], [128]) == ["2.7b"]


def test_the_note_names_what_stands_at_the_smaller_default():
    note = small_defaults_note(Options(steps=5), defaults, "batch_size", "steps")
    assert note == "On a CPU the defaults shrink: --batch-size 4 8 (on a GPU 16)."
    assert small_defaults_note(Options(batch_size=(1,), steps=5), defaults, "batch_size", "steps") == ""
    assert small_defaults_note(Options("cuda"), defaults, "steps") == ""
