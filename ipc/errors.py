"""Whose fault it is, in which phase, and what to do next: the error classes and their one report.

`ipc` raises these without a report: it knows neither processes nor logs. The host adds the report
on the way out (`backends/backend.py`), once; the first cause is never replaced by a later one.
"""

from dataclasses import dataclass
from typing import Optional, Tuple


@dataclass(frozen=True)
class ErrorReport:
    """The circumstances of an error. Every part is known to the host alone."""

    phase: str
    simulator: str = ""
    rank: Optional[int] = None
    pid: Optional[int] = None
    exit: str = ""  # "exit code 3", "SIGKILL", "" while the process lives
    interpreter: str = ""
    device: str = ""  # the device plan in words
    log_path: str = ""
    log_tail: Tuple[str, ...] = ()  # last lines of the worker's log

    def text(self) -> str:
        rows = [
            ("phase", self.phase),
            ("simulator", self.simulator),
            ("rank", "" if self.rank is None else str(self.rank)),
            ("worker pid", "" if self.pid is None else str(self.pid)),
            ("worker exit", self.exit),
            ("interpreter", self.interpreter),
            ("device plan", self.device),
            ("worker log", self.log_path),
        ]
        lines = [f"  {name}: {value}" for name, value in rows if value]
        if self.log_tail:
            lines.append("  last lines of the worker's log:")
            lines.extend("    | " + line for line in self.log_tail)
        return "\n".join(lines)


class OutboardError(Exception):
    """Base of every error of this library. `report` is None where no worker was involved yet."""

    def __init__(self, message: str, report: Optional[ErrorReport] = None) -> None:
        super().__init__(message)
        self.message = message
        self.report = report

    def __str__(self) -> str:
        return self.message if self.report is None else self.message + "\n" + self.report.text()


class UsageError(OutboardError, ValueError):
    """The caller's fault: an argument, or a call in the wrong state. Nothing was sent."""


class SceneError(OutboardError):
    """The model's fault: it is missing, does not compile, or asks for what cannot be simulated."""


class DevicePlanError(OutboardError):
    """The launcher's or configuration's fault: the GPU of this rank cannot be told for certain."""


class DeviceMismatchError(OutboardError):
    """The simulator is not on the planned device. The worker was killed."""


class ProtocolError(OutboardError):
    """The far side broke the protocol (or is another version of it)."""


class WorkerLaunchError(OutboardError):
    """The worker's interpreter could not be started, or lacks what a worker needs."""


class WorkerFailed(OutboardError):
    """The worker reported an exception; `remote_traceback` is its text."""

    remote_type: str = ""
    remote_traceback: str = ""

    def __str__(self) -> str:
        text = super().__str__()
        if self.remote_traceback:
            text += "\n  traceback in the worker:\n" + self.remote_traceback.rstrip()
        return text


class WorkerDied(OutboardError):
    """The worker's process is gone without a BYE."""


class WorkerTimeout(OutboardError):
    """The worker lives and is silent."""


class PeerGone(Exception):
    """Internal: the other end of the channel or bell is gone. Each side says it in its own words."""


class DeadlinePassed(Exception):
    """Internal: a wait ran out of time. The caller knows what it waited for and says so."""
