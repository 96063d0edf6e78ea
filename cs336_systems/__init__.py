"""Understanding and speeding up Transformer training: what it should cost, what it does cost, and why the two differ.

``docs/architecture.md`` lists the folders, in the order in which they import each other.
"""
