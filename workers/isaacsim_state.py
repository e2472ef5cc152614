"""The moving part of the Isaac Sim worker: targets in, resets, time, fields out. All of it in torch tensors
on the simulation's device; in a step nothing here waits for the GPU but `ids_of` and `finish`.

Isaac Lab's frames are nearly ours (wxyz, velocity of the link's origin on offer), but positions include the
environment's origin, the root's spin is along world axes, and joints and bodies are in the engine's order.
What a reset wrote is kept here until the next step and published from here: bit for bit, with poses and
velocities of bodies by forward kinematics. Isaac Lab has fresh poses after a reset, and stale velocities.
Imported after Kit has started.
"""

from typing import Any, Dict, List

import numpy as np
import torch

from ..ipc.errors import DevicePlanError
from ..ipc.layout import ENV_NONFINITE
from .isaacsim_scene import Scene
from .kinematics import Tree

BODY_FIELDS = ("body_pos", "body_quat", "body_linvel", "body_angvel")
Rows = Dict[str, Any]  # field -> tensor


class State:
    """Of all environments."""

    def __init__(self, scene: Scene) -> None:
        self._scene, self._init, self._contract = scene, scene.init, scene.contract
        self._robot, self._sim, self._sensor = scene.robot, scene.sim, scene.sensor
        self._device, self._floating = scene.device, scene.contract.floating
        n, contract = scene.init.num_envs, scene.contract
        self._root_q, self._root_v = (7, 6) if self._floating else (0, 0)
        self._origins = self._tensor(scene.origins)
        self._joint_ids = self._index(scene.joint_ids)
        self._body_ids = self._index(scene.body_ids)
        self._driven = self._joint_ids[self._index(contract.actuator_joint)]
        low, high = contract.ctrl_range.T
        self._low, self._high = self._tensor(low), self._tensor(high)
        self._targets = torch.zeros((n, len(scene.joint_ids)), device=self._device)
        self._bad_ctrl = torch.zeros(n, dtype=torch.bool, device=self._device)
        self._pending = torch.zeros(n, dtype=torch.bool, device=self._device)
        self._any_pending = False  # known without asking the GPU
        self._contact_ids = self._align_contacts()
        self._tree = Tree(contract)
        self._make_overlay()

    def _tensor(self, values: Any) -> Any:
        return torch.as_tensor(np.array(values, np.float32), device=self._device)

    def _index(self, values: Any) -> Any:
        return torch.as_tensor(np.array(values, np.int64), device=self._device)

    def _align_contacts(self) -> Any:
        if self._sensor is None:
            return None
        names = [str(name) for name in self._sensor.body_names]
        if sorted(names) != sorted(self._contract.body_names):
            raise RuntimeError(f"Isaac Sim's contact sensor sees the bodies {', '.join(names)}")
        return self._index([names.index(name) for name in self._contract.body_names])

    def _make_overlay(self) -> None:
        """What is published of environments that were reset since the last step; contact forces zero."""
        n, (nq, nv, _, bodies) = self._init.num_envs, self._contract.sizes
        shapes = {"qpos": (nq,), "qvel": (nv,), "body_quat": (bodies, 4)}
        self._overlay: Rows = {
            name: torch.zeros((n, *shapes.get(name, (bodies, 3))), device=self._device)
            for name in ("qpos", "qvel", *self._init.publish)
        }
        self._wants_bodies = any(name in self._overlay for name in BODY_FIELDS)
        qpos, qvel = self._contract.default_qpos, self._contract.default_qvel
        self._default = self._rows(qpos[None].astype(np.float32), qvel[None].astype(np.float32))
        # The keyframe's targets may differ from its joints.
        self._default_targets = torch.zeros((1, self._targets.shape[1]), device=self._device)
        self._default_targets[:, self._driven] = self._tensor(self._contract.default_ctrl)

    # -- resets ------------------------------------------------------------------------------------

    def ids_of(self, mask: Any) -> Any:
        """The environments where a tensor is not zero. Waits for the GPU: Isaac Lab takes indices."""
        return torch.nonzero(mask).flatten()

    def put_default(self, env_ids: Any) -> None:
        """To the keyframe, whose rows are computed once: this is called in every step of a training run."""
        ids = torch.as_tensor(env_ids, dtype=torch.long, device=self._device)
        self._put(ids, self._default, self._default_targets)

    def put(self, env_ids: np.ndarray, qpos: np.ndarray, qvel: np.ndarray) -> None:
        """`env_ids` (n,), `qpos` (n, nq), `qvel` (n, nv)."""
        rows = self._rows(qpos, qvel)
        targets = torch.zeros((len(qpos), self._targets.shape[1]), device=self._device)
        targets[:, self._joint_ids] = rows["qpos"][:, self._root_q :]
        self._put(self._index(env_ids), rows, targets)

    def _rows(self, qpos: np.ndarray, qvel: np.ndarray) -> Rows:
        rows = {"qpos": self._tensor(qpos), "qvel": self._tensor(qvel)}
        if self._wants_bodies:
            bodies = self._tree.forward(qpos, qvel)
            rows.update({name: self._tensor(bodies[name]) for name in BODY_FIELDS})
        return rows

    def _put(self, ids: Any, rows: Rows, targets: Any) -> None:
        """`rows` and `targets` have a row for each of `ids`, or one for all."""
        if not len(ids):
            return
        qpos, qvel = (rows[name].expand(len(ids), -1) for name in ("qpos", "qvel"))
        robot = self._robot
        if self._floating:
            self._write_root(ids, qpos, qvel)
        if len(self._joint_ids):
            shape = (len(ids), len(self._joint_ids))
            pos, vel = (torch.zeros(shape, device=self._device) for _ in range(2))
            pos[:, self._joint_ids] = qpos[:, self._root_q :]
            vel[:, self._joint_ids] = qvel[:, self._root_v :]
            robot.write_joint_state_to_sim(pos, vel, None, ids)
            self._targets[ids] = targets
            robot.set_joint_position_target(self._targets)
        robot.reset(ids)  # external wrenches too
        for name, field in self._overlay.items():
            if name in rows:
                field[ids] = rows[name]
        self._pending[ids] = True
        self._any_pending = True

    def _write_root(self, ids: Any, qpos: Any, qvel: Any) -> None:
        """The pose first: the velocity is carried over to the centre of mass by the pose that is known."""
        quat = _normalised(qpos[:, 3:7])
        pose = torch.cat([qpos[:, :3] + self._origins[ids], quat], dim=1)
        self._robot.write_root_link_pose_to_sim(pose, ids)
        velocity = torch.cat([qvel[:, :3], _rotate(quat, qvel[:, 3:6])], dim=1)
        self._robot.write_root_link_velocity_to_sim(velocity, ids)

    def place_base(self) -> None:
        """A fixed base where the model has it: the importer's own idea of it is not relied on."""
        if self._floating:
            return
        at, turn = self._contract.body_pos[0], self._contract.body_quat[0]
        everyone = self._index(range(self._init.num_envs))
        row = self._tensor(np.concatenate([at, turn])).expand(len(everyone), -1).clone()
        row[:, :3] += self._origins
        self._robot.write_root_link_pose_to_sim(row, everyone)

    # -- time --------------------------------------------------------------------------------------

    def take_targets(self, ctrl: Any) -> None:
        """`ctrl` (num_envs, nu), within the control range. An environment with a target that is no number
        keeps its last ones, and is flagged: one NaN may spoil the whole solver."""
        good = torch.isfinite(ctrl).all(dim=1)
        torch.logical_not(good, out=self._bad_ctrl)
        if not len(self._driven):
            return
        wanted = torch.minimum(torch.maximum(ctrl, self._low), self._high)
        self._targets[:, self._driven] = torch.where(
            good[:, None], wanted, self._targets[:, self._driven]
        )
        # This fills a buffer; `write_data_to_sim` sends it.
        self._robot.set_joint_position_target(self._targets)

    def advance(self, steps: int) -> None:
        dt = self._scene.dt
        for _ in range(steps):
            self._robot.write_data_to_sim()
            self._sim.step(render=False)
            self._robot.update(dt)  # until then every read is of before
            if self._sensor is not None:
                # A force that ended is zero in that one step only (IsaacLab issue 7613).
                self._sensor.update(dt, force_recompute=True)
        if self._any_pending:
            self._pending.zero_()
            self._any_pending = False

    def probe(self) -> None:
        """One step from the keyframe: the state must come back sound and where it was put. Leaves no trace.
        DevicePlanError."""
        contract, everyone = self._contract, self._index(range(self._init.num_envs))
        self.place_base()
        self.put_default(everyone)
        self.take_targets(self._tensor(contract.default_ctrl).expand(len(everyone), -1))
        self.advance(1)
        self._scene.look_at_log("simulating the first step")
        data = self._robot.data
        pose = data.root_link_pose_w.cpu().numpy().astype(np.float64)
        start = contract.default_qpos[:3] if contract.floating else contract.body_pos[0]
        moved = np.abs(pose[:, :3] - self._scene.origins - start).max()
        wrong = ""
        if not (np.isfinite(pose).all() and bool(torch.isfinite(data.joint_pos).all())):
            wrong = "is not finite"
        elif np.abs(np.linalg.norm(pose[:, 3:], axis=1) - 1).max() > 1e-3:
            wrong = "holds no rotations: nothing was computed"
        elif moved > 1.0:
            wrong = f"is {moved:.3g} m from where it was put"
        if wrong:
            raise DevicePlanError(
                f"after one step on {self._scene.where} the state {wrong}: Isaac Sim does not simulate there"
            )
        self.put_default(everyone)

    def pointer(self) -> int:
        """Of the physics view's own tensor of the roots."""
        return int(self._robot.root_physx_view.get_root_transforms().data_ptr())

    # -- publishing --------------------------------------------------------------------------------

    def publish(self, fields: Rows) -> None:
        """Into tensors of ours, by name: views of the shared block, or of the arena. Only enqueues."""
        for name in fields:
            if name != "env_flags":
                value = self._field(name)
                if self._any_pending:
                    shape = (-1, *(1,) * (value.dim() - 1))
                    value = torch.where(self._pending.view(shape), self._overlay[name], value)
                fields[name].copy_(value, non_blocking=True)
        fields["env_flags"].copy_(self._flags(), non_blocking=True)

    def finish(self) -> None:
        """What was enqueued has arrived."""
        if self._scene.gpu:
            torch.cuda.current_stream().synchronize()

    def forget_targets(self) -> None:
        """What was wrong with the last targets is not wrong with a reset."""
        self._bad_ctrl.zero_()

    def _field(self, name: str) -> Any:
        data = self._robot.data
        if name == "qpos":
            return self._qpos(data)
        if name == "qvel":
            return self._qvel(data)
        if name == "body_pos":
            return data.body_link_pose_w[:, self._body_ids, :3] - self._origins[:, None]
        if name == "body_quat":
            return data.body_link_pose_w[:, self._body_ids, 3:]
        if name == "body_linvel":
            return data.body_link_vel_w[:, self._body_ids, :3]
        if name == "body_angvel":
            return data.body_link_vel_w[:, self._body_ids, 3:]
        return self._sensor.data.net_forces_w[:, self._contact_ids]

    def _qpos(self, data: Any) -> Any:
        joints = data.joint_pos[:, self._joint_ids]
        if not self._floating:
            return joints
        pose = data.root_link_pose_w
        return torch.cat([pose[:, :3] - self._origins, pose[:, 3:], joints], dim=1)

    def _qvel(self, data: Any) -> Any:
        joints = data.joint_vel[:, self._joint_ids]
        if not self._floating:
            return joints
        velocity, quat = data.root_link_vel_w, data.root_link_pose_w[:, 3:]
        return torch.cat([velocity[:, :3], _rotate_back(quat, velocity[:, 3:]), joints], dim=1)

    def _flags(self) -> Any:
        """A sum of squares is not finite where a number is not (or is beyond 1e19, which is no state)."""
        data = self._robot.data
        parts: List[Any] = [data.root_link_pose_w, data.root_link_vel_w, data.joint_pos]
        squares: Any = sum((part * part).sum(dim=1) for part in (*parts, data.joint_vel))
        bad = (
            ~torch.isfinite(squares) & ~self._pending
        )  # a reset state is one that the host has checked
        return (bad | self._bad_ctrl).to(torch.uint8) * ENV_NONFINITE


# -- rotations: quaternions wxyz, (n, 4); vectors (n, 3) -----------------------------------------------


def _normalised(quat: Any) -> Any:
    """Unit quaternions; the identity where there is no direction, as MuJoCo does."""
    length = torch.linalg.norm(quat, dim=1, keepdim=True)
    identity = torch.tensor([1.0, 0.0, 0.0, 0.0], device=quat.device)
    return torch.where(length > 1e-10, quat / length.clamp(min=1e-10), identity)


def _rotate(quat: Any, vector: Any) -> Any:
    """From the body's axes to the world's."""
    half = torch.linalg.cross(quat[:, 1:], vector)
    return vector + 2 * (quat[:, :1] * half + torch.linalg.cross(quat[:, 1:], half))


def _rotate_back(quat: Any, vector: Any) -> Any:
    """From the world's axes to the body's."""
    half = torch.linalg.cross(-quat[:, 1:], vector)
    return vector + 2 * (quat[:, :1] * half + torch.linalg.cross(-quat[:, 1:], half))
