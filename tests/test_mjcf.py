"""The model contract: what is refused, by which rule, where; and what must not be refused."""

from __future__ import annotations

import math
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from mjcf_scenes import KNEE, TETRAHEDRON, leg, write
from outboard.backends.mjcf import (
    RULES,
    InvalidModelError,
    ModelContractError,
    UnsupportedModelError,
    Verdict,
    inspect,
)
from outboard.ipc.errors import SceneError, UsageError

mujoco: Any = pytest.importorskip("mujoco")

UNSUPPORTED, INVALID = UnsupportedModelError, InvalidModelError
INF = math.inf
MESH = '<asset><mesh name="m" file="m.obj"/></asset>'


def position(attributes: str) -> str:
    return f'<position name="knee_servo" joint="knee" {attributes}/>'


@dataclass(frozen=True)
class Refused:
    """A model, and what is said of it."""

    id: str  # the rule's number, then the case
    scene: dict[str, str]
    error: type[ModelContractError]
    element: str = "position"
    name: str = "knee_servo"
    value: str = ""  # a part of it
    rule: str = ""  # where it is not the id's
    files: dict[str, str] = field(default_factory=dict[str, str])


def knee(attributes: str) -> dict[str, str]:
    return {"actuator": position(attributes)}


def other(tag: str, attributes: str, **scene: str) -> dict[str, str]:
    return {"actuator": f'<{tag} name="knee_servo" {attributes}/>', **scene}


TWICE = KNEE + '<position name="second" joint="knee" kp="2"/>'
TENDON = '<tendon><fixed name="t"><joint joint="knee" coef="1"/></fixed></tendon>'
SECOND = '<body name="box"><geom name="box_geom" size=".1"/></body>'
LIKE_POSITION = 'joint="knee" gainprm="30" biastype="affine" biasprm="0 -30 -1"'
FLOOR = '<geom name="floor" type="plane" size="0 0 1" {}/>'


REFUSALS = [
    # C1.1: every other actuator, whatever it compiles to
    Refused("C1.1-motor", other("motor", 'joint="knee"'), UNSUPPORTED, "motor", value="motor"),
    Refused("C1.1-velocity", other("velocity", 'joint="knee" kv="1"'), UNSUPPORTED, "velocity"),
    Refused(
        "C1.1-intvelocity",
        other("intvelocity", 'joint="knee" kp="1" actrange="-1 1"'),
        UNSUPPORTED,
        "intvelocity",
    ),
    Refused(
        "C1.1-damper", other("damper", 'joint="knee" kv="1" ctrlrange="0 1"'), UNSUPPORTED, "damper"
    ),
    Refused("C1.1-cylinder", other("cylinder", 'joint="knee"'), UNSUPPORTED, "cylinder"),
    Refused(
        "C1.1-muscle", other("muscle", 'joint="knee" lengthrange="0 1"'), UNSUPPORTED, "muscle"
    ),
    Refused(
        "C1.1-adhesion", other("adhesion", 'body="shin" ctrlrange="0 1"'), UNSUPPORTED, "adhesion"
    ),
    Refused("C1.1-general", other("general", 'joint="knee"'), UNSUPPORTED, "general"),
    Refused(
        "C1.1-general_that_equals_a_position",
        other("general", LIKE_POSITION),
        UNSUPPORTED,
        "general",
    ),
    # C1.2
    Refused(
        "C1.2-tendon", other("position", 'tendon="t"', bottom=TENDON), UNSUPPORTED, value="tendon"
    ),
    Refused(
        "C1.2-site",
        other("position", 'site="s"', shin='<site name="s"/>'),
        UNSUPPORTED,
        value="site",
    ),
    Refused(
        "C1.2-slider",
        other(
            "position",
            'cranksite="s" slidersite="r" cranklength=".1"',
            shin='<site name="s"/>',
            trunk='<site name="r"/>',
        ),
        UNSUPPORTED,
        value="slidercrank",
    ),
    Refused(
        "C1.2-jointinparent",
        other("position", 'jointinparent="knee"'),
        UNSUPPORTED,
        value="jointinparent",
    ),
    Refused("C1.2-free_joint", other("position", 'joint="base"'), UNSUPPORTED, value="base"),
    Refused("C1.2-unknown_joint", other("position", 'joint="x"'), INVALID, "", rule="C2.17"),
    # C1.3
    Refused("C1.3-two", knee('gear="2"'), UNSUPPORTED, value="2.0 0.0"),
    Refused("C1.3-second_number", knee('gear="1 1"'), UNSUPPORTED, value="1.0 1.0"),
    # C1.4
    Refused("C1.4-asymmetric", knee('forcerange="-10 20"'), UNSUPPORTED, value="-10.0 20.0"),
    Refused("C1.4-reversed", knee('forcerange="5 -5"'), INVALID, value="5.0 -5.0"),
    Refused("C1.4-no_numbers", knee('forcerange="nan nan"'), INVALID, value="nan nan"),
    Refused("C1.4-one_point", knee('forcerange="5 5"'), INVALID, value="5.0 5.0"),
    Refused(
        "C1.4-no_forcelimited",
        {**knee('forcerange="-5 5"'), "top": '<compiler autolimits="false"/>'},
        INVALID,
        "",
        rule="C2.17",
    ),
    # C1.5, C1.6
    Refused("C1.5-negative", knee('kp="-30"'), INVALID, value="-30.0"),
    Refused("C1.5-zero", knee('kp="0"'), INVALID, value="0.0"),
    Refused("C1.5-infinite", knee('kp="inf"'), INVALID, value="inf"),
    Refused("C1.6-infinite", knee('kv="inf"'), INVALID, value="inf"),
    Refused("C1.6-negative", knee('kv="-1"'), INVALID, name="", rule="C2.17"),
    # C1.7
    Refused("C1.7-timeconst", knee('timeconst=".02"'), UNSUPPORTED, value="filter"),
    # C1.9, C1.11
    Refused("C1.9-two_on_a_joint", {"actuator": TWICE}, UNSUPPORTED, "position", "second"),
    Refused("C1.11-reversed", knee('ctrlrange="1 -1"'), INVALID, value="1.0 -1.0"),
    # C2.1, C2.2
    Refused(
        "C2.1-ball",
        {"shin": '<body name="b"><joint name="bj" type="ball"/><geom size=".1"/></body>'},
        UNSUPPORTED,
        "joint",
        "bj",
        "ball",
    ),
    Refused(
        "C2.1-two_joints", {"shin": '<joint name="k2" axis="1 0 0"/>'}, UNSUPPORTED, "body", "shin"
    ),
    Refused(
        "C2.1-nested_free_joint",
        {"shin": '<body name="b"><freejoint/><geom size=".1"/></body>'},
        INVALID,
        "",
        rule="C2.17",
    ),
    Refused(
        "C2.2-unnamed_joint",
        {"knee": '<joint axis="0 1 0"/>', "actuator": ""},
        INVALID,
        "joint",
        "",
        "''",
    ),
    Refused("C2.2-unnamed_body", {"shin": "<body/>"}, INVALID, "body", "", "''"),
    Refused(
        "C2.2-body_with_a_dash",
        {"shin": '<body name="a-b"/>'},
        INVALID,
        "body",
        "a-b",
        "a-b",
    ),
    Refused("C2.2-leading_digit", {"shin": '<body name="1b"/>'}, INVALID, "body", "1b", "1b"),
    # C2.3 to C2.7
    Refused("C2.3-ref", {"joint": 'ref="30"'}, UNSUPPORTED, "joint", "knee", "ref 0.5235"),
    Refused(
        "C2.4-stiffness", {"joint": 'stiffness="2"'}, UNSUPPORTED, "joint", "knee", "stiffness 2.0"
    ),
    Refused("C2.4-springdamper", {"joint": 'springdamper="1 1"'}, UNSUPPORTED, "joint", "knee"),
    Refused("C2.5-damping", {"joint": 'damping=".5"'}, UNSUPPORTED, "joint", "knee", "damping 0.5"),
    Refused(
        "C2.6-asymmetric",
        {"joint": 'actuatorfrcrange="-1 2"'},
        UNSUPPORTED,
        "joint",
        "knee",
        "-1.0 2.0",
    ),
    Refused("C2.7-reversed", {"joint": 'range="40 -40"'}, INVALID, "joint", "knee", "40.0 -40.0"),
    # C2.9
    Refused("C2.9-gravcomp", {"shin": '<body name="b" gravcomp="1"/>'}, UNSUPPORTED, "body", "b"),
    Refused(
        "C2.9-mocap",
        {"world": '<body name="hand" mocap="true"/>'},
        UNSUPPORTED,
        "body",
        "hand",
        "mocap",
    ),
    Refused(
        "C2.9-equality",
        {"bottom": '<equality><joint name="e" joint1="knee"/></equality>'},
        UNSUPPORTED,
        "joint",
        "e",
    ),
    Refused("C2.9-tendon", {"bottom": TENDON}, UNSUPPORTED, "fixed", "t"),
    Refused(
        "C2.9-pair",
        {"bottom": '<contact><pair name="p" geom1="foot" geom2="floor"/></contact>'},
        UNSUPPORTED,
        "pair",
        "p",
    ),
    Refused(
        "C2.9-hfield",
        {"top": '<asset><hfield name="h" nrow="2" ncol="2" size="1 1 1 1"/></asset>'},
        UNSUPPORTED,
        "hfield",
        "h",
    ),
    Refused("C2.9-density", {"top": '<option density="1.2"/>'}, UNSUPPORTED, "option", "", "1.2"),
    Refused("C2.9-viscosity", {"top": '<option viscosity="1"/>'}, UNSUPPORTED, "option", ""),
    Refused("C2.9-wind", {"top": '<option wind="0 1 0"/>'}, UNSUPPORTED, "option", "", "wind"),
    # C2.10, C2.11
    Refused("C2.10-static_obstacle", {"world": SECOND}, UNSUPPORTED, "body", "trunk", "box, trunk"),
    Refused(
        "C2.10-second_robot",
        {"world": '<body name="r2"><joint name="j2"/><geom size=".1"/></body>'},
        UNSUPPORTED,
        "body",
        "trunk",
    ),
    Refused(
        "C2.11-box", {"world": '<geom name="b" size=".1"/>'}, UNSUPPORTED, "geom", "b", "sphere"
    ),
    Refused("C2.11-slope", {"world": FLOOR.format('euler="10 0 0"')}, UNSUPPORTED, "geom", "floor"),
    Refused(
        "C2.11-ceiling", {"world": FLOOR.format('euler="180 0 0"')}, UNSUPPORTED, "geom", "floor"
    ),
    Refused(
        "C2.11-second_floor",
        {"world": FLOOR.format("") + '<geom name="f2" type="plane" size="0 0 1"/>'},
        UNSUPPORTED,
        "geom",
        "f2",
        "beside floor",
    ),
    # C2.12
    Refused(
        "C2.12-ellipsoid",
        {"shin": '<geom name="e" type="ellipsoid" size=".1 .2 .1"/>'},
        UNSUPPORTED,
        "geom",
        "e",
        "ellipsoid",
    ),
    # C2.17
    Refused(
        "C2.17-missing_mesh",
        {"top": MESH, "shin": '<geom type="mesh" mesh="m"/>'},
        INVALID,
        "",
        "",
    ),
    Refused("C2.17-unknown_class", {"shin": '<geom class="no" size="1"/>'}, INVALID, "geom", ""),
    Refused(
        "C2.17-unknown_exclude",
        {"bottom": '<contact><exclude name="x" body1="shin" body2="no"/></contact>'},
        INVALID,
        "",
        "x",
    ),
    Refused("C2.17-bad_attribute", {"joint": 'colour="red"'}, INVALID, "joint", ""),
    Refused("C2.17-missing_include", {"top": '<include file="no.xml"/>'}, INVALID, "include", ""),
    Refused("C2.17-unknown_sensor", {"bottom": "<sensor><taste/></sensor>"}, INVALID, "taste", ""),
    # C2.18
    Refused(
        "C2.18-contact",
        {"top": '<option><flag contact="disable"/></option>'},
        UNSUPPORTED,
        "flag",
        "",
    ),
    Refused(
        "C2.18-clampctrl",
        {"top": '<option><flag clampctrl="disable"/></option>'},
        UNSUPPORTED,
        "flag",
        "",
    ),
    Refused(
        "C2.18-actuator_group",
        {"top": '<option actuatorgroupdisable="0"/>'},
        UNSUPPORTED,
        "option",
        "",
    ),
]


@pytest.mark.parametrize("case", REFUSALS, ids=lambda case: case.id)
def test_a_model_is_refused_by_rule_with_file_element_name_and_value(
    tmp_path: Path, case: Refused
) -> None:
    path = write(tmp_path, leg(**case.scene))
    with pytest.raises(ModelContractError) as caught:
        inspect(path)
    error = caught.value
    assert (type(error), error.rule) == (case.error, case.rule or case.id.split("-")[0])
    assert (error.file, error.name) == (
        str(path),
        case.name if case.rule != "C2.17" else error.name,
    )
    if case.element:
        assert error.element == case.element
    assert case.value in error.value
    assert str(path) in str(error) and f"rule {error.rule}: {RULES[error.rule]}" in str(error)


def test_every_rule_has_a_case_that_breaks_it() -> None:
    elsewhere = {"C1.10", "C2.15", "C2.16"}
    shown = {case.rule or case.id.split("-")[0] for case in REFUSALS}
    assert shown | elsewhere == set(RULES)


@pytest.mark.parametrize(
    "scene",
    [
        pytest.param({"actuator": position('delay=".01" nsample="5"')}, id="C1.10-delay"),
        pytest.param({"actuator": position('armature="1"')}, id="C1.10-actuator_armature"),
        pytest.param({"actuator": position('damping="1"')}, id="C1.10-actuator_damping"),
        pytest.param({"joint": 'springyield="1"'}, id="C1.10-springyield"),
        pytest.param({"joint": 'actuatorgravcomp="true"'}, id="C1.10-jnt_actgravcomp"),
        pytest.param(
            {"base": '<joint name="base" type="free" damping="1"/>'}, id="C1.10-free_joint_damping"
        ),
        pytest.param(
            {"base": '<joint name="base" type="free" armature="1"/>'},
            id="C1.10-free_joint_armature",
        ),
    ],
)
def test_a_feature_the_contract_does_not_know_is_refused_by_the_name_of_its_array(
    tmp_path: Path, scene: dict[str, str]
) -> None:
    with pytest.raises(ModelContractError) as caught:
        inspect(write(tmp_path, leg(**scene)))
    if caught.value.rule == "C2.17":  # this MuJoCo is older than the feature
        assert "unrecognized attribute" in str(caught.value)
        return
    assert (caught.value.rule, caught.value.verdict) == ("C1.10", Verdict.UNSUPPORTED)
    assert caught.value.name in ("knee_servo", "knee", "base")
    assert any(prefix in str(caught.value) for prefix in (": actuator_", ": jnt_", ": dof_"))


def test_the_errors_are_scene_errors_and_what_callers_of_other_libraries_catch() -> None:
    assert issubclass(UnsupportedModelError, (SceneError, NotImplementedError))
    assert issubclass(InvalidModelError, (SceneError, ValueError))
    assert UnsupportedModelError.verdict is Verdict.UNSUPPORTED
    assert InvalidModelError.verdict is Verdict.INVALID


def test_a_refusal_names_the_included_file_it_is_about(tmp_path: Path) -> None:
    part = '<mujocoinclude><actuator><motor name="m" joint="knee"/></actuator></mujocoinclude>'
    included = write(tmp_path, part, "parts/motors.xml")
    main = write(tmp_path, leg(actuator="", bottom='<include file="parts/motors.xml"/>'))
    with pytest.raises(UnsupportedModelError) as caught:
        inspect(main)
    assert (caught.value.file, caught.value.element) == (str(included), "motor")


def test_a_missing_file_and_a_file_that_is_not_mjcf_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidModelError, match="there is no such file"):
        inspect(tmp_path / "none.xml")
    urdf = '<robot name="r"><link name="l"/></robot>'
    with pytest.raises(InvalidModelError, match=r"C2\.1[07]"):
        inspect(write(tmp_path, urdf))


def test_a_world_without_a_robot_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidModelError, match="there is no robot"):
        inspect(write(tmp_path, "<mujoco/>"))


# Keyframes


def key(attributes: str) -> str:
    return f"<keyframe><key {attributes}/></keyframe>"


STAND = 'name="stand" qpos="0 0 .5 2 0 0 0 .3"'


@pytest.mark.parametrize("name, numbers", [("qpos", "0 0 1"), ("qvel", "1"), ("ctrl", "1 2")])
def test_C2_15_a_keyframe_of_the_wrong_size_is_refused(
    tmp_path: Path, name: str, numbers: str
) -> None:
    with pytest.raises(InvalidModelError) as caught:
        inspect(write(tmp_path, leg(bottom=key(f'name="short" {name}="{numbers}"'))))
    assert caught.value.rule in ("C2.15", "C2.17")  # C2.17: this MuJoCo refuses it itself


def test_C2_16_a_keyframe_that_does_not_exist_is_refused_with_the_names_of_those_that_do(
    tmp_path: Path,
) -> None:
    path = write(tmp_path, leg(bottom=key(STAND)))
    with pytest.raises(InvalidModelError, match="there are: stand") as caught:
        inspect(path, keyframe="sit")
    assert (caught.value.rule, caught.value.value) == ("C2.16", "sit")


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


ATTACHED = """<mujoco><asset><model name="leg" file="leg.xml"/></asset>
<worldbody><attach model="leg" body="trunk" prefix="left_"/></worldbody></mujoco>"""


def test_an_attached_robot_is_accepted_with_its_prefixed_names(tmp_path: Path) -> None:
    write(tmp_path, leg())
    model = inspect(write(tmp_path, ATTACHED, "scene.xml"))
    assert model.body_names == ("left_trunk", "left_shin")
    assert (model.actuator_names, model.actuators[0].kp) == (("left_knee_servo",), 30)


@pytest.mark.parametrize(
    "tag, attributes, rule",
    [
        ("motor", "", "C1.1"),
        ("velocity", 'kv="1"', "C1.1"),
        ("general", 'gainprm="3 1" biastype="affine" biasprm="0 -3 0"', "C1.1"),
        ("general", 'gainprm="3" biastype="affine" biasprm="1 -3 0"', "C1.1"),
    ],
)
def test_an_actuator_whose_tag_is_in_an_attached_file_is_judged_by_its_arrays(
    tmp_path: Path, tag: str, attributes: str, rule: str
) -> None:
    write(tmp_path, leg(actuator=f'<{tag} name="m" joint="knee" {attributes}/>'))
    with pytest.raises(ModelContractError) as caught:
        inspect(write(tmp_path, ATTACHED, "scene.xml"))
    assert (caught.value.rule, caught.value.name) == (rule, "left_m")


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


# The host without a usable MuJoCo


def test_without_mujoco_the_error_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "mujoco", None)
    with pytest.raises(UsageError, match=r"pip install 'outboard\[mujoco\]'"):
        inspect(write(tmp_path, leg()))


def test_a_mujoco_that_is_too_old_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mujoco, "__version__", "3.2.2")
    with pytest.raises(UsageError, match=r"mujoco 3\.2\.2 is too old: 3\.2\.3"):
        inspect(write(tmp_path, leg()))
