"""Where are the FLOPs, and where goes the time? Measured as ``experiments/leaks/flops_against_time.py`` says."""

from cs336_systems.experiments.leaks.flops_against_time import NAME, main
from cs336_systems.report.console import exit_with

if __name__ == "__main__":
    exit_with(NAME, main)
