"""The conformance kit: what any worker must do, ours or not, as checks that can be run against it.

    outcomes = run_kit(make_target(backend="mujoco", scene="arm7"))
    print_outcomes(outcomes)
    sys.exit(exit_code(outcomes))

Real worker processes throughout: the checks of the protocol talk to one over a raw channel, the others
through the public API. No pytest. Each check is a function in one of the files
imported below; its docstring is the rule.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
from collections.abc import Callable, Collection, Generator
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from ..ipc.errors import OutboardError
from . import (
    conformance_ends,
    conformance_forces,
    conformance_physics,
    conformance_protocol,
    conformance_published,
    conformance_state,
)
from .conformance_kit import (
    CHECKS,
    FAILED,
    HELD,
    SIMULATOR,
    SKIPPED,
    Bench,
    Broken,
    Check,
    NotApplicable,
    Outcome,
    Target,
    make_target,
)
from .events import LOG

__all__ = [
    "CHECKS",
    "FAILED",
    "HELD",
    "SKIPPED",
    "Outcome",
    "Target",
    "as_json",
    "exit_code",
    "make_target",
    "print_outcomes",
    "run_kit",
]

# Importing them fills CHECKS; this is the order in which they run.
_TABLES = (
    conformance_protocol,
    conformance_ends,
    conformance_state,
    conformance_published,
    conformance_physics,
    conformance_forces,
)


def run_kit(
    target: Target,
    *,
    groups: Collection[str] = (),
    only: Collection[str] = (),
    on_outcome: Callable[[Outcome], None] = lambda outcome: None,
) -> list[Outcome]:
    """Run the checks against `target`, all of them or those of `groups` or named in `only`.

    Never raises for what the target does: that is an outcome. When it does not open at all, the checks
    that need an open simulator are skipped, and `opens` has failed.
    """
    unknown = sorted(set(only) - set(CHECKS))
    if unknown:
        raise ValueError(f"no such check: {', '.join(unknown)}")
    order = [module.__name__ for module in _TABLES]
    chosen = [
        entry
        for entry in sorted(CHECKS.values(), key=lambda entry: order.index(entry.run.__module__))
        if (not groups or entry.group in groups) and (not only or entry.name in only)
    ]
    bench = Bench(target)
    outcomes: list[Outcome] = []
    try:
        with _quiet():
            closed = _opens(bench, on_outcome, outcomes)
            for entry in chosen:
                if closed and entry.group == SIMULATOR:
                    outcome = _outcome(entry, SKIPPED, "the simulator did not open")
                else:
                    outcome = _judge(entry, bench)
                outcomes.append(outcome)
                on_outcome(outcome)
    finally:
        bench.forget()
    return outcomes


def _opens(bench: Bench, on_outcome: Callable[[Outcome], None], outcomes: list[Outcome]) -> bool:
    """The check before all others. True when it failed."""

    def opens(bench: Bench) -> None:
        bench.sim  # noqa: B018 - opened, and kept for the checks to come

    entry = Check("opens", SIMULATOR, "The simulator opens with all fields that it offers.", opens)
    outcomes.append(_judge(entry, bench))
    on_outcome(outcomes[-1])
    return outcomes[-1].verdict != HELD


def _outcome(entry: Check, verdict: str, why: str = "") -> Outcome:
    return Outcome(entry.name, verdict, why, entry.rule, entry.group)


def _judge(entry: Check, bench: Bench) -> Outcome:
    try:
        entry.run(bench)
    except NotApplicable as reason:
        return _outcome(entry, SKIPPED, str(reason))
    except Broken as reason:
        return _outcome(entry, FAILED, str(reason))
    except OutboardError as error:
        bench.forget()
        return _outcome(entry, FAILED, f"{type(error).__name__}: {error.message}")
    except Exception as error:  # noqa: BLE001 - whatever a foreign worker provokes is an outcome
        bench.forget()
        return _outcome(entry, FAILED, f"{type(error).__name__}: {error}")
    return _outcome(entry, HELD)


@contextlib.contextmanager
def _quiet() -> Generator[None]:
    """Checks provoke what the library warns of: with a handler that drops it, nothing is printed; a
    caller's own handlers still get everything."""
    handler = logging.NullHandler()
    LOG.addHandler(handler)
    try:
        yield
    finally:
        LOG.removeHandler(handler)


# -- telling ----------------------------------------------------------------------------------------

_STYLE = {HELD: "green", FAILED: "bold red", SKIPPED: "yellow"}


def exit_code(outcomes: Collection[Outcome]) -> int:
    return int(any(outcome.verdict == FAILED for outcome in outcomes))


def tally(outcomes: Collection[Outcome]) -> dict[str, int]:
    """How many of each verdict. Skipped is not held."""
    return {
        verdict: sum(outcome.verdict == verdict for outcome in outcomes)
        for verdict in (HELD, FAILED, SKIPPED)
    }


def as_json(target: Target, outcomes: Collection[Outcome]) -> dict[str, Any]:
    """Plain data for `--json`."""
    return {
        "simulator": target.simulator or target.kind.simulator,
        "scene": target.scene,
        "device": str(target.plan),
        "python": target.worker_python or "",
        **tally(outcomes),
        "outcomes": [dataclasses.asdict(outcome) for outcome in outcomes],
    }


def print_outcomes(outcomes: Collection[Outcome], console: Console | None = None) -> None:
    """The table: what held, what did not and why, what does not apply and why."""
    console = console or Console()
    table = Table("check", "verdict", "why, or the rule", expand=False)
    for outcome in outcomes:
        why = Text(outcome.why)
        if outcome.verdict == FAILED:
            why.append(f"\nrule: {outcome.rule}", "dim")
        elif outcome.verdict == HELD:
            why = Text(outcome.rule, "dim")
        table.add_row(outcome.name, Text(outcome.verdict, _STYLE[outcome.verdict]), why)
    console.print(table)
    counts = tally(outcomes)
    console.print(", ".join(f"{count} {verdict}" for verdict, count in counts.items()))
