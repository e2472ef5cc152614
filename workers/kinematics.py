"""Forward kinematics of a contract's model, for many environments at once.

For engines that show a reset only after their next step: poses and velocities of the bodies follow from
`qpos` and `qvel` alone. A loop over bodies, never over environments. Quaternions wxyz.
"""

from typing import Dict, List, Optional, Tuple

import numpy as np

from .contract import Contract

Frames = Dict[str, np.ndarray]


def rotate(quats: np.ndarray, vectors: np.ndarray) -> np.ndarray:
    """`vectors` (..., 3) turned by unit quaternions (..., 4) wxyz; shapes broadcast."""
    w, u = quats[..., :1], quats[..., 1:]
    half = np.cross(u, vectors)
    return vectors + 2 * (w * half + np.cross(u, half))


def multiply(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """The rotation `b`, then `a`."""
    w, x, y, z = np.moveaxis(a, -1, 0)
    p, q, r, s = np.moveaxis(b, -1, 0)
    parts = (
        w * p - x * q - y * r - z * s,
        w * q + x * p + y * s - z * r,
        w * r - x * s + y * p + z * q,
        w * s + x * r - y * q + z * p,
    )
    return np.stack(parts, axis=-1)


def conjugate(quats: np.ndarray) -> np.ndarray:
    return quats * (1.0, -1.0, -1.0, -1.0)


def normalised(quats: np.ndarray) -> np.ndarray:
    """Unit quaternions; the identity where there is no direction, as MuJoCo does."""
    length = np.linalg.norm(quats, axis=-1, keepdims=True)
    unit = quats / np.where(length > 1e-10, length, 1.0)
    return np.where(length > 1e-10, unit, (1.0, 0.0, 0.0, 0.0))


class Tree:
    """The bodies of a model and how they hang on one another."""

    def __init__(self, contract: Contract) -> None:
        self._contract = contract
        # body -> its joint; the contract allows one at most
        self._joint: List[Optional[int]] = [None] * len(contract.body_names)
        for joint, body in enumerate(contract.joint_body):
            self._joint[body] = joint

    def forward(self, qpos: np.ndarray, qvel: np.ndarray) -> Frames:
        """body_pos, body_quat, body_linvel, body_angvel as `ipc/layout.py` has them, float64,
        (n, bodies, 3 or 4), of `qpos` (n, nq) and `qvel` (n, nv)."""
        model, n = self._contract, len(qpos)
        count = len(model.body_names)
        pos, quat = np.zeros((n, count, 3)), np.zeros((n, count, 4))
        vel, spin = np.zeros((n, count, 3)), np.zeros((n, count, 3))
        first_q, first_v = (7, 6) if model.floating else (0, 0)
        for body, parent in enumerate(model.parent):
            if parent < 0:
                pos[:, body], quat[:, body], vel[:, body], spin[:, body] = self._root(qpos, qvel)
            else:
                arm = rotate(quat[:, parent], model.body_pos[body])
                pos[:, body] = pos[:, parent] + arm
                quat[:, body] = multiply(quat[:, parent], model.body_quat[body])
                vel[:, body] = vel[:, parent] + np.cross(spin[:, parent], arm)
                spin[:, body] = spin[:, parent]
            joint = self._joint[body]
            if joint is not None:
                angle, rate = qpos[:, first_q + joint, None], qvel[:, first_v + joint, None]
                self._move(joint, angle, rate, pos[:, body], quat[:, body], vel[:, body], spin[:, body])
        return {"body_pos": pos, "body_quat": quat, "body_linvel": vel, "body_angvel": spin}

    def _root(
        self, qpos: np.ndarray, qvel: np.ndarray
    ) -> Tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        n, model = len(qpos), self._contract
        if not model.floating:
            still = np.zeros((n, 3))
            at = np.broadcast_to(model.body_pos[0], (n, 3))
            return at, np.broadcast_to(model.body_quat[0], (n, 4)), still, still
        turn = normalised(qpos[:, 3:7].astype(np.float64))
        return qpos[:, :3], turn, qvel[:, :3], rotate(turn, qvel[:, 3:6])

    def _move(
        self,
        joint: int,
        angle: np.ndarray,
        rate: np.ndarray,
        pos: np.ndarray,
        quat: np.ndarray,
        vel: np.ndarray,
        spin: np.ndarray,
    ) -> None:
        """Move the body of `joint` in place, from where its parent alone would put it."""
        axis, anchor = self._contract.joint_axis[joint], self._contract.joint_pos[joint]
        world_axis = rotate(quat, axis)
        if self._contract.joint_slides[joint]:
            shift = world_axis * angle
            pos += shift
            vel += np.cross(spin, shift) + world_axis * rate
            return
        at = rotate(quat, anchor)  # from the body's origin to the anchor, which stays in place
        turn = np.concatenate([np.cos(angle / 2), np.sin(angle / 2) * axis], axis=-1)
        quat[:] = multiply(quat, turn)
        back = rotate(quat, anchor)
        anchor_vel = vel + np.cross(spin, at)
        pos += at - back
        spin += world_axis * rate
        vel[:] = anchor_vel - np.cross(spin, back)
