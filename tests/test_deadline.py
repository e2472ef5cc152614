"""Deadlines: one limit that nested waits share, on a clock that nobody sets."""

from __future__ import annotations

import math
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from outboard.ipc.deadline import Deadline


class Clock:
    def __init__(self) -> None:
        self.now_ns = 5_000_000_000


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(time, "monotonic_ns", lambda: clock.now_ns)
    return clock


def test_a_deadline_counts_down(clock: Clock) -> None:
    deadline = Deadline(2.0)
    clock.now_ns += 500_000_000
    assert deadline.remaining_s() == pytest.approx(1.5)
    assert not deadline.expired()


def test_a_deadline_expires_at_its_time(clock: Clock) -> None:
    deadline = Deadline(2.0)
    clock.now_ns += 2_000_000_000
    assert deadline.expired()


def test_what_remains_is_never_negative(clock: Clock) -> None:
    deadline = Deadline(2.0)
    clock.now_ns += 9_000_000_000
    assert deadline.remaining_s() == 0.0
    assert deadline.poll_ms() == 0


@pytest.mark.parametrize("seconds", [0.0, -1.0])
def test_no_time_at_all_is_expired(clock: Clock, seconds: float) -> None:
    assert Deadline(seconds).expired()


def test_never_never_comes(clock: Clock) -> None:
    deadline = Deadline(math.inf)
    clock.now_ns = 1 << 61
    assert not deadline.expired()
    assert deadline.remaining_s() == math.inf
    assert deadline.poll_ms() == 10_000


def test_a_poll_never_ends_before_the_deadline(clock: Clock) -> None:
    # Rounded down, the last millisecond would be a loop without sleep.
    deadline = Deadline(0.0101)
    assert deadline.poll_ms() == 11


def test_the_wall_clock_is_not_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse() -> float:
        raise AssertionError("the wall clock was asked")

    monkeypatch.setattr(time, "time", refuse)
    monkeypatch.setattr(time, "time_ns", refuse)
    deadline = Deadline(1.0)
    assert 0 < deadline.remaining_s() <= 1.0 and not deadline.expired()


@settings(deadline=None)
@given(st.floats(0, 1e9))
def test_a_poll_lasts_ten_seconds_at_most(seconds: float) -> None:
    assert 0 <= Deadline(seconds).poll_ms() <= 10_000
