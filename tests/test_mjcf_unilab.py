"""The files people have: UniLab's G1 and Go2, from its public wheel."""

from __future__ import annotations

import re
import struct
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest

from mjcf_compare import assert_same_robot, recompile
from mjcf_scenes import TETRAHEDRON
from outboard.backends.mjcf import UnsupportedModelError, inspect

mujoco: Any = pytest.importorskip("mujoco")

pytestmark = [pytest.mark.slow, pytest.mark.timeout(180)]

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


@pytest.mark.parametrize("robot", ["g1/g1.xml", "go2/go2.xml", "go2/go2_mujoco.xml"])
def test_unilabs_robots_round_trip_exactly(unilab: Path, tmp_path: Path, robot: str) -> None:
    path = unilab / robot
    rebuilt, _ = recompile(inspect(path, fold_joint_damping=True), tmp_path)
    assert_same_robot(mujoco.MjModel.from_xml_path(str(path)), rebuilt)


@pytest.mark.parametrize(
    "scene, rule",
    [("scene_crawl_slope.xml", "C2.11"), ("scene_flat_with_largebox.xml", "C2.10")],
)
def test_unilabs_scenes_with_obstacles_are_refused(unilab: Path, scene: str, rule: str) -> None:
    with pytest.raises(UnsupportedModelError) as caught:
        inspect(unilab / "g1" / scene)
    assert caught.value.rule == rule
