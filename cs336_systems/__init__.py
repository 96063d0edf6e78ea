"""Understanding and speeding up Transformer training: what it should cost, what it does cost, and why the two differ.

The folders follow that sentence; a file imports only from the stages before its own:
``config, hardware -> costs -> model -> attention | kernels -> training -> measurement -> report -> benchmarks``.
"""
