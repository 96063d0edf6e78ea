"""Freezes what the fork server has imported, so that the garbage collector of forked processes skips it; imported last.

A full collection writes to every object that it visits, and so copies all pages shared with the server: in the middle
of some step, 18,250 of them in 0.27 s (profiles/log/2026-11-25.md).
"""

import gc

gc.collect()
gc.freeze()
