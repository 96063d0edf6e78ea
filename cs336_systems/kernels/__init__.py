"""Fused Triton and Gluon kernels, each in a file with its formula, and the helpers that launch them and move memory.

``launching.py`` launches kernels, ``copy_engine.py`` serves Hopper's kernels, ``host_memory.py`` pins host memory and
copies from and to it. Callers import from the files, because kernels need Triton, which not every machine has;
``linear_cross_entropy.py``, ``quantize_reference.py`` and ``host_memory.py`` do not.
"""
