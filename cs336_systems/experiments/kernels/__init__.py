"""How fast is each fused kernel, against plain PyTorch, others' kernels and a copy?

A kernel takes two files and its name in the list ``cells.KERNELS``: ``cs336_systems/kernels/<name>.py`` computes;
``<name>.py`` in this folder says on what that is measured, beside which formula, and which bytes must move. Its one
function ``subject(cell, device)`` returns a ``measure.Subject``; see ``weighted_sum.py``. Others' kernels for the same
are in ``peers.py``, and in the table ``cells.PEERS``.
"""
