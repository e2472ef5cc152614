"""The stand-in's physics views: torch tensors in the engine's order and frames, xyzw, positions in the world.

A getter refills the same tensor each time. State is on the simulation's device; masses and the like are in
host memory and take indices there, whatever the device is.
"""

from types import SimpleNamespace
from typing import Any, List

import numpy as np
import torch

from .engine import Engine
from .importer import native_order
from .kit import KIT, torch_device
from .settings import SETTINGS


class ArticulationView:
    def __init__(self, engine: Engine, paths: List[str], device: str) -> None:
        self.engine, self._device = engine, torch_device(device)
        self.prim_paths = paths[::-1] if SETTINGS.envs == "reversed" else paths
        self.count = engine.count
        self.bodies = native_order(engine.body_names, engine.body_parents)
        # A joint comes where its body comes.
        joints = range(len(engine.joint_names))
        self.dofs = sorted(joints, key=lambda j: self.bodies.index(engine.joint_bodies[j]))
        self.shared_metatype = SimpleNamespace(
            link_count=len(self.bodies),
            link_names=[engine.body_names[i] for i in self.bodies],
            dof_count=len(self.dofs),
            dof_names=[engine.joint_names[i] for i in self.dofs],
            fixed_base=engine.fixed,
        )
        self.max_fixed_tendons = self.max_spatial_tendons = 0
        self.origins = np.array(KIT.origins)
        self._buffers: dict[str, Any] = {}

    def _refill(self, name: str, values: np.ndarray, device: str) -> Any:
        fresh = torch.as_tensor(np.ascontiguousarray(values, np.float32), device=device)
        if name not in self._buffers:
            self._buffers[name] = fresh.clone()
        self._buffers[name].copy_(fresh)
        return self._buffers[name]

    def _rows(self, data: Any, indices: Any, device: str) -> Any:
        """(environment, row) pairs of a setter's full tensor and its indices."""
        if not isinstance(data, torch.Tensor) or not isinstance(indices, torch.Tensor):
            raise TypeError("a physics view takes tensors, and indices as a tensor")
        if str(data.device) != device or str(indices.device) != device:
            raise RuntimeError(
                f"tensors on {data.device} and {indices.device} where {device} is expected"
            )
        if data.dtype != torch.float32 or indices.is_floating_point():
            raise RuntimeError(f"{data.dtype} rows and {indices.dtype} indices")
        rows = data.cpu().numpy().astype(np.float64)
        return [(int(i), rows[int(i)]) for i in indices]

    # -- state -----------------------------------------------------------------------------------------

    def get_root_transforms(self) -> Any:
        rows = np.array([self.engine.root_pose(i) for i in range(self.count)])
        rows[:, :3] += self.origins * (SETTINGS.physics != "zeros")
        return self._refill("root", rows[:, [0, 1, 2, 4, 5, 6, 3]], self._device)

    def set_root_transforms(self, data: Any, indices: Any) -> None:
        for i, row in self._rows(data, indices, self._device):
            pose = row[[0, 1, 2, 6, 3, 4, 5]]
            pose[:3] -= self.origins[i]
            self.engine.put_root_pose(i, pose)

    def get_root_velocities(self) -> Any:
        rows = np.array([self.engine.root_velocity(i) for i in range(self.count)])
        return self._refill("root_velocity", rows, self._device)

    def set_root_velocities(self, data: Any, indices: Any) -> None:
        for i, row in self._rows(data, indices, self._device):
            self.engine.put_root_velocity(i, row)

    def get_link_transforms(self) -> Any:
        rows = self.engine.links[:, self.bodies][..., [0, 1, 2, 4, 5, 6, 3]]
        rows[..., :3] += self.origins[:, None] * (SETTINGS.physics != "zeros")
        return self._refill("links", rows, self._device)

    def get_link_velocities(self) -> Any:
        return self._refill(
            "link_velocities", self.engine.link_velocities[:, self.bodies], self._device
        )

    def _joint_rows(self, name: str) -> np.ndarray:
        rows = [self.engine.joints(i)[name][self.dofs] for i in range(self.count)]
        return np.array(rows).reshape(self.count, len(self.dofs))

    def get_dof_positions(self) -> Any:
        return self._refill("dof_positions", self._joint_rows("pos"), self._device)

    def get_dof_velocities(self) -> Any:
        return self._refill("dof_velocities", self._joint_rows("vel"), self._device)

    def set_dof_positions(self, data: Any, indices: Any) -> None:
        for i, row in self._rows(data, indices, self._device):
            self.engine.joints(i)["pos"][self.dofs] = row
            self.engine.datas[i].qacc_warmstart[:] = 0

    def set_dof_velocities(self, data: Any, indices: Any) -> None:
        for i, row in self._rows(data, indices, self._device):
            self.engine.joints(i)["vel"][self.dofs] = row

    def set_dof_position_targets(self, data: Any, indices: Any) -> None:
        for i, row in self._rows(data, indices, self._device):
            self.engine.targets[i, self.dofs] = row

    # -- properties of joints; in host memory -----------------------------------------------------------

    def _get_dofs(self, name: str) -> Any:
        values = getattr(self.engine.props, name)[self.dofs]
        return self._refill(name, np.repeat(values[None], self.count, axis=0), "cpu").clone()

    def _set_dofs(self, name: str, data: Any, indices: Any) -> None:
        rows = self._rows(data, indices, "cpu")
        _all_alike([row for _, row in rows], self.count)
        getattr(self.engine.props, name)[self.dofs] = rows[0][1]
        self.engine.changed = True

    def get_dof_limits(self) -> Any:
        return self._get_dofs("limits")

    def set_dof_limits(self, data: Any, indices: Any) -> None:
        if SETTINGS.limits != "stuck":
            self._set_dofs("limits", data, indices)

    def get_dof_stiffnesses(self) -> Any:
        return self._get_dofs("stiffness")

    def set_dof_stiffnesses(self, data: Any, indices: Any) -> None:
        if SETTINGS.gains == "held":
            self._set_dofs("stiffness", data, indices)

    def get_dof_dampings(self) -> Any:
        return self._get_dofs("damping")

    def set_dof_dampings(self, data: Any, indices: Any) -> None:
        self._set_dofs("damping", data, indices)

    def get_dof_max_forces(self) -> Any:
        return self._get_dofs("effort")

    def set_dof_max_forces(self, data: Any, indices: Any) -> None:
        if not bool(torch.isfinite(data).all()):
            raise RuntimeError("an effort limit is not finite")
        self._set_dofs("effort", data, indices)

    def get_dof_max_velocities(self) -> Any:
        return self._get_dofs("velocity")

    def set_dof_max_velocities(self, data: Any, indices: Any) -> None:
        self._set_dofs("velocity", data, indices)

    def get_dof_armatures(self) -> Any:
        return self._get_dofs("armature")

    def set_dof_armatures(self, data: Any, indices: Any) -> None:
        self._set_dofs("armature", data, indices)

    def get_dof_friction_properties(self) -> Any:
        return self._get_dofs("friction")

    def set_dof_friction_properties(self, data: Any, indices: Any) -> None:
        self._set_dofs("friction", data, indices)

    # -- properties of bodies and shapes; in host memory -------------------------------------------------

    def _get(self, name: str, values: np.ndarray) -> Any:
        return self._refill(name, np.repeat(values[None], self.count, axis=0), "cpu").clone()

    def _set(self, data: Any, indices: Any) -> np.ndarray:
        rows = self._rows(data, indices, "cpu")
        if indices.dtype != torch.int32:
            raise RuntimeError(f"{indices.dtype} indices")
        _all_alike([row for _, row in rows], self.count)
        self.engine.changed = True
        return rows[0][1]

    def get_masses(self) -> Any:
        return self._get("mass", self.engine.props.mass[self.bodies])

    def set_masses(self, data: Any, indices: Any) -> None:
        row = self._set(data, indices)
        if SETTINGS.masses != "stuck":
            self.engine.props.mass[self.bodies] = row

    def get_coms(self) -> Any:
        return self._get("com", self.engine.props.com[self.bodies])

    def set_coms(self, data: Any, indices: Any) -> None:
        self.engine.props.com[self.bodies] = self._set(data, indices)

    def get_inertias(self) -> Any:
        return self._get("inertia", self.engine.props.inertia[self.bodies].reshape(-1, 9))

    def set_inertias(self, data: Any, indices: Any) -> None:
        self.engine.props.inertia[self.bodies] = self._set(data, indices).reshape(-1, 3, 3)

    def get_material_properties(self) -> Any:
        return self._get("materials", self.engine.props.materials)

    def set_material_properties(self, data: Any, indices: Any) -> None:
        row = self._set(data, indices)
        if SETTINGS.friction == "held":
            self.engine.props.materials[:] = row


def _all_alike(rows: List[np.ndarray], count: int) -> None:
    if len(rows) != count or any(not np.array_equal(row, rows[0]) for row in rows):
        raise NotImplementedError("the stand-in has one model for all environments")


class SimulationView:
    """What `physics_sim_view` is in the original."""

    def __init__(self) -> None:
        self.engines: List[Engine] = []

    def get_gravity(self) -> Any:
        return tuple(KIT.context.cfg.gravity)

    def update_articulations_kinematic(self) -> None:
        for engine in self.engines:
            engine.kinematics()
