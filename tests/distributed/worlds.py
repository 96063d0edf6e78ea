"""Workers of the process group's tests, and a program that tests start by itself, under a launcher or not."""

import json
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.elastic.multiprocessing.errors import record

from cs336_systems.distributed.process_group import Rank, alone, check_same_across_ranks, joined
from cs336_systems.distributed.spawn import spawn


def add_up(rank: Rank, start):
    """The sum over ranks of ``start`` plus the rank's number, and who this rank was."""
    total = torch.tensor([start + rank.rank], device=rank.device)
    dist.all_reduce(total)
    return total.cpu(), rank


def who_is_there(rank: Rank, start):
    """The sum, who this rank was, and what a launcher would have left behind for it."""
    variables = {name: os.environ[name] for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE")}
    return add_up(rank, start), torch.get_num_threads(), variables


def add_up_alone(rank: Rank):
    """The sums of a group of one and, afterwards, of all ranks; twice."""
    sums = []
    for _ in range(2):
        with alone(rank) as own:
            mine = add_up(own, 10 + rank.rank)
        sums.append((mine, add_up(rank, 10)))
    return sums


def fail_alone(rank: Rank):
    """Rank 1 raises while it is alone; rank 0 comes back."""
    with alone(rank):
        if rank.rank == 1:
            raise ArithmeticError("nobody to add to")


def wait_after_being_alone(rank: Rank):
    """Rank 0 waits in a barrier for rank 1, which never comes."""
    with alone(rank):
        pass
    if rank.rank == 1:
        time.sleep(300)
    dist.barrier()


def train_until(rank: Rank, how, at_step, folder):
    """Steps of a linear layer with reduced gradients; at ``at_step`` rank 1 fails as ``how`` says."""
    note_processes(rank, folder)
    model = torch.nn.Linear(4, 4)

    def reduce(parameter):
        if how == "raise in hook" and step == at_step and rank.rank == 1:
            raise ArithmeticError("a gradient that nobody wants")
        dist.all_reduce(parameter.grad)

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(reduce)
    for step in range(at_step + 3):
        if how == "kill" and step == at_step and rank.rank == 1:
            os.kill(os.getpid(), 9)
        model(torch.ones(2, 4)).sum().backward()
        model.zero_grad()


def note_processes(rank: Rank, folder):
    """Start a process that would outlive its rank, and leave both ids."""
    child = subprocess.Popen([sys.executable, "-S", "-c", "import time; time.sleep(300)"])
    part = Path(folder, f"{rank.rank}.part")
    part.write_text(json.dumps([os.getpid(), child.pid]))
    part.rename(part.with_suffix(".json"))


def hang(rank: Rank, folder):
    """Rank 1 never comes to the barrier."""
    note_processes(rank, folder)
    if rank.rank == 1:
        time.sleep(300)
    dist.barrier()


def compare(rank: Rank):
    """What ``check_same_across_ranks`` says to values that are equal, and that differ on the last rank."""
    odd = rank.rank == rank.world_size - 1
    messages = []
    check_same_across_ranks([(4, 4), (4,)], "parameter shapes")
    for value in ([(4, 4), (5,) if odd else (4,)], [1] * (3 + odd), "bf16" if odd else "fp32"):
        try:
            check_same_across_ranks(value, "values")
            messages.append("same")
        except ValueError as error:
            messages.append(str(error))
    dist.barrier()  # the group still works
    return messages


def unpicklable(rank: Rank):
    """A result that cannot travel."""
    return threading.Lock()


@record
def main() -> None:
    """``group ...``: join and add up, twice; ``raise N``: rank N raises the second time; ``spawn FOLDER``: hang."""
    what, *arguments = sys.argv[1:]
    if what == "spawn":
        spawn(hang, 2, arguments[0])
        return
    for again in range(2):  # leaving and joining again
        with joined(timeout_s=60) as rank:
            total, _ = add_up(rank, 10)
            line = json.dumps([rank.rank, rank.local_rank, rank.world_size, total.item(), *arguments])
            sys.stdout.write(line + "\n")  # at once: ranks share the pipe, and torchrun's Python does not buffer
            sys.stdout.flush()
            if what == "raise" and rank.rank == int(arguments[0]) and again:
                raise ArithmeticError(f"rank {rank.rank} cannot go on")
            dist.barrier()


if __name__ == "__main__":
    main()
