"""Imported last by the tests' fork server: what it has imported is no garbage that each process must look into."""

import gc

gc.collect()
gc.freeze()
