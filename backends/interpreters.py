"""Where a simulator's Python is, what it must contain, and how to say what is missing."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from ..ipc.errors import WorkerLaunchError
from .traits import Recipe, Traits

# What `ipc` imports in the foreign interpreter. The newest of each that still has a Python 3.8 build is
# found by that interpreter's own pip.
WORKER_PACKAGES = ("numpy", "msgpack", "posix_ipc")
OLDEST = (3, 8)
_PROBE_S = 30.0

_PROBE = """
import json, sys
found, missing = {}, {}
sys.path.extend(json.loads(sys.argv[1]))
for name in json.loads(sys.argv[2]):
    try:
        module = __import__(name)
        version = getattr(module, "__version__", None) or getattr(module, "version", "")
        found[name] = ".".join(map(str, version)) if isinstance(version, tuple) else str(version)
    except Exception as error:
        missing[name] = "%s: %s" % (type(error).__name__, error)
print("\\n" + json.dumps({"version": list(sys.version_info[:3]), "prefix": sys.prefix,
                         "found": found, "missing": missing}))
"""


def cache_folder() -> Path:
    """Ours under the user's cache: worker sites, model exports, kernel caches."""
    base = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    return Path(base) / "outboard"


def site_folder(python: str) -> Path:
    """The worker site of an interpreter: packages of ours, outside its environment."""
    real = os.path.realpath(shutil.which(python) or python)
    return cache_folder() / "site" / hashlib.sha256(real.encode()).hexdigest()[:16]


def environment_folder(name: str) -> Path:
    """Where `outboard setup NAME` makes a simulator's own environment."""
    return cache_folder() / "environments" / name


def environment_stamp(name: str) -> Path:
    """Written when everything is in that environment: without it, it is half made."""
    return environment_folder(name) / ".outboard-complete"


def environment_python(recipe: Recipe) -> Path | None:
    """The interpreter of that environment, where it is complete."""
    python = environment_folder(recipe.name) / "bin" / "python"
    there = environment_stamp(recipe.name).is_file() and os.access(python, os.X_OK)
    return python if there else None


@dataclass(frozen=True)
class Inspection:
    """What an interpreter said about itself."""

    python: str
    version: tuple[int, ...]  # () when it did not answer
    found: dict[str, str]
    missing: dict[str, str]  # package -> why
    problem: str  # "" or why it cannot be asked at all

    @property
    def good(self) -> bool:
        return not (self.problem or self.missing) and self.version >= OLDEST


def locate(python: str | None) -> str:
    """The absolute path of `python` (default: this one). WorkerLaunchError when there is none."""
    if python is None:
        return sys.executable
    text = os.fspath(python)
    found = shutil.which(text)
    if found is None:
        there = os.path.exists(text)
        raise WorkerLaunchError(
            f"{text} {'is not executable' if there else 'does not exist'}: worker_python= (or "
            "--worker-python) takes the path of a Python interpreter"
        )
    return os.path.abspath(found)


def locate_for(traits: Traits, python: str | None) -> str:
    """The interpreter of a simulator's workers: `python` where the caller names one, else what the
    simulator's variable names, else its own environment, else this Python. WorkerLaunchError."""
    recipe = traits.environment
    if python is not None or recipe is None:
        return locate(python)
    named = os.environ.get(recipe.variable)
    if named:
        try:
            return locate(named)
        except WorkerLaunchError as error:
            raise WorkerLaunchError(f"{recipe.variable}: {error.message}") from None
    made = environment_python(recipe)
    return locate(None if made is None else str(made))


def inspect(
    python: str, packages: tuple[str, ...] = WORKER_PACKAGES, site: Path | None = None
) -> Inspection:
    """Ask an interpreter what it is and has, its worker site (or `site`) included. Never raises: the
    answer says what is wrong."""
    folders = [str(site_folder(python) if site is None else site)]
    argv = [python, "-E", "-s", "-B", "-c", _PROBE, json.dumps(folders), json.dumps(list(packages))]
    said = ""
    try:
        done = subprocess.run(
            argv, capture_output=True, text=True, timeout=_PROBE_S, check=False,
            stdin=subprocess.DEVNULL,
            env={k: v for k, v in os.environ.items() if k in ("PATH", "HOME", "LD_LIBRARY_PATH")},
        )  # fmt: skip
        said = (done.stderr or done.stdout).strip()
        answer = json.loads(done.stdout.rsplit("\n", 2)[-2])
    except subprocess.TimeoutExpired:
        return Inspection(python, (), {}, {}, f"did not answer within {_PROBE_S:.0f} s")
    except OSError as error:
        return Inspection(python, (), {}, {}, f"cannot be run: {error.strerror}")
    except (ValueError, IndexError):
        last = said.splitlines()[-1] if said else "it said nothing"
        return Inspection(
            python,
            (),
            {},
            {},
            f"is no Python interpreter: {last}",
        )
    version = tuple(answer["version"])
    return Inspection(python, version, answer["found"], answer["missing"], "")


def setup_line(python: str, word: str = "worker") -> str:
    return f"outboard setup {word} --python {python}"


def explain(python: str, traits: Traits) -> str:
    """Why a worker that never spoke could not start here; "" when the interpreter looks good."""
    seen = inspect(python, WORKER_PACKAGES)
    if seen.problem:
        return f"{python} {seen.problem}"
    if seen.version < OLDEST:
        version = ".".join(map(str, seen.version))
        return f"{python} is Python {version}; a worker needs {OLDEST[0]}.{OLDEST[1]} or newer"
    if seen.missing:
        return (
            f"{python} lacks {', '.join(seen.missing)}. Run: {setup_line(python)}\n"
            "(it fills a folder of Outboard's; that environment itself is not written to)"
        )
    return ""
