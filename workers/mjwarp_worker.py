"""`mjwarp`: MuJoCo-Warp, MuJoCo's own model on the GPU, or on the CPU where that is planned.

What it settles, and where:

* Warp's default device is set before the model is put: everything that MuJoCo-Warp allocates goes there;
* each command is one graph, recorded for each bank and slot (`mjwarp_graph.py`): controls in, `decimation`
  steps, forces, poses that belong to the published `qpos` (after a step they are one substep behind), flags,
  state out (`mjwarp_world.py`);
* more contacts or constraints than there is room for corrupt other environments without a word
  (`mjwarp_capacity.py`). Every step looks for it on the device and leaves what it saw in page-locked memory,
  where the next command finds it. On the block, whose commands wait anyway, the same command fails;
* a NaN stays in its environment: ENV_NONFINITE. NaN and huge controls are taken as zero and flagged likewise,
  as MuJoCo does.

Options (Cfg of the same names in `backends/mjwarp.py`): keyframe, nconmax, njmax.
"""

import sys
from typing import Any, Mapping, Sequence, Tuple

import numpy as np

from ..ipc import cuda_driver, cuda_memory
from ..ipc.arena import MASK, DeviceField
from ..ipc.device import CPU, ENGINE_BUFFER, DeviceReport
from ..ipc.errors import UsageError
from ..ipc.layout import PUBLISHABLE
from ..ipc.messages import Init, ModelFacts
from . import device_probe
from .simulator import Fields, Progress, Simulator, split_fields

try:
    import warp as wp  # type: ignore[import-not-found]

    wp.config.log_level = wp.LOG_WARNING  # no banner, and no line for each of its modules
    import mujoco_warp as mjw  # type: ignore[import-not-found]

    from . import mjwarp_graph as graph
    from .mjwarp_world import World
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        f"{sys.executable} lacks MuJoCo-Warp ({error}). Run: outboard setup mjwarp", name=error.name
    ) from error

_INPUTS = (MASK, "set_qpos", "set_qvel")


class MJWarpSimulator(Simulator):
    engine = "MuJoCo-Warp"
    engine_version = f"{mjw.__version__} (Warp {wp.__version__})"
    _cpu = True  # until build() says otherwise

    def build(self, init: Init, progress: Progress) -> ModelFacts:
        if init.render:
            raise UsageError("the MuJoCo-Warp worker renders no pictures")
        device_probe.check_device(init)
        self._init = init
        self._cpu = init.device.kind == CPU
        if not self._cpu:
            # Warp works in the primary context; so do our own calls, from now on.
            cuda_driver.set_current(cuda_driver.retain_primary(0))
        wp.init()
        wp.set_device(init.device.local)
        self._device = wp.get_device()
        if not self._cpu:
            self.stream = wp.get_stream(self._device).cuda_stream
            self.transports = ("block", "cuda")
        progress("putting the model", 0, 1)
        self._world = World(init, self._device)
        progress("putting the model", 1, 1)
        self._world.warm_up(progress, self._wait)
        self._graphs = graph.Graphs(wp, self._device)
        self._record_resets("block", self._world.given.device)
        self.notes = tuple(self._world.notes())
        return self._world.facts

    @property
    def capabilities(self) -> Tuple[str, ...]:
        return PUBLISHABLE

    def report_device(self) -> DeviceReport:
        if self._cpu:
            return device_probe.in_host_memory("qpos")
        return device_probe.of_pointer(self._world.evidence, "qpos", ENGINE_BUFFER)

    # -- memory of the host's --------------------------------------------------------------------

    @property
    def _names(self) -> Tuple[str, ...]:
        return ("ctrl", *self._init.publish, "env_flags")

    def bind(self, banks: Sequence[Fields]) -> None:
        self._flags = [bank["env_flags"] for bank in banks]
        for bank, fields in enumerate(split_fields(banks, self._names)):
            if self._cpu:
                port = graph.host_port(wp, fields)
            else:
                port = graph.BlockPort(wp, fields, self._device, self._world.own_fields)
            self._record("block", bank, port)

    def bind_arena(self, slots: Sequence[Mapping[str, DeviceField]]) -> None:
        for slot, fields in enumerate(slots):
            chosen = {name: fields[name] for name in self._names}
            self._record("arena", slot, graph.arena_port(wp, chosen, self._device))
        given = {name: graph.over_field(wp, slots[0][name], self._device) for name in _INPUTS}
        self._record_resets("arena", given)

    def _record(self, plane: str, bank: int, port: graph.Port) -> None:
        self._graphs.record(("step", plane, bank), lambda: self._world.advance(port))
        self._graphs.record(("publish", plane, bank), lambda: self._world.publish(port))

    def _record_resets(self, plane: str, given: Mapping[str, Any]) -> None:
        mask, qpos, qvel = (given[name] for name in _INPUTS)
        self._graphs.record(("reset", plane), lambda: self._world.put_default(mask))
        self._graphs.record(("set_state", plane), lambda: self._world.put_rows(mask, qpos, qvel))

    # -- commands on the block -------------------------------------------------------------------

    def step(self, bank: int) -> int:
        return self._finish(("step", "block", bank))

    def publish(self, bank: int) -> int:
        return self._finish(("publish", "block", bank))

    def _finish(self, key: Tuple[Any, ...]) -> int:
        self._graphs.run(key)
        self._wait()
        self._world.raise_overflow()
        return int(np.count_nonzero(self._flags[key[2]]))

    def reset(self, env_ids: np.ndarray) -> None:
        self._choose(env_ids)
        self._world.given.up()
        self._graphs.run(("reset", "block"))

    def set_state(self, env_ids: np.ndarray, qpos: np.ndarray, qvel: np.ndarray) -> None:
        host = self._choose(env_ids)
        host["set_qpos"][env_ids], host["set_qvel"][env_ids] = qpos, qvel
        self._world.given.up()
        self._graphs.run(("set_state", "block"))

    def _choose(self, env_ids: np.ndarray) -> Mapping[str, np.ndarray]:
        self._wait()  # the copy of the last choice may still be on its way
        host = self._world.given.host
        host[MASK][:] = 0
        host[MASK][env_ids] = 1
        return host

    def _wait(self) -> None:
        if not self._cpu:
            cuda_memory.stream_synchronize(self.stream)

    # -- commands in the arena -------------------------------------------------------------------

    def step_arena(self, slot: int) -> None:
        self._world.raise_overflow()
        self._graphs.run(("step", "arena", slot))

    def publish_arena(self, slot: int) -> None:
        self._world.raise_overflow()
        self._graphs.run(("publish", "arena", slot))

    def reset_mask(self, mask: DeviceField) -> None:
        self._graphs.run(("reset", "arena"))

    def set_state_mask(self, mask: DeviceField, qpos: DeviceField, qvel: DeviceField) -> None:
        self._graphs.run(("set_state", "arena"))

    def close(self) -> None:
        self._wait()
