"""The model contract: legal models are read as they compile, and what is left out is said."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from mjcf_scenes import ATTACHED, FLOOR, KNEE, MESH, STAND, TETRAHEDRON, key, leg, position, write
from outboard.backends.mjcf import (
    InvalidModelError,
    ModelContractError,
    UnsupportedModelError,
    inspect,
)

mujoco: Any = pytest.importorskip("mujoco")

INF = math.inf

# Keyframes


def test_the_default_pose_is_the_only_keyframe_with_its_quaternion_normalised(
    tmp_path: Path,
) -> None:
    model = inspect(write(tmp_path, leg(bottom=key(STAND))))
    assert model.keyframe == "stand"
    assert model.default_qpos == (0, 0, 0.5, 1, 0, 0, 0, 0.3)
    assert model.default_qvel == (0,) * 7


def test_without_a_keyframe_or_with_several_the_default_pose_is_the_reference_pose(
    tmp_path: Path,
) -> None:
    two = f'<keyframe><key {STAND}/><key name="b" qpos="0 0 .2 1 0 0 0 0"/></keyframe>'
    for bottom in ("", two):
        path = write(tmp_path, leg(bottom=bottom))
        model = inspect(path)
        assert model.keyframe is None
        assert model.default_qpos == (0, 0, 1, 1, 0, 0, 0, 0)
    assert inspect(path, keyframe="b").default_qpos[2] == 0.2


def test_the_default_target_is_the_keyframes_ctrl_or_else_holds_its_pose(tmp_path: Path) -> None:
    written = inspect(write(tmp_path, leg(bottom=key(STAND + ' ctrl=".1"'))))
    assert written.default_ctrl == (0.1,)
    held = inspect(write(tmp_path, leg(bottom=key(STAND))))
    assert held.default_ctrl == (0.3,)
    clipped = leg(bottom=key(STAND), actuator=position('ctrlrange="-.2 .2"'))
    assert inspect(write(tmp_path, clipped)).default_ctrl == (0.2,)


# Legal models that hand-written scanners refuse or misread


def test_a_legal_model_is_read_in_si_units_and_radians(tmp_path: Path) -> None:
    actuator = position('kp="30" kv="2" forcerange="-7 7" ctrlrange="-1 1"')
    joint = 'range="-90 180" armature=".01" frictionloss=".2"'
    model = inspect(write(tmp_path, leg(actuator=actuator, joint=joint)))
    assert model.floating_base
    assert model.body_names == ("trunk", "shin")
    assert [body.parent for body in model.bodies] == [-1, 0]
    assert model.joint_names == ("knee",)
    assert model.joints[0].range == (-math.pi / 2, math.pi)
    assert (model.joints[0].armature, model.joints[0].frictionloss) == (0.01, 0.2)
    servo = model.actuators[0]
    assert (servo.name, servo.joint, servo.kp, servo.kv) == ("knee_servo", 0, 30, 2)
    assert (servo.force_range, servo.ctrl_range) == ((-7, 7), (-1, 1))
    assert (model.root_pos, model.root_quat) == ((0, 0, 1), (1, 0, 0, 0))
    assert model.mass == pytest.approx(8 + 1000 * 4 / 3 * math.pi * 0.03**3)
    assert model.floor is not None and model.floor.height == 0
    assert model.gravity == (0, 0, -9.81) and model.timestep == 0.002
    assert model.not_reproduced == () and model.notes == ()


@pytest.mark.parametrize(
    "attributes, kp, kv, force, ctrl",
    [
        pytest.param('kp="3" gear="1 0 0 0 0 0"', 3, 0, INF, INF, id="C1.3-full_gear"),
        pytest.param('kp="3" forcelimited="false" forcerange="-10 10"', 3, 0, INF, INF, id="C1.4"),
        pytest.param('kp="3" forcerange="0 0"', 3, 0, INF, INF, id="C1.4-zeros"),
        pytest.param('kp="3" ctrllimited="false" ctrlrange="-1 1"', 3, 0, INF, INF, id="C1.11"),
        pytest.param('class="strong"', 200, 5, 40, INF, id="default_class"),
        pytest.param('kp="3" inheritrange="1"', 3, 0, INF, 0.5, id="C1.11-inheritrange"),
        pytest.param('kp="3" group="2" user="1"', 3, 0, INF, INF, id="C1.10-no_effect"),
    ],
)
def test_a_position_actuator_is_read_as_it_compiles(
    tmp_path: Path, attributes: str, kp: float, kv: float, force: float, ctrl: float
) -> None:
    top = (
        '<compiler angle="radian"/><size nuser_actuator="1"/><default>'
        '<default class="strong"><position kp="200" kv="5" forcerange="-40 40"/></default></default>'
    )
    text = leg(top=top, joint='range="-.5 .5"', actuator=position(attributes))
    servo = inspect(write(tmp_path, text)).actuators[0]
    assert (servo.kp, servo.kv) == (kp, kv)
    assert (servo.force_range, servo.ctrl_range) == ((-force, force), (-ctrl, ctrl))


def test_C1_6_a_damping_ratio_is_the_kv_it_compiles_to(tmp_path: Path) -> None:
    path = write(tmp_path, leg(actuator=position('kp="30" dampratio="1"')))
    compiled = mujoco.MjModel.from_xml_path(str(path))
    servo = inspect(path).actuators[0]
    assert servo.kv == -compiled.actuator_biasprm[0, 2] > 0


def test_C1_5_an_omitted_kp_is_1_and_reported(tmp_path: Path) -> None:
    model = inspect(write(tmp_path, leg(actuator=position(""))))
    assert model.actuators[0].kp == 1
    assert model.notes == ("actuator knee_servo: kp is 1 and not written on its element",)
    assert inspect(write(tmp_path, leg(actuator=position('kp="1"')))).notes == ()


def test_C2_6_a_symmetric_joint_force_range_lowers_the_force_limit(tmp_path: Path) -> None:
    for limit, force in ((3, 3), (20, 7)):
        joint = f'actuatorfrcrange="-{limit} {limit}"'
        text = leg(joint=joint, actuator=position('forcerange="-7 7"'))
        assert inspect(write(tmp_path, text)).actuators[0].force_range == (-force, force)


def test_an_unnamed_actuator_goes_by_the_name_of_its_joint(tmp_path: Path) -> None:
    path = write(tmp_path, leg(actuator='<position joint="knee" kp="2"/>'))
    assert inspect(path).actuator_names == ("knee",)


def test_actuators_keep_their_own_order_and_say_which_joint_they_drive(tmp_path: Path) -> None:
    shin = '<body name="toe"><joint name="ankle"/><geom size=".01"/></body>'
    actuator = '<position name="a" joint="ankle" kp="2"/>' + KNEE
    model = inspect(write(tmp_path, leg(shin=shin, actuator=actuator)))
    assert model.joint_names == ("knee", "ankle")
    assert [servo.joint for servo in model.actuators] == [1, 0]


@pytest.mark.parametrize(
    "scene",
    [
        pytest.param(
            {"top": '<default class="main"><joint armature=".1"/></default>'},
            id="root_default_main",
        ),
        pytest.param(
            {"shin": '<frame euler="0 90 0"><body name="toe"/></frame>', "joint": 'armature=".1"'},
            id="frame",
        ),
        pytest.param(
            {
                "top": '<default><default class="l"><joint armature=".1"/></default></default>',
                "joint": 'class="l"',
            },
            id="class",
        ),
        pytest.param(
            {"top": "<!-- a -- b -->", "joint": 'armature=".1"'}, id="dashes_in_a_comment"
        ),
        pytest.param({"base": "", "joint": 'armature=".1"'}, id="fixed_base"),
        pytest.param(
            {
                "shin": '<site name="s" euler="1 2 3"/><camera name="c"/>',
                "bottom": '<sensor><gyro name="g" site="s"/></sensor>',
                "joint": 'armature=".1"',
            },
            id="sites_and_sensors",
        ),
        pytest.param(
            {"joint": 'armature=".1" margin=".1" solreflimit=".01 1" limited="false"'}, id="C2.8"
        ),
    ],
)
def test_legal_mjcf_is_accepted(tmp_path: Path, scene: dict[str, str]) -> None:
    model = inspect(write(tmp_path, leg(**scene)))
    assert model.joints[0].armature == 0.1
    assert model.joints[0].range == (-INF, INF)
    assert model.floating_base == (scene.get("base") is None)


def test_includes_are_followed_also_from_included_files(tmp_path: Path) -> None:
    write(tmp_path, f"<mujocoinclude>{KNEE}</mujocoinclude>", "servo.xml")
    nested = '<mujocoinclude><actuator><include file="servo.xml"/></actuator></mujocoinclude>'
    write(tmp_path, nested, "drives.xml")
    path = write(tmp_path, leg(actuator="", bottom='<include file="drives.xml"/>'))
    assert inspect(path).actuators[0].kp == 30


def test_an_attached_robot_is_accepted_with_its_prefixed_names(tmp_path: Path) -> None:
    write(tmp_path, leg())
    model = inspect(write(tmp_path, ATTACHED, "scene.xml"))
    assert model.body_names == ("left_trunk", "left_shin")
    assert (model.actuator_names, model.actuators[0].kp) == (("left_knee_servo",), 30)


def test_slide_joints_are_accepted(tmp_path: Path) -> None:
    model = inspect(write(tmp_path, leg(joint='type="slide" range="-.1 .1"')))
    assert (model.joints[0].type, model.joints[0].range) == ("slide", (-0.1, 0.1))


# Joint damping


def test_C2_5_joint_damping_is_folded_into_kv_when_asked_for_and_reported(tmp_path: Path) -> None:
    path = write(tmp_path, leg(joint='damping=".5"'))
    with pytest.raises(UnsupportedModelError, match="fold_joint_damping=True"):
        inspect(path)
    model = inspect(path, fold_joint_damping=True)
    assert model.actuators[0].kv == 1.5
    assert model.joints[0].damping == 0.5
    assert model.notes == ("joint knee: damping 0.5 is folded into kv, now 1.5",)


def test_C2_5_damping_of_a_joint_without_an_actuator_cannot_be_folded(tmp_path: Path) -> None:
    path = write(tmp_path, leg(joint='damping=".5"', actuator=""))
    with pytest.raises(UnsupportedModelError, match="no kv to fold it into") as caught:
        inspect(path, fold_joint_damping=True)
    assert caught.value.rule == "C2.5"


def test_C2_5_polynomial_damping_and_that_of_a_free_joint_are_never_folded(tmp_path: Path) -> None:
    free = '<joint name="base" type="free" damping="1"/>'
    for scene in ({"joint": 'damping=".5 1 1"'}, {"base": free}):
        with pytest.raises(ModelContractError):
            inspect(write(tmp_path, leg(**scene)), fold_joint_damping=True)


def test_folding_leaves_a_model_without_damping_as_it_is(tmp_path: Path) -> None:
    path = write(tmp_path, leg())
    assert inspect(path, fold_joint_damping=True) == inspect(path)


# The floor and the world


def test_the_floor_has_a_height_and_may_be_turned_about_the_vertical(tmp_path: Path) -> None:
    world = FLOOR.format('pos="1 2 -.5" euler="0 0 30" friction=".7 .01 .001"')
    floor = inspect(write(tmp_path, leg(world=world))).floor
    assert floor is not None
    assert (floor.height, floor.friction) == (-0.5, (0.7, 0.01, 0.001))


def test_a_scene_need_not_have_a_floor(tmp_path: Path) -> None:
    assert inspect(write(tmp_path, leg(world=""))).floor is None


def test_world_geoms_that_nothing_can_touch_are_ignored(tmp_path: Path) -> None:
    ghost = '<geom type="box" size="1 1 1" contype="0" conaffinity="0"/>'
    body = f'<body name="mark">{ghost}</body>'
    model = inspect(write(tmp_path, leg(world=ghost + body + FLOOR.format(""))))
    assert model.floor is not None
    assert model.body_names == ("trunk", "shin")
    assert model.bodies[1].parent == 0 and model.joints[0].body == 1
    assert model.not_reproduced == ("bodies beside the robot: mark",)


def test_a_plane_that_nothing_can_touch_is_no_floor(tmp_path: Path) -> None:
    world = FLOOR.format('contype="0" conaffinity="0"')
    assert inspect(write(tmp_path, leg(world=world))).floor is None


# What is left out, and said


def left_out(tmp_path: Path, **scene: str) -> tuple[str, ...]:
    return inspect(write(tmp_path, leg(**scene))).not_reproduced


@pytest.mark.parametrize(
    "scene, phrase",
    [
        ({"geom": 'margin=".01"'}, "geom margin: foot"),
        ({"geom": 'gap=".01"'}, "geom gap: foot"),
        ({"geom": 'solref=".01 1"'}, "geom solref: foot"),
        ({"geom": 'solimp=".8"'}, "geom solimp: foot"),
        ({"geom": 'condim="6"'}, "geom condim: foot"),
        ({"geom": 'priority="1"'}, "geom priority: foot"),
        ({"world": FLOOR.format('condim="1"')}, "geom condim: floor"),
        ({"joint": 'margin=".1"'}, "joint margin: knee"),
        ({"joint": 'solreflimit=".01 1"'}, "joint solreflimit: knee"),
        ({"joint": 'solimplimit=".8"'}, "joint solimplimit: knee"),
        ({"joint": 'solreffriction=".01 1"'}, "joint solreffriction: knee"),
        ({"top": '<option integrator="implicitfast"/>'}, "integrator: implicitfast"),
        ({"top": '<option cone="elliptic"/>'}, "friction cone: elliptic"),
        ({"top": '<option impratio="10"/>'}, "impratio: 10.0"),
        ({"top": '<option><flag refsafe="disable"/></option>'}, "disabled flags: refsafe"),
        ({"top": '<option><flag energy="enable"/></option>'}, "enabled flags: energy"),
        ({"shin": '<geom size="1" contype="0" conaffinity="0"/>'}, "visual geoms: 1"),
        (
            {"geom": 'contype="2" conaffinity="2"'},
            "geoms that cannot touch the floor: foot",
        ),
        (
            {"bottom": '<contact><exclude body1="world" body2="shin"/></contact>'},
            "geoms that cannot touch the floor: foot",
        ),
        (
            {"bottom": '<contact><exclude body1="trunk" body2="shin"/></contact>'},
            "contact excludes: 1 (self-collision is off altogether)",
        ),
        (
            {
                "trunk": '<site name="s"/>',
                "bottom": '<sensor><gyro name="g" site="s"/><accelerometer site="s"/></sensor>',
            },
            "sensors: g, sensor 1",
        ),
    ],
)
def test_C2_8_what_is_left_out_is_said_by_name(
    tmp_path: Path, scene: dict[str, str], phrase: str
) -> None:
    assert phrase in left_out(tmp_path, **scene)


def test_long_lists_of_geoms_are_shortened(tmp_path: Path) -> None:
    shin = "".join(f'<geom name="g{i}" size=".01" condim="1"/>' for i in range(6))
    assert "geom condim: g0, g1, g2, g3 and 2 more" in left_out(tmp_path, shin=shin)


def test_gravity_that_is_switched_off_is_zero(tmp_path: Path) -> None:
    path = write(tmp_path, leg(top='<option><flag gravity="disable"/></option>'))
    assert inspect(path).gravity == (0, 0, 0)


def test_C2_13_a_go2_style_mask_touches_the_floor_and_not_itself(tmp_path: Path) -> None:
    masks = '<default><geom contype="1" conaffinity="2"/></default>'
    floor = FLOOR.format('contype="1" conaffinity="1"')
    toe = '<body name="toe"><joint name="ankle"/><geom size=".05"/></body>'
    model = inspect(write(tmp_path, leg(top=masks, world=floor, shin=toe)))
    assert model.colliding_pairs == 0
    assert model.not_reproduced == ()


@pytest.mark.parametrize(
    "scene, expected",
    [
        pytest.param({}, 1, id="not_with_the_parent"),
        pytest.param({"base": ""}, 2, id="with_a_parent_welded_to_the_world"),
        pytest.param(
            {"bottom": '<contact><exclude body1="trunk" body2="toe"/></contact>'}, 0, id="excluded"
        ),
        pytest.param({"shin": '<body name="cover"><geom size=".05"/></body>{}'}, 1, id="welded"),
        pytest.param({"top": '<default><geom conaffinity="2"/></default>'}, 0, id="masked"),
    ],
)
def test_colliding_pairs_are_those_that_mujoco_lets_collide(
    tmp_path: Path, scene: dict[str, str], expected: int
) -> None:
    toe = '<body name="toe"><joint name="ankle"/><geom size=".05"/></body>'
    text = leg(**{**scene, "shin": scene.get("shin", "{}").format(toe), "world": ""})
    path = write(tmp_path, text.replace('pos="0 0 -.2"', ""))  # every geom overlaps every other
    compiled = mujoco.MjModel.from_xml_path(str(path))
    data = mujoco.MjData(compiled)
    mujoco.mj_forward(compiled, data)
    pairs = {tuple(sorted(pair)) for pair in data.contact.geom.tolist()}
    assert inspect(path).colliding_pairs == len(pairs) == expected


def test_C2_12_shapes_that_nothing_can_touch_may_be_any(tmp_path: Path) -> None:
    shin = '<geom type="ellipsoid" size="1 1 1" contype="0" conaffinity="0"/>'
    assert left_out(tmp_path, shin=shin) == ("visual geoms: 1",)


def test_C2_14_a_massless_frame_gets_a_tiny_mass_and_is_reported(tmp_path: Path) -> None:
    model = inspect(write(tmp_path, leg(shin='<body name="tip" pos="0 0 -.1"/>')))
    assert model.bodies[2].mass == 1e-6
    assert model.notes == ("body tip has no mass; it is given 1e-06 kg",)


# Sensors newer than the MuJoCo in use


NEW_SENSOR = '<sensor><contact name="touch" geom1="floor" geom2="foot" data="found"/></sensor>'


def test_a_sensor_that_an_old_mujoco_cannot_read_is_reported_and_nothing_else_changes(
    tmp_path: Path,
) -> None:
    write(tmp_path, TETRAHEDRON, "meshes/m.obj")
    top = '<compiler meshdir="meshes"/>' + MESH
    shin = '<geom type="mesh" mesh="m" contype="0" conaffinity="0"/>'
    with_sensor = inspect(write(tmp_path, leg(top=top, shin=shin, bottom=NEW_SENSOR)))
    without = inspect(write(tmp_path, leg(top=top, shin=shin)))
    assert with_sensor.sensors == ("touch",)
    assert with_sensor.not_reproduced == (*without.not_reproduced, "sensors: touch")
    assert with_sensor.flat == without.flat


def test_an_old_mujoco_is_made_to_read_the_rest_of_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same with a MuJoCo that is told to be old, so that the path is run by every release."""

    def refuse(_path: str) -> None:
        raise ValueError("XML Error: Schema violation: unrecognized element\nElement 'contact'\n")

    write(tmp_path, TETRAHEDRON, "meshes/m.obj")
    top = '<compiler meshdir="meshes"/>' + MESH
    path = write(tmp_path, leg(top=top, shin='<geom type="mesh" mesh="m"/>', bottom=NEW_SENSOR))

    class Old(mujoco.MjModel):
        from_xml_path = staticmethod(refuse)

    monkeypatch.setattr(mujoco, "MjModel", Old)
    assert inspect(path).sensors == ("touch",)


def test_an_error_behind_an_unreadable_sensor_is_still_refused(tmp_path: Path) -> None:
    text = leg(bottom=NEW_SENSOR, joint='colour="red"')
    with pytest.raises(InvalidModelError, match="colour"):
        inspect(write(tmp_path, text))
