"""Choices that are made elsewhere are those that are made here."""

import re
from functools import partial

import pytest

from cs336_systems.config import ModelConfig
from cs336_systems.costs.streaming import Rates
from cs336_systems.hardware import find_hardware
from cs336_systems.streaming.choice import Caps, CapsTooSmallError
from cs336_systems.streaming.choose import choose
from cs336_systems.streaming.explain import Elsewhere, next_gib, reasons, with_next_gib

CONFIG = ModelConfig("wide", 1024, 4096, 2, 8, vocab_size=1000, context_length=512)
CAPS = Caps(2**28, 2**30, 0, 0)


def reasons_of(config, caps, chunk, tokens_per_step):
    rates = Rates.of(find_hardware("NVIDIA H200"))
    asked = {"tokens_per_step": tokens_per_step, "chunk": chunk, "effort": 20}
    return list(reasons(choose(config, config.context_length, caps, rates, **asked)))


def test_small_plans_are_in_units_that_show_them():
    small = ModelConfig("small", 64, 192, 2, 4, vocab_size=512, context_length=128)
    *_, device, host = reasons_of(small, Caps(2**24, 2**30, 0, 0), 1024, 1024)
    assert re.fullmatch(r"The device holds [1-9][\d.]* MiB of 16\.0 MiB, .* most of all\.", device)
    assert host == "The host holds 0.0 MiB of 1.0 GiB."


def test_the_end_of_a_step_is_no_part_of_what_kernels_wait():
    """Kernels of the optimizer run there, too."""
    said = " ".join(reasons_of(CONFIG, CAPS, 512, 4096))
    time = r"[1-9][\d.]* ms"
    assert re.search(rf"Kernels wait {time} for copies to the device; the step ends {time} after backward\.", said)


@pytest.mark.slow
def test_processes_of_their_own_find_the_same():
    again = partial(
        choose, CONFIG, 512, rates=Rates.of(find_hardware("NVIDIA H200")), tokens_per_step=4096, chunk=512, effort=100
    )
    choice, too_small = again(CAPS), Caps(1, 1, 0, 0)
    elsewhere = Elsewhere(again, *with_next_gib(CAPS).values(), too_small)
    said = list(next_gib(choice, elsewhere))
    assert said == list(next_gib(choice, again))
    assert len(said) == 2
    with pytest.raises(CapsTooSmallError, match="the device is .* short"):
        elsewhere(too_small)
    unasked = Elsewhere(again, CAPS)
    (process,) = unasked._processes.values()
    unasked.end()
    assert not process.is_alive()
