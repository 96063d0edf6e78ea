"""Fresh processes: what they share with the fork server, and what becomes of them."""

import gc
import signal
import subprocess
import sys
import time

import psutil

from cs336_systems.processes import FreshProcess


def tell_what_is_frozen(connection):
    connection.send(gc.get_freeze_count())


def test_the_collector_passes_over_what_the_server_has_imported():
    process = FreshProcess(tell_what_is_frozen)
    try:
        assert process.receive() > 100_000
    finally:
        process.end()


def wait(connection):
    connection.send("here")
    connection.recv()


STARTER = """
import signal, time
from cs336_systems.processes import FreshProcess, start_server
from tests.test_processes import wait

if __name__ == "__main__":
    start_server("json")
    processes = [FreshProcess(wait) for _ in range(2)]
    for each in processes:
        each.receive()
    processes[0].send_signal(signal.SIGSTOP)
    print("here", flush=True)
    time.sleep(60)
"""


def test_a_stopped_process_and_the_server_end_with_who_started_them():
    starter = subprocess.Popen([sys.executable, "-c", STARTER], stdout=subprocess.PIPE, text=True)
    assert starter.stdout is not None and starter.stdout.readline() == "here\n"
    below = psutil.Process(starter.pid).children(recursive=True)
    assert len(below) >= 3
    starter.send_signal(signal.SIGKILL)
    starter.wait()
    starter.stdout.close()
    _, alive = psutil.wait_procs(below, timeout=60)
    for each in alive:
        each.kill()
    assert not alive


def sleep(connection):
    connection.send("here")
    time.sleep(600)


SIGNALLED = """
import os, signal
from cs336_systems.processes import FreshProcess
from tests.test_processes import sleep

if __name__ == "__main__":
    first = FreshProcess(sleep)
    first.receive()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda *_: None)
        os.killpg(0, number)
    second = FreshProcess(sleep)
    second.receive()
    print(first.is_alive(), second.is_alive())
    second.send_signal(signal.SIGTERM)
    try:
        second.receive()
    except Exception as death:
        print(death)
    first.end()
    FreshProcess(sleep).receive()
    del first, second
"""


def test_signals_to_the_group_reach_neither_processes_nor_server_and_exit_waits_for_none():
    """A process hears a signal of its own; the last one has been lost, and would sleep for ten minutes."""
    command = [sys.executable, "-c", SIGNALLED]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, start_new_session=True)
    assert (done.stdout, done.stderr) == ("True True\ndied without a report: SIGTERM\n", ""), done.stderr


def test_the_age_of_a_process_counts_from_its_start():
    began = time.monotonic()
    code = "import time; time.sleep(0.3); from cs336_systems.processes import age_s; print(age_s())"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert 0.3 - 0.02 <= float(found.stdout) <= time.monotonic() - began + 0.02
