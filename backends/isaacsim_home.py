"""Where an Isaac Sim installation is, and what kind: one table, the first row that says something wins.

Three kinds are known: a home as UniSim's script makes it (`venv/bin/python` and a checkout
`IsaacLab/source`), any environment into which `isaacsim` and `isaaclab` were installed with pip, and
NVIDIA's binary install, whose `python.sh` sets the paths that its Python needs.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass

from ..ipc.errors import WorkerLaunchError

HOME, PYTHON = "home", "interpreter"

DEFAULT_HOME = "~/.cache/unisim/isaacsim"  # documented by UniSim
# In a home, the first that is there.
INTERPRETERS = ("venv/bin/python", "bin/python", "python.sh")
CHECKOUT = "IsaacLab/source/isaaclab"


@dataclass(frozen=True)
class Row:
    """A variable, what it names, and for whom it was made."""

    variable: str
    names: str  # HOME or PYTHON
    origin: str


TABLE = (
    Row("OUTBOARD_ISAACSIM_PYTHON", PYTHON, "Outboard"),
    Row("OUTBOARD_ISAACSIM_HOME", HOME, "Outboard"),
    Row("UNISIM_ISAACSIM_PYTHON", PYTHON, "UniSim"),
    Row("UNISIM_ISAACSIM_HOME", HOME, "UniSim"),
)


@dataclass(frozen=True)
class Installation:
    """What was found. `why` says for each part which row of the table gave it."""

    python: str
    package_root: str  # goes to the end of the worker's sys.path; "" when isaaclab is installed
    why: tuple[str, ...]

    @property
    def binary(self) -> bool:
        """A wrapper script that passes its paths in PYTHONPATH, so they must not be ignored."""
        return os.path.basename(self.python) == "python.sh"

    @property
    def python_flags(self) -> tuple[str, ...]:
        own = () if self.binary else ("-E",)
        return ("-u", *own, "-s", "-X", "faulthandler")


def find(env: Mapping[str, str], python: str | None = None) -> Installation:
    """The installation that the table names. `python`: the caller's own interpreter, before all rows.

    WorkerLaunchError when there is none, with every place that was looked at.
    """
    given = [(row, os.path.expanduser(env[row.variable])) for row in TABLE if env.get(row.variable)]
    home, by = os.path.expanduser(DEFAULT_HOME), "the default"
    for row, value in given:
        if row.names == HOME:
            home, by = value, row.variable
            break
    why: list[str] = []
    interpreter = _interpreter(given, python, home, by, why)
    if not os.access(interpreter, os.X_OK):
        raise WorkerLaunchError(_not_found(interpreter, why[-1]))
    package_root = os.path.join(home, CHECKOUT)
    # A checkout beside another interpreter than its own is no part of that one's installation.
    if os.path.isdir(package_root) and interpreter.startswith(home + os.sep):
        why.append(f"package: {package_root} ({by})")
    else:
        package_root = ""
        why.append("package: the interpreter's own")
    return Installation(interpreter, package_root, tuple(why))


def _interpreter(
    given: list[tuple[Row, str]], python: str | None, home: str, by: str, why: list[str]
) -> str:
    if python:
        why.append(f"interpreter: {python} (worker_python=)")
        return os.path.abspath(shutil.which(python) or python)
    for row, value in given:
        if row.names == PYTHON:
            why.append(f"interpreter: {value} ({row.variable})")
            return os.path.abspath(shutil.which(value) or value)
        break  # a home stands before the rows after it
    there = (os.path.join(home, name) for name in INTERPRETERS)
    fallback = os.path.join(home, INTERPRETERS[0])
    interpreter = next((path for path in there if os.access(path, os.X_OK)), fallback)
    why.append(f"interpreter: {interpreter} ({by})")
    return interpreter


def _not_found(interpreter: str, why: str) -> str:
    names = ", ".join(row.variable for row in TABLE)
    return (
        f"there is no Isaac Sim interpreter at {interpreter} ({why.rpartition('(')[2].rstrip(')')}). Set "
        "OUTBOARD_ISAACSIM_PYTHON to the Python of an environment with isaacsim and isaaclab, or "
        f"OUTBOARD_ISAACSIM_HOME to a folder with one of {', '.join(INTERPRETERS)}. Looked at, in this "
        f"order: {names}, {DEFAULT_HOME}"
    )
