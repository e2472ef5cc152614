"""`isaacsim`: Isaac Sim through Isaac Lab, in Kit's own Python (3.11 for Isaac Sim 5).

The order is Isaac Lab's: the launcher first and all else after it, so every module of ours that imports
Isaac Lab, USD or torch is imported in `build`. What is settled, and where:

* Kit on one GPU, its licence, its signals, its end (`isaacsim_app.py`);
* the model, by a USD file in a cache of ours (`isaacsim_usd.py`), and the stage (`isaacsim_scene.py`);
* drives in SI units, joints and bodies by name, what the engine kept (`isaacsim_robot.py`);
* targets written and views updated in every substep, resets, frames (`isaacsim_state.py`).

State is torch tensors on the simulation's GPU. Into the arena they go within the GPU, into the block by one
copy for each field. The physics view's tensors are copies that the engine makes for us, and so is the
evidence.
"""

from typing import Any, Dict, List, Mapping, Sequence, Tuple

import numpy as np

from ..ipc.arena import DeviceField
from ..ipc.device import DERIVED_COPY, DeviceReport
from ..ipc.errors import SceneError
from ..ipc.layout import PUBLISHABLE
from ..ipc.messages import Init, ModelFacts, Render
from . import device_probe
from .contract import Contract, read_contract
from .engine_log import EngineLog
from .isaacsim_app import App
from .simulator import Fields, Progress, Simulator

_BUFFER = "root transforms of the physics view"


class IsaacSimSimulator(Simulator):
    engine = "Isaac Sim"
    _app: App
    _contract: Contract
    _scene: Any = None
    _state: Any = None
    _torch: Any = None

    # -- building ----------------------------------------------------------------------------------

    def build(self, init: Init, progress: Progress) -> ModelFacts:
        self._init, self._contract = init, read_contract(init)
        if not self._contract.body_names:
            raise SceneError(f"{self._contract.path} has no robot")
        device_probe.check_device(init)
        self._log = EngineLog()
        progress("starting Kit", 0, 1)
        self._app = App(init)
        progress("starting Kit", 1, 1)

        # Everything that needs Kit follows.
        import torch

        from .isaacsim_scene import Scene
        from .isaacsim_state import State

        self._torch = torch
        self._scene = Scene(init, self._contract, self._app.version, self._log, progress)
        self._scene.build()
        self._state = State(self._scene)
        progress("simulating the first step", 0, 1)
        self._state.probe()
        progress("simulating the first step", 1, 1)
        if self._scene.gpu:
            self.transports = ("block", "cuda")
            self.stream = int(torch.cuda.current_stream().cuda_stream)
        self.engine_version = f"{self._app.version} (Isaac Lab {self._app.lab_version})"
        self.notes = tuple(self._make_notes())
        lost = tuple(self._scene.not_reproduced)
        return self._contract.facts(init, self._scene.origins, lost)

    def _make_notes(self) -> List[str]:
        notes = [f"physics on {self._scene.device}, torch {self._torch.__version__}"]
        if not self._log.readable:
            notes.append("descriptor 2 is no file: errors that the engine only logs were not seen")
        return [*notes, *self._scene.notes, *self._contract.notes]

    @property
    def capabilities(self) -> Tuple[str, ...]:
        return (*PUBLISHABLE, "render") if self._init.render else PUBLISHABLE

    def report_device(self) -> DeviceReport:
        """The context moves to another GPU in some of Kit's calls: the pointer is asked, not torch."""
        if self._scene.gpu:
            return device_probe.of_pointer(self._state.pointer(), _BUFFER, DERIVED_COPY)
        return device_probe.in_host_memory(_BUFFER)

    # -- the shared block ----------------------------------------------------------------------------

    def bind(self, banks: Sequence[Fields]) -> None:
        """Views of the block as tensors: what a field is copied into. serve.py has page-locked it."""
        view = self._torch.from_numpy
        names = (*self._init.publish, "env_flags")
        self._banks = [{name: view(bank[name]) for name in names} for bank in banks]
        self._host_flags = [bank["env_flags"] for bank in banks]
        self._host_ctrl = view(banks[0]["ctrl"])
        self._ctrl = self._torch.zeros(self._host_ctrl.shape, device=self._scene.device)

    def step(self, bank: int) -> int:
        self._ctrl.copy_(self._host_ctrl, non_blocking=True)
        self._advance(self._ctrl)
        return self._publish(bank)

    def publish(self, bank: int) -> int:
        self._state.forget_targets()
        return self._publish(bank)

    def _advance(self, ctrl: Any) -> None:
        self._state.take_targets(ctrl)
        self._state.advance(self._init.decimation)
        self._scene.watch_log("stepping")

    def _publish(self, bank: int) -> int:
        self._state.publish(self._banks[bank])
        self._state.finish()
        return int(np.count_nonzero(self._host_flags[bank]))

    def reset(self, env_ids: np.ndarray) -> None:
        self._state.put_default(env_ids)

    def set_state(self, env_ids: np.ndarray, qpos: np.ndarray, qvel: np.ndarray) -> None:
        if len(env_ids):
            self._state.put(env_ids, qpos, qvel)

    # -- the CUDA arena: the same tensors, and no copy leaves the GPU ------------------------------------

    def bind_arena(self, slots: Sequence[Mapping[str, DeviceField]]) -> None:
        names = (*self._init.publish, "env_flags")
        self._slots: List[Dict[str, Any]] = [
            {name: self._over(slot[name]) for name in names} for slot in slots
        ]
        self._arena_ctrl = self._over(slots[0]["ctrl"])

    def _over(self, field: Any) -> Any:
        """A tensor over the arena's memory; torch reads `__cuda_array_interface__`."""
        if 0 in field.shape:
            return self._torch.zeros(field.shape, device=self._scene.device)
        return self._torch.as_tensor(field, device=self._scene.device)

    def step_arena(self, slot: int) -> None:
        self._advance(self._arena_ctrl)
        self._state.publish(self._slots[slot])

    def publish_arena(self, slot: int) -> None:
        self._state.forget_targets()
        self._state.publish(self._slots[slot])

    def reset_mask(self, mask: Any) -> None:
        self._state.put_default(self._state.ids_of(self._over(mask)))

    # -- pictures and the end ----------------------------------------------------------------------------

    def render(self, request: Render) -> np.ndarray:
        if self._scene.camera is None:
            return super().render(request)
        return self._scene.camera.picture(request)

    def close(self) -> None:
        """After BYE. Kit ends the process in here, or hangs: `isaacsim_app.py`."""
        app = getattr(self, "_app", None)
        if app is not None:
            app.close(getattr(self._scene, "sim", None))
