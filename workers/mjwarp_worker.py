"""`mjwarp`: MuJoCo-Warp, MuJoCo's own model on the GPU, or on the CPU where that is planned.

What it settles, and where:

* Warp's default device is set before the model is put: everything that MuJoCo-Warp allocates goes there;
* a step is one graph (`mjwarp_graph.py`): controls in, `decimation` steps, forces, poses that belong to the
  published `qpos` (mj_step leaves them one substep behind), flags, state out;
* more contacts or constraints than there is room for corrupt other environments without a word
  (`mjwarp_capacity.py`). The graph looks after every command and leaves what it saw in page-locked memory, where
  the next command finds it: nothing waits for the GPU. On the block, whose step waits anyway, the same command;
* a NaN stays in its environment: ENV_NONFINITE. NaN and huge controls are taken as zero and flagged likewise,
  as MuJoCo does.

Options (Cfg of the same names in `backends/mjwarp.py`): keyframe, nconmax, njmax.
"""

import os
import sys
from typing import Any, Callable, Dict, List, Mapping, Optional, Sequence, Tuple

import numpy as np

from ..ipc import cuda_driver, cuda_memory
from ..ipc.arena import MASK, DeviceField
from ..ipc.device import CPU, ENGINE_BUFFER, DeviceReport
from ..ipc.errors import SceneError, UsageError, WorkerLaunchError
from ..ipc.layout import PUBLISHABLE
from ..ipc.messages import Init, ModelFacts
from . import device_probe
from .simulator import Fields, Progress, Simulator, split_fields

_NOTHING_SEEN = (0, 2**31 - 1, 2**31 - 1)  # bits, lowest environment, first command


class MJWarpSimulator(Simulator):
    engine = "MuJoCo-Warp"

    # -- building --------------------------------------------------------------------------------

    def build(self, init: Init, progress: Progress) -> ModelFacts:
        if init.render:
            raise UsageError("the MuJoCo-Warp worker renders no pictures")
        device_probe.check_device(init)
        self._init = init
        self._cpu = init.device.kind == CPU
        progress("importing mujoco_warp", 0, 1)
        self._import()
        progress("importing mujoco_warp", 1, 1)
        model = self._load(init, progress)
        facts = self._model_module.facts(model, init.num_envs, self._key, ())
        self._allocate(model, facts)
        self._warm_up(progress)
        self.notes = tuple(self._make_notes(model))
        self.transports = ("block",) if self._cpu else ("block", "cuda")
        return facts

    def _import(self) -> None:
        """Not at the top of this file: Warp reads its settings once, and takes a second."""
        try:
            import warp as wp  # type: ignore[import-not-found]

            wp.config.log_level = wp.LOG_WARNING  # a banner, and a line for each module
            import mujoco_warp as mjw  # type: ignore[import-not-found]

            from . import mjwarp_capacity, mjwarp_graph, mjwarp_kernels, mujoco_model
        except ImportError as error:
            raise WorkerLaunchError(
                f"MuJoCo-Warp cannot be imported by {sys.executable} ({error}). Run: outboard setup mjwarp"
            ) from error
        self._wp, self._mjw, self._kernels = wp, mjw, mjwarp_kernels
        self._graph_module, self._model_module = mjwarp_graph, mujoco_model
        self._capacity_module = mjwarp_capacity
        if not self._cpu:
            # Warp works in the primary context; so do our own calls, from now on.
            cuda_driver.set_current(cuda_driver.retain_primary(0))
        wp.init()
        wp.set_device(self._init.device.local)
        self._device = wp.get_device()
        if not self._cpu:
            self.stream = wp.get_stream(self._device).cuda_stream
        self.engine_version = f"{mjw.__version__} (Warp {wp.__version__})"
        self._graphs = mjwarp_graph.Graphs(wp, self._device)

    def _load(self, init: Init, progress: Progress) -> Any:
        """The compiled model on the device, and data for all environments. SceneError."""
        progress("compiling the scene", 0, 1)
        scene = os.path.abspath(init.scene)
        model = self._model_module.load(scene, init.dt)
        self._key = self._model_module.keyframe_index(model, str(init.options.get("keyframe", "")))
        try:
            self._m = self._mjw.put_model(model)
            pairs = [tuple(map(int, pair)) for pair in self._m.nxn_geom_pair_filtered.numpy()]
            self._room = self._capacity_module.capacity(
                model,
                pairs,
                int(init.options.get("nconmax", 0)),
                int(init.options.get("njmax", 0)),
            )
            self._m.opt.warn_overflow = 0  # it would print in every step; `watch` sees more
            self._d = self._mjw.make_data(
                model, nworld=init.num_envs, nconmax=self._room.nconmax, njmax=self._room.njmax
            )
        except (NotImplementedError, ValueError) as error:
            raise SceneError(f"MuJoCo-Warp cannot simulate {scene}: {error}") from error
        progress("compiling the scene", 1, 1)
        return model

    def _allocate(self, model: Any, facts: ModelFacts) -> None:
        """Everything that is ours, once and for the worker's life: graphs hold the addresses."""
        wp, n = self._wp, self._init.num_envs
        key = self._key

        def constant(values: Any, dtype: Any) -> Any:
            return wp.array(np.ascontiguousarray(values), dtype=dtype)

        start_act = model.key_act[key] if key >= 0 else np.zeros(model.na)
        self._start = tuple(
            constant(np.array(values, np.float32), float)
            for values in (facts.default_qpos, facts.default_qvel, start_act, facts.default_ctrl)
        )
        targets = self._model_module.targets(model)
        follows, gear = np.full(model.nu, -1, np.int32), np.zeros(model.nu, np.float32)
        follows[targets.actuator], gear[targets.actuator] = targets.qpos, targets.gear
        self._targets = constant(follows, int), constant(gear, float)
        self._roots = constant(np.array(model.body_rootid, np.int32), int)
        self._chosen = wp.zeros(n, dtype=wp.bool)
        self._bad = wp.zeros(n, dtype=wp.uint8)
        self._commands = wp.zeros(1, dtype=int)
        sizes = facts.sizes
        mirror = self._graph_module.Mirror
        with wp.ScopedMempool(self._device, False):
            self._seen = mirror(wp, self._device, {"seen": ((3,), wp.int32)})
            self._given = mirror(
                wp,
                self._device,
                {
                    MASK: ((n,), wp.uint8),
                    "set_qpos": ((n, sizes.nq), wp.float32),
                    "set_qvel": ((n, sizes.nv), wp.float32),
                },
            )
        self._seen.host["seen"][:] = _NOTHING_SEEN
        self._seen.up()
        kinds = self._mjw.OverflowType
        self._fatal_names = {int(kinds[name]): name for name in self._capacity_module.OVERFLOWS}
        self._publishes_forces = "contact_force" in self._init.publish
        self._force = wp.zeros((n, sizes.nbody), dtype=wp.vec3)
        if self._publishes_forces:
            count = self._d.naconmax
            self._wrench = wp.zeros(count, dtype=wp.spatial_vector)
            self._contact_ids = constant(np.arange(count, dtype=np.int32), int)

    def _warm_up(self, progress: Progress) -> None:
        """Run every kernel once, stage by stage, since with an empty cache each is compiled now; simulate one
        step; and put the keyframe back."""
        mjw, m, d, given = self._mjw, self._m, self._d, self._given.device
        port = self._graph_module.Port(self._scratch_port())
        stages: Tuple[Callable[[], None], ...] = (
            lambda: self._put_default(given[MASK]),
            lambda: self._put_rows(given[MASK], given["set_qpos"], given["set_qvel"]),
            lambda: mjw.fwd_position(m, d),
            lambda: mjw.fwd_velocity(m, d),
            lambda: mjw.fwd_actuation(m, d),
            lambda: mjw.fwd_acceleration(m, d),
            lambda: mjw.solve(m, d),
            lambda: self._publish(port),
            lambda: self._advance(port),
        )
        self._given.host[MASK][:] = 1
        self._given.up()
        self._put_default(given[MASK])
        for i, stage in enumerate(stages):
            progress("compiling kernels", i, len(stages))
            # Put back between: the rows that were put are zeros, and no state to compute a step from.
            self._put_default(given[MASK])
            stage()
            self._wait()
        progress("compiling kernels", len(stages), len(stages))
        self._put_default(given[MASK])
        self._commands.zero_()
        self._wait()
        self._raise_overflow()
        self._record_resets("block", given)

    def _scratch_port(self) -> Dict[str, Any]:
        """Arrays of the fields' shapes before there is a block: for the kernels to have run once."""
        wp, n, m = self._wp, self._init.num_envs, self._m
        arrays: Dict[str, Any] = {
            "ctrl": wp.zeros((n, m.nu), dtype=float),
            "env_flags": wp.zeros(n, dtype=wp.uint8),
        }
        widths = {"qpos": (m.nq,), "qvel": (m.nv,), "body_quat": (m.nbody - 1, 4)}
        for name in self._init.publish:
            shape = (n, *widths.get(name, (m.nbody - 1, 3)))
            dtype, shape = self._graph_module.element(wp, name, shape, "<f4")
            arrays[name] = wp.zeros(shape, dtype=dtype)
        return arrays

    def _make_notes(self, model: Any) -> List[str]:
        notes = [self._room.words, *self._model_module.notes(model, self._key)]
        notes.append(f"compiled kernels are kept in {self._wp.config.kernel_cache_dir}")
        return notes

    @property
    def capabilities(self) -> Tuple[str, ...]:
        return PUBLISHABLE

    def report_device(self) -> DeviceReport:
        if self._cpu:
            return device_probe.in_host_memory("qpos")
        return device_probe.of_pointer(self._d.qpos.ptr, "qpos", ENGINE_BUFFER)

    # -- memory of the host's --------------------------------------------------------------------

    def bind(self, banks: Sequence[Fields]) -> None:
        names = ("ctrl", *self._init.publish, "env_flags")
        module, wp = self._graph_module, self._wp
        self._flags = [bank["env_flags"] for bank in banks]
        for bank, fields in enumerate(split_fields(banks, names)):
            if self._cpu:
                port = module.host_port(wp, fields)
            else:
                port = module.BlockPort(wp, fields, self._device, self._own_fields())
            self._record(("block", bank), port)

    def bind_arena(self, slots: Sequence[Mapping[str, DeviceField]]) -> None:
        names = ("ctrl", *self._init.publish, "env_flags")
        module, wp, device = self._graph_module, self._wp, self._device
        for slot, fields in enumerate(slots):
            chosen = {name: fields[name] for name in names}
            self._record(("arena", slot), module.arena_port(wp, chosen, device))
        inputs = (MASK, "set_qpos", "set_qvel")
        given = {name: module.over_field(wp, slots[0][name], device) for name in inputs}
        self._record_resets("arena", given)

    def _own_fields(self) -> Dict[str, Any]:
        """The engine's arrays that have a field's layout as they are."""
        return {"qpos": self._d.qpos, "qvel": self._d.qvel, "contact_force": self._force}

    def _record(self, where: Tuple[str, int], port: Any) -> None:
        self._graphs.record(("step", *where), lambda: self._advance(port))
        self._graphs.record(("publish", *where), lambda: self._publish(port))

    def _record_resets(self, plane: str, given: Mapping[str, Any]) -> None:
        mask = given[MASK]
        self._graphs.record(("reset", plane), lambda: self._put_default(mask))
        self._graphs.record(
            ("set_state", plane),
            lambda: self._put_rows(mask, given["set_qpos"], given["set_qvel"]),
        )

    # -- what the graphs are made of -------------------------------------------------------------

    def _launch(self, name: str, over: Any, *arguments: Any) -> None:
        self._wp.launch(getattr(self._kernels, name), dim=over, inputs=list(arguments))

    def _advance(self, port: Any) -> None:
        d, n = self._d, self._init.num_envs
        port.fetch()
        self._launch("take_ctrl", n, port.arrays["ctrl"], d.ctrl, self._bad, self._commands)
        for _ in range(self._init.decimation):
            self._mjw.step(self._m, d)
        if self._publishes_forces:
            self._sum_forces()
        fatal = sum(self._fatal_names)
        self._launch("watch", n, d.overflow, fatal, self._commands, self._seen.device["seen"])
        self._seen.down()
        self._publish(port)

    def _sum_forces(self) -> None:
        """Of the last substep, whose contacts and constraint forces are still there."""
        d, contact = self._d, self._d.contact
        self._force.zero_()
        self._mjw.contact_force(self._m, d, self._contact_ids, True, self._wrench)
        self._launch(
            "add_forces",
            d.naconmax,
            d.nacon,
            contact.geom,
            contact.worldid,
            self._m.geom_bodyid,
            self._wrench,
            self._force,
        )

    def _publish(self, port: Any) -> None:
        """The present state: poses and velocities of the bodies from qpos and qvel, never from the last step."""
        d, m, arrays, n = self._d, self._m, port.arrays, self._init.num_envs
        bodies = (n, m.nbody - 1)
        moving = "body_linvel" in arrays or "body_angvel" in arrays
        if moving or "body_pos" in arrays or "body_quat" in arrays:
            self._mjw.kinematics(m, d)
        if moving:
            self._mjw.com_pos(m, d)
            self._mjw.com_vel(m, d)
        for name, own in self._own_fields().items():
            if name in arrays and arrays[name] is not own and own.size:
                self._wp.copy(arrays[name], own)
        for name, kernel, sources in (
            ("body_pos", "positions", (d.xpos,)),
            ("body_quat", "orientations", (d.xquat,)),
            ("body_angvel", "angular_velocities", (d.cvel,)),
            ("body_linvel", "linear_velocities", (d.cvel, d.xpos, d.subtree_com, self._roots)),
        ):
            if name in arrays:
                self._launch(kernel, bodies, *sources, arrays[name])
        self._launch("flag", n, d.qpos, d.qvel, self._bad, arrays["env_flags"])
        port.deliver()

    def _begin_put(self, mask: Any) -> None:
        """MuJoCo-Warp's own reset first: warm starts, time, sleep, contacts, whatever a version has."""
        n = self._init.num_envs
        self._launch("choose", n, mask, self._chosen)
        self._mjw.reset_data(self._m, self._d, self._chosen)
        self._launch("forget_forces", self._force.shape, self._chosen, self._force)

    def _put_default(self, mask: Any) -> None:
        d = self._d
        self._begin_put(mask)
        into = (d.qpos, d.qvel, d.act, d.ctrl, self._bad)
        self._launch("put_default", self._init.num_envs, self._chosen, *self._start, *into)

    def _put_rows(self, mask: Any, qpos: Any, qvel: Any) -> None:
        d = self._d
        self._begin_put(mask)
        rows, into = (qpos, qvel, *self._targets), (d.qpos, d.qvel, d.ctrl, self._bad)
        self._launch("put_rows", self._init.num_envs, self._chosen, *rows, *into)

    # -- commands on the block -------------------------------------------------------------------

    def step(self, bank: int) -> int:
        return self._finish(("step", "block", bank))

    def publish(self, bank: int) -> int:
        return self._finish(("publish", "block", bank))

    def _finish(self, key: Tuple[Any, ...]) -> int:
        self._graphs.run(key)
        self._wait()
        self._raise_overflow()
        return int(np.count_nonzero(self._flags[key[2]]))

    def reset(self, env_ids: np.ndarray) -> None:
        self._choose_on_host(env_ids)
        self._given.up()
        self._graphs.run(("reset", "block"))

    def set_state(self, env_ids: np.ndarray, qpos: np.ndarray, qvel: np.ndarray) -> None:
        self._choose_on_host(env_ids)
        self._given.host["set_qpos"][env_ids] = qpos
        self._given.host["set_qvel"][env_ids] = qvel
        self._given.up()
        self._graphs.run(("set_state", "block"))

    def _choose_on_host(self, env_ids: np.ndarray) -> None:
        self._wait()  # a copy of the last choice may still be on its way
        self._given.host[MASK][:] = 0
        self._given.host[MASK][env_ids] = 1

    def _wait(self) -> None:
        if not self._cpu:
            cuda_memory.stream_synchronize(self.stream)

    def _raise_overflow(self) -> None:
        """From page-locked memory: what the GPU has seen so far. Nothing is waited for."""
        bits, env, command = map(int, self._seen.host["seen"])
        if bits:
            raise RuntimeError(
                self._capacity_module.overflow_words(
                    bits, self._fatal_names, env, command, self._room
                )
            )

    # -- commands in the arena -------------------------------------------------------------------

    def step_arena(self, slot: int) -> None:
        self._raise_overflow()
        self._graphs.run(("step", "arena", slot))

    def publish_arena(self, slot: int) -> None:
        self._raise_overflow()
        self._graphs.run(("publish", "arena", slot))

    def reset_mask(self, mask: DeviceField) -> None:
        self._graphs.run(("reset", "arena"))

    def set_state_mask(self, mask: DeviceField, qpos: DeviceField, qvel: DeviceField) -> None:
        self._graphs.run(("set_state", "arena"))

    # -- life ------------------------------------------------------------------------------------

    def close(self) -> None:
        device: Optional[Any] = getattr(self, "_device", None)
        if device is not None:
            self._wait()
