"""Commands that act as machines, each a replica of its own, at one lighthouse."""

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

from cs336_systems.pretraining.replica_options import check_lighthouse
from cs336_systems.pretraining.run_log import LOG, read_run
from cs336_systems.pretraining.run_records import End, LoggedStep, Membership
from tests.distributed.checks import free_port

from .trained import write_dataset

pytest.importorskip("torchft")

ROOT = Path(__file__).resolve().parents[2]
SMALL = "--device cpu --size tiny --context-length 16 --batch-size 4 --steps 1000000 --warmup-steps 3 --save-every 20"
SMALL += " --evaluate-every None --no-export --agree every-step --replicas 2 --agree-timeout 20"


@pytest.fixture
def lighthouse():
    from torchft.coordination import LighthouseServer

    server = LighthouseServer("127.0.0.1:0", 1, join_timeout_ms=20_000, quorum_tick_ms=20, heartbeat_timeout_ms=1500)
    yield f"http://127.0.0.1:{server.address().rsplit(':', 1)[1]}"
    server.shutdown()


class Machine:
    """A folder in which train.py runs as one replica."""

    def __init__(self, name, folder, lighthouse):
        self.name, self.out = name, folder / f"machine-{name}"
        self._command = [sys.executable, "scripts/train.py", *SMALL.split(), "--data", str(folder / "data")]
        self._command += ["--out", str(self.out), "--lighthouse", lighthouse, "--replica", name]

    def start(self):
        environment = os.environ | {"OMP_NUM_THREADS": "1"}
        said = {"stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE, "text": True, "env": environment}
        self.process = subprocess.Popen(self._command, cwd=ROOT, **said)

    def records(self, kind):
        path = self.out / f"replica-{self.name}" / LOG
        return read_run(path).all(kind) if path.exists() else []

    def wait_for(self, happened):
        """Wait until the newest who-is-there and the newest step satisfy ``happened``."""
        while True:
            there, steps = self.records(Membership), self.records(LoggedStep)
            if there and steps and happened(there[-1], steps[-1].step):
                return
            assert self.process.poll() is None, self.process.communicate()[1]
            time.sleep(0.1)


@pytest.mark.slow
def test_two_commands_train_as_one_and_a_killed_one_comes_back_when_it_is_started_again(tmp_path, lighthouse):
    """Each saves and logs to a folder of its own; the one that evaluates and saves dies."""
    write_dataset(tmp_path / "data")
    one, two = (Machine(name, tmp_path, lighthouse) for name in ("a", "b"))
    try:
        one.start()
        two.start()
        two.wait_for(lambda newest, step: list(newest.there) == ["a", "b"] and step >= 20)
        one.process.send_signal(signal.SIGKILL)
        one.process.wait()
        two.wait_for(lambda newest, step: list(newest.there) == ["b"] and step > newest.step)
        one.start()
        two.wait_for(lambda newest, step: list(newest.there) == ["a", "b"] and step > newest.step + 3)
        two.process.send_signal(signal.SIGTERM)
        assert [each.process.wait() for each in (one, two)] == [0, 0]
    finally:
        for each in (one, two):
            each.process.kill()
            each.process.communicate()
    gone = [list(each.gone) for each in two.records(Membership) if each.gone]
    assert gone == [["a"]]
    assert one.records(Membership)[-1].healed_seconds > 0
    (first_end, second_end) = one.records(End)[-1], two.records(End)[-1]
    assert (first_end.step, first_end.reason) == (second_end.step, second_end.reason) == (first_end.step, "terminated")
    losses = {step.step: step.loss for step in two.records(LoggedStep)}
    assert list(losses) == list(range(second_end.step))
    back = one.records(Membership)[-1].step
    together = {step.step: step.loss for step in one.records(LoggedStep) if step.step >= back}
    assert together and together == {step: losses[step] for step in together}


def test_a_lighthouse_that_is_just_started_again_is_found():
    from torchft.coordination import LighthouseServer

    port, started = free_port(), []
    start = threading.Timer(1.0, lambda: started.append(LighthouseServer(f"127.0.0.1:{port}", 1)))
    start.start()
    check_lighthouse(f"http://127.0.0.1:{port}")
    start.join()
    (server,) = started
    server.shutdown()


class Other(BaseHTTPRequestHandler):
    """A server that is no lighthouse."""

    def do_GET(self):
        self.send_error(404)

    def log_message(self, *_):
        pass


@pytest.mark.parametrize("address", ["node0:29510", "http://node0", "http://[::1:29510", "http://node..0:29510"])
def test_what_is_no_address_is_told_by_the_option(address):
    with pytest.raises(ValueError, match="^--lighthouse must be an address such as .*, got "):
        check_lighthouse(address)


def test_a_lighthouse_that_does_not_answer_is_named_within_ten_seconds(command, tmp_path):
    """Somebody listens at a port and never speaks; at another somebody else does, and later nobody."""
    with socket.create_server(("127.0.0.1", 0)) as silent, HTTPServer(("127.0.0.1", 0), Other) as other:
        threading.Thread(target=other.handle_request).start()
        for port, why in ((silent.getsockname()[1], ": "), (other.server_port, ", but something else: 404")):
            began, address = time.monotonic(), f"http://127.0.0.1:{port}"
            with pytest.raises(ValueError, match=f"^no lighthouse answers at {address}{why}"):
                check_lighthouse(address)
            assert time.monotonic() - began < 10
    arguments = f"{SMALL} --lighthouse {address} --replica a --data {tmp_path} --out {tmp_path / 'run'}"
    began = time.monotonic()
    code, _, err = command("train", *arguments.split())
    assert time.monotonic() - began < 10
    assert (code, err.count("\n")) == (2, 1) and f"no lighthouse answers at {address}" in err


class Gone(Other):
    """A lighthouse that answers once."""

    def do_GET(self):
        self.send_response(200)
        self.end_headers()
        self.wfile.write(b"Lighthouse")


@pytest.mark.slow
def test_a_lighthouse_that_dies_while_torch_is_imported_is_a_sentence(tmp_path):
    write_dataset(tmp_path / "data")
    with HTTPServer(("127.0.0.1", 0), Gone) as server:
        machine = Machine("a", tmp_path, address := f"http://127.0.0.1:{server.server_port}")
        machine.start()
        server.handle_request()
    _, said = machine.process.communicate(timeout=120)
    assert machine.process.returncode == 2
    assert said.splitlines()[-1] == f"train: no lighthouse answers at {address} any more"
    assert "Traceback" not in said
