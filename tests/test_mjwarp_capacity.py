"""The rule for MuJoCo-Warp's room, on compiled models: no engine is needed for it."""

from __future__ import annotations

from typing import Any

import mujoco  # type: ignore[import-untyped]
import pytest

from outboard.workers import mjwarp_capacity as rule

mj: Any = mujoco  # its stubs do not list its names

PLANE, SPHERE, CAPSULE, BOX, MESH, HFIELD = (
    int(getattr(mj.mjtGeom, f"mjGEOM_{name}"))
    for name in ("PLANE", "SPHERE", "CAPSULE", "BOX", "MESH", "HFIELD")
)


def compiled(geoms: str, body: str = "", more: str = "", option: str = "") -> Any:
    return mj.MjModel.from_xml_string(
        f"""<mujoco><option {option}/><worldbody><geom type="plane" size="0 0 1"/>
        <body pos="0 0 1"><freejoint/>{geoms}{body}</body></worldbody>{more}</mujoco>"""
    )


@pytest.mark.parametrize(
    ("one", "other", "points"),
    [
        (PLANE, SPHERE, 1),
        (PLANE, CAPSULE, 2),
        (PLANE, BOX, 8),
        (PLANE, MESH, 4),
        (SPHERE, MESH, 1),
        (CAPSULE, CAPSULE, 2),
        (BOX, BOX, 8),
        (HFIELD, SPHERE, 50),
    ],
)
def test_a_pair_counts_with_as_many_points_as_its_shapes_can_have(
    one: int, other: int, points: int
) -> None:
    assert rule.contact_points(one, other) == rule.contact_points(other, one) == points


def test_contacts_are_those_of_all_pairs_at_once() -> None:
    model = compiled('<geom size=".1 .1 .1" type="box"/><geom size=".1 .2" type="capsule"/>')
    room = rule.capacity(model, [(0, 1), (0, 2)], 0, 0)
    assert room.nconmax == 8 + 2
    assert room.njmax == 10 * 4  # pyramids of condim 3


def test_few_contacts_have_room_for_eight_and_many_for_no_more_than_the_limit() -> None:
    model = compiled('<geom size=".1 .1 .1" type="box"/>')
    assert rule.capacity(model, [], 0, 0).nconmax == rule.FEWEST
    assert rule.capacity(model, [(0, 1)] * 1000, 0, 0).nconmax == rule.MOST


def test_rows_are_limits_equalities_dry_friction_and_contacts() -> None:
    model = compiled(
        '<geom name="a" size=".1"/>',
        body='<body name="b"><joint name="j" range="-1 1" limited="true" frictionloss="1"/>'
        '<geom size=".1"/></body>',
        more='<equality><weld body1="b"/><connect body1="b" anchor="0 0 0"/></equality>',
    )
    assert rule.constraint_rows(model) == 1 + 1 + 6 + 3
    assert rule.capacity(model, [(0, 1)], 0, 0).njmax == 11 + rule.FEWEST * 4


@pytest.mark.parametrize(
    ("cone", "condim", "rows"),
    [("pyramidal", 1, 1), ("pyramidal", 3, 4), ("pyramidal", 6, 10), ("elliptic", 3, 3)],
)
def test_a_contact_has_the_rows_of_its_cone(cone: str, condim: int, rows: int) -> None:
    model = compiled(f'<geom size=".1" condim="{condim}"/>', option=f'cone="{cone}"')
    model.geom_condim[0] = condim  # the floor's own is 3
    assert rule.rows_per_contact(model) == rows


def test_what_the_caller_gives_is_taken_and_said_to_be_given() -> None:
    model = compiled('<geom size=".1"/>')
    room = rule.capacity(model, [(0, 1)], 33, 0)
    assert room.nconmax == 33 and room.njmax == 33 * 4
    assert "33 contacts per environment on average (nconmax, given)" in room.words
    assert "(njmax, by rule)" in room.words


@pytest.mark.parametrize(
    ("bits", "advice"),
    [
        (1, "raise njmax above 40 in MJWarpCfg"),
        (8, "raise nconmax above 10 in MJWarpCfg"),
        (1 | 8, "raise nconmax above 10 and njmax above 40 in MJWarpCfg"),
        (32, "the model needs more than the engine has"),
    ],
)
def test_an_overflow_says_which_limit_to_raise(bits: int, advice: str) -> None:
    names = {1: "NEFC", 8: "NARROWPHASE", 32: "HFIELD"}
    words = rule.overflow_words(bits, names, env=3, command=17, room=rule.Capacity(10, 40, ()))
    assert words.endswith(advice)
    assert "in step 17, environment 3" in words
