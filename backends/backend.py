"""Backend: one simulator in its own interpreter, driven from training code.

This file opens it, says what is known of it, and ends it. The commands (step, reset, ...) are in
`commands.py`, the way from spawn to READY in `launch.py`.
"""

from __future__ import annotations

import copy
import logging
import os
import weakref
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar, NoReturn

import numpy as np
from numpy.typing import NDArray

from ..ipc import shm
from ..ipc.doorbell import History
from ..ipc.errors import OutboardError, UsageError
from ..ipc.layout import DEFAULT_PUBLISH
from ..ipc.states import Phase
from . import arguments, launch
from .arena_plane import ArenaPlane, lock_pages
from .arguments import Cfg
from .commands import OPCODES, Commands
from .events import tell
from .launch import Opened, Order
from .state import Floats, Model, State, Timings
from .traits import Traits

if TYPE_CHECKING:
    from typing_extensions import Self  # in `typing` from Python 3.11 on

    from .torch_view import TorchView

_READY, _BUSY = Phase.READY, Phase.BUSY
# Everything of a backend that keeps the shared block in memory.
_VIEWS = (
    *("_block", "_bell", "_ring", "_wait", "_request", "_reply"),
    *("_fields", "_states", "_ctrl", "_require_finite", "_plane", "_tensors", "_page_lock"),
)


class Backend(Commands):
    """One simulator with `num_envs` environments in a process of its own.

    Not thread-safe: one thread uses a backend at a time. Several backends of one process may all be in
    flight (`step_async`, `step_wait`).

    Args:
        device: required. "cpu", "cuda:1" (this process's own numbering), a UUID, `plan.device`.
        scene: path of an MJCF file, or the name of one of ours ("humanoid29", ...).
        num_envs: environments, stepped together.
        dt: simulation step in seconds; None keeps the scene's own.
        decimation: simulation steps per `step()`.
        publish: fields to publish, from `ipc/layout.py`.
        seed: of the simulator; under several ranks use `plan.seed(base)`.
        banks: 1: addresses never change, each command overwrites; 2: a result stays valid until the
            second-next command starts.
        cfg: the simulator's own frozen Cfg.
        transport: "block": state in shared host memory. "cuda": on the simulator's GPU as well, for
            `sim.torch` and for commands given as tensors on that GPU; an error where it cannot be had.
            "auto": as "cuda" when torch was imported before and it can be had, else as "block";
            `report["transport_why"]` says why. Numpy code works the same with all three: commands
            given in numpy publish in host memory.
        worker_python: the interpreter of the worker (default: where this simulator is found).
        env: variables added to the worker's environment, which is otherwise an allow-list.
        rank: global rank, for logs and errors; taken from the plan when there is one.
        render: make `render()` possible.
        check_finite: refuse NaN and infinity in `ctrl` before anything is sent.
        raise_on_bad_env: raise WorkerFailed when an environment's state is not finite or the engine
            reset it by itself; otherwise `flagged` names them and a warning is logged.
        step_timeout_s: how long one command may take.
        share: allow another process on the same GPU.

    Raises:
        UsageError, SceneError, DevicePlanError, DeviceMismatchError, WorkerLaunchError, WorkerFailed,
        WorkerDied, WorkerTimeout, ProtocolError: each says whose fault, in which phase, what to do.
    """

    simulator: ClassVar[str] = ""
    traits: ClassVar[Traits] = Traits()
    cfg_type: ClassVar[type[Cfg]] = Cfg

    def __init__(
        self,
        *,
        device: object,
        scene: str | os.PathLike[str] = "",
        num_envs: int,
        dt: float | None = None,
        decimation: int = 1,
        publish: tuple[str, ...] = DEFAULT_PUBLISH,
        seed: int = 0,
        banks: int = 1,
        cfg: Cfg | None = None,
        transport: str = "auto",
        worker_python: str | os.PathLike[str] | None = None,
        env: Mapping[str, str] | None = None,
        rank: int | None = None,
        render: bool = False,
        check_finite: bool = True,
        raise_on_bad_env: bool = False,
        step_timeout_s: float = 60.0,
        share: bool = False,
    ) -> None:
        self._phase: Phase = Phase.CLOSED  # so that a failed constructor can be closed
        order = arguments.order(
            simulator=self.simulator,
            traits=self.traits,
            cfg=arguments.check_cfg(cfg, self.cfg_type),
            device=device,
            scene=scene,
            num_envs=num_envs,
            dt=dt,
            decimation=decimation,
            publish=publish,
            seed=seed,
            banks=banks,
            transport=transport,
            worker_python=worker_python,
            env=env,
            rank=rank,
            render=render,
            share=share,
        )
        self._order = self.prepare(order)
        self._check_finite = check_finite
        self._raise_on_bad_env = raise_on_bad_env
        self._timeout_s = arguments.positive("step_timeout_s", step_timeout_s)
        self._cause: OutboardError | None = None
        launch.open_worker(self._order, None, self._adopt)

    @classmethod
    def prepare(cls, order: Order) -> Order:
        """What must be done on the host before a worker can start: find its interpreter, turn the scene into
        what the simulator imports. Once per backend; `restart()` uses the same order again."""
        return order

    def _adopt(self, opened: Opened) -> None:
        """Take over a worker that has just become READY."""
        assert opened.worker.data is not None
        self._opened = opened
        self._worker = opened.worker
        self._cause = None
        data = opened.worker.data
        block = data.block
        self._block, self._bell = block, data.bell
        self._request, self._reply = block.request, block.reply
        self._answered = 0
        self._last_bank = block.layout.banks - 1
        self._fields = block.fields
        self._ring, self._wait = self._bell.ring, self._bell.wait
        if not hasattr(self, "_states"):
            self._states = tuple(State(fields) for fields in block.fields)
            self._ctrl: Floats = block.fields[0]["ctrl"]
            self._ctrl_shape = self._ctrl.shape
            self._require_finite = arguments.finite_check(self._ctrl)
            self._all_ids = np.arange(self._order.init.num_envs, dtype=np.int32)
            self._model = Model.of(opened.reply)
            self._plane = None if data.arena is None else ArenaPlane(data.arena, block)
            self._page_lock = lock_pages(block, self._order.plan.device.uuid, data.arena)
            self._tensors: TorchView | None = None
        # Until the caller writes targets, the robot holds its default pose.
        self._ctrl[:] = self._model.default_ctrl
        if self._plane is not None:
            self._plane.begin()
        if self._tensors is not None:
            self._tensors.restarted()
        self._histories = [History() for _ in range(OPCODES + 1)]  # index = opcode
        self._wall_ns = self._rang_ns = 0
        if hasattr(self, "_finalizer"):
            self._finalizer.detach()
        self._finalizer = weakref.finalize(self, launch.abandon, opened)
        self._finalizer.atexit = False  # at the end of the process it is closed, not abandoned
        launch.remember(self)
        self._phase = _READY

    # -- facts -----------------------------------------------------------------------------------

    @property
    def state(self) -> State:
        """The state published last. After a command on tensors it is copied from the GPU first."""
        if self._phase is Phase.CLOSED:
            self._not_open()
        if self._plane is not None:
            self._plane.fetch(self._answered, self._answered & self._last_bank)
        return self._states[self._answered & self._last_bank]

    @property
    def torch(self) -> TorchView:
        """The same simulator with tensors: `sim.torch.qpos`, `sim.torch.step(ctrl)`.

        With transport "cuda" they lie on the simulator's GPU and no command waits for it; with "block"
        they share the memory of the numpy views.
        """
        if self._phase is Phase.CLOSED:
            self._not_open()
        if self._tensors is None:
            try:
                from . import torch_view
            except ImportError as error:
                raise UsageError(
                    f"sim.torch needs torch, and it cannot be imported: {error}"
                ) from None
            self._tensors = torch_view.view(self)
        return self._tensors

    @property
    def ctrl_view(self) -> Floats:
        """(num_envs, nu) in the shared block: write here and call `step()` for no copy at all."""
        if self._phase is Phase.CLOSED:
            self._not_open()
        return self._ctrl

    @property
    def flagged(self) -> NDArray[np.intp]:
        """Environments whose state was not finite, or that the engine reset, in the last command."""
        if self._phase is Phase.CLOSED:
            self._not_open()
        if self._plane is not None:
            self._plane.fetch(self._answered, self._answered & self._last_bank)
        return np.flatnonzero(self._fields[self._answered & self._last_bank]["env_flags"])

    @property
    def device(self) -> str:
        """Where the simulator is and how that is known, in one line."""
        return launch.device_words(self._order, self._opened)

    @property
    def model(self) -> Model:
        return self._model

    @property
    def capabilities(self) -> tuple[str, ...]:
        return self._opened.reply.capabilities

    @property
    def num_envs(self) -> int:
        return self._order.init.num_envs

    @property
    def timings(self) -> Timings:
        if self._phase is not Phase.CLOSED:
            sim_s = self._reply[shm.SIM_NS] * 1e-9
            self._timings = Timings(self._answered, self._wall_ns * 1e-9, sim_s)
        return self._timings

    @property
    def report(self) -> dict[str, Any]:
        """Everything that is known about this worker, as plain data."""
        return launch.report(self._order, self._opened, self._phase)

    # -- life ------------------------------------------------------------------------------------

    def restart(self) -> State:
        """A new worker on the same device and the same memory, at the keyframe. Verified anew."""
        if self._opened.worker.process.owner != os.getpid():
            self._not_open()
        if self._phase is Phase.CLOSED:
            raise UsageError("this backend is closed; open a new one")
        tell(logging.INFO, "RESTART", self._worker.process, self._phase)
        self._phase, self._cause = Phase.FAILED, None
        self._end_worker(0.0, keep_log=False)
        self._hold_only_the_lock()
        try:
            launch.open_worker(self._order, self._opened, self._adopt)
        except OutboardError as error:
            self._cause = copy.copy(error)
            raise
        return self.state

    def close(self, timeout_s: float | None = None) -> None:
        """Ask the worker to leave, wait, kill what is left. Idempotent; bounded by `timeout_s`
        (default: what the simulator needs). Views the caller still holds stay valid."""
        if self._phase is Phase.CLOSED:
            return
        live = self._phase in (_READY, _BUSY)
        grace_s = self.traits.close_s if timeout_s is None else timeout_s
        _ = self.timings  # so that they can be asked later
        self._phase = Phase.CLOSED
        try:
            self._end_worker(grace_s if live else 0.0, keep_log=self._cause is not None)
            launch.closed(self._worker, asked=live)
        finally:  # also when a second ^C ends the wait
            self._finalizer.detach()
            launch.released(self._opened)
            self._block.close_fd()
            # The memory goes with the last view of it, and from here on all views are the caller's.
            self._worker.data = None
            if self._page_lock is not None:
                self._page_lock.release()
            if self._plane is not None:
                self._plane.close()
            for name in _VIEWS:
                delattr(self, name)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __reduce__(self) -> NoReturn:
        raise UsageError("a backend cannot be pickled: open one in the process that uses it")

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self._phase.value} {self._order.words}>"

    def _forked(self) -> None:
        """In a forked child: this object may not answer, kill or unlink."""
        self._finalizer.detach()
        if self._phase is not Phase.CLOSED:
            self._phase = Phase.FAILED
