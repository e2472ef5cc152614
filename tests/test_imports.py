"""Imports run one way, workers -> ipc <- backends, and `ipc` needs nothing but what every worker has. Read
with `ast`, so that an import inside a function counts too."""

from __future__ import annotations

import ast
import os
import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = ("ipc", "workers", "backends")
# What each folder of ours may import of ours.
ARROWS = {"ipc": {"ipc"}, "workers": {"workers", "ipc"}, "backends": {"backends", "ipc"}}
# What a foreign interpreter has, or `outboard setup worker` gives it.
OF_A_WORKER = {"numpy", "msgpack", "posix_ipc"}
# Of Python 3.8, whichever Python runs this test.
STANDARD = {
    *(
        "abc",
        "argparse",
        "array",
        "atexit",
        "collections",
        "contextlib",
        "ctypes",
        "dataclasses",
        "enum",
    ),
    *(
        "fcntl",
        "functools",
        "hashlib",
        "importlib",
        "io",
        "itertools",
        "json",
        "math",
        "mmap",
        "os",
    ),
    *("pathlib", "platform", "queue", "random", "re", "resource", "secrets", "select", "shutil"),
    *("signal", "socket", "stat", "struct", "subprocess", "sys", "tempfile", "threading", "time"),
    *("traceback", "types", "typing", "warnings", "weakref", "__future__"),
}


def imported(source: str, package: str) -> set[str]:
    """Absolute names of everything that `source`, a module of `package` ("outboard.ipc"), imports."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = (
                package.split(".")[: len(package.split(".")) + 1 - node.level] if node.level else []
            )
            stem = ".".join([*base, *([node.module] if node.module else [])])
            # `from .. import ipc` imports outboard.ipc, `from ..ipc import shm` outboard.ipc.shm.
            names |= {f"{stem}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith("import_module"):
            first = node.args[0] if node.args else None
            while isinstance(first, ast.BinOp):  # "outboard.workers." + name
                first = first.left
            if isinstance(first, ast.Constant):
                names.add(str(first.value))
    return names


def wrong_arrows(source: str, folder: str) -> set[str]:
    """What `source`, a file of `folder`, imports of ours and may not."""
    ours = {name.split(".")[1] for name in imported(source, f"outboard.{folder}") if of_ours(name)}
    return (ours & {*FOLDERS, "tests", "benchmarks"}) - ARROWS[folder]


def of_ours(name: str) -> bool:
    return name.startswith("outboard.")


def foreign_to_ipc(source: str) -> set[str]:
    roots = {name.split(".")[0] for name in imported(source, "outboard.ipc") if not of_ours(name)}
    return roots - OF_A_WORKER - STANDARD


def sources(folder: str) -> list[Path]:
    found = sorted((ROOT / folder).glob("**/*.py"))
    assert found
    return found


@pytest.mark.parametrize("folder", FOLDERS)
def test_imports_follow_the_arrows(folder: str) -> None:
    wrong = {path.name: wrong_arrows(path.read_text(), folder) for path in sources(folder)}
    assert {name: arrows for name, arrows in wrong.items() if arrows} == {}


def test_ipc_imports_what_every_worker_has_and_nothing_else() -> None:
    wrong = {path.name: foreign_to_ipc(path.read_text()) for path in sources("ipc")}
    assert {name: modules for name, modules in wrong.items() if modules} == {}


@pytest.mark.parametrize(
    ("folder", "source", "arrow"),
    [
        ("ipc", "from ..backends import backend", "backends"),
        ("ipc", "from .. import workers", "workers"),
        ("workers", "import outboard.backends.process", "backends"),
        ("workers", "def late():\n    from ..backends.mjcf import compile", "backends"),
        ("backends", "from ..workers.simulator import REGISTRY", "workers"),
        ("backends", "from outboard.workers import simulator", "workers"),
        (
            "backends",
            "import importlib\nimportlib.import_module('outboard.workers.serve')",
            "workers",
        ),
        (
            "backends",
            "from importlib import import_module as i\nimport outboard.tests.pair",
            "tests",
        ),
    ],
)
def test_a_wrong_arrow_is_seen(folder: str, source: str, arrow: str) -> None:
    assert wrong_arrows(source, folder) == {arrow}


@pytest.mark.parametrize(
    ("folder", "source"),
    [
        ("ipc", "from . import codec\nfrom .layout import Layout\nimport numpy"),
        ("workers", "from ..ipc import shm\nfrom .simulator import load\nimport mujoco"),
        ("backends", "from .. import ipc\nfrom ..ipc.errors import UsageError\nfrom . import logs"),
    ],
)
def test_a_right_arrow_is_not_reported(folder: str, source: str) -> None:
    assert wrong_arrows(source, folder) == set()


@pytest.mark.parametrize(
    "module", ["torch", "mujoco", "pynvml", "psutil", "typing_extensions", "tomllib"]
)
def test_a_package_that_a_worker_may_lack_is_seen(module: str) -> None:
    assert foreign_to_ipc(f"def f():\n    import {module}.part") == {module}


# -- nothing of one machine ----------------------------------------------------------------------------

_A_MACHINES_PATH = re.compile(r"(?<![\w.{}$-])/(?:home|root|Users|work|mnt|data|scratch)/[\w.-]")


def committed() -> list[Path]:
    """What git tracks or would: the files, without links."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    if listed.returncode:
        pytest.skip("this is no git checkout: " + listed.stderr.strip())
    paths = [ROOT / name for name in listed.stdout.split("\0") if name]
    return [path for path in paths if path.is_file() and not path.is_symlink()]


def machine_paths(text: str) -> list[str]:
    return [line.strip()[:120] for line in text.splitlines() if _A_MACHINES_PATH.search(line)]


def test_no_file_names_a_path_of_one_machine() -> None:
    found: dict[str, list[str]] = {}
    for path in committed():
        if path == Path(__file__).resolve():
            continue
        try:
            lines = machine_paths(path.read_text())
        except UnicodeDecodeError:
            lines = machine_paths(path.read_bytes().decode("latin-1"))
        if lines:
            found[os.path.relpath(path, ROOT)] = lines
    assert found == {}


@pytest.mark.parametrize("line", ["see /home/me/x", "'/work/x'", 'open("/root/.cache")'])
def test_a_path_of_one_machine_is_seen(line: str) -> None:
    assert machine_paths(line) == [line]


@pytest.mark.parametrize(
    "line", ["/dev/shm", "/proc/self/fd", "$HOME/data/x", "a/work/b", "/workers"]
)
def test_a_path_that_is_on_every_machine_is_not_reported(line: str) -> None:
    assert machine_paths(line) == []
