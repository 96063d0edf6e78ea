"""What does autocast do to every dtype of a model? ``cs336_systems.experiments.precision.autocast`` says how."""

from cs336_systems.experiments.precision.autocast import main
from cs336_systems.report.command_line import exit_with

if __name__ == "__main__":
    exit_with("autocast_dtypes", main)
