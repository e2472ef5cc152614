"""Monotonic deadlines. The wall clock is never asked: it can be set."""

import math
import time


class Deadline:
    """A point on the monotonic clock; pass it down so that nested waits share one limit."""

    __slots__ = ("at_ns", "seconds")

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        never = math.isinf(seconds)
        self.at_ns = (1 << 62) if never else time.monotonic_ns() + int(seconds * 1e9)

    def remaining_s(self) -> float:
        """Seconds left, never negative; inf for a deadline that never comes."""
        if self.at_ns >= 1 << 62:
            return math.inf
        return max(0.0, (self.at_ns - time.monotonic_ns()) * 1e-9)

    def expired(self) -> bool:
        return time.monotonic_ns() >= self.at_ns

    def poll_ms(self) -> int:
        """The same for `select.poll`: milliseconds rounded up, at most ten seconds at once."""
        return min(10_000, math.ceil(min(self.remaining_s(), 10.0) * 1e3))
