"""How good a step has to be: each goal as a number over the medians of one run."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from step_cells import HOGS, ONE_CORE, PYTHON, Cell


class Missing(Exception):
    """A row that a goal needs was not measured."""


class Numbers:
    """Medians over the runs of a cell; quiet runs only, where there are some."""

    QUIET = 0.06  # of the machine's time that others may have taken in a run

    def __init__(self, runs: Mapping[str, list[dict[str, Any]]]) -> None:
        self._runs = runs
        self.busy = False  # a number was asked for of which there is no quiet run

    def runs(self, key: str) -> list[dict[str, Any]]:
        every = self._runs.get(key, [])
        return [run for run in every if run["foreign"] < self.QUIET] or every

    def of(self, cell: Cell, what: str = "median_us") -> float:
        runs = self.runs(cell.key)
        if not runs:
            raise Missing(cell.key)
        self.busy |= all(run["foreign"] >= self.QUIET for run in runs)
        return float(np.median([run[what] for run in runs]))


@dataclass(frozen=True)
class Goal:
    text: str
    limit: float
    unit: str
    value: Callable[[Numbers], float]


def _ratio(ours: Cell, other: Cell) -> Callable[[Numbers], float]:
    return lambda numbers: numbers.of(ours) / numbers.of(other)


def _median(cell: Cell, what: str = "median_us") -> Callable[[Numbers], float]:
    return lambda numbers: numbers.of(cell, what)


def _cpu(cell: Cell) -> Callable[[Numbers], float]:
    return lambda numbers: 100 * numbers.of(cell, "host_cpu")


def _working(work_us: int, limit_us: float) -> tuple[Goal, ...]:
    steady, varying = (
        Cell("ours", work_us=work_us),
        Cell("ours", work_us=work_us, vary=0.2),
    )
    name = f"a worker that computes {work_us // 1000} ms"
    return (
        Goal(f"{name}: added", limit_us, "us", _median(steady)),
        Goal(f"{name}: of one core spent waiting", 15, "%", _cpu(steady)),
        Goal(f"{name} +-20 %: added", 2 * limit_us, "us", _median(varying)),
    )


_EMPTY = Cell("ours")
GOALS = (
    Goal("empty step, tiny payload (the facts' machine: floor 0.12 us)", 2, "us", _median(_EMPTY)),
    Goal("empty step, tiny payload, of the C floor", 17, "x", _ratio(_EMPTY, Cell("C spin"))),
    Goal("... of PufferLib's", 0.5, "x", _ratio(_EMPTY, Cell("PufferLib"))),
    Goal("... of unisim-core's", 1 / 40, "x", _ratio(_EMPTY, Cell("unisim-core"))),
    Goal(
        "4096 environments, of the same copies in C, unchecked",
        1.15,
        "x",
        _ratio(Cell("ours, unchecked", 4096), Cell("C spin", 4096)),
    ),
    Goal(
        "4096 environments, of the same copies in C, default check",
        1.5,
        "x",
        _ratio(Cell("ours", 4096), Cell("C spin", 4096)),
    ),
    *_working(1000, 15),
    *_working(5000, 50),
    Goal(
        "both on one core, of plain semaphores",
        2.5,
        "x",
        _ratio(Cell("ours", where=ONE_CORE), Cell("semaphores", where=ONE_CORE)),
    ),
    Goal("beside a busy Python thread", 15, "us", _median(Cell("ours", where=PYTHON))),
    Goal(
        "a worker that wants both cores, of the same with a sleeping host",
        1.05,
        "x",
        _ratio(Cell("ours", two_cores=True), Cell("semaphores", two_cores=True)),
    ),
    Goal(
        "two foreign hogs, of plain semaphores (no goal was set; never bad)",
        2.5,
        "x",
        _ratio(Cell("ours", where=HOGS), Cell("semaphores", where=HOGS)),
    ),
)


def judge(runs: Mapping[str, list[dict[str, Any]]]) -> list[tuple[Goal, float, str]]:
    """Each goal of which the rows are there, with its value here and the verdict. Beside foreign load the
    scheduler is measured and not the schemes: then nothing is decided, for us or against us."""
    out: list[tuple[Goal, float, str]] = []
    for goal in GOALS:
        numbers = Numbers(runs)
        try:
            value = goal.value(numbers)
        except Missing:
            continue
        verdict = "met" if value <= goal.limit else "MISSED"
        out.append((goal, value, "undecided: no quiet run" if numbers.busy else verdict))
    return out
