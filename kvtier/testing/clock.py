"""FakeClock: time that passes when a test says so."""

__all__ = ["FakeClock"]


class FakeClock:
    """A monotonic clock in nanoseconds; call it where ``time.monotonic_ns`` would be called."""

    def __init__(self, now_ns: int = 1_000_000_000) -> None:
        self.now_ns = now_ns

    def __call__(self) -> int:
        """Return the time."""
        return self.now_ns

    def advance(self, elapsed_ns: int) -> int:
        """Let time pass and return what it is then."""
        assert elapsed_ns >= 0, "time does not run backwards"
        self.now_ns += elapsed_ns
        return self.now_ns
