"""What does rounding do to a long sum? ``cs336_systems.experiments.precision.accumulation`` says how."""

import sys

from cs336_systems.experiments.precision.accumulation import main

if __name__ == "__main__":
    sys.exit(main())
