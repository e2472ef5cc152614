"""What a simulator must implement to be driven by `serve.py`, and where each of ours is.

A simulator is one file with one class. Differences to the contract below (quaternion order, velocity frame,
joint order, when a reset takes effect, what must be set before an import) end inside that file.
"""

import abc
import importlib
import importlib.util
import os
import sys
from typing import Callable, Dict, List, Mapping, Sequence, Tuple, Type

import numpy as np

from ..ipc.arena import DeviceField
from ..ipc.device import DeviceReport
from ..ipc.errors import UsageError
from ..ipc.messages import Init, ModelFacts, Render
from . import device_copy

Progress = Callable[[str, int, int], None]  # stage, done, total
Fields = Mapping[str, np.ndarray]  # field name -> view, shapes and units as in ipc/layout.py


class Simulator(abc.ABC):
    """One simulator in one process. Calls come from one thread, in this order:

    build, report_device, bind, publish, then any number of step / reset / set_state / set_property /
    render / report_device, then close.
    """

    engine: str = ""  # "MuJoCo"
    engine_version: str = ""  # known after build()
    notes: Tuple[str, ...] = ()  # what a user should know, known after build()

    @abc.abstractmethod
    def build(self, init: Init, progress: Progress) -> ModelFacts:
        """Import the simulator, load `init.scene`, make `init.num_envs` environments, simulate one step
        (contexts and kernels are made lazily), and put the keyframe back bit for bit.

        Raise SceneError when the model is at fault, DevicePlanError when the device is."""

    @property
    @abc.abstractmethod
    def capabilities(self) -> Tuple[str, ...]:
        """The fields it can publish, plus "render" and "set_property:NAME". Known after build()."""

    @abc.abstractmethod
    def report_device(self) -> DeviceReport:
        """Measure where the state lies now; never repeat what was asked for."""

    @abc.abstractmethod
    def bind(self, banks: Sequence[Fields]) -> None:
        """Take the views of the shared block, one mapping per bank. Host-written fields (`ctrl`, ...)
        are the same memory in every bank."""

    @abc.abstractmethod
    def step(self, bank: int) -> int:
        """Read `ctrl`, advance every environment by `decimation` steps, publish into `bank`.

        Returns how many environments have a non-zero `env_flags`."""

    @abc.abstractmethod
    def publish(self, bank: int) -> int:
        """Write the current state into `bank` without advancing time; poses by forward kinematics,
        contact forces zero where they were not computed. Returns as `step`."""

    @abc.abstractmethod
    def set_state(self, env_ids: np.ndarray, qpos: np.ndarray, qvel: np.ndarray) -> None:
        """Put the environments `env_ids` (int32, unique) to `qpos` (n, nq), `qvel` (n, nv); time, warm
        starts and targets as after a reset, targets at the joints' new positions. Others untouched."""

    @abc.abstractmethod
    def reset(self, env_ids: np.ndarray) -> None:
        """Put the environments `env_ids` (int32, unique) back to the keyframe. Others untouched."""

    # -- in the CUDA arena: only for simulators whose `transports` has "cuda" ------------------------
    #
    # Between the two counts that `arena_commands.py` puts around these calls, everything must be enqueued in
    # `stream`, and nothing needs to be waited for. Each fills `env_flags` of its slot.

    transports: Tuple[str, ...] = ("block",)  # known after build()
    stream: int = 0  # the CUDA stream in which it works, as the driver names it

    def bind_arena(self, slots: Sequence[Mapping[str, DeviceField]]) -> None:
        """Take the fields in GPU memory, one mapping per slot; called once, after `bind`. Host-written
        fields, and with one bank the published ones too, are the same memory in both slots."""
        raise NotImplementedError

    def step_arena(self, slot: int) -> None:
        """As `step`, with `ctrl` and state in the arena."""
        raise NotImplementedError

    def publish_arena(self, slot: int) -> None:
        """As `publish`, into the arena."""
        raise NotImplementedError

    def reset_mask(self, mask: DeviceField) -> None:
        """As `reset`, for the environments where `mask` (uint8) is not zero. This one waits for the GPU
        and asks `reset`; override it where the simulator can do it in its stream."""
        self.reset(device_copy.mask_ids(mask, self.stream))

    def set_state_mask(self, mask: DeviceField, qpos: DeviceField, qvel: DeviceField) -> None:
        """As `set_state`: row i of `qpos` and `qvel` for environment i, where `mask` is not zero."""
        ids = device_copy.mask_ids(mask, self.stream)
        self.set_state(
            ids,
            device_copy.to_host(qpos, self.stream)[ids],
            device_copy.to_host(qvel, self.stream)[ids],
        )

    def set_property(self, name: str, env_ids: np.ndarray, values: np.ndarray) -> None:
        """Set a physical property declared as "set_property:NAME"; `values` is (n, width)."""
        raise UsageError(f"{self.engine} has no property {name!r}")

    def render(self, request: Render) -> np.ndarray:
        """uint8 (height, width, 3) of one environment."""
        raise UsageError(f"{self.engine} does not render")

    def close(self) -> None:  # noqa: B027 - most simulators need nothing here
        """Release what the process exit does not. BYE was sent before; the process ends after."""


# Imported by name only in the worker, and only the one that is asked for.
REGISTRY: Dict[str, str] = {
    "fake": "fake_worker:FakeSimulator",
    "genesis": "genesis_worker:GenesisSimulator",
    "isaacgym": "isaacgym_worker:IsaacGymSimulator",
    "isaacsim": "isaacsim_worker:IsaacSimSimulator",
    "mjwarp": "mjwarp_worker:MJWarpSimulator",
    "mujoco": "mujoco_worker:MuJoCoSimulator",
}


def load(name: str) -> Type[Simulator]:
    """The class behind a registry name, or behind FILE:CLASS for a simulator that is not ours."""
    if name in REGISTRY:
        module_name, _, class_name = REGISTRY[name].partition(":")
        module = importlib.import_module("outboard.workers." + module_name)
    else:
        path, _, class_name = name.rpartition(":")
        if not path or not os.path.isfile(path):
            raise UsageError(
                "{!r} is neither one of {} nor FILE:CLASS".format(name, ", ".join(sorted(REGISTRY)))
            )
        spec = importlib.util.spec_from_file_location("outboard_user_simulator", path)
        if spec is None or spec.loader is None:
            raise UsageError(f"{path!r} is not a Python file")
        sys.path.append(os.path.dirname(os.path.abspath(path)))  # its own neighbours, last
        module = importlib.util.module_from_spec(spec)
        sys.modules[spec.name] = module
        spec.loader.exec_module(module)
    cls = getattr(module, class_name, None)
    if not (isinstance(cls, type) and issubclass(cls, Simulator)):
        raise UsageError(f"{name!r} names no subclass of Simulator")
    return cls


def split_fields(banks: Sequence[Fields], names: Sequence[str]) -> List[Dict[str, np.ndarray]]:
    """Per bank, the views of those `names` that are published: what a simulator copies into."""
    return [{name: bank[name] for name in names if name in bank} for bank in banks]
