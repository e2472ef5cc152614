"""Forward kinematics of a contract's model, for many environments at once.

For engines that show a reset only after their next step: poses and velocities of the bodies follow from
`qpos` and `qvel` alone. A loop over the levels of the tree, never over environments. Vectors are tuples of
arrays, one for each component, since numpy's own cross product costs more than all the rest. Quaternions
wxyz.
"""

from typing import Any, Dict, List, Optional, Tuple

import numpy as np

from .contract import Contract

Parts = Tuple[Any, ...]  # the components of a vector or quaternion, arrays of one shape


def cross(a: Parts, b: Parts) -> Parts:
    return a[1] * b[2] - a[2] * b[1], a[2] * b[0] - a[0] * b[2], a[0] * b[1] - a[1] * b[0]


def add(a: Parts, b: Parts) -> Parts:
    return tuple(x + y for x, y in zip(a, b))


def scaled(a: Parts, by: Any) -> Parts:
    return tuple(x * by for x in a)


def turned(u: Parts, w: Any, v: Parts) -> Parts:
    """`v` turned by the unit quaternion (w, u): v + 2 (w (u x v) + u x (u x v))."""
    half = cross(u, v)
    more = cross(u, half)
    return tuple(v[i] + 2 * (w * half[i] + more[i]) for i in range(3))


def rotate(quat: Parts, v: Parts) -> Parts:
    return turned(quat[1:], quat[0], v)


def multiply(a: Parts, b: Parts) -> Parts:
    """The rotation `b`, then `a`."""
    (w, x, y, z), (p, q, r, s) = a, b
    return (
        w * p - x * q - y * r - z * s,
        w * q + x * p + y * s - z * r,
        w * r - x * s + y * p + z * q,
        w * s + x * r - y * q + z * p,
    )


def normalised(quat: Parts) -> Parts:
    """A unit quaternion; the identity where there is no direction, as MuJoCo does."""
    length = np.sqrt(sum(part * part for part in quat))
    known = length > 1e-10
    scale = 1 / np.where(known, length, 1.0)
    return tuple(np.where(known, part * scale, float(i == 0)) for i, part in enumerate(quat))


def parts(array: np.ndarray) -> Parts:
    """The last axis as components."""
    return tuple(array[..., i] for i in range(array.shape[-1]))


class _Level:
    """The bodies of one depth of the tree: constants with a leading axis of 1, for all environments."""

    def __init__(self, contract: Contract, bodies: List[int]) -> None:
        joint_of: Dict[int, int] = {body: j for j, body in enumerate(contract.joint_body)}
        joints = [joint_of.get(body) for body in bodies]
        self.bodies = bodies
        self.parents = [contract.parent[body] for body in bodies]
        self.pos = parts(contract.body_pos[bodies])
        self.quat = parts(contract.body_quat[bodies])
        self.moved = [i for i, joint in enumerate(joints) if joint is not None]
        self.joints = [joint for joint in joints if joint is not None]
        slides = np.zeros(len(bodies))
        axis, anchor = np.zeros((len(bodies), 3)), np.zeros((len(bodies), 3))
        for i, joint in zip(self.moved, self.joints):
            slides[i] = contract.joint_slides[joint]
            axis[i], anchor[i] = contract.joint_axis[joint], contract.joint_pos[joint]
        self.slides, self.turns = slides, 1.0 - slides
        self.axis, self.anchor = parts(axis), parts(anchor)


class Tree:
    """The bodies of a model and how they hang on one another."""

    def __init__(self, contract: Contract) -> None:
        self._floating, self._count = contract.floating, len(contract.body_names)
        depths: List[int] = []
        for parent in contract.parent:
            depths.append(0 if parent < 0 else depths[parent] + 1)
        self._levels = [
            _Level(contract, [b for b, depth in enumerate(depths) if depth == level])
            for level in range(max(depths) + 1)
        ]

    def forward(self, qpos: np.ndarray, qvel: np.ndarray) -> Dict[str, np.ndarray]:
        """body_pos, body_quat, body_linvel, body_angvel as `ipc/layout.py` has them, float64,
        (n, bodies, 3 or 4), of `qpos` (n, nq) and `qvel` (n, nv)."""
        qpos, qvel = qpos.astype(np.float64), qvel.astype(np.float64)
        first_q, first_v = (7, 6) if self._floating else (0, 0)
        out: List[Optional[Parts]] = [None] * 4
        columns: List[int] = []
        for level in self._levels:
            if level.parents[0] < 0:
                at = self._root(level, qpos, qvel)
            else:
                above = [columns.index(parent) for parent in level.parents]
                at = self._hang(level, [tuple(p[:, above] for p in each or ()) for each in out])
            angle = np.zeros((len(qpos), len(level.bodies)))
            rate = np.zeros_like(angle)
            angle[:, level.moved] = qpos[:, [first_q + j for j in level.joints]]
            rate[:, level.moved] = qvel[:, [first_v + j for j in level.joints]]
            at = _moved(level, angle, rate, at)
            columns += level.bodies
            out = [
                tuple(np.concatenate(pair, axis=1) for pair in zip(old, new)) if old else new
                for old, new in zip(out, at)
            ]
        order = np.argsort(columns)
        names = ("body_pos", "body_quat", "body_linvel", "body_angvel")
        arrays = (np.stack(each or (), axis=-1)[:, order] for each in out)
        return dict(zip(names, arrays))

    def _root(self, level: _Level, qpos: np.ndarray, qvel: np.ndarray) -> List[Parts]:
        n = (len(qpos), 1)
        if not self._floating:
            fixed = [tuple(np.broadcast_to(p, n) for p in each) for each in (level.pos, level.quat)]
            still = (np.zeros(n),) * 3
            return [*fixed, still, still]
        quat = normalised(parts(qpos[:, None, 3:7]))
        spin = rotate(quat, parts(qvel[:, None, 3:6]))
        return [parts(qpos[:, None, :3]), quat, parts(qvel[:, None, :3]), spin]

    def _hang(self, level: _Level, parent: List[Parts]) -> List[Parts]:
        """Where its parent alone puts a body."""
        pos, quat, vel, spin = parent
        arm = rotate(quat, level.pos)
        return [add(pos, arm), multiply(quat, level.quat), add(vel, cross(spin, arm)), spin]


def _moved(level: _Level, angle: np.ndarray, rate: np.ndarray, at: List[Parts]) -> List[Parts]:
    """The same after the joints moved: a slide shifts along its axis, a hinge turns about its anchor, which
    stays in place. A body without a joint does neither."""
    pos, quat, vel, spin = at
    axis = rotate(quat, level.axis)
    shift = scaled(axis, angle * level.slides)
    slide_vel = add(cross(spin, shift), scaled(axis, rate * level.slides))
    anchor = rotate(quat, level.anchor)
    half = angle * level.turns / 2
    new_quat = multiply(quat, (np.cos(half), *scaled(level.axis, np.sin(half))))
    back = scaled(rotate(new_quat, level.anchor), -1.0)
    new_spin = add(spin, scaled(axis, rate * level.turns))
    turn_vel = add(cross(spin, anchor), cross(new_spin, back))
    new_pos = add(add(pos, shift), add(anchor, back))
    return [new_pos, new_quat, add(vel, add(slide_vel, turn_vel)), new_spin]
