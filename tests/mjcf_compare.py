"""Comparison of a flat export with the model it was made of. Needs MuJoCo."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from outboard.backends.mjcf import FlatModel, Model, export_flat

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
