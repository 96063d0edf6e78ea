"""Where time and memory go: ranges, traces, allocator snapshots, what a block keeps for backward."""
