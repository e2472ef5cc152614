"""The flat export: it says the same robot, and its cache survives crowds and crashes."""

from __future__ import annotations

import os
import re
import struct
import subprocess
import sys
import xml.etree.ElementTree as ET
import zipfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mjcf_scenes import TETRAHEDRON, leg, write
from outboard.backends.mjcf import (
    FlatModel,
    Model,
    UnsupportedModelError,
    default_cache_dir,
    export_flat,
    inspect,
)
from outboard.ipc.errors import UsageError

mujoco: Any = pytest.importorskip("mujoco")
np: Any = pytest.importorskip("numpy")

BODY = ("pos", "quat", "mass", "ipos", "iquat", "inertia", "parentid", "jntnum", "weldid")
JOINT = ("type", "axis", "pos", "limited", "range", "bodyid", "qposadr", "dofadr")
GEOM = ("type", "size", "pos", "quat", "contype", "conaffinity", "friction", "bodyid")


def recompile(model: Model, folder: Path) -> tuple[Any, FlatModel]:
    flat = export_flat(model, folder / "cache")
    return mujoco.MjModel.from_xml_path(str(flat.path)), flat


def assert_same_robot(original: Any, rebuilt: Any, *, shapes: tuple[str, ...] = GEOM) -> None:
    """Every array of bodies, joints and collision geoms, without a tolerance.

    The scene's robot must be its only body tree, so that body numbers agree.
    """
    solid = [
        geom
        for geom in range(original.ngeom)
        if original.geom_bodyid[geom]
        and (original.geom_contype[geom] or original.geom_conaffinity[geom])
    ]
    pairs = [(f"body_{name}", slice(None)) for name in BODY]
    pairs += [(f"jnt_{name}", slice(None)) for name in JOINT]
    pairs += [(f"dof_{name}", slice(None)) for name in ("armature", "frictionloss")]
    for name, rows in pairs:
        np.testing.assert_array_equal(
            getattr(original, name)[rows], getattr(rebuilt, name), err_msg=name
        )
    for name in shapes:
        np.testing.assert_array_equal(
            getattr(original, "geom_" + name)[solid], getattr(rebuilt, "geom_" + name), err_msg=name
        )
    np.testing.assert_array_equal(original.qpos0, rebuilt.qpos0)


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


LONG = vector(4, 0.01)  # never all zeros
AXIS = vector(3, 0.01)
SIZE = vector(3, 0.01)


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


def meshed(folder: Path, attributes: str) -> Path:
    write(folder, TETRAHEDRON, "m.obj")
    top = f'<asset><mesh name="m" file="m.obj" {attributes}/></asset>'
    shin = (
        '<geom type="mesh" mesh="m" pos="0 .1 0" euler="10 20 30"/>'
        '<geom type="mesh" mesh="m" contype="0" conaffinity="0"/>'
    )
    return write(folder, leg(top=top, shin=shin))


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


# The cache


def test_the_same_robot_has_the_same_key_wherever_and_however_it_is_written(
    tmp_path: Path,
) -> None:
    one = inspect(write(tmp_path / "a", leg(joint='range="-90 90"')))
    spelled = leg(joint='range="-1.5707963267948966 1.5707963267948966" limited="true"')
    spelled = spelled.replace("<worldbody>", '<compiler angle="radian"/><worldbody>')
    other = inspect(write(tmp_path / "b", spelled, "x.xml"))
    first, second = export_flat(one, tmp_path / "cache"), export_flat(other, tmp_path / "cache")
    assert first == second
    assert first.path.parent.name == first.sha256 and len(first.sha256) == 64


def test_the_key_changes_with_the_xml_the_meshes_and_the_exporter(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = tmp_path / "cache"
    keys = [export_flat(inspect(meshed(tmp_path, "")), cache).sha256]
    keys.append(export_flat(inspect(meshed(tmp_path, 'scale="2 2 2"')), cache).sha256)
    longer = TETRAHEDRON.replace(".3", ".4")
    path = meshed(tmp_path, "")
    write(tmp_path, longer, "m.obj")
    keys.append(export_flat(inspect(path), cache).sha256)
    monkeypatch.setattr("outboard.backends.mjcf_flat.EXPORTER_VERSION", 0)
    keys.append(export_flat(inspect(path), cache).sha256)
    assert len(set(keys)) == 4


def test_the_file_name_has_one_dot_and_a_letter_first(tmp_path: Path) -> None:
    flat = export_flat(inspect(write(tmp_path, leg(), "9.my-robot.xml")), tmp_path / "cache")
    assert re.fullmatch(r"[A-Za-z][A-Za-z0-9_]*\.xml", flat.path.name)


def test_a_second_export_writes_nothing(tmp_path: Path) -> None:
    model = inspect(meshed(tmp_path, ""))
    first = export_flat(model, tmp_path / "cache")
    before = {path: path.stat().st_mtime_ns for path in first.path.parent.iterdir()}
    assert export_flat(model, tmp_path / "cache") == first
    assert {path: path.stat().st_mtime_ns for path in first.path.parent.iterdir()} == before


def test_a_damaged_or_missing_file_is_replaced(tmp_path: Path) -> None:
    model = inspect(meshed(tmp_path, ""))
    flat = export_flat(model, tmp_path / "cache")
    flat.path.write_text("<mujoco")
    flat.mesh_paths[0].unlink()
    export_flat(model, tmp_path / "cache")
    assert flat.path.read_text() == model.flat.xml
    assert flat.mesh_paths[0].read_bytes() == model.flat.meshes[0][1]


BUILDER = """
import os, sys, time
from pathlib import Path
from outboard.backends import mjcf
scene, cache, start, mode = sys.argv[1:5]
model = mjcf.inspect(scene)
if mode == "die":
    Path.rename = lambda *_: os._exit(9)  # all is written, nothing is in place
print("ready", flush=True)
while not os.path.exists(start):
    time.sleep(0.0005)
flat = mjcf.export_flat(model, Path(cache))
complete = flat.path.read_text() == model.flat.xml
complete = complete and all(
    path.read_bytes() == content
    for path, (_, content) in zip(flat.mesh_paths, model.flat.meshes)
)
print(flat.sha256, complete, flush=True)
"""


def builder(tmp_path: Path, scene: Path, mode: str = "") -> subprocess.Popen[str]:
    source = str(Path(__file__).resolve().parent.parent / ".src")
    arguments = [str(scene), str(tmp_path / "cache"), str(tmp_path / "start"), mode]
    return subprocess.Popen(
        [sys.executable, "-c", BUILDER, *arguments],
        env={**os.environ, "PYTHONPATH": source},
        stdout=subprocess.PIPE,
        text=True,
    )


def test_eight_processes_that_build_the_same_model_at_once_all_get_it_whole(
    tmp_path: Path,
) -> None:
    scene = meshed(tmp_path, "")
    builders = [builder(tmp_path, scene) for _ in range(8)]
    try:
        for process in builders:
            assert process.stdout is not None and process.stdout.readline() == "ready\n"
        (tmp_path / "start").touch()
        answers = [process.communicate(timeout=30)[0] for process in builders]
    finally:
        for process in builders:
            process.kill()
            process.communicate()
    key = export_flat(inspect(scene), tmp_path / "cache").sha256
    assert answers == [f"{key} True\n"] * 8
    assert [path.name for path in (tmp_path / "cache").iterdir()] == [key]


def test_a_builder_that_dies_leaves_nothing_that_could_be_taken_for_a_model(
    tmp_path: Path,
) -> None:
    scene = meshed(tmp_path, "")
    (tmp_path / "start").touch()
    process = builder(tmp_path, scene, "die")
    process.communicate(timeout=30)
    assert process.returncode == 9
    (left,) = (tmp_path / "cache").iterdir()
    assert left.name.startswith(".building-")
    flat = export_flat(inspect(scene), tmp_path / "cache")
    assert flat.path.is_file()
    assert left.exists()  # young: another process may be at work in it
    os.utime(left, (0, 0))
    export_flat(inspect(write(tmp_path, leg())), tmp_path / "cache")
    assert not left.exists()


def test_a_cache_that_cannot_be_written_is_the_callers_error(tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("a file")
    with pytest.raises(UsageError, match="set XDG_CACHE_HOME"):
        export_flat(inspect(write(tmp_path, leg())), tmp_path / "cache")


@pytest.mark.parametrize(
    "environ, expected",
    [
        ({"XDG_CACHE_HOME": "/c", "HOME": "/h"}, "/c/outboard/models"),
        ({"HOME": "/h"}, "/h/.cache/outboard/models"),
        ({"XDG_CACHE_HOME": "", "HOME": "/h"}, "/h/.cache/outboard/models"),
        ({"XDG_CACHE_HOME": "relative", "HOME": "/h"}, "/h/.cache/outboard/models"),
    ],
)
def test_the_cache_is_where_the_users_caches_are(environ: dict[str, str], expected: str) -> None:
    assert default_cache_dir(environ) == Path(expected)


# The files people have: UniLab's G1 and Go2


UNILAB = "unilab==1.5.2"


def dummy_mesh(path: Path) -> None:
    """A tetrahedron: the wheel refers to meshes and does not hold them."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".obj":
        path.write_text(TETRAHEDRON)
        return
    corner = [(0, 0, 0), (0.1, 0, 0), (0, 0.2, 0), (0, 0, 0.3)]
    faces = [(0, 2, 1), (0, 1, 3), (0, 3, 2), (1, 2, 3)]
    triangles = b"".join(
        struct.pack("<12fH", 0, 0, 0, *corner[a], *corner[b], *corner[c], 0) for a, b, c in faces
    )
    path.write_bytes(b"\0" * 80 + struct.pack("<I", len(faces)) + triangles)


@pytest.fixture(scope="module")
def unilab(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """UniLab's robots from its wheel, with dummy meshes. Skips when the wheel cannot be had."""
    folder = tmp_path_factory.mktemp("unilab")
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--quiet", "--dest"]
    done = subprocess.run(
        [*command, str(folder), UNILAB], capture_output=True, text=True, timeout=120
    )
    wheels = list(folder.glob("*.whl"))
    if done.returncode or not wheels:
        last = (done.stderr.strip().splitlines() or ["pip said nothing"])[-1]
        pytest.skip(f"the wheel of {UNILAB} cannot be downloaded: {last}")
    with zipfile.ZipFile(wheels[0]) as wheel:
        wheel.extractall(folder)
    robots = folder / "unilab" / "assets" / "robots"
    for xml in robots.glob("*/*.xml"):
        for name in re.findall(r'file="([^"]+\.(?:obj|STL))"', xml.read_text()):
            dummy_mesh(xml.parent / "assets" / name)
    return robots


@pytest.mark.slow
@pytest.mark.timeout(180)
def test_unilabs_g1_keeps_the_contract(unilab: Path, tmp_path: Path) -> None:
    model = inspect(unilab / "g1" / "scene_flat.xml")
    assert (len(model.bodies), len(model.joints), len(model.actuators)) == (30, 29, 29)
    assert model.keyframe == "stand" and model.default_qpos[2] == 0.754
    assert model.default_ctrl == model.default_qpos[7:]
    first = model.actuators[0]
    assert (first.name, first.kp, first.kv) == ("left_hip_pitch_joint", 40.179, 2.558)
    assert first.force_range == (-88, 88)
    assert model.floor is not None and model.excludes == 4
    assert len(model.sensors) == 21 and "left_foot_contact_0" in model.sensors
    assert "visual geoms: 35" in model.not_reproduced
    rebuilt, flat = recompile(model, tmp_path)
    assert flat.mesh_paths == ()
    assert rebuilt.nq == 36 and rebuilt.nbody == 31


@pytest.mark.slow
@pytest.mark.timeout(180)
def test_unilabs_go2_is_refused_for_its_joint_damping_unless_that_is_folded(
    unilab: Path, tmp_path: Path
) -> None:
    scene = unilab / "go2" / "scene_flat.xml"
    with pytest.raises(UnsupportedModelError) as caught:
        inspect(scene)
    error = caught.value
    assert (error.rule, error.name, error.value) == ("C2.5", "FL_hip_joint", "damping 0.5")
    assert error.file == str(unilab / "go2" / "go2.xml")
    model = inspect(scene, fold_joint_damping=True)
    assert {actuator.kv for actuator in model.actuators} == {0.5}
    assert len(model.notes) == 12
    assert [model.joints[a.joint].name for a in model.actuators[:3]] == [
        "FR_hip_joint",
        "FR_thigh_joint",
        "FR_calf_joint",
    ]
    assert model.actuators[2].force_range == (-45.43, 45.43)
    assert model.colliding_pairs == 0  # its masks meet the floor's only
    assert len(model.sensors) == 38 and "FL_foot_contact" in model.sensors
    rebuilt, _ = recompile(model, tmp_path)
    assert rebuilt.nq == 19 and rebuilt.ngeom == 23


@pytest.mark.slow
@pytest.mark.timeout(180)
@pytest.mark.parametrize("robot", ["g1/g1.xml", "go2/go2.xml", "go2/go2_mujoco.xml"])
def test_unilabs_robots_round_trip_exactly(unilab: Path, tmp_path: Path, robot: str) -> None:
    path = unilab / robot
    rebuilt, _ = recompile(inspect(path, fold_joint_damping=True), tmp_path)
    assert_same_robot(mujoco.MjModel.from_xml_path(str(path)), rebuilt)


@pytest.mark.slow
@pytest.mark.timeout(180)
@pytest.mark.parametrize(
    "scene, rule",
    [("scene_crawl_slope.xml", "C2.11"), ("scene_flat_with_largebox.xml", "C2.10")],
)
def test_unilabs_scenes_with_obstacles_are_refused(unilab: Path, scene: str, rule: str) -> None:
    with pytest.raises(UnsupportedModelError) as caught:
        inspect(unilab / "g1" / scene)
    assert caught.value.rule == rule
