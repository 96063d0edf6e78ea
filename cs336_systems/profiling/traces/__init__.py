"""Recordings of what ran when, from nsys or torch.profiler: two readers, one pair of tables, one set of questions."""
