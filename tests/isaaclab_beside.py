"""Runs the wheel's own `ArticulationData`, and its writers, beside the stand-in's over equal simulations:
`isaaclab_beside.py SOURCES`, in the stand-in's Python. The last line: reads compared, reads that differ,
reads that were old.

What the wheel's two files import of Kit is stubbed here; what they compute with (`utils/math.py`,
`utils/buffers`) is the wheel's.
"""

# pyright: reportMissingImports=false, reportAttributeAccessIssue=false

from __future__ import annotations

import importlib
import os
import sys
import tempfile
import types
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

READS = ("root_link_pose_w", "root_link_vel_w", "root_com_vel_w", "body_link_pose_w",
         "body_link_vel_w", "body_com_vel_w", "joint_pos", "joint_vel")  # fmt: skip
NUM_ENVS = 3
ROUNDS = 120


def standin_robot(folder: Path) -> Any:
    """An articulation of the stand-in, in a simulation that plays."""
    from isaacgym_home import write_scene
    from outboard.backends import mjcf

    flat = mjcf.export_flat(mjcf.inspect(write_scene(folder, "floating")), folder / "models")
    importlib.import_module("isaacsim")
    from isaaclab.app import AppLauncher

    kit_args = "--/renderer/multiGpu/autoEnable=False --/renderer/multiGpu/maxGpuCount=1"
    AppLauncher({"headless": True, "device": "cpu", "multi_gpu": False, "kit_args": kit_args})
    import isaaclab.sim as sim_utils
    from isaaclab.assets import Articulation, ArticulationCfg
    from isaacsim.core.cloner import GridCloner
    from kit_standin.importer import convert

    usd = str(folder / "robot.usd")
    convert(str(flat.path), usd, "/robot", False)
    sim_utils.create_new_stage()
    sim = sim_utils.SimulationContext(
        sim_utils.SimulationCfg(device="cpu", dt=0.004, save_logs_to_file=False)
    )
    cloner = GridCloner(spacing=3.0)
    cloner.define_base_env("/World/envs")
    paths = cloner.generate_paths("/World/envs/env", NUM_ENVS)
    sim.get_initial_stage().DefinePrim(paths[0], "Xform")
    spawn = sim_utils.UsdFileCfg(
        usd_path=usd, articulation_props=sim_utils.ArticulationRootPropertiesCfg()
    )
    robot = Articulation(
        ArticulationCfg(
            prim_path="/World/envs/env_.*/Robot", articulation_root_prim_path="/hub/hub",
            spawn=spawn, actuators={},
        )
    )  # fmt: skip
    cloner.clone(paths[0], paths, base_env_path="/World/envs", root_path="/World/envs/env_")
    sim.reset()
    return robot


def second_view(robot: Any) -> Any:
    """The physics view of an equal simulation, with what the wheel asks of one besides."""
    import torch
    from kit_standin.engine import Engine
    from kit_standin.kit import KIT
    from kit_standin.view import ArticulationView

    class View(ArticulationView):
        def get_link_accelerations(self) -> Any:
            return torch.zeros((self.count, len(self.bodies), 6))

    first = KIT.stage.GetPrimAtPath(KIT.env_paths[0] + "/Robot")
    custom = first.GetCustomData()
    engine = Engine(custom["mjcf"], custom["folder"], custom["fix_base"], robot.cfg.spawn)
    KIT.context.physics_sim_view.engines.append(engine)
    return View(engine, robot.root_physx_view.prim_paths, "cpu")


def module(name: str, **content: Any) -> Any:
    made = types.ModuleType(name)
    made.__path__ = []
    made.__dict__.update(content)
    sys.modules[name] = made
    outer, _, inner = name.rpartition(".")
    if outer in sys.modules:
        setattr(sys.modules[outer], inner, made)
    return made


def wheel_classes(sources: Path) -> tuple[Any, Any]:
    """`Articulation` and `ArticulationData` of the wheel, their files alone."""
    from kit_standin.kit import KIT

    for name in [name for name in sys.modules if name.split(".")[0] == "isaaclab"]:
        del sys.modules[name]
    manager = SimpleNamespace(get_physics_sim_view=lambda: KIT.context.physics_sim_view)
    module("isaacsim.core.simulation_manager", SimulationManager=manager)
    for name in ("omni", "omni.physics", "omni.physics.tensors", "omni.physics.tensors.impl"):
        module(name)
    module("omni.physics.tensors.impl.api", ArticulationView=object)
    module("warp")
    module("prettytable", PrettyTable=object)
    sys.modules["pxr"].PhysxSchema = object
    module("isaaclab").__path__ = [str(sources)]
    module("isaaclab.sim")
    module("isaaclab.utils").__path__ = [str(sources / "utils")]
    module("isaaclab.utils.types", ArticulationActions=object)
    module("isaaclab.utils.version", get_isaac_sim_version=lambda: SimpleNamespace(major=5))
    module("isaaclab.utils.wrench_composer", WrenchComposer=object)
    module(
        "isaaclab.actuators", ActuatorBase=object, ActuatorBaseCfg=object, ImplicitActuator=object
    )
    module("isaaclab.assets").__path__ = [str(sources / "assets")]
    module("isaaclab.assets.asset_base", AssetBase=object)
    module("isaaclab.assets.articulation").__path__ = [str(sources / "assets" / "articulation")]
    files = [
        importlib.import_module("isaaclab.assets.articulation." + name)
        for name in ("articulation", "articulation_data")
    ]
    assert all(str(file.__file__).startswith(str(sources)) for file in files)
    return files[0].Articulation, files[1].ArticulationData


class Beside:
    """Two robots, to which the same is done, and what was read of both."""

    def __init__(self, ours: Any, theirs: Any, view: Any, context: Any) -> None:
        self.ours, self.theirs, self.view, self.context = ours, theirs, view, context
        self.rng = np.random.default_rng(11)
        self.compared = self.differing = self.old = 0

    def rows(self, width: int) -> tuple[Any, Any]:
        import torch

        count = int(self.rng.integers(1, NUM_ENVS + 1))
        ids = torch.as_tensor(np.sort(self.rng.permutation(NUM_ENVS)[:count]))
        rows = self.rng.normal(size=(count, width))
        if width == 7:
            rows[:, 2] += 3
            rows[:, 3:] /= np.linalg.norm(rows[:, 3:], axis=1, keepdims=True)
        return torch.as_tensor(rows, dtype=torch.float32), ids

    def write(self, method: str, width: int) -> None:
        rows, ids = self.rows(width)
        for robot in (self.ours, self.theirs):
            if method == "write_joint_state_to_sim":
                half = width // 2
                robot.write_joint_state_to_sim(
                    0.1 * rows[:, :half], rows[:, half:], None, ids.clone()
                )
            else:
                getattr(robot, method)(rows.clone(), ids.clone())

    def step(self, update: bool) -> None:
        for engine in self.context.physics_sim_view.engines:
            engine.step()
        if update:
            self.ours.update(0.004)
            self.theirs._data.update(0.004)

    def read(self) -> None:
        """Some properties, in some order: what is read first decides what the others are made of."""
        for i in self.rng.permutation(len(READS))[: int(self.rng.integers(1, 6))]:
            name = READS[i]
            ours, theirs = (getattr(d, name).clone() for d in (self.ours.data, self.theirs._data))
            self.compared += 1
            if not np.allclose(ours.numpy(), theirs.numpy(), rtol=1e-5, atol=1e-5):
                self.differing += 1
                off = float((ours - theirs).abs().max())
                print(f"read {self.compared}: {name} differs by {off:.3g}")
            if name == "body_com_vel_w":
                now = self.view.engine.link_velocities[
                    :, self.view.bodies
                ]  # its getter would refill
                self.old += int(not np.allclose(theirs.numpy(), now, atol=1e-6))
            elif name == "root_link_pose_w":
                now = np.array([self.view.engine.root_pose(i) for i in range(NUM_ENVS)])
                now[:, :3] += self.view.origins
                self.old += int(not np.allclose(theirs.numpy(), now, atol=1e-6))

    def run(self, joints: int) -> None:
        acts = (
            lambda: self.write("write_root_link_pose_to_sim", 7),
            lambda: self.write("write_root_link_velocity_to_sim", 6),
            lambda: self.write("write_root_com_velocity_to_sim", 6),
            lambda: self.write("write_joint_state_to_sim", 2 * joints),
            lambda: self.step(update=True),
            lambda: self.step(update=False),
        )
        for _ in range(ROUNDS):
            acts[int(self.rng.integers(len(acts)))]()
            self.read()


def main(sources: Path) -> None:
    import torch

    with tempfile.TemporaryDirectory() as folder:
        ours = standin_robot(Path(folder))
        view = second_view(ours)
        from kit_standin.kit import KIT

        articulation, data = wheel_classes(sources)
        theirs = object.__new__(articulation)
        theirs._root_physx_view, theirs._data = view, data(view, "cpu")
        theirs._ALL_INDICES = torch.arange(NUM_ENVS)
        beside = Beside(ours, theirs, view, KIT.context)
        beside.run(len(view.dofs))
        print(beside.compared, beside.differing, beside.old, flush=True)
    os._exit(0)


if __name__ == "__main__":
    main(Path(sys.argv.pop()))  # Kit would take it for its own
