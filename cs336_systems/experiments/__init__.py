"""One file per benchmark: its options, table and figure; a second file (``*_measure.py``) may hold the measuring."""
