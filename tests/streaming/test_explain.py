"""Choices that are made elsewhere are those that are made here."""

from functools import partial

import pytest

from cs336_systems.config import ModelConfig
from cs336_systems.costs.streaming import Rates
from cs336_systems.hardware import find_hardware
from cs336_systems.streaming.choose import Caps, CapsTooSmallError, choose
from cs336_systems.streaming.explain import Elsewhere, next_gib, with_next_gib

CONFIG = ModelConfig("wide", 1024, 4096, 2, 8, vocab_size=1000, context_length=512)
CAPS = Caps(2**28, 2**30, 0, 0)


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
