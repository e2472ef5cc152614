"""The moving part of the Isaac Gym worker: targets in, resets staged, time, tensors out, fields published.

A setter acts at the next simulate and may be called once until then, and bodies are stale until after it.
So a reset never calls the engine: its rows wait here, are published at once (poses by forward kinematics),
and go out together just before the next step.
"""

from typing import Any, Dict, List, Tuple

import numpy as np

from ..ipc.errors import DevicePlanError
from ..ipc.layout import ENV_NONFINITE
from . import isaacgym_frames as frames
from .isaacgym_build import Scene
from .isaacgym_tensors import CPU_DEVICE, Staging, View, open_bridge
from .kinematics import Tree

BODY_FIELDS = ("body_pos", "body_quat", "body_linvel", "body_angvel")


class State:
    """Of all environments. Holds every buffer that the engine reads or fills, for the worker's life."""

    def __init__(self, scene: Scene) -> None:
        self._scene, self._init, self._contract = scene, scene.init, scene.contract
        self._gym, self._sim = scene.gym, scene.sim
        self._acquire()
        self._make_stagings()
        first_q, first_v = (7, 6) if self._contract.floating else (0, 0)
        self._joint_q, self._joint_v = slice(first_q, None), slice(first_v, None)
        self._low, self._high = self._contract.ctrl_range.T.astype(np.float32)
        self._make_overlay()

    # -- buffers -----------------------------------------------------------------------------------

    def _acquire(self) -> None:
        """The tensors that are needed, the bridge to them, and how each is refreshed."""
        gym, n, publish = self._gym, self._init.num_envs, self._init.publish
        joints, bodies = len(self._contract.joint_names), len(self._contract.body_names)
        tensors: Dict[str, Tuple[Any, Tuple[int, ...]]] = {}
        self._refreshes: List[Tuple[str, Any]] = []
        for name, shape, acquire, refresh, needed in (
            ("root_state", (n, 13), gym.acquire_actor_root_state_tensor,
             gym.refresh_actor_root_state_tensor, True),
            # An empty tensor cannot be made.
            ("dof_state", (n, joints, 2), gym.acquire_dof_state_tensor,
             gym.refresh_dof_state_tensor, joints > 0),
            ("rigid_body_state", (n, bodies, 13), gym.acquire_rigid_body_state_tensor,
             gym.refresh_rigid_body_state_tensor, any(field in publish for field in BODY_FIELDS)),
            ("net_contact_force", (n, bodies, 3), gym.acquire_net_contact_force_tensor,
             gym.refresh_net_contact_force_tensor, "contact_force" in publish),
        ):  # fmt: skip
            if needed:
                tensors[name] = self._checked(name, acquire(self._sim), shape), shape
                self._refreshes.append((f"refresh of {name}", refresh))
        self._scene.look_at_log("acquiring the state tensors")
        self.evidence = "dof_state" if joints else "root_state"
        tensor = tensors[self.evidence][0]
        self.pointer = int(tensor.data_address)
        self.bridge = open_bridge(self._scene.options.tensor_bridge, self._scene.gymapi, tensor)
        self._views: Dict[str, View] = {
            name: self.bridge.view(*pair) for name, pair in tensors.items()
        }
        self._all_views = tuple(self._views.values())
        self.root: np.ndarray = self._views["root_state"].array
        self.dof = self._views["dof_state"].array if joints else np.zeros((n, 0, 2), np.float32)

    def _checked(self, name: str, tensor: Any, shape: Tuple[int, ...]) -> Any:
        """It is there, is what it should be, and lies where it should lie."""
        self._scene.check(tensor is not None, f"acquire of {name}")
        size = int(np.prod(tensor.shape))
        if tensor.dtype != self._scene.gymapi.DTYPE_FLOAT32 or size != int(np.prod(shape)):
            raise RuntimeError(
                f"Isaac Gym's {name} is {tensor.dtype} {tuple(tensor.shape)}; float32 {shape} belongs"
            )
        if tensor.device != self._scene.device and tensor.device == CPU_DEVICE:
            raise DevicePlanError(
                f"PhysX fell back to the CPU without failing: {name} lies in host memory, and "
                f"{self._init.device.uuid} is planned (its GPU library could not be loaded?)"
            )
        if tensor.device != self._scene.device:
            raise DevicePlanError(
                f"{name} lies on Isaac Gym's device {tensor.device}; {self._scene.device} is planned"
            )
        return tensor

    def _make_stagings(self) -> None:
        """What the engine reads. One buffer for each setter, used for nothing else: it must stay as it is
        until the next simulate has returned."""
        n, joints = self._init.num_envs, len(self._contract.joint_names)
        staging = self.bridge.staging
        self._new_root: Staging = staging((n, 13))
        self._root_ids: Staging = staging((n,), np.int32)
        self._new_dof: Staging = staging((n, max(1, joints), 2))
        self._dof_ids: Staging = staging((n,), np.int32)
        self._targets: Staging = staging((n, max(1, joints)))
        driven = self._contract.actuator_joint
        self._driven: Any = driven
        if len(driven) and (np.diff(driven) == 1).all():
            self._driven = slice(int(driven[0]), int(driven[-1]) + 1)  # a view, where that is one

    def _make_overlay(self) -> None:
        """What is published of environments that wait for their reset."""
        n, (nq, nv, _, bodies) = self._init.num_envs, self._contract.sizes
        shapes = {"qpos": (nq,), "qvel": (nv,), "body_quat": (bodies, 4)}
        self._overlay = {
            name: np.zeros((n, *shapes.get(name, (bodies, 3))), np.float32)
            for name in self._init.publish
        }
        self._tree = Tree(self._contract)
        self._pending, self._bad_ctrl = np.zeros(n, bool), np.zeros(n, bool)
        qpos, qvel = self._contract.default_qpos[None], self._contract.default_qvel[None]
        self._default = self._rows(qpos.astype(np.float32), qvel.astype(np.float32))

    # -- resets ------------------------------------------------------------------------------------

    def put_default(self, env_ids: np.ndarray) -> None:
        """To the keyframe. Its rows are computed once: this is called in every step of a training run."""
        self._store(env_ids, self._default)

    def put(self, env_ids: np.ndarray, qpos: np.ndarray, qvel: np.ndarray) -> None:
        if len(env_ids):
            self._store(env_ids, self._rows(qpos, qvel))

    def _rows(self, qpos: np.ndarray, qvel: np.ndarray) -> Dict[str, np.ndarray]:
        """Fields of a state, and the engine's rows of it under the names of its tensors."""
        rows: Dict[str, np.ndarray] = {"qpos": qpos, "qvel": qvel}
        if any(name in self._overlay for name in BODY_FIELDS):
            rows.update(self._tree.forward(qpos, qvel))
        if self._contract.floating:
            rows["root_state"] = frames.native_root(qpos, qvel, self._contract.com[0])
        joints = qpos[:, self._joint_q], qvel[:, self._joint_v]
        rows["dof_state"] = np.stack(joints, axis=-1)
        return rows

    def _store(self, env_ids: np.ndarray, rows: Dict[str, np.ndarray]) -> None:
        """Into the staging buffers and the overlay; a later state of the same environment replaces it."""
        for name, overlay in self._overlay.items():
            if name in rows:  # contact_force stays zero: none was computed
                overlay[env_ids] = rows[name]
        if self._contract.floating:
            self._new_root.array[env_ids] = rows["root_state"]
        if self._contract.joint_names:
            self._new_dof.array[env_ids] = rows["dof_state"]
        self._pending[env_ids] = True

    def _submit_resets(self) -> None:
        """Each kind once, the union of all; both take indices of actors, also the joints' setter."""
        gym, sim, check = self._gym, self._sim, self._scene.check
        ids = np.flatnonzero(self._pending)
        count = len(ids)
        for indices in (self._root_ids, self._dof_ids):
            indices.array[:count] = ids
            indices.tensor.shape = (count,)
        if self._contract.floating:
            self.bridge.copy_in((self._new_root, self._root_ids))
            answer = gym.set_actor_root_state_tensor_indexed(
                sim, self._new_root.tensor, self._root_ids.tensor, count
            )
            check(answer, "set_actor_root_state_tensor_indexed")
        if self._contract.joint_names:
            self.bridge.copy_in((self._new_dof, self._dof_ids))
            answer = gym.set_dof_state_tensor_indexed(
                sim, self._new_dof.tensor, self._dof_ids.tensor, count
            )
            check(answer, "set_dof_state_tensor_indexed")

    # -- time --------------------------------------------------------------------------------------

    def take_targets(self, ctrl: np.ndarray) -> None:
        """ctrl (num_envs, nu) into the engine's order, within the control range. An environment with a
        target that is no number keeps its last ones, and is flagged: one NaN may spoil the whole solver."""
        targets, bad = self._targets.array, self._bad_ctrl
        bad[:] = False
        if np.isfinite(ctrl).all():
            if isinstance(self._driven, slice):
                np.clip(ctrl, self._low, self._high, out=targets[:, self._driven])
            else:
                targets[:, self._driven] = np.clip(ctrl, self._low, self._high)
            return
        bad[:] = ~np.isfinite(ctrl).all(axis=1)
        kept = targets[bad]
        targets[:, self._driven] = np.clip(ctrl, self._low, self._high)
        targets[bad] = kept

    def advance(self, steps: int) -> None:
        """Targets, all waiting resets, `steps` times simulate, one refresh."""
        gym, sim, check = self._gym, self._sim, self._scene.check
        if self._contract.joint_names:
            self.bridge.copy_in((self._targets,))
            answer = gym.set_dof_position_target_tensor(sim, self._targets.tensor)
            check(answer, "set_dof_position_target_tensor")
        if self._pending.any():
            self._submit_resets()
        for _ in range(steps):
            gym.simulate(sim)
            if not self._scene.gpu:
                gym.fetch_results(sim, True)
        self._pending[:] = False
        for name, refresh in self._refreshes:
            check(refresh(sim), name)
        self.bridge.copy_out(self._all_views)

    def probe(self) -> None:
        """One step from the keyframe: the state must come back, be sound, and be where it was put. Leaves no
        trace: the keyframe waits again afterwards. DevicePlanError."""
        contract, everyone = self._contract, np.arange(self._init.num_envs)
        self.put_default(everyone)
        self.take_targets(np.tile(contract.default_ctrl, (len(everyone), 1)))
        self.bridge.poison(self._all_views)
        self.advance(1)
        self._scene.look_at_log("simulating the first step")
        start = contract.default_qpos[:3] if contract.floating else contract.body_pos[0]
        moved = np.abs(self.root[:, :3] - start).max()
        wrong = ""
        if not all(np.isfinite(view.array).all() for view in self._all_views):
            wrong = "is not finite"
        elif np.abs(np.linalg.norm(self.root[:, 3:7], axis=1) - 1).max() > 1e-3:
            wrong = "holds no rotations: nothing was computed"
        elif moved > 1.0:
            wrong = f"is {moved:.3g} m from where it was put"
        if wrong:
            raise DevicePlanError(
                f"after one step on {self._scene.where} the state {wrong}: Isaac Gym does not simulate there"
            )
        self.put_default(everyone)

    # -- publishing --------------------------------------------------------------------------------

    def publish(self, fields: Dict[str, np.ndarray]) -> int:
        """One conversion of each tensor into the shared block, then the rows that wait for their reset."""
        root, dof = self.root, self.dof
        floating = self._contract.floating
        if "qpos" in fields:
            np.copyto(fields["qpos"][:, self._joint_q], dof[:, :, 0])
            if floating:
                frames.copy_positions(root, fields["qpos"][:, :3])
                frames.copy_quats(root, fields["qpos"][:, 3:7])
        if "qvel" in fields:
            np.copyto(fields["qvel"][:, self._joint_v], dof[:, :, 1])
            if floating:
                linvel = fields["qvel"][:, None, :3]
                frames.copy_linvels(root[:, None], self._contract.com[:1], linvel)
                frames.copy_root_spin(root, fields["qvel"][:, 3:6])
        if "rigid_body_state" in self._views:
            self._publish_bodies(self._views["rigid_body_state"].array, fields)
        if "contact_force" in fields:
            np.copyto(fields["contact_force"], self._views["net_contact_force"].array)
        if self._pending.any():
            ids = np.flatnonzero(self._pending)
            for name, rows in self._overlay.items():
                fields[name][ids] = rows[ids]
        return self._publish_flags(fields["env_flags"])

    def _publish_bodies(self, rows: np.ndarray, fields: Dict[str, np.ndarray]) -> None:
        if "body_pos" in fields:
            frames.copy_positions(rows, fields["body_pos"])
        if "body_quat" in fields:
            frames.copy_quats(rows, fields["body_quat"])
        if "body_linvel" in fields:
            frames.copy_linvels(rows, self._contract.com, fields["body_linvel"])
        if "body_angvel" in fields:
            frames.copy_angvels(rows, fields["body_angvel"])

    def _publish_flags(self, flags: np.ndarray) -> int:
        """A sum of squares is not finite where a number is not (or is beyond 1e19, which is no state)."""
        with np.errstate(over="ignore", invalid="ignore"):
            squares = np.einsum("ij,ij->i", self.root, self.root)
            squares += np.einsum("ijk,ijk->i", self.dof, self.dof)
        bad = ~np.isfinite(squares)
        bad &= ~self._pending  # replaced by a state that the host has checked
        bad |= self._bad_ctrl
        np.multiply(bad, ENV_NONFINITE, out=flags, casting="unsafe")
        return int(np.count_nonzero(bad))

    def forget_targets(self) -> None:
        """What was wrong with the last targets is not wrong with a reset."""
        self._bad_ctrl[:] = False
