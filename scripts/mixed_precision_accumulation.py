"""What does rounding do to a long sum? ``cs336_systems.experiments.precision.accumulation`` says how."""

from cs336_systems.experiments.precision.accumulation import main
from cs336_systems.report.command_line import exit_with

if __name__ == "__main__":
    exit_with("mixed_precision_accumulation", main)
