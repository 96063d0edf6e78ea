"""Fresh processes: what they share with the fork server."""

import gc
import time

from cs336_systems.processes import FreshProcess


def tell_what_is_frozen(connection):
    connection.send(gc.get_freeze_count())


def test_the_collector_passes_over_what_the_server_has_imported():
    process = FreshProcess(tell_what_is_frozen)
    try:
        assert process.receive(time.monotonic() + 60) > 100_000
    finally:
        process.end()
