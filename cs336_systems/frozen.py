"""Imported last by the fork server: Python's collector passes over what it has imported, in all processes forked then.

A full collection writes to every object that it looks at, and so copies all pages that the process shares with the
server: in the middle of some step, 18,250 of them in 0.27 s (profiles/distributed.md).
"""

import gc

gc.collect()
gc.freeze()
