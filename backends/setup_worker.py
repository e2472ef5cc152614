"""`outboard setup worker`: gives a foreign Python what a worker needs, in a folder of ours.

The environment itself is never written to: the packages go into the *worker site* of that interpreter,
which workers append to their `sys.path`, so what the environment has of its own wins.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import platform
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Generator, Mapping, Sequence
from pathlib import Path

from rich.console import Console
from rich.text import Text

from ..ipc.errors import WorkerLaunchError
from . import interpreters, terminal
from .interpreters import Inspection

# A download of numpy over a slow line, or a compilation of posix_ipc.
_PIP_S = 600.0
PIP_FLAGS = ("--quiet", "--no-input", "--disable-pip-version-check", "--no-warn-script-location")
# The user's pip settings (index, proxies, certificates) hold, but for those that contradict --target.
_PIP_ENV = {"PIP_USER": "0", "PIP_REQUIRE_VIRTUALENV": "0", "PYTHONDONTWRITEBYTECODE": "1"}


def run(python: str, dry_run: bool, pins: Mapping[str, str] | None = None) -> int:
    """The command; 0 when that interpreter can run workers at the end. WorkerLaunchError.

    pins: package -> what pip is asked for in its place, where a simulator allows some versions only.
    """
    console = terminal.console()
    python = interpreters.locate(python)
    seen = require_python(interpreters.inspect(python))
    version = ".".join(map(str, seen.version))
    if not seen.missing:
        found = ", ".join(f"{name} {number}" for name, number in seen.found.items())
        say(console, f"Python {version} has all a worker needs: {found}. Nothing to do.")
        return 0
    missing, pins = tuple(seen.missing), pins or {}
    wanted = [pins.get(name, name) for name in missing]
    site = interpreters.site_folder(python)
    say(console, f"Python {version} lacks {', '.join(missing)}; they go into {site}")
    if dry_run:
        say(console, f"would run: {shlex.join(_pip(seen, wanted, site))}")
        return 0
    with console.status("installing"):
        fill(seen, missing, site, wanted)
    done = interpreters.inspect(python)
    if not done.good:
        raise WorkerLaunchError(f"{python} still lacks {why(done)} after the set-up of {site}")
    installed = ", ".join(f"{name} {done.found[name]}" for name in missing)
    say(console, f"done: {installed}. Use it with --worker-python {python}")
    return 0


def fill(seen: Inspection, missing: Sequence[str], site: Path, wanted: Sequence[str] = ()) -> None:
    """Install `missing` (pip's words for it: `wanted`) into `site`: under a temporary name, tried out there,
    then renamed."""
    site.parent.mkdir(parents=True, exist_ok=True)
    with alone(site.parent), tempfile.TemporaryDirectory(
        prefix=f".{site.name}-", dir=site.parent
    ) as work:  # fmt: skip
        fresh = Path(work) / "new"
        install(_pip(seen, wanted or missing, fresh))
        tried = interpreters.inspect(seen.python, tuple(missing), fresh)
        if not tried.good:
            raise WorkerLaunchError(f"what pip installed for {seen.python} fails: {why(tried)}")
        if not site.exists():
            fresh.rename(site)
            return
        # Another environment of the same interpreter filled it before; workers may be using it, so
        # what is there and good stays in place.
        for entry in sorted(fresh.iterdir()):
            if (site / entry.name).exists():
                (site / entry.name).rename(Path(work) / entry.name)
            entry.rename(site / entry.name)


def require_python(seen: Inspection) -> Inspection:
    if seen.problem:
        raise WorkerLaunchError(f"{seen.python} {seen.problem}")
    if seen.version < interpreters.OLDEST:
        version, oldest = (".".join(map(str, v)) for v in (seen.version, interpreters.OLDEST))
        raise WorkerLaunchError(
            f"{seen.python} is Python {version}; a worker needs {oldest} or newer"
        )
    return seen


def _pip(seen: Inspection, packages: Sequence[str], target: Path) -> list[str]:
    """The pip command: that Python's own pip where it has one, else ours, told what to install for."""
    if _has_pip(seen.python, "-E", "-s", "-B"):
        command = [seen.python, "-E", "-s", "-B", "-m", "pip", "install", *PIP_FLAGS]
        return [*command, "--target", str(target), *packages]
    if _has_pip(sys.executable):
        command = [sys.executable, "-m", "pip", "install", *PIP_FLAGS, *_tags(seen.version)]
        return [*command, "--only-binary", ":all:", "--target", str(target), *packages]
    raise WorkerLaunchError(
        f"neither {seen.python} nor this Python has pip. Give one of them pip "
        f"({sys.executable} -m ensurepip), or run with a pip of your own: pip --python "
        f"{seen.python} install --target {target} {' '.join(packages)}"
    )


def _has_pip(python: str, *flags: str) -> bool:
    command = [python, *flags, "-m", "pip", "--version"]
    done = subprocess.run(command, capture_output=True, stdin=subprocess.DEVNULL, check=False)
    return done.returncode == 0


def _tags(version: tuple[int, ...]) -> list[str]:
    """What our pip must be told of a Python that is not its own: version and platforms."""
    machine = platform.machine()
    platforms = [f"manylinux2014_{machine}", f"manylinux2010_{machine}", f"manylinux1_{machine}"]
    library, glibc = platform.libc_ver()
    if library == "glibc":
        minor = int(glibc.split(".")[1])
        platforms = [f"manylinux_2_{n}_{machine}" for n in range(minor, 4, -1)] + platforms
    tags = ["--implementation", "cp", "--python-version", ".".join(map(str, version[:2]))]
    for name in (*platforms, f"linux_{machine}"):
        tags += ["--platform", name]
    return tags


def install(command: Sequence[str], limit_s: float = _PIP_S) -> None:
    """Run pip; WorkerLaunchError with its last words, or when `limit_s` is over."""
    environment = {name: v for name, v in os.environ.items() if not name.startswith("PYTHON")}
    try:
        done = subprocess.run(
            command, env={**environment, **_PIP_ENV}, capture_output=True, text=True,
            stdin=subprocess.DEVNULL, timeout=limit_s, check=False,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        raise WorkerLaunchError(f"pip did not end within {limit_s:.0f} s") from None
    if done.returncode != 0:
        words = "\n".join((done.stderr or done.stdout).strip().splitlines()[-8:])
        raise WorkerLaunchError(f"pip failed: {shlex.join(command)}\n{words}")


def why(seen: Inspection) -> str:
    return seen.problem or "; ".join(f"{name} ({why})" for name, why in seen.missing.items())


@contextlib.contextmanager
def alone(folder: Path) -> Generator[None, None, None]:
    """One set-up at a time. The kernel frees the lock when its holder dies."""
    with open(folder / ".lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def say(console: Console, words: str) -> None:
    console.print(Text(words), soft_wrap=True)
