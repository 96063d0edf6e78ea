"""Does a matrix product care about its data? Measured as ``experiments/leaks/matmul_data.py`` says."""

from cs336_systems.experiments.leaks.matmul_data import NAME, main
from cs336_systems.report.console import exit_with

if __name__ == "__main__":
    exit_with(NAME, main)
