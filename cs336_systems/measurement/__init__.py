"""What a step does cost: clocks, memory, ceilings, provenance, rows, and sweeps over cells."""
