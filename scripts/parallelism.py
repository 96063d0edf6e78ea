"""Questions about training on many devices, answered by arithmetic: see --help."""

import sys

from cs336_systems.experiments.parallelism.questions import main

if __name__ == "__main__":
    sys.exit(main())
