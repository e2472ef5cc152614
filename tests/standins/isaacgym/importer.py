"""The stand-in's MJCF importer: it loses what the original is known, or suspected, to lose.

Friction, frictionloss, armature and the axes of inertia are dropped, a joint limit counts only where the
joint itself says limited="true", the root's pose is zero, ranges of default classes are taken as radians
whatever the file says, and everything beside bodies, joints and shapes is ignored.
"""

import copy
import math
import os
import xml.etree.ElementTree as ET
from typing import Any, Dict, List, Optional

import mujoco  # type: ignore[import-untyped]
import numpy as np

from .lines import error
from .settings import SETTINGS

mj: Any = mujoco
_KEPT = ("compiler", "default", "asset", "worldbody")
DOF_DTYPE = np.dtype(
    [("hasLimits", "?"), ("lower", "f4"), ("upper", "f4"), ("driveMode", "i4"), ("velocity", "f4"),
     ("effort", "f4"), ("stiffness", "f4"), ("damping", "f4"), ("friction", "f4"), ("armature", "f4")]
)  # fmt: skip


class Asset:
    """A robot as imported: its tree for MuJoCo, and what can be asked about it."""

    def __init__(self, root: ET.Element, files: Dict[str, bytes], options: Any, model: Any) -> None:
        self.root, self.files, self.options = root, files, options
        self.fixed = bool(options.fix_base_link)
        bodies, joints = range(1, model.nbody), range(0 if self.fixed else 1, model.njnt)
        self.body_names: List[str] = [model.body(i).name for i in bodies]
        self.dof_names: List[str] = [model.joint(i).name for i in joints]
        self.masses = model.body_mass[1:].copy()
        self.coms = model.body_ipos[1:].copy()
        self.inertias = np.array([np.diag(row) for row in model.body_inertia[1:]])
        self.frictions: List[float] = [
            1.0
        ] * model.ngeom  # the engine's default, whatever was written
        dofs = np.zeros(len(self.dof_names), DOF_DTYPE)
        dofs["lower"], dofs["upper"] = -3.4e38, 3.4e38
        for dof, joint in enumerate(joints):
            if model.jnt_limited[joint]:
                dofs["hasLimits"][dof] = True
                dofs["lower"][dof], dofs["upper"][dof] = model.jnt_range[joint]
        dofs["driveMode"] = options.default_dof_drive_mode
        dofs["velocity"] = dofs["effort"] = 3.4e38
        self.dofs = dofs

    def told(self, names: List[str]) -> List[str]:
        """Names as they are told: in another order when the test wants that."""
        return names[::-1] if SETTINGS.order == "reversed" else list(names)


def load(folder: str, file: str, options: Any) -> Optional[Asset]:
    """None, and a line in the log, for whatever cannot be imported."""
    path = os.path.join(folder, file)
    if not os.path.isfile(path):
        return _failed(f"file {path} not found")
    if os.path.splitext(file)[1] not in (".xml", ".mjcf"):
        return _failed(f"{path}: unknown extension")
    try:
        root = ET.parse(path).getroot()
    except ET.ParseError as why:
        return _failed(f"{path}: {why}")
    world = root.find("worldbody")
    if world is None or len(world.findall("body")) != 1 or world.findall("geom"):
        return _failed(f"{path}: the world must hold one body and nothing else")
    lossy = _lossy(root, bool(options.fix_base_link))
    files = _files(root, folder)
    try:
        model = mj.MjModel.from_xml_string(ET.tostring(lossy, encoding="unicode"), files)
    except ValueError as why:
        return _failed(f"{path}: {why}")
    return Asset(lossy, files, options, model)


def _failed(why: str) -> None:
    error(f"Failed to load asset: {why}")


def _files(root: ET.Element, folder: str) -> Dict[str, bytes]:
    names = [mesh.get("file", "") for mesh in root.iter("mesh")]
    found: Dict[str, bytes] = {}
    for name in names:
        path = os.path.join(folder, name)
        if name and os.path.isfile(path):
            with open(path, "rb") as file:
                found[name] = file.read()
    return found


def _lossy(root: ET.Element, fixed: bool) -> ET.Element:
    root = copy.deepcopy(root)
    for child in list(root):
        if child.tag not in _KEPT:
            root.remove(child)
    compiler = root.find("compiler")
    if compiler is None:
        compiler = ET.Element("compiler")
        root.insert(0, compiler)
    compiler.set("autolimits", "false")
    degrees = compiler.get("angle", "degree") == "degree"
    for default in root.iter("default"):
        for joint in default.findall("joint"):
            if degrees and joint.get("range"):
                low, high = (math.degrees(float(v)) for v in joint.get("range", "").split())
                joint.set("range", f"{low!r} {high!r}")
    for joint in root.iter("joint"):
        for name in ("frictionloss", "armature", "damping", "stiffness"):
            joint.attrib.pop(name, None)
        if joint.get("limited") != "true":
            joint.attrib.pop("range", None)
            joint.set("limited", "false")
    for inertial in root.iter("inertial"):
        inertial.attrib.pop("quat", None)
    world = root.find("worldbody")
    assert world is not None
    body = world.find("body")
    assert body is not None
    for name in ("pos", "quat", "euler", "axisangle"):
        body.attrib.pop(name, None)
    for free in [e for e in body if e.tag == "freejoint" or e.get("type") == "free"]:
        body.remove(free)
    if not fixed:
        body.insert(0, ET.Element("freejoint"))
    return root
