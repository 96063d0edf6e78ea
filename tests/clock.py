"""A clock for what is timed: seconds that a test decides, whatever else the machine does."""


class Clock:
    """The host's, which stands still but for ``sleep``; put in place of a module's ``time``."""

    now = 0.0

    def perf_counter(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds
