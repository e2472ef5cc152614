"""What `benchmarks/bench_simulators.py` makes of its measurements; the GPUs themselves are elsewhere."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import pytest

BENCHMARKS = Path(__file__).resolve().parent.parent / "benchmarks"


@pytest.fixture(autouse=True)
def bench(monkeypatch: pytest.MonkeyPatch) -> Any:
    pytest.importorskip("torch", reason="needs torch on the host")
    monkeypatch.syspath_prepend(str(BENCHMARKS))  # pyright: ignore[reportUnknownMemberType]
    return importlib.import_module("bench_simulators")


U0, U1 = "GPU-0", "GPU-1"


def rank(number: int, uuid: str, **changes: Any) -> dict[str, Any]:
    rounds = [{"running": [number], "ms": 2.0}, {"running": [0, 1], "ms": 2.1},
              {"running": [number], "ms": 1.0}, {"running": [0, 1], "ms": 1.02}]  # fmt: skip
    return {"rank": number, "pid": 10 + number, "worker_pid": 20 + number, "planned": uuid,
            "reported": uuid, "learner": uuid, "rounds": rounds, **changes}  # fmt: skip


def test_each_rank_runs_alone_and_with_others_twice(bench: Any) -> None:
    schedule = bench.simulator_rank.schedule
    assert schedule(2) == 2 * [[0], [1], [0, 1]]
    assert schedule(8)[8:11] == [[0, 1], [0, 1, 2, 3], list(range(8))]


def test_throughput_takes_the_better_round_and_judges_the_slowdown(bench: Any) -> None:
    found = bench.throughput([rank(0, U0), rank(1, U1)], 1000)
    assert found["slower_together"] == {0: 0.02, 1: 0.02} and found["within_goal"]
    assert found["env_steps_per_s"] == {1: 1_000_000, 2: round(2 * 1_000_000 / 1.02)}
    assert found["parallel_efficiency"] == {1: 1.0, 2: 0.9804}
    slow = rank(1, U1)
    slow["rounds"] = [{"running": [1], "ms": 1.0}, {"running": [0, 1], "ms": 1.5}]
    assert not bench.throughput([rank(0, U0), slow], 1000)["within_goal"]


def test_a_rank_elsewhere_is_wrong_by_report_learner_or_nvml(bench: Any) -> None:
    seen, placement = {U0: [10, 20], U1: [11, 21]}, bench.placement
    assert placement.judge_running(rank(0, U0), seen) == []
    assert placement.judge_running(rank(0, U0, reported=U1), seen)
    assert placement.judge_running(rank(0, U0, learner=U1), seen)
    assert placement.judge_running(rank(0, U0), {U0: [10], U1: [20]})


def test_a_page_shows_what_was_wrong(bench: Any) -> None:
    placement = bench.placement
    ranks = [
        placement.public(rank(n, u), {U0: [10, 20], U1: [11, 21]}) for n, u in enumerate((U0, U1))
    ]
    facts: dict[str, Any] = {
        "simulator": "mjwarp", "scene": "humanoid29", "rank_envs": 1000,
        "gpus": [{"uuid": U0, "name": "A"}],
        "ranks": {"as_it_should_be": False, "wrong": ["two ranks are on one GPU"], "ranks": ranks,
                  "throughput": {}},
        "hand_over": [{"num_envs": 8, "decimation": 1, "out_ms": 1.5, "in_ms": 1.0, "out_over_in": 1.5}],
    }  # fmt: skip
    page = bench.markdown(facts)
    assert "**Wrong**: ['two ranks are on one GPU']" in page
    assert "| 8 | 1 | 1.0 | 1.5 | 1.5 |" in page
