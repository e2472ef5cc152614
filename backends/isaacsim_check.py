"""What an Isaac Sim installation consists of, and what is wrong with it. Kit is not started and nothing of
it is imported: the first import asks for the licence. `outboard setup isaacsim` and `outboard doctor` ask
here."""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass

from .isaacsim_home import Installation

LICENCE = "OMNI_KIT_ACCEPT_EULA"
_ASK_S = 120.0
_GLIBC = (2, 35)  # of Isaac Sim 5
# Isaac Sim's major version -> the Python that it is built for
_PYTHON_OF = {4: "3.10", 5: "3.11", 6: "3.12"}

_ASK = """
import importlib.util, json, os, platform, sys
from importlib import metadata
sys.path.extend(json.loads(sys.argv[1]))
said = {"version": "%d.%d" % sys.version_info[:2], "glibc": platform.libc_ver()[1], "found": {}}
for name in ("isaacsim", "isaaclab", "torch", "numpy"):
    try:
        said["found"][name] = metadata.version(name)
    except metadata.PackageNotFoundError:
        try:
            spec = importlib.util.find_spec(name)
        except (ImportError, ValueError):
            spec = None
        if spec is not None:
            said["found"][name] = "there"
root = os.environ.get("ISAAC_PATH", "")
try:
    with open(os.path.join(root, "VERSION")) as file:
        said["found"]["isaacsim"] = file.readline().strip()
except OSError:
    pass
print("\\n" + json.dumps(said))
"""


@dataclass(frozen=True)
class Outcome:
    """What the interpreter said of itself; `problems` are sentences, [] when it looks right."""

    version: str
    found: dict[str, str]
    problems: tuple[str, ...]


def check(found: Installation, env: Mapping[str, str]) -> Outcome:
    """Never raises: what is wrong is in the answer."""
    flags = [flag for flag in found.python_flags if flag != "-u"]
    paths = [found.package_root] if found.package_root else []
    kept = {name: env[name] for name in ("HOME", "LANG", "PATH") if name in env}
    command = [found.python, *flags, "-B", "-c", _ASK, json.dumps(paths)]
    try:
        done = subprocess.run(
            command, env=kept, capture_output=True, text=True, stdin=subprocess.DEVNULL,
            timeout=_ASK_S, check=False, errors="replace",
        )  # fmt: skip
        said = json.loads(done.stdout.rsplit("\n", 2)[-2])
    except subprocess.TimeoutExpired:
        return Outcome("", {}, (f"did not answer within {_ASK_S:.0f} s",))
    except OSError as error:
        return Outcome("", {}, (f"cannot be run: {error.strerror}",))
    except (ValueError, IndexError):
        return Outcome("", {}, ("is no Python interpreter",))
    return Outcome(said["version"], said["found"], tuple(problems(said)))


def problems(said: Mapping[str, object]) -> list[str]:
    """Of an answer: packages that are missing, and versions that do not go together."""
    version, packages = str(said["version"]), said["found"]
    assert isinstance(packages, dict)
    wrong = [
        f"has no {name}: {help_}"
        for name, help_ in (
            ("isaacsim", "pip install 'isaacsim[all,extscache]', as NVIDIA's manual says"),
            ("isaaclab", "pip install isaaclab, or a checkout at IsaacLab/source in its home"),
        )
        if name not in packages
    ]
    major = re.match(r"\d+", str(packages.get("isaacsim", "")))
    wanted = _PYTHON_OF.get(int(major.group())) if major else None
    if wanted is not None and wanted != version:
        wrong.append(
            f"is Python {version}, and Isaac Sim {packages['isaacsim']} is built for {wanted}"
        )
    glibc = re.match(r"(\d+)\.(\d+)", str(said["glibc"]))
    if major and int(major.group()) >= 5 and glibc and tuple(map(int, glibc.groups())) < _GLIBC:
        wrong.append(f"runs on glibc {said['glibc']}, and Isaac Sim 5 needs 2.35 (Ubuntu 22.04)")
    return wrong
