"""The `isaaclab` wheel as an oracle that nobody here wrote: fetched once, unpacked beside the caches, never
installed.

Its sources are NVIDIA's: they are read and, as oracles of buffers and frames, run; nothing of them is in
this tree.
"""

from __future__ import annotations

import ast
import os
import subprocess
import sys
import zipfile
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

from conftest import missing

VERSION = "2.3.2.post1"
_FETCH_S = 300.0


def _folder() -> Path:
    base = os.environ.get("OUTBOARD_TEST_CACHE") or "~/.cache/outboard-tests"
    return Path(base).expanduser() / f"isaaclab-{VERSION}"


@cache
def sources() -> Path:
    """The package's folder, `.../source/isaaclab/isaaclab`. Skips the calling test, with the reason, where
    the wheel is not there and cannot be fetched."""
    folder = _folder()
    package = folder / "isaaclab" / "source" / "isaaclab" / "isaaclab"
    if (folder / ".complete").is_file():
        return package
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for wheel in _download(folder):
            with zipfile.ZipFile(wheel) as archive:
                archive.extractall(folder)
            wheel.unlink()
        (folder / ".complete").touch()
    except (OSError, subprocess.SubprocessError, zipfile.BadZipFile) as why:
        missing(f"the isaaclab {VERSION} wheel cannot be fetched from the package registry: {why}")
    return package


def _download(folder: Path) -> list[Path]:
    """By this Python's own pip, told what the wheel is for: it is cp311 and for a newer Linux than some."""
    command = [
        sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--no-input",
        "--disable-pip-version-check", "--only-binary", ":all:", "--implementation", "cp",
        "--python-version", "3.11", "--platform", "manylinux_2_35_x86_64", "--dest", str(folder),
        f"isaaclab=={VERSION}",
    ]  # fmt: skip
    done = subprocess.run(
        command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=_FETCH_S
    )
    if done.returncode != 0:
        raise OSError((done.stderr or done.stdout).strip().splitlines()[-1])
    found = list(folder.glob("isaaclab-*.whl"))
    if not found:
        raise OSError("pip said nothing and fetched nothing")
    return found


# -- what the sources define -----------------------------------------------------------------------


@dataclass
class Class:
    bases: list[str]
    fields: set[str] = field(default_factory=set[str])  # annotated or assigned in the body
    # name -> parameters without self; None: it takes anything
    methods: dict[str, tuple[str, ...] | None] = field(
        default_factory=dict[str, "tuple[str, ...] | None"]
    )


class Oracle:
    """Every class and function of the wheel, by name; inner classes by `Outer.Inner`."""

    def __init__(self, package: Path) -> None:
        self.classes: dict[str, Class] = {}
        self.functions: dict[str, tuple[str, ...] | None] = {}
        for path in sorted(package.rglob("*.py")):
            for node in ast.parse(path.read_text(encoding="utf-8")).body:
                self._read(node, "")

    def _read(self, node: ast.stmt, outer: str) -> None:
        if isinstance(node, ast.FunctionDef):
            self.functions.setdefault(node.name, parameters(node))
        if not isinstance(node, ast.ClassDef):
            return
        name = outer + node.name
        known = Class([ast.unparse(base) for base in node.bases])
        # The first wins: names repeat in deprecated modules.
        known = self.classes.setdefault(name, known)
        for member in node.body:
            if isinstance(member, ast.AnnAssign) and isinstance(member.target, ast.Name):
                known.fields.add(member.target.id)
            elif isinstance(member, ast.Assign):
                known.fields |= {t.id for t in member.targets if isinstance(t, ast.Name)}
            elif isinstance(member, ast.FunctionDef):
                known.methods.setdefault(member.name, parameters(member))
                known.fields |= _assigned(member)
            else:
                self._read(member, name + ".")

    def fields(self, name: str) -> set[str]:
        """With those of its bases, as far as the wheel has them."""
        known = self.classes.get(name)
        if known is None:
            return set()
        return known.fields.union(*(self.fields(base) for base in self._bases(name)))

    def _bases(self, name: str) -> list[str]:
        """`sim_utils.FileCfg` is FileCfg here, and `AssetBaseCfg.InitialStateCfg` is what it says."""
        written = self.classes[name].bases
        bases = [base if base in self.classes else base.rpartition(".")[2] for base in written]
        return [base for base in bases if base != name]

    def method(self, name: str, method: str) -> tuple[bool, tuple[str, ...] | None]:
        """(it is there, its parameters)"""
        known = self.classes.get(name)
        if known is None:
            return False, None
        if method in known.methods:
            return True, known.methods[method]
        for base in self._bases(name):
            there, names = self.method(base, method)
            if there:
                return there, names
        return False, None


def _assigned(function: ast.FunctionDef) -> set[str]:
    """Attributes that a method gives to its object."""
    return {
        node.attr
        for node in ast.walk(function)
        if isinstance(node, ast.Attribute)
        and isinstance(node.ctx, ast.Store)
        and isinstance(node.value, ast.Name)
        and node.value.id == "self"
    }


def parameters(function: ast.FunctionDef) -> tuple[str, ...] | None:
    arguments = function.args
    if arguments.vararg or arguments.kwarg:
        return None
    names = [a.arg for a in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)]
    return tuple(names[1:] if names[:1] in (["self"], ["cls"]) else names)
