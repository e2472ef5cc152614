"""Where an Isaac Gym installation is: one table, the first row that says something wins.

An installation has a *home* with `isaacgym/python` (the package) and `miniconda3/envs/hsgym` (Python 3.8).
Variables of UniSim and UniLab are read too, so an installation made by their scripts works as it is.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from ..ipc.errors import WorkerLaunchError

HOME, PYTHON, LIBRARIES = "home", "interpreter", "libraries"

DEFAULT_HOME = "~/.cache/unisim/isaacgym"  # documented by UniSim, filled by its set-up script
PACKAGE = "isaacgym/python"
INTERPRETER = "miniconda3/envs/hsgym/bin/python3.8"


@dataclass(frozen=True)
class Row:
    """A variable, what it names, and for whom it was made."""

    variable: str
    names: str  # HOME, PYTHON or LIBRARIES
    origin: str
    notice: str = ""  # one line to log when it is used


TABLE = (
    Row("OUTBOARD_ISAACGYM_HOME", HOME, "Outboard"),
    Row("UNISIM_ISAACGYM_PYTHON", PYTHON, "UniSim"),
    Row("UNILAB_BENCHMARK_HSGYM_PYTHON", PYTHON, "UniLab's benchmarks"),
    Row("UNILAB_BENCHMARK_HSGYM_LIB", LIBRARIES, "UniLab's benchmarks"),
    Row("UNISIM_ISAACGYM_HOME", HOME, "UniSim"),
    Row("UNILAB_BENCHMARK_HOLOSOMA_DEPS", HOME, "UniLab's benchmarks"),
    Row(
        "UNILAB_ISAACGYM_HOME",
        HOME,
        "UniLab, legacy",
        "UNILAB_ISAACGYM_HOME is a legacy name; set OUTBOARD_ISAACGYM_HOME to the same folder",
    ),
)


@dataclass(frozen=True)
class Installation:
    """What was found. `why` says for each part which row of the table gave it."""

    python: str
    package_root: (
        str  # goes to the end of the worker's sys.path; "" when only an interpreter is known
    )
    libraries: tuple[
        str, ...
    ]  # for LD_LIBRARY_PATH: libpython3.8 and a libstdc++ that is new enough
    why: tuple[str, ...]
    notices: tuple[str, ...] = ()

    def variables(self, host: Mapping[str, str], user: Mapping[str, str]) -> dict[str, str]:
        """PATH and LD_LIBRARY_PATH of the worker alone; what the user adds comes first. The loader reads
        LD_LIBRARY_PATH once, so it must stand there at exec."""
        paths = (os.path.dirname(self.python), user.get("PATH", host.get("PATH", "")))
        libraries = (user.get("LD_LIBRARY_PATH", ""), *self.libraries)
        return {
            "PATH": ":".join(part for part in paths if part),
            "LD_LIBRARY_PATH": ":".join(part for part in libraries if part),
        }


def find(env: Mapping[str, str], python: str | None = None) -> Installation:
    """The installation that the table names. `python`: the caller's own interpreter, before all rows.

    WorkerLaunchError when there is none, with every place that was looked at.
    """
    given = [(row, os.path.expanduser(env[row.variable])) for row in TABLE if env.get(row.variable)]
    why: list[str] = []
    homes = [(row.variable, value) for row, value in given if row.names == HOME]
    homes.append(("the default", os.path.expanduser(DEFAULT_HOME)))
    by, home = homes[0]
    package_root = os.path.join(home, PACKAGE)
    interpreter = _first(given, python, why)
    if not interpreter:
        interpreter = os.path.join(home, INTERPRETER)
        why.append(f"interpreter: {interpreter} ({by})")
    if not os.access(interpreter, os.X_OK):
        raise WorkerLaunchError(_not_found(interpreter, why[-1]))
    if os.path.isdir(package_root):
        why.append(f"package: {package_root} ({by})")
    else:
        package_root = ""
        why.append(f"package: the interpreter's own ({home} has no {PACKAGE})")
    libraries = _libraries(given, interpreter, why)
    used = {row.variable: row for row, _ in given}
    notices = tuple(row.notice for name, row in used.items() if row.notice and name == by)
    return Installation(interpreter, package_root, libraries, tuple(why), notices)


def _first(given: list[tuple[Row, str]], python: str | None, why: list[str]) -> str:
    """The interpreter, when the caller or a row names one before any home does; else ""."""
    if python:
        why.append(f"interpreter: {python} (worker_python=)")
        return _path(python)
    for row, value in given:
        if row.names == PYTHON:
            why.append(f"interpreter: {value} ({row.variable})")
            return _path(value)
        # Outboard's own home is whole: the names of others that follow do not mix into it. A home of
        # theirs is completed by their own variables, which stand before it.
        if row.names == HOME:
            return ""
    return ""


def _path(python: str) -> str:
    """Of an interpreter that is given by path or by a name in PATH; the link is kept, not followed."""
    return os.path.abspath(shutil.which(python) or python)


def _libraries(given: list[tuple[Row, str]], interpreter: str, why: list[str]) -> tuple[str, ...]:
    for row, value in given:
        if row.names == LIBRARIES:
            why.append(f"libraries: {value} ({row.variable})")
            return (value,)
        if row.names == HOME:
            break
    beside = str(Path(interpreter).parent.parent / "lib")
    why.append(f"libraries: {beside} (beside the interpreter)")
    return (beside,) if os.path.isdir(beside) else ()


def _not_found(interpreter: str, why: str) -> str:
    names = ", ".join(row.variable for row in TABLE)
    return (
        f"there is no Isaac Gym interpreter at {interpreter} ({why.rpartition('(')[2].rstrip(')')}). Set "
        f"OUTBOARD_ISAACGYM_HOME to the folder with {PACKAGE} and {INTERPRETER}, or run: outboard setup "
        f"isaacgym. Looked at, in this order: {names}, {DEFAULT_HOME}"
    )
