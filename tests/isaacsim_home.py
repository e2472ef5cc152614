"""A home of the stand-in Isaac Sim, laid out as UniSim's, whose Python has what Kit's would have."""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from conftest import missing
from outboard.backends import isaacsim_home as table

STANDIN = Path(__file__).resolve().parent / "standins" / "isaacsim"
LICENCE = "OMNI_KIT_ACCEPT_EULA"
_VERSIONS = {"isaacsim": "5.1.0", "isaaclab": "2.3.2"}


def make_home(home: Path) -> Path:
    """`<home>/venv`: this interpreter, this environment's packages, and the stand-in."""
    for name in ("torch", "pxr", "mujoco"):
        if importlib.util.find_spec(name) is None:
            missing(f"the stand-in of Isaac Sim needs {name}: Python 3.11 and .ci/setup test")
    version = "python{}.{}".format(*sys.version_info[:2])
    venv = home / "venv"
    site = venv / "lib" / version / "site-packages"
    site.mkdir(parents=True)
    (venv / "bin").mkdir()
    (venv / "bin" / "python").symlink_to(os.path.realpath(sys.executable))
    base = Path(os.path.realpath(sys.executable)).parent
    (venv / "pyvenv.cfg").write_text(f"home = {base}\ninclude-system-site-packages = false\n")
    own = Path(importlib.util.find_spec("numpy").origin).parent.parent  # type: ignore[union-attr,arg-type]
    (site / "standin.pth").write_text(f"{STANDIN}\n{own}\n")
    for name, number in _VERSIONS.items():
        info = site / f"{name}-{number}.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {number}\n")
    return home


@pytest.fixture(scope="session")
def sim_home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_home(tmp_path_factory.mktemp("isaacsim"))


@pytest.fixture
def home(sim_home: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The home, found by discovery; a licence that is accepted, and caches of this session's own."""
    for row in table.TABLE:
        monkeypatch.delenv(row.variable, raising=False)
    monkeypatch.setenv("OUTBOARD_ISAACSIM_HOME", str(sim_home))
    monkeypatch.setenv(LICENCE, "YES")
    yield sim_home
