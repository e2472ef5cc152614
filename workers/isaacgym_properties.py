"""What of a robot is written into Isaac Gym's actors because its importer loses it, and what came of that.

Gains, force limits, friction, armature, joint limits and the axes of inertia. One set of arrays, written to
every actor; an answer of False is an error, a number that was not kept is an error or is reported.
"""

import math
from typing import Any, Dict, List, Set

import numpy as np

from .contract import Contract

NO_LIMIT = 1e9  # N or N m; an infinite effort is not one to this engine
NO_CAP = 1e6  # rad/s or m/s: above what a joint reaches, so that no hidden cap exists
# How well float32 gives back what it was given.
_RTOL = 1e-4
_MUST_HOLD = ("driveMode", "stiffness", "damping", "effort", "armature")


class Properties:
    """Of all actors of a scene (`isaacgym_build.Scene`)."""

    def __init__(self, scene: Any) -> None:
        self._scene, self._gym, self._gymapi = scene, scene.gym, scene.gymapi
        self._contract: Contract = scene.contract
        self._made = False
        # [] or None: the importer got it right, nothing to write
        self._dofs: Any = None
        self._bodies: List[Any] = []
        self._shapes: List[Any] = []
        self._differ: Dict[str, Set[int]] = {}  # field -> joints whose number was not kept

    def write(self, env: Any, actor: int) -> None:
        gym, check = self._gym, self._scene.check
        if not self._made:
            self._make(env, actor)
        if self._dofs is not None:
            answer = gym.set_actor_dof_properties(env, actor, self._dofs)
            check(answer, "set_actor_dof_properties")
            self._compare_dofs(gym.get_actor_dof_properties(env, actor))
        if self._bodies:
            answer = gym.set_actor_rigid_body_properties(env, actor, self._bodies, False)
            check(answer, "set_actor_rigid_body_properties")
        if self._shapes:
            answer = gym.set_actor_rigid_shape_properties(env, actor, self._shapes)
            check(answer, "set_actor_rigid_shape_properties")

    def _make(self, env: Any, actor: int) -> None:
        """From the first actor, as imported; all others are like it."""
        gym = self._gym
        if self._contract.joint_names:
            self._dofs = self._dof_properties(gym.get_actor_dof_properties(env, actor))
        self._bodies = self._body_properties(gym.get_actor_rigid_body_properties(env, actor))
        self._shapes = self._shape_properties(gym.get_actor_rigid_shape_properties(env, actor))
        self._made = True

    # -- joints --------------------------------------------------------------------------------------

    def _dof_properties(self, props: Any) -> Any:
        """The law of the drive is effort = clip(stiffness (target - q) - damping dq/dt)."""
        contract, driven = self._contract, self._contract.actuator_joint
        props["driveMode"] = int(self._gymapi.DOF_MODE_POS)
        for name in ("stiffness", "damping"):  # of a joint without an actuator
            props[name] = 0.0
        props["stiffness"][driven] = contract.kp
        props["damping"][driven] = contract.kv
        props["effort"] = NO_LIMIT
        props["effort"][driven] = np.minimum(contract.force_range[:, 1], NO_LIMIT)
        props["velocity"] = NO_CAP
        props["armature"] = contract.armature
        props["friction"] = contract.frictionloss
        low, high = contract.joint_range.T
        limited = np.isfinite(high) & bool(self._scene.options.enforce_joint_limits)
        props["hasLimits"] = limited
        props["lower"][limited], props["upper"][limited] = low[limited], high[limited]
        return props

    def _compare_dofs(self, got: Any) -> None:
        wanted = self._dofs
        if got.tobytes() == wanted.tobytes():
            return
        for name in wanted.dtype.names:
            same = np.isclose(got[name], wanted[name], rtol=_RTOL, atol=1e-6)
            if name in ("lower", "upper"):
                same |= ~wanted["hasLimits"]
            if not same.all():
                self._differ.setdefault(name, set()).update(np.flatnonzero(~same).tolist())

    # -- bodies and shapes ---------------------------------------------------------------------------

    def _body_properties(self, bodies: List[Any]) -> List[Any]:
        contract, inertia = self._contract, self._contract.inertia_matrices()
        if not self._wrong_bodies(bodies):
            return []
        for i, body in enumerate(bodies):
            body.mass, body.invMass = float(contract.mass[i]), 1.0 / float(contract.mass[i])
            body.com = self._vec3(contract.com[i])
            body.inertia = self._mat33(inertia[i])
            body.invInertia = self._mat33(np.linalg.inv(inertia[i]))
        return bodies

    def _vec3(self, values: np.ndarray) -> Any:
        return self._gymapi.Vec3(*(float(value) for value in values))

    def _mat33(self, rows: np.ndarray) -> Any:
        matrix = self._gymapi.Mat33()
        matrix.x, matrix.y, matrix.z = (self._vec3(row) for row in rows)
        return matrix

    def _wrong_bodies(self, bodies: List[Any]) -> List[str]:
        """Names of the bodies whose mass, centre of mass or inertia is not the contract's."""
        contract, inertia = self._contract, self._contract.inertia_matrices()
        wrong: List[str] = []
        for i, body in enumerate(bodies):
            rows = [
                [row.x, row.y, row.z] for row in (body.inertia.x, body.inertia.y, body.inertia.z)
            ]
            at = [body.com.x, body.com.y, body.com.z]
            scale = float(np.abs(inertia[i]).max())
            good = (
                math.isclose(body.mass, contract.mass[i], rel_tol=_RTOL)
                and np.allclose(at, contract.com[i], rtol=0, atol=1e-6)
                and np.allclose(rows, inertia[i], rtol=0, atol=_RTOL * scale)
            )
            if not good:
                wrong.append(contract.body_names[i])
        return wrong

    def _shape_properties(self, shapes: List[Any]) -> List[Any]:
        """Friction, shape by shape in the export's order; reported where the engine made other shapes."""
        wanted = self._contract.shape_friction
        if len(shapes) != len(wanted):
            if len(set(wanted.tolist())) > 1:
                self._scene.not_reproduced.append(
                    f"friction per shape: the engine made {len(shapes)} shapes of {len(wanted)}"
                )
                return []
            wanted = np.full(len(shapes), wanted[0] if len(wanted) else 1.0)
        if np.allclose([shape.friction for shape in shapes], wanted, rtol=_RTOL):
            return []
        for shape, friction in zip(shapes, wanted):
            shape.friction = float(friction)
        return shapes

    # -- what came of it -----------------------------------------------------------------------------

    def read_back(self, env: Any, actor: int) -> None:
        """Joints were compared in every environment; bodies and shapes, whose reading is a loop in Python,
        are in the last one."""
        wrong = self._wrong_bodies(self._gym.get_actor_rigid_body_properties(env, actor))
        if wrong:
            listed = ", ".join(wrong)
            raise RuntimeError(
                f"Isaac Gym did not keep the mass, centre of mass or inertia of: {listed}"
            )
        for field in _MUST_HOLD:
            if field in self._differ:
                raise RuntimeError(f"Isaac Gym did not keep the {field} of: {self._joints(field)}")
        self._judge_limits()
        self._judge_the_rest(env, actor)

    def _joints(self, *fields: str) -> str:
        lost = set().union(*(self._differ.get(field, set()) for field in fields))
        return ", ".join(self._contract.joint_names[i] for i in sorted(lost))

    def _judge_limits(self) -> None:
        scene, limited = self._scene, int(np.isfinite(self._contract.joint_range[:, 1]).sum())
        lost = self._joints("hasLimits", "lower", "upper")
        if lost:
            scene.not_reproduced.append(f"joint limits: not kept by the engine: {lost}")
        elif limited and not scene.options.enforce_joint_limits:
            scene.not_reproduced.append(f"joint limits: {limited}, switched off by the Cfg")
        elif limited:
            scene.notes.append(f"joint limits: {limited} written and read back")

    def _judge_the_rest(self, env: Any, actor: int) -> None:
        scene = self._scene
        if "velocity" in self._differ:
            capped = self._joints("velocity")
            scene.notes.append(f"joint velocities are capped by the engine: {capped}")
        if (self._contract.frictionloss > 0).any():
            lost = "not kept by the engine" if "friction" in self._differ else "the same number"
            scene.not_reproduced.append(
                f"frictionloss: {lost}; PhysX takes it as a coefficient of the load on the joint"
            )
        if self._shapes:
            shapes = self._gym.get_actor_rigid_shape_properties(env, actor)
            wanted = [shape.friction for shape in self._shapes]
            if not np.allclose([shape.friction for shape in shapes], wanted, rtol=_RTOL):
                scene.not_reproduced.append("friction per shape: not kept by the engine")
