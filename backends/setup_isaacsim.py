"""`outboard setup isaacsim`: makes an Isaac Sim installation usable as it is.

What a worker needs beside it goes into a folder of Outboard's, with that Python's own pip; versions are
compared. Nothing is written into the installation, and the licence is not accepted for anybody.
"""

from __future__ import annotations

import os
import shlex

from rich.text import Text

from ..ipc.errors import WorkerLaunchError
from . import isaacsim_check, isaacsim_home, setup_worker, terminal

# Isaac Lab and Kit's extensions are built for numpy 1; a newer one of ours would be imported before theirs.
PINS = {"numpy": "numpy<2"}


def run(python: str, dry_run: bool) -> int:
    """The command; 0 when a worker can start there. WorkerLaunchError says what is missing."""
    found = isaacsim_home.find(os.environ, python or None)
    for line in found.why:
        _say(line)
    seen = isaacsim_check.check(found, os.environ)
    _say(", ".join([f"Python {seen.version or '?'}", *(f"{n} {v}" for n, v in seen.found.items())]))
    if seen.problems:
        raise WorkerLaunchError(f"{found.python} " + "; it ".join(seen.problems))
    setup_worker.run(found.python, dry_run, PINS)
    if not os.environ.get(isaacsim_check.LICENCE):
        _say(
            f"not set: {isaacsim_check.LICENCE}. Read NVIDIA's Omniverse licence and set it to YES; "
            "Outboard does not"
        )
    _say("ready. Where it is not found by itself, put this into your shell's start-up file:")
    _say(f"export {isaacsim_home.TABLE[0].variable}={shlex.quote(found.python)}")
    return 0


def _say(words: str) -> None:
    terminal.console().print(Text(words), soft_wrap=True)
