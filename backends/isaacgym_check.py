"""Does an Isaac Gym installation import, and if not, why: one table of symptoms, one text for each.

`outboard setup isaacgym` ends with this check and `outboard doctor` makes it; the table is used by both.
"""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from . import interpreters
from .isaacgym_home import Installation

# An import from a cold disk takes seconds; from a slow network disk, a minute.
_IMPORT_S = 120.0
LIBPYTHON = "libpython3.8.so.1.0"


@dataclass(frozen=True)
class Symptom:
    """A failure that is known: how it shows, and what is said about it."""

    name: str
    shows: str  # a regular expression on what was printed or raised
    words: str


SYMPTOMS = (
    Symptom(
        "corrupt tarball",
        r"[Nn]ot a gzip|CRC check failed|end-of-stream|invalid (block|stored|distance|code|literal)"
        r"|Error -[35] while decompressing|Incorrect length of data|unexpected end of data|truncated",
        "the tarball is damaged or incomplete: delete it and fetch it again, or pass --tarball with a good "
        "one",
    ),
    Symptom(
        "libstdc++ too old",
        r"GLIBCXX_[\d.]+'? not found",
        "the libstdc++ that was found is too old: the environment's lib folder must stand first in "
        "LD_LIBRARY_PATH and hold conda-forge's libstdcxx-ng",
    ),
    Symptom(
        "no libpython",
        r"libpython3\.\d+\.so[\w.]*: cannot open",
        "the shared library of Python 3.8 is not found: LD_LIBRARY_PATH must hold the environment's lib "
        "folder, with libpython3.8.so.1.0 in it",
    ),
    Symptom(
        "wrong Python",
        r"No gym module found",
        "this interpreter is not Python 3.6, 3.7 or 3.8; Isaac Gym has no build for another",
    ),
    Symptom(
        "no ninja",
        r"[Nn]inja is required|No such file or directory: '?ninja",
        "gymtorch is built at its first import and needs ninja: it must be in the environment, and the "
        "environment's bin folder in PATH",
    ),
    Symptom(
        "stale lock",
        r"torch_extensions\S*/lock\b|gymtorch/lock\b",
        "a build of gymtorch was killed and left its lock, for which torch waits for ever: delete that "
        "file",
    ),
    Symptom(
        "no libcuda",
        r"libcuda\.so|failed to preload CUDA",
        "the CUDA driver's library libcuda.so is not found: install the NVIDIA driver; under WSL it is "
        "only in /usr/lib/wsl/lib, which must stand in LD_LIBRARY_PATH",
    ),
    Symptom(
        "no isaacgym",
        r"No module named '?isaacgym",
        "the package is not where it is looked for: OUTBOARD_ISAACGYM_HOME must be the folder that holds "
        "isaacgym/python",
    ),
    Symptom(
        "torch first",
        r"PyTorch was imported before",
        "something in this environment imports torch at start-up (a .pth file, sitecustomize)",
    ),
)  # fmt: skip

# Reported by users to die with SIGSEGV in create_sim: Preview 4 is older than these chips.
_TOO_NEW = re.compile(r"\b(H100|H200|H800|H20|GH200|B100|B200|B300|GB200|GB300|RTX 50\d\d)\b")

_CHECK = """
import ctypes, json, os, re, sys
asked = json.loads(sys.argv[1])
sys.path.extend(asked["path"])
said = {"version": list(sys.version_info[:3]), "numpy": "", "glibcxx": "", "failed": ""}
said["torch"] = said["ninja"] = False
try:
    ctypes.CDLL(asked["libpython"])
    ctypes.CDLL("libstdc++.so.6")
    for line in open("/proc/self/maps"):
        if "libstdc++.so" in line:
            with open(line.split(None, 5)[5].strip(), "rb") as library:
                found = re.findall(rb"GLIBCXX_3\\.4\\.(\\d+)", library.read())
            said["glibcxx"] = "3.4.%d" % max(map(int, found))
            break
    from isaacgym import gymapi
    gymapi.acquire_gym
    import importlib.util, numpy, shutil
    said["numpy"] = numpy.__version__
    said["torch"] = importlib.util.find_spec("torch") is not None
    said["ninja"] = shutil.which("ninja") is not None
except BaseException as error:
    said["failed"] = "%s: %s" % (type(error).__name__, error)
os.write(1, ("\\n" + json.dumps(said) + "\\n").encode())
os._exit(0)
"""


@dataclass(frozen=True)
class Outcome:
    """What the interpreter said. `failed` is "" when `from isaacgym import gymapi` worked."""

    version: str = ""
    numpy: str = ""
    glibcxx: str = ""  # the newest that the libstdc++ in use offers
    torch: bool = False
    ninja: bool = False
    failed: str = ""
    warning: str = ""  # printed, not raised: the engine goes on without


def explain(text: str) -> str:
    """What is said about the failure that shows itself like this; "" when it is not a known one."""
    return next((one.words for one in SYMPTOMS if re.search(one.shows, text)), "")


def with_help(text: str) -> str:
    help_ = explain(text)
    return f"{text}: {help_}" if help_ else text


def too_new(names: Iterable[str]) -> tuple[str, ...]:
    """Those GPU names on which Isaac Gym is reported to crash."""
    return tuple(dict.fromkeys(name for name in names if _TOO_NEW.search(name)))


def check(found: Installation, env: Mapping[str, str]) -> Outcome:
    """Import gymapi as the worker does: same flags, same libraries, worker site included. Never raises."""
    path = [
        part for part in (found.package_root, str(interpreters.site_folder(found.python))) if part
    ]
    asked = json.dumps({"path": path, "libpython": LIBPYTHON})
    kept = {name: env[name] for name in ("HOME", "LANG", "ISAACGYM_STANDIN") if name in env}
    command = [found.python, "-u", "-E", "-s", "-B", "-c", _CHECK, asked]
    try:
        done = subprocess.run(
            command, env={**kept, **found.variables(env, {})}, capture_output=True, text=True,
            stdin=subprocess.DEVNULL, timeout=_IMPORT_S, check=False, errors="replace",
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return Outcome(failed=f"the import did not end within {_IMPORT_S:.0f} s")
    except OSError as error:
        return Outcome(failed=f"cannot be run: {error.strerror}")
    try:
        said = json.loads(done.stdout.rsplit("\n", 2)[-2])
    except (ValueError, IndexError):
        lines = (done.stderr or done.stdout).strip().splitlines()
        how = f"signal {-done.returncode}" if done.returncode < 0 else f"code {done.returncode}"
        return Outcome(failed=f"the import ended the process ({how}): {lines[-1] if lines else ''}")
    version = ".".join(map(str, said.pop("version")))
    warned = [
        line for line in (done.stdout + done.stderr).splitlines() if "failed to preload" in line
    ]
    return Outcome(version=version, warning=warned[0].strip() if warned else "", **said)
