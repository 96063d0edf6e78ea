"""What a measurement stands on: clock, memory meter, processes and ranks, sweeps, rows, provenance."""
