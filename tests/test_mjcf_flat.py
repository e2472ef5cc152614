"""The flat export: it says the same robot, and its cache survives crowds and crashes."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mjcf_compare import assert_same_robot, recompile
from mjcf_scenes import leg, meshed, write
from outboard.backends.mjcf import (
    inspect,
)

mujoco: Any = pytest.importorskip("mujoco")
np: Any = pytest.importorskip("numpy")

# What an importer reads


def test_the_export_is_explicit_where_importers_guess(tmp_path: Path) -> None:
    top = '<default><joint armature=".1"/><geom friction=".5"/></default>'
    shin = '<frame euler="0 90 0"><body name="tip"/></frame>'
    text = leg(top=top, joint='range="-90 90"', shin=shin)
    model = inspect(write(tmp_path, text))
    root = ET.fromstring(model.flat.xml)
    assert [child.tag for child in root] == ["compiler", "worldbody"]
    assert root[0].attrib == {
        "angle": "radian",
        "autolimits": "false",
        "inertiafromgeom": "false",
    }
    assert {element.tag for element in root[1].iter()} == {
        "worldbody",
        "body",
        "inertial",
        "freejoint",
        "joint",
        "geom",
    }
    assert [body.get("name") for body in root.iter("body")] == ["trunk", "shin", "tip"]
    for body in root.iter("body"):
        assert set(body.attrib) == {"name", "pos", "quat"}
        inertial = body.find("inertial")
        assert inertial is not None
        assert set(inertial.attrib) == {"pos", "quat", "mass", "diaginertia"}
        assert float(inertial.get("mass", "0")) > 0
    joint = next(root.iter("joint"))
    assert joint.get("limited") == "true"
    assert joint.get("range") == "-1.5707963267948966 1.5707963267948966"
    assert (joint.get("armature"), joint.get("frictionloss")) == ("0.1", "0.0")
    explicit = {"type", "size", "pos", "quat", "contype", "conaffinity", "friction"}
    assert all(set(geom.attrib) >= explicit for geom in root.iter("geom"))


def test_an_unlimited_joint_says_so(tmp_path: Path) -> None:
    root = ET.fromstring(inspect(write(tmp_path, leg())).flat.xml)
    joint = next(root.iter("joint"))
    assert joint.get("limited") == "false" and joint.get("range") is None


def test_names_that_an_importer_would_change_are_left_out(tmp_path: Path) -> None:
    shin = '<geom name="left/foot" size=".1"/>'
    base = '<freejoint name="the base"/>'
    root = ET.fromstring(inspect(write(tmp_path, leg(shin=shin, base=base))).flat.xml)
    assert [geom.get("name") for geom in root.iter("geom")] == ["trunk_box", "foot", None]
    assert next(root.iter("freejoint")).attrib == {}


def test_geoms_that_cannot_touch_the_floor_are_not_exported(tmp_path: Path) -> None:
    shin = (
        '<geom name="paint" size="1" contype="0" conaffinity="0"/>'
        '<geom name="hook" size="1" contype="2" conaffinity="2"/>'
    )
    root = ET.fromstring(inspect(write(tmp_path, leg(shin=shin))).flat.xml)
    assert [geom.get("name") for geom in root.iter("geom")] == ["trunk_box", "foot"]


# It is the same robot


@pytest.mark.parametrize(
    "scene",
    [
        pytest.param({}, id="floating"),
        pytest.param({"base": ""}, id="fixed"),
        pytest.param({"joint": 'range="-33 77" armature=".1" frictionloss=".3"'}, id="hinge"),
        pytest.param({"joint": 'type="slide" range="-.1 .3" pos="1 2 3"'}, id="slide"),
        pytest.param(
            {"shin": '<body name="a" euler="10 20 30"><geom type="capsule" size=".1 .2"/></body>'},
            id="welded",
        ),
        pytest.param(
            {
                "top": '<compiler angle="radian" eulerseq="ZYX"/>',
                "trunk": '<geom type="cylinder" fromto="0 0 0 .1 .2 .3" size=".05"/>'
                '<geom type="box" size=".1 .2 .3" zaxis="1 1 1" friction=".1 .2 .3"/>',
            },
            id="orientations",
        ),
        pytest.param(
            {
                "trunk": '<body name="arm"><inertial pos=".1 0 0" mass="2"'
                ' fullinertia="1 2 2.5 .1 .2 .3"/><joint name="shoulder"/>'
                '<geom size=".1"/></body>'
            },
            id="fullinertia",
        ),
        pytest.param({"joint": 'actuatorfrcrange="-3 3"'}, id="joint_force_range"),
    ],
)
def test_a_flat_export_compiles_to_the_very_same_arrays(
    tmp_path: Path, scene: dict[str, str]
) -> None:
    path = write(tmp_path, leg(**scene))
    rebuilt, _ = recompile(inspect(path), tmp_path)
    assert_same_robot(mujoco.MjModel.from_xml_path(str(path)), rebuilt)


def vector(size: int, low: float = -2, high: float = 2) -> st.SearchStrategy[str]:
    number = st.floats(low, high, allow_nan=False, width=32)
    return st.lists(number, min_size=size, max_size=size).map(lambda v: " ".join(map(repr, v)))


LONG = vector(4, 0.015625)  # never all zeros
AXIS = vector(3, 0.015625)
SIZE = vector(3, 0.015625)


@settings(
    max_examples=60,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(body=LONG, axis=AXIS, geom=LONG, inertial=LONG, size=SIZE, place=vector(3))
def test_round_trips_are_exact_for_any_pose(
    tmp_path: Path, body: str, axis: str, geom: str, inertial: str, size: str, place: str
) -> None:
    shin = f"""<body name="toe" pos="{place}" quat="{body}">
      <inertial pos="{place}" quat="{inertial}" mass=".3" diaginertia=".03 .02 .015"/>
      <joint name="ankle" axis="{axis}" pos="{place}"/>
      <geom type="box" size="{size}" pos="{place}" quat="{geom}"/></body>
      <body name="tip"><joint name="tip_joint"/>
      <geom type="box" size="{size}" pos="{place}" quat="{geom}"/></body>"""
    path = write(tmp_path, leg(shin=shin))
    rebuilt, _ = recompile(inspect(path), tmp_path)
    assert_same_robot(mujoco.MjModel.from_xml_path(str(path)), rebuilt)


def test_a_body_beside_the_robot_does_not_shift_what_belongs_to_what(tmp_path: Path) -> None:
    mark = '<body name="mark"><geom size="1" contype="0" conaffinity="0"/></body>'
    beside = inspect(write(tmp_path, leg(world=mark)))
    alone = inspect(write(tmp_path, leg(world="")))
    assert beside.flat == alone.flat


# Meshes


def corners(model: Any, geom: int) -> Any:
    """(n, 3) m: a mesh geom's vertices in its body's frame, sorted."""
    mesh = model.geom_dataid[geom]
    first = model.mesh_vertadr[mesh]
    points = model.mesh_vert[first : first + model.mesh_vertnum[mesh]]
    turn = np.zeros(9)
    mujoco.mju_quat2Mat(turn, model.geom_quat[geom])
    placed = points @ turn.reshape(3, 3).T + model.geom_pos[geom]
    return np.array(sorted(np.round(placed, 6).tolist()))


@pytest.mark.parametrize(
    "attributes",
    ["", 'scale="2 3 4"', 'scale="-1 1 1"', 'refpos="1 2 3" refquat="1 1 0 0"'],
    ids=["plain", "scaled", "mirrored", "moved"],
)
def test_meshes_are_written_as_compiled_and_stand_where_they_stood(
    tmp_path: Path, attributes: str
) -> None:
    path = meshed(tmp_path, attributes)
    original = mujoco.MjModel.from_xml_path(str(path))
    model = inspect(path)
    rebuilt, flat = recompile(model, tmp_path)
    assert [p.name for p in flat.mesh_paths] == ["mesh_0.obj"]
    assert flat.mesh_paths[0].parent == flat.path.parent
    np.testing.assert_allclose(corners(rebuilt, 2), corners(original, 3), atol=2e-6)
    written = re.findall(rb"^v (.*)$", flat.mesh_paths[0].read_bytes(), re.MULTILINE)
    read = np.array([line.split() for line in written], dtype=np.float32)
    np.testing.assert_array_equal(read, original.mesh_vert)
    geom = [g for g in ET.fromstring(model.flat.xml).iter("geom") if g.get("type") == "mesh"]
    assert len(geom) == 1 and geom[0].get("size") is None
    pose = [float(v) for v in geom[0].get("pos", "").split() + geom[0].get("quat", "").split()]
    assert pose == [*original.geom_pos[3], *original.geom_quat[3]]


def test_a_shape_that_is_fitted_to_a_mesh_needs_no_mesh(tmp_path: Path) -> None:
    path = meshed(tmp_path, "")
    path.write_text(path.read_text().replace('type="mesh"', 'type="box"'))
    _, flat = recompile(inspect(path), tmp_path)
    assert flat.mesh_paths == ()
