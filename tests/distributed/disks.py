"""Disks that are full, and processes that die in the middle of writing."""

import os
import resource
import sys
from contextlib import contextmanager

CHANGES = ("open", "os.rename", "os.mkdir", "os.remove", "os.rmdir", "shutil.rmtree")
"""Audited events that change the disk."""


class Killed(BaseException):
    pass


class Death:
    """From now on the process is killed at every change to the disk but the first ``n_left``; syncs are left out."""

    def __init__(self):
        self.n_left = float("inf")
        sys.addaudithook(self._kill)
        os.fsync = lambda descriptor: None  # slow, and only a power cut would tell

    def _kill(self, event, args):
        if event in CHANGES:
            self.n_left -= 1
            if self.n_left < 0:  # and whatever the dead one would still do
                raise Killed

    @contextmanager
    def after(self, n_changes):
        self.n_left = n_changes
        try:
            yield
        finally:
            self.n_left = float("inf")


@contextmanager
def full_disk(n_bytes):
    """No file can grow beyond so many bytes, which fails as on a disk that is full, in other words."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (n_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
