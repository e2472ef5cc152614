"""Monotonic deadlines. The wall clock is never asked: it can be set. And time in which this process was
stopped does not count: the peer was perhaps stopped with us, and deserves its time."""

import math
import time
from typing import Callable, Optional, TypeVar

_T = TypeVar("_T")

_NEVER_NS = 1 << 62
# The longest nap that is taken at once: the shorter it is, the better a stop is told from it.
_NAP_MS = 500
# A nap that lasted this much longer than asked was not only a nap. No scheduler is that late; a stop by a
# person, a frozen container or a suspended machine is longer.
_STOPPED_S = 0.1


def counted_s(asked_s: float, took_s: float) -> float:
    """How much of a nap counts against the peer: all of it, or what was asked for when this process
    was stopped during the nap (or the wall clock was set back under a semaphore). The one rule,
    for the channel and for the bell."""
    return took_s if took_s <= asked_s + _STOPPED_S else asked_s


class Deadline:
    """A point on the monotonic clock; pass it down so that nested waits share one limit.

    within: an outer deadline, which comes first when it is nearer.
    """

    __slots__ = ("_within", "at_ns", "seconds")

    def __init__(self, seconds: float, within: "Optional[Deadline]" = None) -> None:
        self.seconds = seconds
        never = math.isinf(seconds)
        self.at_ns = _NEVER_NS if never else time.monotonic_ns() + int(seconds * 1e9)
        self._within = within
        if within is not None and within.at_ns < self.at_ns:
            self.at_ns, self.seconds = within.at_ns, within.seconds

    def remaining_s(self) -> float:
        """Seconds left, never negative; inf for a deadline that never comes."""
        if self.at_ns >= _NEVER_NS:
            return math.inf
        return max(0.0, (self.at_ns - time.monotonic_ns()) * 1e-9)

    def expired(self) -> bool:
        return time.monotonic_ns() >= self.at_ns

    def poll_ms(self) -> int:
        """The next nap: milliseconds rounded up, at most half a second at once (ten seconds for a
        deadline that never comes)."""
        remaining_s = self.remaining_s()
        return 10_000 if math.isinf(remaining_s) else min(_NAP_MS, math.ceil(remaining_s * 1e3))

    def nap(self, poll: Callable[[int], _T]) -> _T:
        """`poll(milliseconds)` for a part of what remains. What it lasted beyond `counted_s` moves
        the deadline, and the ones around it."""
        asked_ms, before_ns = self.poll_ms(), time.monotonic_ns()
        result = poll(asked_ms)
        took_s = (time.monotonic_ns() - before_ns) * 1e-9
        self._move(took_s - counted_s(asked_ms * 1e-3, took_s))
        return result

    def _move(self, seconds: float) -> None:
        if seconds > 0 and self.at_ns < _NEVER_NS:
            self.at_ns += int(seconds * 1e9)
        if self._within is not None:
            self._within._move(seconds)
