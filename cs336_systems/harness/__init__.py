"""The tools that measurements rely on: clock, memory meter, processes and ranks, sweeps, rows, provenance."""
