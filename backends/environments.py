"""`outboard setup NAME` for a simulator that has an environment of its own: makes it, or completes it.

A simulator's packages may be gigabytes that no training environment should hold. So it gets a virtual
environment in a folder of ours, and nothing else is written to. A file that is written last says that it is
complete and from which recipe: what was interrupted is made again, a newer recipe is installed over it.
"""

from __future__ import annotations

import json
import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from ..ipc.errors import WorkerLaunchError
from . import interpreters, setup_worker, terminal
from .setup_worker import say
from .traits import Recipe, Traits

# Gigabytes over a slow line.
_PIP_S = 3600.0
_VENV_S = 120.0
_GB = 1_000_000_000


def run(traits: Traits, python: str | None, dry_run: bool) -> int:
    """The command; 0 when the simulator's workers can run at the end. WorkerLaunchError.

    python: an interpreter that has the simulator already and only gets what a worker needs, or one from
    which the environment is made; None: the first suitable one here."""
    recipe, console = traits.environment, terminal.console()
    assert recipe is not None, "a simulator without an environment of its own"
    if python is not None and _has(traits.packages, python):
        say(console, f"{python} has {', '.join(traits.packages)} already")
        return setup_worker.run(python, dry_run)
    folder = interpreters.environment_folder(recipe.name)
    if _complete(recipe, traits):
        say(console, f"{folder} is complete: {', '.join(recipe.requirements)}. Nothing to do.")
        return 0
    base = _base(recipe, python)
    if dry_run:
        for command in (_venv(base, folder), _pip(recipe)):
            say(console, f"would run: {shlex.join(command)}")
        return 0
    say(console, f"making {folder} from {base}, about {recipe.size_gb:g} GB")
    with console.status("installing"):
        make(recipe, traits.packages, base)
    say(console, f"done. Opening {recipe.name} finds it; {recipe.variable} would come before it")
    return 0


def make(recipe: Recipe, packages: tuple[str, ...], base: str) -> None:
    """The environment, complete or not at all; `packages` are what must import there at the end."""
    folder = interpreters.environment_folder(recipe.name)
    folder.parent.mkdir(parents=True, exist_ok=True)
    free_gb = shutil.disk_usage(folder.parent).free / _GB
    if free_gb < recipe.size_gb:
        raise WorkerLaunchError(
            f"{folder.parent} has {free_gb:.1f} GB free and {recipe.size_gb:g} GB are needed; free some, or "
            "set XDG_CACHE_HOME to a folder on another disk"
        )
    with setup_worker.alone(folder.parent):
        if interpreters.environment_python(recipe) is None:
            shutil.rmtree(folder, ignore_errors=True)  # what an interrupted run left
            _run_venv(_venv(base, folder))
        setup_worker.install(_pip(recipe), _PIP_S)
        tried = interpreters.inspect(str(_python(recipe)), interpreters.WORKER_PACKAGES + packages)
        if not tried.good:
            raise WorkerLaunchError(
                f"what pip installed in {folder} fails: {setup_worker.why(tried)}"
            )
        interpreters.environment_stamp(recipe.name).write_text(_stamp(recipe))


def _complete(recipe: Recipe, traits: Traits) -> bool:
    stamp = interpreters.environment_stamp(recipe.name)
    if interpreters.environment_python(recipe) is None or stamp.read_text() != _stamp(recipe):
        return False
    return _has(interpreters.WORKER_PACKAGES + traits.packages, str(_python(recipe)))


def _has(packages: tuple[str, ...], python: str) -> bool:
    return interpreters.inspect(interpreters.locate(python), packages).good


def _stamp(recipe: Recipe) -> str:
    return json.dumps({"requirements": recipe.requirements}) + "\n"


def _python(recipe: Recipe) -> Path:
    return interpreters.environment_folder(recipe.name) / "bin" / "python"


# -- the Python below it -------------------------------------------------------------------------------


def _base(recipe: Recipe, python: str | None) -> str:
    """The interpreter to make the environment from. WorkerLaunchError says what was looked for."""
    if python is not None:
        seen = setup_worker.require_python(interpreters.inspect(interpreters.locate(python), ()))
        if not _fits(recipe, seen.version):
            version = ".".join(map(str, seen.version))
            raise WorkerLaunchError(f"{python} is Python {version}; {_range(recipe)}")
        return seen.python
    for candidate in _candidates(recipe):
        seen = interpreters.inspect(candidate, ())
        if not seen.problem and _fits(recipe, seen.version):
            return candidate
    raise WorkerLaunchError(f"{_range(recipe)}, and none was found: pass --python PATH")


def _candidates(recipe: Recipe) -> Iterator[str]:
    """This Python first, then those of the search path, the newest that fits before older ones."""
    yield sys.executable
    for minor in range(recipe.newest[1], recipe.oldest[1] - 1, -1):
        found = shutil.which(f"python3.{minor}")
        if found:
            yield os.path.abspath(found)


def _fits(recipe: Recipe, version: tuple[int, ...]) -> bool:
    return recipe.oldest <= version[:2] <= recipe.newest


def _range(recipe: Recipe) -> str:
    oldest, newest = (".".join(map(str, version)) for version in (recipe.oldest, recipe.newest))
    return f"{recipe.name} needs Python {oldest} to {newest}"


# -- commands ------------------------------------------------------------------------------------------


def _venv(base: str, folder: Path) -> list[str]:
    return [base, "-m", "venv", str(folder)]


def _run_venv(command: list[str]) -> None:
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, stdin=subprocess.DEVNULL, timeout=_VENV_S,
            check=False,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        raise WorkerLaunchError(f"{shlex.join(command)} did not end in {_VENV_S:.0f} s") from None
    if done.returncode != 0:
        words = (done.stderr or done.stdout).strip()
        raise WorkerLaunchError(
            f"{shlex.join(command)} failed: {words}\nWith --python another Python can be named"
        )


def _pip(recipe: Recipe) -> list[str]:
    pip = [str(_python(recipe)), "-m", "pip", "install", *setup_worker.PIP_FLAGS]
    return [*pip, *recipe.requirements, *interpreters.WORKER_PACKAGES]
