"""Workers of the process group's tests, and a program that tests start by itself, under a launcher or not."""

import json
import os
import signal
import sys
import time

import torch
import torch.distributed as dist
from torch.distributed.elastic.multiprocessing.errors import record

from cs336_systems.distributed.process_group import Rank, alone, check_same_across_ranks, joined


def add_up(rank: Rank, start):
    """The sum over ranks of ``start`` plus the rank's number, and who this rank was."""
    total = torch.tensor([start + rank.rank], device=rank.device)
    dist.all_reduce(total)
    return total.item(), rank


def add_up_alone(rank: Rank):
    """The sums of a group of one and, afterwards, of all ranks; twice."""
    sums = []
    for _ in range(2):
        with alone(rank) as own:
            mine = add_up(own, 10 + rank.rank)
        sums.append((mine, add_up(rank, 10)))
    return sums


def compare(rank: Rank):
    """What ``check_same_across_ranks`` says to values that are equal, and that differ on the last rank."""
    odd = rank.rank == rank.world_size - 1
    messages = []
    check_same_across_ranks([(4, 4), (4,)], "parameter shapes")
    for value in ([(4, 4), (5,) if odd else (4,)], [1] * (3 + odd), "bf16" if odd else "fp32"):
        try:
            check_same_across_ranks(value, "values")
        except ValueError as error:
            messages.append(str(error))
    dist.barrier()  # the group still works
    return messages


def work_together(rank: Rank):
    """Who these ranks are, what a launcher would have left for them, and what the functions above return."""
    variables = {name: os.environ[name] for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE")}
    return add_up(rank, 10), torch.get_num_threads(), variables, add_up_alone(rank), compare(rank)


def fail_alone(rank: Rank):
    """Rank 1 raises while it is alone; rank 0 comes back."""
    with alone(rank):
        if rank.rank == 1:
            raise ArithmeticError("nobody to add to")


def hang(rank: Rank):
    """After having been alone, rank 0 waits in a barrier for rank 1, which never comes.

    In another group, whose time-out is short, once both have started.
    """
    dist.barrier()
    dist.destroy_process_group()
    with joined(timeout_s=3) as again:
        with alone(again):
            pass
        if rank.rank == 1:
            time.sleep(300)
        dist.barrier()


@record
def main() -> None:
    """Join and add up, twice; the arguments are ``group`` and any, or ``raise N``: rank N is killed, then raises.

    With ``stop``, each rank says that it is there, and how many SIGTERMs it has had by a second after the first.
    """
    what, *arguments = sys.argv[1:]
    if what == "stop":
        heard: list[int] = []
        signal.signal(signal.SIGTERM, lambda number, _: heard.append(number))
        with joined() as rank:
            for _ in range(2):
                sys.stdout.write(json.dumps([rank.rank, len(heard)]) + "\n")
                sys.stdout.flush()
                while not heard:
                    time.sleep(0.1)
                time.sleep(1)
        return
    for again in range(2):  # leaving and joining again
        with joined() as rank:
            chosen = what == "raise" and rank.rank == int(arguments[0])
            if chosen and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
                os.kill(os.getpid(), signal.SIGKILL)
            total, _ = add_up(rank, 10)
            line = json.dumps([rank.rank, rank.local_rank, rank.world_size, total, *arguments])
            sys.stdout.write(line + "\n")  # at once: ranks share the pipe, and torchrun's Python does not buffer
            sys.stdout.flush()
            if chosen and again:
                raise ArithmeticError(f"rank {rank.rank} cannot go on")
            dist.barrier()


if __name__ == "__main__":
    main()
