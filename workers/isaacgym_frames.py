"""Between Isaac Gym's rows of 13 and the public fields; no loop over environments or bodies.

Native: position relative to the environment's origin, quaternion xyzw, velocity of the *centre of mass* and
angular velocity, both along world axes. Public (`ipc/layout.py`): quaternion wxyz, velocity of the body
frame's *origin*, and for the root's qvel the angular velocity along the body's own axes.
"""

import numpy as np

from .kinematics import add, cross, normalised, parts, rotate, turned

# Rows per pass where temporaries are needed: they stay in the core's own cache.
_CHUNK = 8192


def copy_positions(rows: np.ndarray, pos: np.ndarray) -> None:
    np.copyto(pos, rows[..., :3])


def copy_quats(rows: np.ndarray, quats: np.ndarray) -> None:
    """xyzw -> wxyz"""
    np.copyto(quats[..., 0], rows[..., 6])
    np.copyto(quats[..., 1:], rows[..., 3:6])


def copy_linvels(rows: np.ndarray, com: np.ndarray, vel: np.ndarray) -> None:
    """v(origin) = v(com) - omega x R com; rows (n, bodies, 13), com (bodies, 3) in the body's frame."""
    arm, chunk = parts(com.astype(np.float32)), max(1, _CHUNK // len(com))
    for start in range(0, len(rows), chunk):
        part, out = rows[start : start + chunk], vel[start : start + chunk]
        turned_arm = turned(parts(part[..., 3:6]), part[..., 6], arm)
        for axis, change in enumerate(cross(parts(part[..., 10:13]), turned_arm)):
            np.subtract(part[..., 7 + axis], change, out=out[..., axis])


def copy_angvels(rows: np.ndarray, spin: np.ndarray) -> None:
    np.copyto(spin, rows[..., 10:13])


def copy_root_spin(rows: np.ndarray, spin: np.ndarray) -> None:
    """World axes -> the body's own: R^T omega. rows (n, 13)."""
    back = tuple(-part for part in parts(rows[:, 3:6]))
    for axis, value in enumerate(turned(back, rows[:, 6], parts(rows[:, 10:13]))):
        np.copyto(spin[:, axis], value)


def native_root(qpos: np.ndarray, qvel: np.ndarray, com: np.ndarray) -> np.ndarray:
    """(n, 13) rows of the root from public `qpos` (n, nq) and `qvel` (n, nv); com (3,)."""
    qpos, qvel = qpos.astype(np.float64), qvel.astype(np.float64)
    quat = normalised(parts(qpos[:, 3:7]))
    spin = rotate(quat, parts(qvel[:, 3:6]))
    vel = add(parts(qvel[:, :3]), cross(spin, rotate(quat, parts(com))))
    return np.stack([*parts(qpos[:, :3]), *quat[1:], quat[0], *vel, *spin], axis=1)
