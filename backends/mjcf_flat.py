"""Our own MJCF of a robot, for importers: everything explicit, nothing inherited.

Importers of other simulators lose what MuJoCo resolves (default classes, frames, includes, implied
limits, degrees, inertia from shapes), and MuJoCo's own writer gives it back unresolved. So this is
written from compiled arrays: the robot's bodies, inertials, joints and collision shapes, in radians
and metres, `repr` exact; no actuators, sensors, keyframes, contacts or world. What it leaves out is
handed over as data (`mjcf_model.py`).
"""

from __future__ import annotations

import hashlib
import os
import shutil
import tempfile
import time
import xml.etree.ElementTree as ET
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..ipc.errors import UsageError
from .mjcf_model import Actuator, Body, Flat, Joint, Model, Range
from .mjcf_rules import PORTABLE_NAME, Robot, floats
from .mjcf_source import Compiled

EXPORTER_VERSION = 1  # part of every hash: a change of what is written must change it
XML_NAME = "robot.xml"  # importers make the stem a name: one dot, letters

# Inertial of a body that has no mass of its own (a frame welded to another body). An importer that
# finds none invents one from the shapes. 1 mg and 1 mg m^2: below what any robot would notice.
FRAME_MASS = 1e-6
FRAME_INERTIA = (1e-6, 1e-6, 1e-6)

_STALE_S = 3600.0  # a build takes seconds: what is older was left by a process that died
_BUILDING = ".building-"


@dataclass(frozen=True)
class FlatModel:
    """A flat export on disk. Its folder holds nothing else and never changes."""

    path: Path  # of the XML
    sha256: str  # of XML, meshes and exporter version, hexadecimal; also the folder's name
    mesh_paths: tuple[Path, ...]


def body_records(c: Compiled, robot: Robot) -> tuple[Body, ...]:
    """The robot's bodies, each with an inertial (C2.14: a massless one gets FRAME_MASS)."""
    m = c.model
    records: list[Body] = []
    for body in robot.bodies:
        mass, inertia = float(m.body_mass[body]), floats(m.body_inertia[body])
        records.append(
            Body(
                name=c.name("body", body),
                parent=-1 if body == robot.root else int(m.body_parentid[body]) - robot.root,
                pos=floats(m.body_pos[body]),
                quat=floats(m.body_quat[body]),
                mass=mass or FRAME_MASS,
                com=floats(m.body_ipos[body]),
                inertia_quat=floats(m.body_iquat[body]),
                inertia=inertia if all(inertia) else FRAME_INERTIA,
            )
        )
    return tuple(records)


def flatten(c: Compiled, robot: Robot, bodies: Sequence[Body], joints: Sequence[Joint]) -> Flat:
    """The export: the XML and its meshes."""
    meshes = _mesh_files(c, robot)
    shapes: dict[int, list[dict[str, str]]] = {}
    for geom in robot.geoms:
        body = int(c.model.geom_bodyid[geom]) - robot.root
        shapes.setdefault(body, []).append(_geom(c, geom, meshes))
    root = write_tree(bodies, joints, _free_joint(c), shapes)
    asset = ET.Element("asset")
    for name in meshes.values():
        ET.SubElement(asset, "mesh", name=name, file=name + ".obj")
    if meshes:
        root.insert(1, asset)
    files = tuple((name + ".obj", _obj(c.model, mesh)) for mesh, name in meshes.items())
    return Flat(to_text(root), files)


def flatten_driven(
    c: Compiled, bodies: Sequence[Body], joints: Sequence[Joint], actuators: Sequence[Actuator]
) -> str:
    """The same robot without shapes, with the plain <position> actuators the contract allows.

    For the closure check: what this compiles to is all that the target simulators are told.
    """
    root = write_tree(bodies, joints, _free_joint(c), {}, effort=True)
    section = ET.SubElement(root, "actuator")
    for actuator in actuators:
        attributes = {"joint": joints[actuator.joint].name}
        attributes |= {"kp": repr(actuator.kp), "kv": repr(actuator.kv)}
        attributes |= _limits("ctrl", actuator.ctrl_range) | _limits("force", actuator.force_range)
        ET.SubElement(section, "position", attributes)
    return to_text(root)


def write_tree(
    bodies: Sequence[Body],
    joints: Sequence[Joint],
    free_joint: str | None,
    shapes: Mapping[int, Sequence[Mapping[str, str]]],
    *,
    effort: bool = False,
) -> ET.Element:
    """The <mujoco> element: compiler and worldbody. `shapes` are <geom> attributes per body."""
    root = ET.Element("mujoco", model="robot")
    ET.SubElement(root, "compiler", angle="radian", autolimits="false", inertiafromgeom="false")
    elements = {-1: ET.SubElement(root, "worldbody")}
    for index, body in enumerate(bodies):
        pose = {"pos": _text(body.pos), "quat": _text(body.quat)}
        element = ET.SubElement(elements[body.parent], "body", {"name": body.name} | pose)
        elements[index] = element
        inertial = {"pos": _text(body.com), "quat": _text(body.inertia_quat)}
        inertial |= {"mass": repr(body.mass), "diaginertia": _text(body.inertia)}
        ET.SubElement(element, "inertial", inertial)
        if index == 0 and free_joint is not None:
            ET.SubElement(element, "freejoint", {"name": free_joint} if free_joint else {})
        for joint in joints:
            if joint.body == index:
                ET.SubElement(element, "joint", _joint(joint, effort))
        for shape in shapes.get(index, ()):
            ET.SubElement(element, "geom", dict(shape))
    return root


def to_text(root: ET.Element) -> str:
    ET.indent(root)
    return ET.tostring(root, encoding="unicode") + "\n"


def _free_joint(c: Compiled) -> str | None:
    """The name of the root's free joint, "" when it has none; None for a fixed base."""
    kind = c.code("mjtJoint", "mjJNT_FREE")
    free = [joint for joint in range(c.model.njnt) if c.model.jnt_type[joint] == kind]
    if not free:
        return None
    name = c.name("joint", free[0])
    return name if PORTABLE_NAME.fullmatch(name) else ""


def _joint(joint: Joint, effort: bool) -> dict[str, str]:
    attributes = {"name": joint.name, "type": joint.type}
    attributes |= {"axis": _text(joint.axis), "pos": _text(joint.pos)}
    attributes |= _limits("", joint.range)
    attributes |= {"armature": repr(joint.armature), "frictionloss": repr(joint.frictionloss)}
    if effort:  # importers disagree about it; workers set the force limit themselves
        attributes |= _limits("actuatorfrc", (-joint.effort, joint.effort))
    return attributes


def _limits(kind: str, values: Range) -> dict[str, str]:
    """An explicit limit: an importer older than autolimits ignores a range without one."""
    if values[1] == float("inf"):
        return {kind + "limited": "false"}
    return {kind + "limited": "true", kind + "range": _text(values)}


def _geom(c: Compiled, geom: int, meshes: Mapping[int, str]) -> dict[str, str]:
    m = c.model
    shape = c.word("mjtGeom", m.geom_type[geom])
    attributes = {"type": shape}
    name = c.name("geom", geom)
    if PORTABLE_NAME.fullmatch(name):  # others would be renamed, perhaps to one that exists
        attributes = {"name": name} | attributes
    if shape == "mesh":
        attributes["mesh"] = meshes[int(m.geom_dataid[geom])]
    else:
        attributes["size"] = _text(floats(m.geom_size[geom]))
    attributes |= {"pos": _text(floats(m.geom_pos[geom])), "quat": _text(floats(m.geom_quat[geom]))}
    attributes |= {
        "contype": str(int(m.geom_contype[geom])),
        "conaffinity": str(int(m.geom_conaffinity[geom])),
        "friction": _text(floats(m.geom_friction[geom])),
    }
    return attributes


def _mesh_files(c: Compiled, robot: Robot) -> dict[int, str]:
    """Mesh id -> name in the export, for the meshes that exported geoms use."""
    m, mesh = c.model, c.code("mjtGeom", "mjGEOM_MESH")
    used = sorted({int(m.geom_dataid[g]) for g in robot.geoms if m.geom_type[g] == mesh})
    return {index: f"mesh_{number}" for number, index in enumerate(used)}


def _obj(m: Any, mesh: int) -> bytes:
    """A compiled mesh: scaled, centred and turned as its geom's compiled pose expects it.

    Nine digits give back every float32 exactly.
    """
    first, count = m.mesh_vertadr[mesh], m.mesh_vertnum[mesh]
    vertices = m.mesh_vert[first : first + count].tolist()
    first, count = m.mesh_faceadr[mesh], m.mesh_facenum[mesh]
    faces = (m.mesh_face[first : first + count] + 1).tolist()
    lines = ["v " + " ".join(f"{value:.9g}" for value in vertex) for vertex in vertices]
    lines += ["f " + " ".join(map(str, face)) for face in faces]
    return ("\n".join(lines) + "\n").encode()


def _text(values: Sequence[float]) -> str:
    return " ".join(map(repr, values))


def content_hash(flat: Flat) -> str:
    """sha256 of everything an importer will read, and of the exporter's version."""
    digest = hashlib.sha256(f"flat MJCF {EXPORTER_VERSION}\n".encode())
    for name, content in _files(flat):
        digest.update(f"{name} {len(content)}\n".encode())
        digest.update(content)
    return digest.hexdigest()


def default_cache_dir(environ: Mapping[str, str]) -> Path:
    """Where exports are kept for this user: `$XDG_CACHE_HOME/outboard/models`, else in ~/.cache.

    As that standard demands, a relative XDG_CACHE_HOME is ignored.
    """
    folder = Path(environ.get("XDG_CACHE_HOME", ""))
    if not folder.is_absolute():
        folder = Path(environ["HOME"] if environ.get("HOME") else Path.home()) / ".cache"
    return folder / "outboard" / "models"


def export_flat(model: Model, cache_dir: Path) -> FlatModel:
    """Put the flat export into the cache, or find it there. UsageError when it cannot be written.

    Any number of processes may do this at once: each builds under a name of its own and renames;
    one wins, the others use its folder. A file found damaged (a full disk, a crash) is replaced.
    """
    key = content_hash(model.flat)
    folder = cache_dir / key
    try:
        if not folder.is_dir():
            cache_dir.mkdir(parents=True, exist_ok=True)
            _remove_stale(cache_dir)
            _build(model.flat, folder)
        _repair(model.flat, folder)
    except OSError as error:
        raise UsageError(
            f"the model cache {cache_dir} cannot be written: {error}; set XDG_CACHE_HOME"
        ) from error
    return FlatModel(folder / XML_NAME, key, tuple(folder / name for name, _ in model.flat.meshes))


def _files(flat: Flat) -> tuple[tuple[str, bytes], ...]:
    return ((XML_NAME, flat.xml.encode()), *flat.meshes)


def _build(flat: Flat, folder: Path) -> None:
    building = Path(tempfile.mkdtemp(prefix=_BUILDING, dir=folder.parent))
    try:
        for name, content in _files(flat):
            (building / name).write_bytes(content)
        building.rename(folder)
    except OSError:
        if not folder.is_dir():  # else another process was first, with the same content
            raise
    finally:
        shutil.rmtree(building, ignore_errors=True)


def _repair(flat: Flat, folder: Path) -> None:
    """Compare with what was meant to be written. Each replacement is whole or not at all."""
    for name, content in _files(flat):
        path = folder / name
        if path.is_file() and path.read_bytes() == content:
            continue
        handle, temporary = tempfile.mkstemp(prefix=_BUILDING, dir=folder.parent)
        with os.fdopen(handle, "wb") as file:
            file.write(content)
        os.replace(temporary, path)


def _remove_stale(cache_dir: Path) -> None:
    """Remove what builders that died have left."""
    for path in cache_dir.glob(_BUILDING + "*"):
        try:
            if time.time() - path.stat().st_mtime < _STALE_S:
                continue
            path.unlink() if path.is_file() else shutil.rmtree(path, ignore_errors=True)
        except FileNotFoundError:
            pass  # another process removes it too
