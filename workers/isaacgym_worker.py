"""`isaacgym`: Isaac Gym Preview 4, in its own Python 3.8, without torch and gymtorch.

What it settles, and where:

* a wrong device shows in four manners: `create_sim` gives None, the process dies, a line in the log and a
  simulation that goes on broken, PhysX on the CPU. Each is looked for; the host compares UUIDs besides;
* what the importer loses of a model is written into the actors and read back (`isaacgym_properties.py`);
* setters act at the next simulate, and only once until then (`isaacgym_state.py`);
* its rows (xyzw, velocity of the centre of mass, world axes) become public fields (`isaacgym_frames.py`).

The scene is the flat MJCF that the host made, the option `contract` what its import loses. All acquired
tensors are caches that a refresh fills, so what `report_device` measures is a copy the engine made for us.
"""

import sys
from typing import Any, List, Sequence, Tuple

import numpy as np

from ..ipc.device import DERIVED_COPY, DeviceReport
from ..ipc.errors import UsageError, WorkerLaunchError
from ..ipc.layout import PUBLISHABLE
from ..ipc.messages import Init, ModelFacts
from . import device_probe
from .contract import Contract, read_contract
from .engine_log import EngineLog
from .isaacgym_build import Scene
from .isaacgym_state import State
from .simulator import Fields, Progress, Simulator, split_fields

# What an import of Isaac Gym fails with, and what to do about it.
_IMPORT_TROUBLE = (
    ("GLIBCXX", "the environment's own libstdc++ is not found: its lib folder must stand in LD_LIBRARY_PATH "
     "(conda package libstdcxx-ng)"),
    ("libpython3", "the environment's lib folder, with libpython3.8.so.1.0, is not in LD_LIBRARY_PATH"),
    ("No gym module found", "this interpreter is not Python 3.6, 3.7 or 3.8"),
    ("libcuda", "the CUDA driver's library was not found (under WSL it is in /usr/lib/wsl/lib only)"),
    ("PyTorch was imported before", "something in this environment imports torch at start-up (a .pth file, "
     "sitecustomize)"),
    ("No module named 'isaacgym'", "Isaac Gym is not in this environment and its package is not known: set "
     "OUTBOARD_ISAACGYM_HOME to the folder that holds isaacgym/python"),
)  # fmt: skip


class IsaacGymSimulator(Simulator):
    engine = "Isaac Gym"
    engine_version = "Preview 4"
    _state: State
    _contract: Contract

    # -- building ----------------------------------------------------------------------------------

    def build(self, init: Init, progress: Progress) -> ModelFacts:
        if init.render:
            raise UsageError("the Isaac Gym worker runs without graphics and renders no pictures")
        self._init = init
        self._contract = read_contract(init)
        device_probe.check_device(init)
        self._log = EngineLog()
        progress("importing isaacgym", 0, 1)
        gymapi = import_gymapi(str(init.options.get("package_root", "")))
        progress("importing isaacgym", 1, 1)
        self._scene = Scene(gymapi, init, self._contract, self._log, progress)
        self._scene.build()
        self._state = State(self._scene)
        progress("simulating the first step", 0, 1)
        self._state.probe()
        progress("simulating the first step", 1, 1)
        version = self._scene.gym.get_version()
        self.engine_version = f"Preview 4 (gymapi {version.major}.{version.minor})"
        self.notes = tuple(self._make_notes())
        return self._contract.facts(init, self._scene.origins, tuple(self._scene.not_reproduced))

    def _make_notes(self) -> List[str]:
        pipeline = "GPU" if self._scene.gpu else "CPU"
        notes = [f"{pipeline} pipeline, state through {self._state.bridge.name}"]
        if not self._log.readable:
            notes.append("descriptor 2 is no file: errors that the engine only logs were not seen")
        if self._contract.floor_height is not None:
            notes.append("PhysX combines the frictions of floor and shape by a rule of its own")
        return [*notes, *self._scene.notes, *self._contract.notes]

    @property
    def capabilities(self) -> Tuple[str, ...]:
        return PUBLISHABLE

    def report_device(self) -> DeviceReport:
        state = self._state
        if self._scene.gpu:
            return device_probe.of_pointer(state.pointer, state.evidence, DERIVED_COPY)
        return device_probe.in_host_memory(state.evidence)

    def bind(self, banks: Sequence[Fields]) -> None:
        self._ctrl = banks[0]["ctrl"]
        self._banks = split_fields(banks, (*self._init.publish, "env_flags"))

    # -- commands ----------------------------------------------------------------------------------

    def step(self, bank: int) -> int:
        self._state.take_targets(self._ctrl)
        self._state.advance(self._init.decimation)
        self._scene.watch_log("stepping")
        return self._state.publish(self._banks[bank])

    def publish(self, bank: int) -> int:
        self._state.forget_targets()
        return self._state.publish(self._banks[bank])

    def reset(self, env_ids: np.ndarray) -> None:
        self._state.put_default(env_ids)

    def set_state(self, env_ids: np.ndarray, qpos: np.ndarray, qvel: np.ndarray) -> None:
        self._state.put(env_ids, qpos, qvel)

    def close(self) -> None:
        """After BYE. It may hang or crash: the host waits a little and ends the process group."""
        scene = getattr(self, "_scene", None)
        if scene is not None and scene.sim is not None:
            scene.gym.destroy_sim(scene.sim)


def import_gymapi(package_root: str) -> Any:
    """isaacgym.gymapi. WorkerLaunchError says what is missing."""
    if package_root and package_root not in sys.path:
        sys.path.append(package_root)  # last: an installed isaacgym wins
    try:
        from isaacgym import gymapi  # type: ignore[import-not-found]
    except Exception as error:  # ImportError, RuntimeError, OSError, ...
        text = f"{type(error).__name__}: {error}"
        help_ = next((said for mark, said in _IMPORT_TROUBLE if mark in text), "")
        raise WorkerLaunchError(
            f"isaacgym cannot be imported by {sys.executable} ({text})" + (help_ and f"; {help_}")
        ) from error
    return gymapi
