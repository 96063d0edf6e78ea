"""Where is the roofline's knee? Measured as ``experiments/leaks/roofline_knee.py`` says."""

from cs336_systems.experiments.leaks.roofline_knee import NAME, main
from cs336_systems.report.console import exit_with

if __name__ == "__main__":
    exit_with(NAME, main)
