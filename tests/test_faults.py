"""The fault matrix: every fault in every phase, with its exact error and its bound, and nothing left behind.

OUTBOARD_WRITE_RESULTS=1 python -m pytest tests/test_faults.py    also writes benchmarks/results/faults.md
"""

from __future__ import annotations

import os
import re
import select
import statistics
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from faults import FAULTS, MOMENTS, Expected, Fault, Moment, NotApplicable, after_close, silent
from hosts import ROOT
from outboard.backends import (
    FakeBackend,
    OutboardError,
    WorkerDied,
    WorkerLaunchError,
    handshake,
    process,
)
from outboard.ipc.states import Phase

CTRL = np.zeros((2, 4), np.float32)
SHORT_S = 1.0  # the deadline that a silent worker is waited for
LONG_S = 60.0  # no other may be near its deadline, however busy the machine is
OLD = ("this Python", "Python 3.8")
PAIRS = [(fault, moment) for fault in FAULTS for moment in MOMENTS]


@dataclass(frozen=True)
class Lived:
    """What became of one worker."""

    fault: Fault
    moment: Moment
    expected: Expected
    error: OutboardError | None
    pid: int
    detected_s: (
        float | None
    )  # from the kernel's word of the death, else from the strike, to the error
    close_s: float
    log_kept: bool

    def wrong(self) -> list[str]:
        """What is not as expected, in words."""
        found = list(self._wrong())
        return [f"{self.fault.name} in {self.moment.name}: {words}" for words in found]

    def _wrong(self) -> Iterator[str]:
        expected, error = self.expected, self.error
        if type(error) is not (expected.error or type(None)):
            yield f"{type(error).__name__} ({error}) instead of {expected.error}"
        elif error is not None:
            if not re.search(expected.text, error.message):
                yield f"it says {error.message!r}, not {expected.text!r}"
            if error.report is None or error.report.phase != expected.phase:
                yield f"the report's phase is {error.report and error.report.phase}"
            if error.report is None or error.report.pid != self.pid:
                yield f"the report's pid is {error.report and error.report.pid}, not {self.pid}"
        bound_s = expected.bound_s + (SHORT_S if expected.silent else 0.0)
        if error is not None and (self.detected_s is None or self.detected_s > bound_s):
            yield f"seen after {self.detected_s} s; the bound is {bound_s} s"
        if self.close_s > bound_s:
            yield f"close() took {self.close_s:.2f} s; the bound is {bound_s} s"
        if error is None and self.log_kept is expected.well:
            yield "it {} well".format("did not leave" if expected.well else "left")
        if _exists(self.pid):
            yield f"something of process group {self.pid} is still there"


def _exists(group: int) -> bool:
    """Waits a moment: what a worker started is not ours to reap once it is dead."""
    end = time.monotonic() + 2.0
    while time.monotonic() < end:
        try:
            os.killpg(group, 0)
        except ProcessLookupError:
            return False
        time.sleep(0.01)
    return True


class Deaths:
    """When the kernel reported the death of each worker: a pidfd of our own for each, and one thread."""

    def __init__(self) -> None:
        self.poll = select.epoll()
        self.at_ns: dict[int, int] = {}
        self.pids: dict[int, int] = {}
        self.started: dict[str, int] = {}  # interpreter path -> pid
        self.started_ns: dict[int, int] = {}
        self.ended = False
        self.thread = threading.Thread(target=self._run)
        self.thread.start()

    def watch(self, worker: Any) -> None:
        fd = os.pidfd_open(worker.pid)
        self.pids[fd] = worker.pid
        self.started[worker.command.python] = worker.pid
        self.started_ns[worker.pid] = time.monotonic_ns()
        self.poll.register(fd, select.EPOLLIN)

    def _run(self) -> None:
        while not self.ended or self.pids:
            for fd, _ in self.poll.poll(0.2):
                self.at_ns[self.pids.pop(fd)] = time.monotonic_ns()
                self.poll.unregister(fd)  # a process that is being forked may hold a copy
                os.close(fd)

    def close(self) -> None:
        self.ended = True
        self.thread.join()
        self.poll.close()


@pytest.fixture
def deaths(monkeypatch: pytest.MonkeyPatch) -> Iterator[Deaths]:
    observer = Deaths()
    honest: Callable[..., None] = getattr(process.WorkerProcess, "_start")  # noqa: B009

    def start(worker: Any, *arguments: Any) -> None:
        honest(worker, *arguments)
        observer.watch(worker)

    monkeypatch.setattr(process.WorkerProcess, "_start", start)
    yield observer
    observer.close()


class Host(FakeBackend):
    """`fake`, with deadlines for the phase in which the worker falls silent."""

    traits = replace(FakeBackend.traits, init_s=LONG_S, init_hard_s=LONG_S)


class Impatient(Host):
    traits = replace(FakeBackend.traits, init_s=SHORT_S, init_hard_s=LONG_S, close_s=SHORT_S)


def live(
    fault: Fault, moment: Moment, expected: Expected, python: str, folder: Path, deaths: Deaths
) -> Lived:
    """One life with one fault: open, step, where, close."""
    folder.mkdir()
    interpreter, stamp = folder / "faulty-python", folder / "stamp"
    interpreter.write_text(
        f'#!/bin/sh\ncase "$*" in *__main__*) ;; *) exec {python} "$@";; esac\nexec {python} -E -s -B '
        f'{ROOT / "tests" / "faulty_worker.py"} "{fault.name}" "{moment.name}" {stamp} -- "$@"\n'
    )
    interpreter.chmod(0o755)
    kind = Impatient if expected.silent else Host
    step_s = SHORT_S if expected.silent and moment.noticed in (Phase.BUSY, Phase.FAILED) else LONG_S
    sim = error = None
    log, seen_ns = "", 0
    try:
        sim = kind(device="cpu", num_envs=2, worker_python=interpreter, step_timeout_s=step_s)
        log = sim.report["log_path"]
        sim.step(CTRL)
        sim.where()
    except OutboardError as caught:
        seen_ns = time.monotonic_ns()
        error = caught.with_traceback(None)  # whose frames would keep the block
        error.__context__ = None
    started = time.monotonic()
    if sim is not None:
        sim.close()
    close_s = time.monotonic() - started
    pid = deaths.started[str(interpreter)]
    struck_ns = int(stamp.read_text())  # it did strike, or this says that it did not
    since_ns = struck_ns
    if by_itself(error):
        since_ns = min(deaths.at_ns.get(pid, struck_ns), seen_ns)
    elif expected.silent and moment.phase is Phase.SPAWNED:
        since_ns = deaths.started_ns[pid]  # that deadline runs from the start of the process
    kept = error is None and os.path.exists(log)
    if kept:
        os.unlink(log)
    detected_s = (seen_ns - since_ns) * 1e-9 if error is not None else None
    return Lived(fault, moment, expected, error, pid, detected_s, close_s, kept)


def by_itself(error: OutboardError | None) -> bool:
    """Whether the worker was dead before the host killed what was left of it."""
    died = isinstance(error, (WorkerDied, WorkerLaunchError))
    return died and "closed the control channel" not in error.message


def run(
    pairs: list[tuple[Fault, Moment]], python: str, folder: Path, deaths: Deaths, what: str,
    monkeypatch: pytest.MonkeyPatch,
) -> list[str]:  # fmt: skip
    """All pairs that are possible, several at once; what was wrong with them. Deadlines are this
    process's, so silent workers have a turn of their own."""
    lives = [
        (fault, moment, expected)
        for fault, moment in pairs
        if isinstance(expected := fault.expected(moment), Expected)
    ]
    results: list[Lived] = []
    for quiet in (False, True):
        turn = [life for life in lives if life[2].silent is quiet]
        with monkeypatch.context() as patch, ThreadPoolExecutor(_threads()) as pool:
            if quiet and any(moment.phase is Phase.SPAWNED for _, moment, _ in turn):
                patch.setattr(handshake, "HELLO_S", SHORT_S)
            if quiet:
                patch.setattr(handshake, "ATTACH_S", SHORT_S)
            jobs = [
                pool.submit(live, *life, python, folder / f"{len(results)}-{number}", deaths)
                for number, life in enumerate(turn)
            ]
        results += [job.result() for job in jobs]
    RESULTS.setdefault(what, []).extend(results)
    return [words for lived in results for words in lived.wrong()]


def _threads() -> int:
    return min(4, os.cpu_count() or 2)


RESULTS: dict[str, list[Lived]] = {}


# -- the list itself ---------------------------------------------------------------------------------


def test_every_phase_of_the_table_is_a_moment() -> None:
    assert {moment.phase for moment in MOMENTS} == set(Phase)


def test_every_pair_is_expected_or_says_why_it_cannot_be() -> None:
    for fault, moment in PAIRS:
        answer = fault.expected(moment)
        assert isinstance(answer, Expected) or answer.why


def test_no_fault_is_possible_nowhere() -> None:
    assert all(any(isinstance(f.expected(m), Expected) for m in MOMENTS) for f in FAULTS)


# -- the matrix --------------------------------------------------------------------------------------


def diagonal(shift: int) -> list[tuple[Fault, Moment]]:
    """Each fault in one moment, and by the shift another one each time."""
    chosen: list[tuple[Fault, Moment]] = []
    for index, fault in enumerate(FAULTS):
        possible = [m for m in MOMENTS if isinstance(fault.expected(m), Expected)]
        chosen.append((fault, possible[(index + shift) % len(possible)]))
    return chosen


@pytest.mark.parametrize(("fault", "moment"), diagonal(0), ids=lambda value: value.name)
def test_a_fault_gets_its_error_within_its_bound(
    fault: Fault, moment: Moment, tmp_path: Path, deaths: Deaths, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert not run([(fault, moment)], sys.executable, tmp_path, deaths, "diagonal", monkeypatch)


@pytest.mark.slow
@pytest.mark.timeout(240)
@pytest.mark.parametrize("moment", MOMENTS, ids=lambda moment: moment.name)
def test_every_fault_gets_its_error_within_its_bound_in(
    moment: Moment, worker_python: str, tmp_path: Path, deaths: Deaths,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    what = OLD[worker_python != sys.executable]
    pairs = [(fault, moment) for fault in FAULTS]
    assert not run(pairs, worker_python, tmp_path, deaths, what, monkeypatch)


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_each_phase_has_a_fault_on_the_newest_python(
    tmp_path: Path, deaths: Deaths, monkeypatch: pytest.MonkeyPatch
) -> None:
    newest = ROOT / ".venv-313" / "bin" / "python"
    if not os.access(newest, os.X_OK):
        pytest.skip(f"no Python 3.13 environment at {newest}; `make test-pythons` makes it")
    pairs: list[tuple[Fault, Moment]] = []
    for index, moment in enumerate(MOMENTS):
        possible = [f for f in FAULTS if isinstance(f.expected(moment), Expected)]
        pairs.append((possible[index % len(possible)], moment))
    assert not run(pairs, str(newest), tmp_path, deaths, "Python 3.13", monkeypatch)


# -- the guards, seen failing ------------------------------------------------------------------------


def an_outcome(**changes: Any) -> Lived:
    fault, moment = FAULTS[0], Moment(Phase.INIT)
    expected = fault.expected(moment)
    assert isinstance(expected, Expected)
    return replace(
        Lived(fault, moment, replace(expected, error=None), None, 1 << 30, None, 0.0, False),
        **changes,
    )


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"error": OutboardError("another"), "detected_s": 0.0}, "OutboardError"),
        ({"close_s": 1.5}, r"close\(\) took 1.50 s"),
        ({"log_kept": True}, "did not leave well"),
        ({"pid": os.getpgid(0)}, "is still there"),
    ],
    ids=lambda value: "",
)  # fmt: skip
def test_what_is_not_as_expected_is_said(changes: dict[str, Any], words: str) -> None:
    [said] = an_outcome(**changes).wrong()
    assert re.search(words, said)


def test_what_is_as_expected_is_not_mentioned() -> None:
    assert not an_outcome().wrong()


# -- results -------------------------------------------------------------------------------------------


@pytest.fixture(scope="module", autouse=True)
def results() -> Iterator[None]:
    """Writes the table when it is asked for, from what the tests of this run measured."""
    yield
    if os.environ.get("OUTBOARD_WRITE_RESULTS"):
        path = ROOT / "benchmarks" / "results" / "faults.md"
        path.write_text(table(RESULTS))


def table(results: dict[str, list[Lived]]) -> str:
    lives = [lived for group in results.values() for lived in group]
    bad = [words for lived in lives for words in lived.wrong()]
    lines = [
        "# Faults: what was done to a worker, and what the caller got",
        "",
        f"Written by `OUTBOARD_WRITE_RESULTS=1 python -m pytest tests/test_faults.py` on "
        f"{time.strftime('%Y-%m-%d', time.gmtime())}, {os.cpu_count()} cores, "
        f"load {os.getloadavg()[0]:.1f}: {len(lives)} workers, "
        f"{len(lives) - len({w.partition(':')[0] for w in bad})} as expected, {len(bad)} deviations. "
        "Nothing was left behind, or the run would have failed.",
        "",
        "`=` every call returned; `close` nothing but close() was left, and it was bounded. Milliseconds: "
        "the median time to the error, from the kernel's report of the death (seen on a pidfd by another "
        "thread of the same process), or from the strike where the worker lived on. A silent worker is "
        f"waited for {SHORT_S:.0f} s, which is subtracted; the wait may begin before the strike. "
        "A worker that dies in SPAWNED is explained by asking its interpreter, which takes the time.",
    ]
    lines += [f"- **deviation**: {words}" for words in bad]
    for what in sorted(results, key=lambda name: (name not in OLD, name)):
        group = results[what]
        lines += ["", f"## {what}: {len(group)} workers", ""]
        lines += ["| fault | " + " | ".join(m.name for m in MOMENTS) + " | median |"]
        lines += ["|---" * (len(MOMENTS) + 2) + "|"]
        for fault in FAULTS:
            own = [lived for lived in group if lived.fault is fault]
            if own:
                cells = " | ".join(_cell(fault, moment, own) for moment in MOMENTS)
                lines += [f"| {fault.name} | {cells} | {_median(own)} |"]
    lines += ["", "## What the faults are", ""]
    lines += [f"- **{fault.name}**: {fault.does}" for fault in FAULTS]
    lines += ["", "## Not applicable", ""]
    for fault in FAULTS:
        why: dict[str, list[str]] = {}
        for moment in MOMENTS:
            answer = fault.expected(moment)
            if isinstance(answer, NotApplicable):
                why.setdefault(answer.why, []).append(moment.name)
        lines += [f"- {fault.name} in {'; '.join(names)}: {text}" for text, names in why.items()]
    return "\n".join(lines) + "\n"


def _cell(fault: Fault, moment: Moment, own: list[Lived]) -> str:
    if isinstance(fault.expected(moment), NotApplicable):
        return "n/a"
    here = [lived for lived in own if lived.moment == moment]
    if not here:
        return ""
    errors = sorted({type(lived.error).__name__ for lived in here if lived.error})
    if not errors:
        return "close" if after_close(moment) else "="
    return f"{', '.join(errors)} {_median(here)}"


def _median(lives: list[Lived]) -> str:
    """Without what is explained at length, and, for what falls silent, without its deadline."""
    times = [
        lived.detected_s - (SHORT_S if lived.expected.silent else 0.0)
        for lived in lives
        if lived.detected_s is not None and (lived.expected.bound_s < 5 or len(lives) == 1)
    ]
    return f"{1e3 * statistics.median(times):.1f} ms" if times else ""


def test_the_table_shows_every_fault_and_every_reason() -> None:
    text = table({"this Python": [an_outcome()]})
    for fault in FAULTS:
        assert f"**{fault.name}**" in text
    assert "only Ready carries it" in text
    assert silent(Moment(Phase.INIT))
