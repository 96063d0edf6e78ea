"""When does the device wait for the host? Measured as ``experiments/leaks/launch_overhead.py`` says."""

from cs336_systems.experiments.leaks.launch_overhead import NAME, main
from cs336_systems.report.console import exit_with

if __name__ == "__main__":
    exit_with(NAME, main)
