"""What does autocast do to every dtype of a model? ``cs336_systems.experiments.precision.autocast`` says how."""

import sys

from cs336_systems.experiments.precision.autocast import main

if __name__ == "__main__":
    sys.exit(main())
