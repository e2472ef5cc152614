"""The peers' environment: a venv of their own under .cache/, filled by pip. Never ours."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

_FOLDER = Path(__file__).resolve().parent.parent / ".cache" / "peers"
_TIMEOUT_S = 300
# What to ask pip for, by what the tables call it. Without dependencies where these are a whole trainer.
_PEERS = {
    "gymnasium": ("gymnasium",),
    "unisim-core": ("--no-deps", "unisim-core>=2,<3"),
    "pufferlib-core": ("--no-deps", "pufferlib-core"),
    "matplotlib": ("matplotlib",),
}
_BASE = ("posix_ipc", "psutil", "rich")


def python() -> Path:
    return _FOLDER / "bin" / "python"


def prepare() -> dict[str, str]:
    """Version of each peer that is there, "" for one that did not install. Made once, then reused."""
    done = _FOLDER / "peers.json"
    if done.exists():
        return json.loads(done.read_text())
    print("making the peers' environment (once) ...", file=sys.stderr)
    try:
        subprocess.run([sys.executable, "-m", "venv", str(_FOLDER)], check=True, timeout=_TIMEOUT_S)
    except (OSError, subprocess.SubprocessError):
        return dict.fromkeys(_PEERS, "")
    import numpy as np

    _pip(f"numpy=={np.__version__}", *_BASE)  # the same numpy as the host's
    versions = {name: _version(name) if _pip(*asked) else "" for name, asked in _PEERS.items()}
    if any(versions.values()):
        done.write_text(json.dumps(versions))
    return versions


def _pip(*asked: str) -> bool:
    argv = [str(python()), "-m", "pip", "install", "-q", "--disable-pip-version-check", *asked]
    try:
        return subprocess.run(argv, capture_output=True, timeout=_TIMEOUT_S).returncode == 0
    except (OSError, subprocess.SubprocessError):
        return False


def _version(name: str) -> str:
    code = f"from importlib.metadata import version; print(version({name!r}))"
    done = subprocess.run([str(python()), "-c", code], capture_output=True, text=True)
    return done.stdout.strip()
