"""A training step under device and host capacities: planned, scheduled as data, executed."""
