"""How the command line speaks: one console, one way to show an error, and what a signal means."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from types import FrameType
from typing import NoReturn

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from ..ipc.errors import OutboardError, UsageError, WorkerDied, WorkerFailed, WorkerTimeout

# Where the output is no terminal nobody says how wide it is; the tables are made for this width.
_PLAIN_WIDTH = 100
# Enough to hold the end of a traceback; the whole log is named beside it.
_LOG_LINES = 12


class Stopped(KeyboardInterrupt):
    """A signal asks this process to end. What is in flight is left as by a Ctrl-C."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number

    @property
    def exit_code(self) -> int:
        return 128 + self.number

    @property
    def name(self) -> str:
        return signal.Signals(self.number).name


def stop_on_signals() -> None:
    """SIGINT and SIGTERM raise Stopped, once: what comes after finds the closing under way.

    Set in so many words, because a shell starts background jobs with SIGINT ignored, and Python then
    installs no handler of its own.
    """
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, _stop)


def ignore_signals() -> None:
    """From here on the process ends by itself, within a time that is bounded."""
    for number in (signal.SIGINT, signal.SIGTERM):
        if signal.getsignal(number) is _stop:  # as a library this touches nobody's handlers
            signal.signal(number, signal.SIG_IGN)


def _stop(number: int, _frame: FrameType | None) -> NoReturn:
    ignore_signals()
    raise Stopped(number)


def console(*, stderr: bool = False) -> Console:
    """Plain words stay plain: numbers and paths are not painted."""
    stream = sys.stderr if stderr else sys.stdout
    width = None if stream.isatty() or "COLUMNS" in os.environ else _PLAIN_WIDTH
    return Console(stderr=stderr, highlight=False, width=width)


def table(*, title: str = "") -> Table:
    return Table(
        box=box.SIMPLE_HEAD,
        title=title or None,
        title_justify="left",
        title_style="bold",
        header_style="bold",
        pad_edge=False,
        padding=(0, 1, 0, 0),
    )


def short_path(path: str) -> str:
    """Relative to here or to the home folder, where that is shorter to read."""
    for base, sign in ((Path.cwd(), ""), (Path.home(), "~/")):
        if Path(path).is_relative_to(base):
            return sign + str(Path(path).relative_to(base))
    return path


def show_error(error: OutboardError) -> int:
    """One readable message on standard error; the exit code."""
    out = console(stderr=True)
    out.print(Text("error: ", style="bold red") + Text(error.message), soft_wrap=True)
    if error.report is not None:
        # Where the message explains it all, the worker's last lines would only repeat it.
        puzzling = isinstance(error, (WorkerDied, WorkerFailed, WorkerTimeout))
        head, found, tail = error.report.text().partition("  last lines of the worker's log:\n")
        out.print(Text(head.rstrip(), style="dim"), soft_wrap=True)
        if puzzling and found:
            lines = "\n".join(tail.splitlines()[-_LOG_LINES:])
            out.print(Text(found + lines, style="dim"), soft_wrap=True)
    return 2 if isinstance(error, UsageError) else 1
