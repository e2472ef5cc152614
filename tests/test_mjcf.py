"""The model contract: what is refused, by which rule, and where."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from mjcf_scenes import ATTACHED, FLOOR, KNEE, MESH, STAND, key, leg, position, write
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


def knee(attributes: str) -> dict[str, str]:
    return {"actuator": position(attributes)}


def other(tag: str, attributes: str, **scene: str) -> dict[str, str]:
    return {"actuator": f'<{tag} name="knee_servo" {attributes}/>', **scene}


TWICE = KNEE + '<position name="second" joint="knee" kp="2"/>'
TENDON = '<tendon><fixed name="t"><joint joint="knee" coef="1"/></fixed></tendon>'
SECOND = '<body name="box"><geom name="box_geom" size=".1"/></body>'
LIKE_POSITION = 'joint="knee" gainprm="30" biastype="affine" biasprm="0 -30 -1"'


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
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, case: Refused
) -> None:
    monkeypatch.chdir(tmp_path)  # where an old MuJoCo writes its log when it meets a NaN
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


def test_C1_1_a_dcmotor_is_refused_also_by_a_mujoco_that_does_not_know_it(tmp_path: Path) -> None:
    text = leg(**other("dcmotor", 'joint="knee" resistance="1" motorconst="1"'))
    with pytest.raises(ModelContractError) as caught:
        inspect(write(tmp_path, text))
    assert (caught.value.rule, caught.value.element) in (("C1.1", "dcmotor"), ("C2.17", "dcmotor"))


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
