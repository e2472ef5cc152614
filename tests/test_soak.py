"""The soak of benchmarks/soak.py for two minutes, and its counters seen to notice what they are there for."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "benchmarks"))

import soak  # pyright: ignore[reportMissingImports]

TWO_MINUTES_S = 120.0


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_two_minutes_of_kills_and_restarts_lose_no_step_and_leave_nothing(
    logs_may_stay: object,
) -> None:
    result = soak.soak(TWO_MINUTES_S)
    assert result.wrong() == []
    assert result.kills > 10
    assert all(count.acknowledged > 100 for count in result.counts)


def test_ten_seconds_of_it_hold_too(logs_may_stay: object) -> None:
    assert soak.soak(10.0, seed=1).wrong() == []


def test_the_counters_notice_what_they_are_there_for() -> None:
    bad = soak.Count(asked=5, acknowledged=4, checksum=1, twin_checksum=2)
    wrong = soak.Result(1.0, 0, [bad], ["processes: 4711"], 65 << 20).wrong()
    assert [words.split(":")[0] for words in wrong] == [
        "left behind", "worker 0", "worker 0", "the host grew by 65 MiB",
    ]  # fmt: skip


def test_a_state_that_is_not_the_twins_ends_the_soak() -> None:
    pair = soak.Pair(0, soak.random.Random(0))
    try:
        pair.turn()
        pair.twin.fields["qpos"][0, 0] += 1
        with pytest.raises(SystemExit, match="the state is another one"):
            pair.compare()
    finally:
        pair.close()
