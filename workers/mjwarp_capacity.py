"""How much room for contacts and constraints MuJoCo-Warp gets, and what to raise when it was too little.

The rule, where the caller gives no number:

    nconmax   contacts per environment: every pair of geoms that may touch, each with as many points as its
              shapes can have, but at most 128 (a thirty-body robot that lies on the floor and on itself has
              about half of that), or 512 where the model has height fields, signed distance fields or flexes
    njmax     constraint rows of one environment: every equality, every limit, every dof with dry friction,
              and nconmax contacts

All environments share one pool of num_envs * nconmax contacts: only the average counts. Rows are kept per
environment. What does not fit is dropped without an error, in *other* environments too; `OVERFLOWS` names
the bits of `Data.overflow` that say so.
"""

# pyright: reportAttributeAccessIssue=false
# (MuJoCo makes its names at run time; its stubs do not list them.)

from typing import Any, Dict, NamedTuple, Sequence, Tuple

import mujoco
import numpy as np

FEWEST, MOST, MOST_ROUGH = 8, 128, 512

_GEOM = mujoco.mjtGeom
_PLANE, _HFIELD, _SDF = (int(_GEOM.mjGEOM_PLANE), int(_GEOM.mjGEOM_HFIELD), int(_GEOM.mjGEOM_SDF))
_ROUND = (int(_GEOM.mjGEOM_SPHERE), int(_GEOM.mjGEOM_ELLIPSOID))
_CAPSULE, _BOX = int(_GEOM.mjGEOM_CAPSULE), int(_GEOM.mjGEOM_BOX)

# mjMAXCONPAIR, of pairs with a height field or a signed distance field.
_ROUGH_POINTS = 50
_EQUALITY_ROWS = {
    int(mujoco.mjtEq.mjEQ_CONNECT): 3,
    int(mujoco.mjtEq.mjEQ_WELD): 6,
    int(mujoco.mjtEq.mjEQ_JOINT): 1,
    int(mujoco.mjtEq.mjEQ_TENDON): 1,
}
_FLEX_ROWS = (
    512  # of edges and vertices, which nobody counts before the run: as the engine's own guess
)

# Bits of `mujoco_warp.OverflowType`, and the option that gives more room; "" has none of ours.
OVERFLOWS: Dict[str, str] = {
    "NEFC": "njmax",
    "NJMAX_NNZ": "njmax",
    "BROADPHASE": "nconmax",
    "NARROWPHASE": "nconmax",
    "CCD": "nconmax",
    "HFIELD": "",
    "CONTACT_MATCH": "",
    "NVMAX": "",
    "TACTILE": "",
}
# Not among them: ITERATIONS, LS_ITERATIONS and EPA_HORIZON, a solver that stopped at its limit in one
# environment. MuJoCo says nothing then either.


class Capacity(NamedTuple):
    nconmax: int
    njmax: int
    given: Tuple[str, ...]  # which of the two the caller chose

    @property
    def words(self) -> str:
        origin = ["given" if name in self.given else "by rule" for name in ("nconmax", "njmax")]
        return (
            f"room for {self.nconmax} contacts per environment on average (nconmax, {origin[0]}) and "
            f"{self.njmax} constraint rows in each (njmax, {origin[1]})"
        )


def capacity(model: Any, pairs: Sequence[Tuple[int, int]], nconmax: int, njmax: int) -> Capacity:
    """pairs: the geoms that may touch, by MuJoCo-Warp's own filter; nconmax, njmax: 0 = by the rule."""
    given = tuple(n for n, value in (("nconmax", nconmax), ("njmax", njmax)) if value)
    if not nconmax:
        points = sum(contact_points(*map(int, model.geom_type[list(pair)])) for pair in pairs)
        nconmax = min(max(points, FEWEST), MOST_ROUGH if _is_rough(model) else MOST)
    if not njmax:
        njmax = max(constraint_rows(model) + nconmax * rows_per_contact(model), FEWEST)
    return Capacity(nconmax, njmax, given)


def _is_rough(model: Any) -> bool:
    return bool(model.nflex or np.isin(model.geom_type, (_HFIELD, _SDF)).any())


def contact_points(one: int, other: int) -> int:
    """The most contacts that geoms of these two types can have."""
    kinds = {one, other}
    if kinds & {_HFIELD, _SDF}:
        return _ROUGH_POINTS
    if kinds & set(_ROUND):
        return 1
    if _CAPSULE in kinds:
        return 2
    if _PLANE in kinds and _BOX not in kinds:
        return 4
    return 8


def constraint_rows(model: Any) -> int:
    """Rows that are there without a contact, when every limit is met at once."""
    rows = sum(_EQUALITY_ROWS.get(int(kind), 0) for kind in model.eq_type)
    rows += np.count_nonzero(model.jnt_limited) + np.count_nonzero(model.tendon_limited)
    rows += np.count_nonzero(model.dof_frictionloss) + np.count_nonzero(model.tendon_frictionloss)
    return int(rows) + (_FLEX_ROWS if model.nflex else 0)


def rows_per_contact(model: Any) -> int:
    dims = [1, *model.geom_condim.tolist(), *model.pair_dim.tolist()]
    if model.nflex:
        dims += model.flex_condim.tolist()
    most = max(dims)
    pyramidal = model.opt.cone == int(mujoco.mjtCone.mjCONE_PYRAMIDAL)
    return 2 * (most - 1) if pyramidal and most > 1 else most


def overflow_words(bits: int, names: Dict[int, str], env: int, command: int, room: Capacity) -> str:
    """What an overflow means and what to raise. names: bit -> name in `mujoco_warp.OverflowType`."""
    hit = [name for bit, name in sorted(names.items()) if bits & bit]
    raises = sorted({OVERFLOWS[name] for name in hit} - {""})
    advice = " and ".join(f"{name} above {getattr(room, name)}" for name in raises)
    remedy = (
        f"raise {advice} in MJWarpCfg" if advice else "the model needs more than the engine has"
    )
    return (
        f"MuJoCo-Warp ran out of room ({', '.join(hit)}) in step {command}, environment {env} among others: "
        f"it drops what does not fit, in other environments too, so the state is not to be trusted. {remedy}"
    )
