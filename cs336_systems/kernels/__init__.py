"""Fused Triton and Gluon kernels, each file beside the formula it computes, and what they and others stand on.

``launching.py`` launches kernels, ``copy_engine.py`` serves Hopper's kernels, ``host_memory.py`` is memory of the host
and copies from and to it. Callers import from the files, as those of kernels need Triton, which not every machine has;
``linear_cross_entropy.py``, ``quantize_reference.py`` and ``host_memory.py`` do not.
"""
