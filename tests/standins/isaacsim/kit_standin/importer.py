"""The stand-in's MJCF importer: it writes a USD file, and loses what the original is known to lose.

Friction of joints and shapes, gains and joint damping are lost; a range counts only where the joint says
limited="true"; there is always a second articulation root, `worldBody`. The model itself travels as text in
the default prim's custom data: the physics behind is MuJoCo's.
"""

# pyright: reportAttributeAccessIssue=false
# (USD makes its names at run time.)

import copy
import os
import re
import xml.etree.ElementTree as ET
from typing import Any, Dict, List

from pxr import Usd, UsdGeom, UsdPhysics

from .settings import SETTINGS

_KEPT = ("compiler", "asset", "worldbody")
_MOST_JOINTS = 3  # on one body; the original ends the process for more


def convert(path: str, usd: str, prim_path: str, fix_base: bool) -> None:
    if SETTINGS.importer == "none":
        return
    root = _lossy(ET.parse(path).getroot(), fix_base)
    world = root.find("worldbody")
    assert world is not None
    if SETTINGS.importer == "exit" or _most_joints(world) > _MOST_JOINTS:
        os._exit(0)
    stage = Usd.Stage.CreateNew(usd)
    top = UsdGeom.Xform.Define(stage, prim_path).GetPrim()
    stage.SetDefaultPrim(top)
    UsdPhysics.ArticulationRootAPI.Apply(
        UsdGeom.Xform.Define(stage, prim_path + "/worldBody").GetPrim()
    )
    (base,) = world.findall("body")
    folder = f"{prim_path}/{_name(base)}"
    UsdGeom.Xform.Define(stage, folder)
    for body in world.iter("body"):
        prim = UsdGeom.Xform.Define(stage, f"{folder}/{_name(body)}").GetPrim()
        UsdPhysics.RigidBodyAPI.Apply(prim)
        if body is base:
            UsdPhysics.ArticulationRootAPI.Apply(prim)
    for joint in world.iter("joint"):
        UsdPhysics.RevoluteJoint.Define(stage, f"{prim_path}/joints/{joint.get('name')}")
    text = ET.tostring(root, encoding="unicode")
    top.SetCustomDataByKey("mjcf", text)
    top.SetCustomDataByKey("folder", os.path.dirname(os.path.abspath(path)))
    top.SetCustomDataByKey("fix_base", fix_base)
    stage.GetRootLayer().Save()


def _name(element: ET.Element) -> str:
    """As the original makes prim names."""
    name = re.sub(r"[^A-Za-z0-9_]", "_", element.get("name", ""))
    return "a" + name if name[:1].isdigit() else name


def _most_joints(world: ET.Element) -> int:
    return max(len(body.findall("joint")) for body in world.iter("body"))


def _lossy(root: ET.Element, fix_base: bool) -> ET.Element:
    root = copy.deepcopy(root)
    for child in list(root):
        if child.tag not in _KEPT:
            root.remove(child)
    for joint in root.iter("joint"):
        for name in ("frictionloss", "damping", "stiffness"):
            joint.attrib.pop(name, None)
        if joint.get("limited") != "true" or SETTINGS.limits != "imported":
            joint.attrib.pop("range", None)
            joint.set("limited", "false")
        if SETTINGS.names == "joints":
            joint.set("name", joint.get("name", "") + "_0")
    for body in root.iter("body"):
        if SETTINGS.names in ("bodies", body.get("name")):
            body.set("name", body.get("name", "") + "_0")
    for geom in root.iter("geom"):
        geom.attrib.pop("friction", None)
    world = root.find("worldbody")
    assert world is not None
    for base in world.findall("body"):
        for free in [e for e in base if e.tag == "freejoint"]:
            base.remove(free)
        if not fix_base:
            base.insert(0, ET.Element("freejoint"))
    return root


def mesh_files(root: ET.Element, folder: str) -> Dict[str, bytes]:
    files: Dict[str, bytes] = {}
    for mesh in root.iter("mesh"):
        name: Any = mesh.get("file")
        with open(os.path.join(folder, name), "rb") as file:
            files[name] = file.read()
    return files


def native_order(names: List[str], parents: List[int]) -> List[int]:
    """Indices in the engine's order: level by level, and within one from the last to the first."""
    if SETTINGS.order == "document":
        return list(range(len(names)))
    depth: List[int] = []
    for parent in parents:
        depth.append(0 if parent < 0 else depth[parent] + 1)
    return sorted(range(len(names)), key=lambda i: (depth[i], -i))
