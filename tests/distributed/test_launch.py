"""torchrun and the launch recipes: two agents on one machine act as two nodes, ranks restart, errors reach the user."""

import json
import os
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.distributed.checks import free_port

ROOT = Path(__file__).resolve().parents[2]
RECIPES = ROOT / "scripts" / "launch"
PYTHON = Path(sys.executable)
TORCHRUN = f"{PYTHON.name} -m torch.distributed.run"
"""In words, by the name on PATH: the folder of the interpreter may hold a space."""
PROGRAM = str(ROOT / "tests" / "distributed" / "worlds.py")
AWKWARD = ["two words", "$HOME 'quoted' \"twice\"", "--size", ""]
"""Arguments that a careless recipe would split or expand."""


def start(command, **variables):
    path = os.pathsep.join([str(PYTHON.parent), variables.pop("PATH", os.environ["PATH"])])
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "TORCHRUN": TORCHRUN, "PATH": path}
    environment |= variables
    return subprocess.Popen(
        command, env=environment, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def output_of(process):
    """(exit code, stdout, stderr), of a process that must end."""
    try:
        stdout, stderr = process.communicate()
    finally:
        process.kill()
    return process.returncode, stdout, stderr


def said_by_ranks(stdout):
    return sorted(json.loads(line) for line in stdout.splitlines() if line.startswith("["))


@pytest.fixture(scope="module", autouse=True)
def restarted():
    """One node whose rank 1 kills itself once and then raises. Started early: imports are slow."""
    node = {"NNODES": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "NPROC_PER_NODE": "2"}
    command = ["bash", str(RECIPES / "multi_node.sh"), PROGRAM, "raise", "1"]
    node = start(command, **node, RENDEZVOUS="c10d", MAX_RESTARTS="1")
    yield node
    node.kill()
    node.wait()


def submit(folder, *arguments):
    """The Slurm recipe with stand-ins for Slurm's commands: ``srun`` starts its command once per node."""
    hostnames = '#!/bin/sh\n[ "$*" = "show hostnames node[0-1]" ] && echo 127.0.0.1 && echo another\n'
    (folder / "scontrol").write_text(f'{hostnames}echo "$@" >>"{folder}/asked"\n')
    srun = f'#!/bin/bash\nshift\necho $$ >"{folder}/step"\nexport SLURM_STEP_ID=0\n'
    (folder / "srun").write_text(f'{srun}"$@" & first=$!\n"$@" & wait $first && wait $!\n')
    every_process = "for one in psutil.Process(int(open(sys.argv[1]).read())).children(True): one.terminate()"
    step = shlex.join([sys.executable, "-c", f"import psutil, sys\n{every_process}", f"{folder}/step"])
    (folder / "scancel").write_text(f'#!/bin/sh\n[ "$*" = "--signal TERM 77" ] && exec {step}\n')
    for command in ("scontrol", "srun", "scancel"):
        (folder / command).chmod(0o755)
    spooled = folder / "slurm_script"
    spooled.write_text((RECIPES / "slurm.sh").read_text().replace("20000 + SLURM_JOB_ID % 10000", str(free_port())))
    variables = {
        "PATH": f"{folder}:{os.environ['PATH']}",
        "SLURM_JOB_ID": "77",
        "SLURM_JOB_NODELIST": "node[0-1]",
        "SLURM_JOB_NUM_NODES": "2",
        "SLURM_SUBMIT_DIR": str(ROOT),
        "NPROC_PER_NODE": "1",
    }
    return start(["bash", str(spooled), PROGRAM, *arguments], **variables)


@pytest.fixture(scope="module", autouse=True)
def slurm_job(tmp_path_factory):
    job = submit(tmp_path_factory.mktemp("slurm"), "group", *AWKWARD)
    yield job
    job.kill()
    job.wait()


@pytest.mark.slow
def test_ranks_meet_anew_when_a_killed_one_is_restarted_and_an_error_is_told(restarted):
    code, stdout, stderr = output_of(restarted)
    assert said_by_ranks(stdout) == [[number, number, 2, 21, "1"] for number in (0, 0, 1, 1)], stderr
    assert code == 1
    assert "ArithmeticError: rank 1 cannot go on" in stderr


@pytest.mark.slow
def test_c10d_rendezvous_under_slurm_makes_two_nodes(slurm_job):
    code, stdout, stderr = output_of(slurm_job)
    assert code == 0, stderr
    assert said_by_ranks(stdout) == [[number, 0, 2, 21, *AWKWARD] for number in (0, 0, 1, 1)]


@pytest.mark.slow
def test_ranks_hear_once_that_slurms_time_is_up_and_the_job_is_queued_again(tmp_path):
    job = submit(tmp_path, "stop")
    there = [json.loads(job.stdout.readline()) for _ in range(2)]
    job.send_signal(signal.SIGUSR1)
    code, stdout, stderr = output_of(job)
    assert sorted(there) == [[0, 0], [1, 0]]
    assert said_by_ranks(stdout) == [[0, 1], [1, 1]], stderr
    assert code == 0
    assert (tmp_path / "asked").read_text().splitlines()[-1] == "requeue 77"


def test_recipes_name_what_is_missing_and_start_torchrun():
    here = {"NNODES": "2", "MASTER_ADDR": "here", "TORCHRUN": "echo"}
    for script, arguments, variables, message in (
        ("multi_node.sh", ["script.py"], {}, "NNODES is not set"),
        ("multi_node.sh", ["script.py"], {"NNODES": "2"}, "MASTER_ADDR is not set"),
        ("multi_node.sh", ["script.py"], here, "NODE_RANK is not set"),
        ("multi_node.sh", ["script.py"], here | {"RENDEZVOUS": "etcd"}, "'etcd'"),
        ("multi_node.sh", [], here, "nothing to run"),
        ("slurm.sh", ["script.py"], {}, "this is a batch script"),
    ):
        code, _, stderr = output_of(start(["bash", str(RECIPES / script), *arguments], **variables))
        assert code != 0
        assert message in stderr
    static = start(["bash", str(RECIPES / "multi_node.sh"), "script.py", "-x"], **here, NODE_RANK="1", MASTER_PORT="7")
    assert output_of(static)[1].split() == [
        *("--nnodes", "2", "--nproc-per-node", "gpu", "--max-restarts", "0", "--rdzv-backend", "static"),
        *("--node-rank", "1", "--master-addr", "here", "--master-port", "7", "--", "script.py", "-x"),
    ]
