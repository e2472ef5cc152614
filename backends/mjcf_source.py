"""Where a model comes from: what MuJoCo compiles of a file, and the file's tags for the messages."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ET
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..ipc.errors import UsageError
from .mjcf_errors import InvalidModelError

OLDEST_MUJOCO = (3, 2, 3)  # the last release that runs on Python 3.8, and the oldest tested

# Sensors that newer releases of MuJoCo added. A sensor moves nothing, so a model that has them can
# be simulated by a release that cannot read them; any other unknown element is refused.
LATER_SENSORS = frozenset({"contact", "insidesite", "tactile"})

_COMMENT = re.compile(rb"<!--.*?-->", re.DOTALL)


@dataclass(frozen=True)
class Place:
    """Where something stands in the XML: keyword arguments of a ModelContractError."""

    file: Path
    element: str
    name: str


@dataclass(frozen=True)
class Source:
    """A model's XML with its includes spliced in. Used for messages; the arrays are judged."""

    main: Path
    root: ET.Element
    files: dict[ET.Element, Path] = field(repr=False)  # which file each element was written in

    def children(self, section: str) -> list[ET.Element]:
        """The elements directly under every top-level `<section>`, in document order."""
        return [child for part in self.root.findall(section) for child in part]

    def place(self, tag: str, name: str) -> Place:
        """Where `<tag name=...>` is written; the main file where it cannot be told.

        Names made by the compiler (replicated or attached elements) are in no file.
        """
        return self.first((tag,), name) if name else Place(self.main, tag, name)

    def first(self, tags: Sequence[str], name: str = "") -> Place:
        """Where the first of these tags is written: with this name, or with any if it is ""."""
        for element in self.root.iter():
            if element.tag in tags and name in ("", element.get("name", "")):
                file = self.files.get(element, self.main)
                return Place(file, element.tag, element.get("name", ""))
        return Place(self.main, tags[0], name)


@dataclass(frozen=True)
class Compiled:
    """A compiled model beside its XML. `model` is an MjModel and `mujoco` the module it is from."""

    mujoco: Any
    model: Any
    source: Source
    unread_sensors: tuple[str, ...]  # sensors that this release of MuJoCo cannot read

    def code(self, enum: str, member: str) -> int:
        """A MuJoCo enum member as a number, e.g. code("mjtJoint", "mjJNT_HINGE").

        As a number, because in MuJoCo 4.0 `member == array_element` is False where
        `array_element == member` is True, so that `in` and `index` miss.
        """
        return int(getattr(getattr(self.mujoco, enum), member))

    def word(self, enum: str, value: Any) -> str:
        """The short name of a compiled code, e.g. word("mjtJoint", 3) == "hinge"."""
        return getattr(self.mujoco, enum)(int(value)).name.split("_", 1)[1].lower()

    def name(self, kind: str, index: int) -> str:
        """The name of an object ("body", "joint", "geom", ...), "" when it has none."""
        code = getattr(self.mujoco.mjtObj, "mjOBJ_" + kind.upper())
        return self.mujoco.mj_id2name(self.model, code, index) or ""

    def label(self, geom: int) -> str:
        """How to speak of a geom, which need not have a name."""
        body = self.name("body", int(self.model.geom_bodyid[geom])) or "?"
        return self.name("geom", geom) or f"geom {geom} of body {body}"


def load_mujoco() -> Any:
    """The mujoco module. UsageError when it is missing or too old."""
    try:
        import mujoco
    except ImportError as error:
        raise UsageError(
            "reading a model needs the Python package 'mujoco' in this interpreter:"
            f" pip install 'outboard[mujoco]' ({error})"
        ) from error
    version = tuple(int(part) for part in re.findall(r"\d+", mujoco.__version__)[:3])
    if version < OLDEST_MUJOCO:
        oldest = ".".join(map(str, OLDEST_MUJOCO))
        raise UsageError(f"mujoco {mujoco.__version__} is too old: {oldest} or newer is needed")
    return mujoco


def compile_file(path: Path) -> Compiled:
    """Compile an MJCF file and read its tags. InvalidModelError C2.17, UsageError."""
    mujoco = load_mujoco()
    if not path.is_file():
        raise InvalidModelError("C2.17", "there is no such file", file=path)
    unread: tuple[str, ...] = ()
    try:
        model = mujoco.MjModel.from_xml_path(str(path))
    except (ValueError, mujoco.FatalError) as error:
        if not _unknown_sensor(str(error)):
            raise _refusal(path, error) from error
        source = read_tags(path)
        unread = _remove_later_sensors(source.root)
        model = _compile_text(mujoco, source)
    # Read again: the sensors that were taken out are still part of what the user wrote.
    return Compiled(mujoco, model, read_tags(path), unread)


def read_tags(path: Path) -> Source:
    """The XML of a model that compiles (so no include is missing). InvalidModelError C2.17."""
    files: dict[ET.Element, Path] = {}
    root = _parse(path)
    if root.tag != "mujoco":
        raise InvalidModelError("C2.17", "the file is not MJCF", file=path, element=root.tag)
    _splice(root, path, path.parent, files, frozenset({path.resolve()}))
    return Source(path, root, files)


def _parse(path: Path) -> ET.Element:
    # Comments are cut first: "--" inside one is common, MuJoCo reads it, and the standard parser
    # does not. Their line ends stay, so that the parser's line numbers are right.
    text = _COMMENT.sub(lambda found: b"\n" * found.group().count(b"\n"), path.read_bytes())
    try:
        return ET.fromstring(text)
    except ET.ParseError as error:
        raise InvalidModelError("C2.17", f"not well-formed XML: {error}", file=path) from error


def _splice(
    parent: ET.Element,
    file: Path,
    base: Path,
    files: dict[ET.Element, Path],
    open_files: frozenset[Path],
) -> None:
    """Put the content of every included file in the place of its <include>."""
    files[parent] = file
    children: list[ET.Element] = []
    for child in parent:
        if child.tag != "include":
            _splice(child, file, base, files, open_files)
            children.append(child)
            continue
        included = _included(child.get("file", ""), file, base)
        if included is None or included.resolve() in open_files:
            continue  # the compiler has refused both, or will
        root = _parse(included)
        _splice(root, included, base, files, open_files | {included.resolve()})
        children.extend(root)
    parent[:] = children


def _included(name: str, file: Path, base: Path) -> Path | None:
    """The file of an <include>: relative to the main file or, in some releases, to this one."""
    for folder in (base, file.parent):
        if (folder / name).is_file():
            return folder / name
    return None


def _unknown_sensor(message: str) -> bool:
    found = re.search(r"unrecognized element\s+Element '(\w+)'", message)
    return found is not None and found.group(1) in LATER_SENSORS


def _remove_later_sensors(root: ET.Element) -> tuple[str, ...]:
    removed: list[str] = []
    for section in root.findall("sensor"):
        for sensor in [child for child in section if child.tag in LATER_SENSORS]:
            section.remove(sensor)
            removed.append(sensor.get("name", "") or f"<{sensor.tag}>")
    return tuple(removed)


def _compile_text(mujoco: Any, source: Source) -> Any:
    """Compile spliced XML. It has no folder of its own, so asset folders are made absolute."""
    base = source.main.resolve().parent
    folders = {"meshdir": "", "texturedir": ""}
    for compiler in source.root.findall("compiler"):
        shared = compiler.get("assetdir")
        for key in folders:
            folders[key] = compiler.get(key, folders[key] if shared is None else shared)
    absolute = {key: str(base / folder) for key, folder in folders.items()}
    source.root.append(ET.Element("compiler", absolute))  # the last one wins
    try:
        return mujoco.MjModel.from_xml_string(ET.tostring(source.root, encoding="unicode"))
    except (ValueError, mujoco.FatalError) as error:
        raise _refusal(source.main, error) from error


def _refusal(path: Path, error: Exception) -> InvalidModelError:
    """MuJoCo's own words, with the file it does not name."""
    text = " ".join(str(error).split())
    name = re.search(r"Element name '([^']*)'", text)
    element = re.search(r"Element '(\w+)'", text)
    return InvalidModelError(
        "C2.17",
        f"MuJoCo cannot compile it: {text}",
        file=path,
        element="" if element is None else element.group(1),
        name="" if name is None else name.group(1),
    )
