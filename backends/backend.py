"""Backend: one simulator in its own interpreter, driven from training code.

Open it with the constructor, step it, close it. What opens a worker is in `launch.py`; this file is what
happens while it lives.
"""

from __future__ import annotations

import contextlib
import copy
import logging
import os
import sys
import weakref
from collections.abc import Mapping
from time import perf_counter_ns as _clock
from typing import TYPE_CHECKING, Any, ClassVar, NoReturn, cast

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ..ipc import shm
from ..ipc.deadline import Deadline
from ..ipc.doorbell import History
from ..ipc.errors import (
    DeadlinePassed,
    OutboardError,
    PeerGone,
    ProtocolError,
    UsageError,
    WorkerDied,
    WorkerFailed,
    WorkerTimeout,
)
from ..ipc.layout import DEFAULT_PUBLISH, ENV_ENGINE_RESET
from ..ipc.messages import (
    Message,
    Opcode,
    RenderReply,
    SetProperty,
    SetPropertyReply,
    Status,
    Where,
    WhereReply,
)
from ..ipc.states import Phase
from . import arguments, launch
from .arena_plane import ArenaPlane, lock_pages
from .arguments import Cfg
from .events import LOG, tell
from .launch import Opened, Order
from .state import Floats, Model, State, Timings
from .traits import Traits

if TYPE_CHECKING:
    from typing_extensions import Self  # in `typing` from Python 3.11 on

    from .torch_view import TorchView

_READY, _BUSY = Phase.READY, Phase.BUSY
_STEP, _STEP_RESET = int(Opcode.STEP), int(Opcode.STEP_RESET)
_SEQUENCE, _OPCODE, _COUNT, _STATUS = shm.SEQUENCE, shm.OPCODE, shm.COUNT, shm.STATUS
_DONE, _FAILED = int(Status.DONE), int(Status.FAILED)
_ENQUEUED, _FIRST_ARENA = int(Status.ENQUEUED), int(Opcode.ARENA_STEP)
_OPCODES = 7  # a mask: whatever stands in the block, it is an index
_SCRIBBLED = "the worker wrote over the request line of the block, which is the host's"
_F32 = np.dtype(np.float32)
# The sockets of a process that is killed close before it can be asked how it ended.
_DEATH_S = 1.0
# Everything of a backend that keeps the shared block in memory.
_VIEWS = (
    *("_block", "_bell", "_ring", "_wait", "_request", "_reply"),
    *("_fields", "_states", "_ctrl", "_require_finite", "_plane", "_tensors", "_page_lock"),
)


class Backend:
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
        self._histories = [History() for _ in range(_OPCODES + 1)]  # index = opcode
        self._wall_ns = self._rang_ns = 0
        self._finalizer = weakref.finalize(self, launch.abandon, opened)
        self._finalizer.atexit = False  # at the end of the process it is closed, not abandoned
        launch.remember(self)
        self._phase = _READY

    # -- commands --------------------------------------------------------------------------------

    def step(self, ctrl: ArrayLike | None = None, *, reset: Any = None) -> State:
        """Advance every environment by `decimation` simulation steps.

        Args:
            ctrl: (num_envs, nu) float32 joint position targets, rad or m. None or `ctrl_view`: what is
                in the block already; nothing is copied.
            reset: environments (ids or mask) to put to the keyframe before the step, with one bell.
        """
        self.step_async(ctrl, reset=reset)
        return self.step_wait()

    def step_async(self, ctrl: ArrayLike | None = None, *, reset: Any = None) -> None:
        """Start a step and return; `step_wait()` collects it."""
        if self._phase is not _READY:
            self._not_ready()
        view = self._ctrl
        if ctrl is not None and ctrl is not view:
            # `view[...] =` and not copyto: 130 ns against 350 for a small array.
            if (
                isinstance(ctrl, np.ndarray)
                and ctrl.dtype is _F32
                and ctrl.shape == self._ctrl_shape
            ):
                view[...] = ctrl
            elif self._is_tensor_on_gpu(ctrl):
                self.torch.step_async(cast(Any, ctrl), reset=reset)
                return
            else:
                arguments.put_ctrl(view, ctrl)
        if self._check_finite:
            self._require_finite()
        if reset is None:
            self._send(_STEP)
        else:
            self._request[_COUNT] = self._put_ids(reset)
            self._send(_STEP_RESET)

    def _send(self, opcode: int) -> None:
        """Ring. The sequence number in the block is the only truth about what is in flight: a
        KeyboardInterrupt between any two instructions leaves a state that `step_wait` can tell."""
        request = self._request
        try:
            request[_OPCODE] = opcode
            self._phase = _BUSY
            self._rang_ns = _clock()
            request[_SEQUENCE] += 1
            self._ring()
        except KeyboardInterrupt:
            if request[_SEQUENCE] != self._answered:
                self._ring()  # perhaps for the second time, which does no harm
            raise
        except ValueError:  # a sequence number that cannot be counted on
            self._fail(ProtocolError(_SCRIBBLED))

    def step_wait(self) -> State:
        """Wait for the command in flight and return the published state.

        After a KeyboardInterrupt inside a step: collects that step's answer.
        """
        if self._phase is not _BUSY:
            self._not_busy()
        request = self._request
        sequence = request[_SEQUENCE]
        if sequence == self._answered:
            self._phase = _READY
            raise UsageError("the interrupted command was never sent; nothing is in flight")
        try:
            self._wait(sequence, self._histories[request[_OPCODE] & _OPCODES], self._timeout_s)
            status = self._reply[_STATUS]
            self._wall_ns += _clock() - self._rang_ns
            # In this order: BUSY together with an answered sequence number means "never sent".
            self._phase = _READY
            self._answered = sequence
        except (PeerGone, DeadlinePassed) as error:
            self._fell_silent(error)
        if status != _DONE:
            return self._look_at(status, sequence)
        return self._states[sequence & self._last_bank]

    def _look_at(self, status: int, sequence: int) -> Any:
        """The state after an answer that is not plainly "done"."""
        plane = self._plane
        if status == _ENQUEUED and plane is not None and self._request[_OPCODE] >= _FIRST_ARENA:
            state = plane.enqueued(sequence)
            if self._tensors is not None:
                self._tensors.report()
            return state
        if status != int(Status.FLAGGED):
            self._fail(
                self._worker.last_words() or ProtocolError(f"a command ended with status {status}")
            )
        self._note_flagged(self._fields[sequence & self._last_bank]["env_flags"])
        return self._states[sequence & self._last_bank]

    def set_state(self, envs: Any, qpos: ArrayLike, qvel: ArrayLike) -> State:
        """Put environments to new states; visible in the returned state, poses included.

        Args:
            envs: ids (n,) unique, or a mask (num_envs,) of bool.
            qpos: (n, nq) float32, m and rad, root quaternion wxyz.
            qvel: (n, nv) float32; root angular velocity in the body frame.
        """
        if self._is_tensor_on_gpu(envs, qpos, qvel):
            return cast(State, self.torch.set_state(envs, cast(Any, qpos), cast(Any, qvel)))
        if self._phase is not _READY:
            self._not_ready()
        count = self._put_ids(envs)
        fields = self._fields[0]
        arguments.put_rows(fields["set_qpos"], qpos, count, "qpos")
        arguments.put_rows(fields["set_qvel"], qvel, count, "qvel")
        return self._command(Opcode.SET_STATE, count)

    def reset(self, envs: Any = None) -> State:
        """Put environments (ids, mask, None for all) to the keyframe; visible at once."""
        if self._is_tensor_on_gpu(envs):
            return cast(State, self.torch.reset(envs))
        if self._phase is not _READY:
            self._not_ready()
        return self._command(Opcode.RESET, self._put_ids(envs))

    @staticmethod
    def _is_tensor_on_gpu(*values: Any) -> bool:
        """Without importing torch: where it was not, nobody has a tensor."""
        torch = sys.modules.get("torch")
        return torch is not None and any(
            isinstance(value, torch.Tensor) and value.is_cuda for value in values
        )

    def _put_ids(self, envs: Any) -> int:
        ids = self._all_ids if envs is None else arguments.env_ids(envs, self._all_ids)
        self._fields[0]["env_ids"][: len(ids)] = ids
        return len(ids)

    def _command(self, opcode: Opcode, count: int) -> State:
        self._request[_COUNT] = count
        self._send(int(opcode))
        return self.step_wait()

    # -- mail ------------------------------------------------------------------------------------

    def where(self) -> str:
        """Measure again where the simulator's state lies; DeviceMismatchError when it moved."""
        reply: WhereReply = self._mail(Where(), WhereReply)
        try:
            self._opened = launch.judged_again(self._order, self._opened, reply.device)
        except OutboardError as error:
            self._fail(error)
        return self.device

    def set_property(self, name: str, envs: Any, values: ArrayLike) -> None:
        """Set a physical property; `capabilities` lists them as "set_property:NAME"."""
        if f"set_property:{name}" not in self.capabilities:
            raise UsageError(f"{self.simulator} has no property {name!r}: {self.capabilities}")
        ids = arguments.env_ids(envs, self._all_ids)
        rows = arguments.property_rows(values)
        if len(rows) not in (1, len(ids)):
            raise UsageError(f"{len(rows)} rows of values for {len(ids)} environments")
        rows = np.ascontiguousarray(np.broadcast_to(rows, (len(ids), *rows.shape[1:])))
        self._mail(SetProperty(name, tuple(map(int, ids)), rows.tobytes()), SetPropertyReply)

    def render(
        self, env_id: int = 0, width: int = 640, height: int = 480, **camera: float
    ) -> NDArray[np.uint8]:
        """One picture of one environment: uint8 (height, width, 3)."""
        if "render" not in self.capabilities:
            raise UsageError(f"{self.simulator} cannot render here; was render=True given?")
        request = arguments.render_request(env_id, width, height, camera, self.num_envs)
        reply: RenderReply = self._mail(request, RenderReply)
        return np.frombuffer(reply.rgb, np.uint8).reshape(reply.height, reply.width, 3)

    def _mail(self, message: Message, kind: type[Any]) -> Any:
        """A message, announced by the bell, and its reply."""
        if self._phase is not _READY:
            self._not_ready()
        talk = self._worker.talk
        deadline = Deadline(self._timeout_s)
        try:
            if talk.channel.pending():
                talk.receive(deadline)  # what nobody asked for is refused, and is no answer to this
            # The ring first: a sleeping worker reads nothing, and a message larger than the socket's
            # buffer would wait for it for ever.
            self._send(int(Opcode.MAIL))
            talk.send(message, deadline=deadline)
            reply = talk.expect(kind, deadline)
        except (PeerGone, DeadlinePassed) as error:
            self._fell_silent(error)
        except OutboardError as error:
            self._fail(error)
        except KeyboardInterrupt:
            # Whether the message left and its reply was read cannot be told any more; a stray reply would
            # be taken for the next one's.
            name = type(message).__name__
            text = f"{name} was interrupted half-way and the worker was ended; restart() or close()"
            with contextlib.suppress(UsageError):
                self._fail(UsageError(text))
            raise
        self.step_wait()
        if self._plane is not None:
            self._plane.mailed(self._answered)
        return reply

    # -- what went wrong -------------------------------------------------------------------------

    def _not_ready(self) -> NoReturn:
        """A command in a phase that allows none."""
        if self._phase is _BUSY and self._request[_SEQUENCE] == self._answered:
            self._phase = _READY  # an interrupt hit before anything was sent
            raise UsageError("the interrupted command was never sent; call again")
        if self._phase is _BUSY:
            raise UsageError(
                "a command is in flight: step_wait() collects its answer, close() and restart() "
                "are allowed"
            )
        self._not_open()

    def _not_busy(self) -> NoReturn:
        if self._phase is _READY:
            raise UsageError("nothing is in flight: step_async() comes before step_wait()")
        self._not_open()

    def _not_open(self) -> NoReturn:
        if self._cause is not None:
            raise copy.copy(self._cause)
        if self._opened.worker.process.owner != os.getpid():
            raise UsageError(
                "this backend belongs to the process that opened it; a forked child opens its own"
            )
        if self._phase is Phase.FAILED:
            raise UsageError("restart() was interrupted: call it again, or close()")
        raise UsageError("this backend is closed")

    def _fell_silent(self, error: Exception) -> NoReturn:
        """The bell or the channel gave up: death, deadline, or a last ERROR before them."""
        if isinstance(error, PeerGone):
            self._worker.process.dead(_DEATH_S)
            self._fail(
                self._worker.last_words()
                or WorkerDied(
                    f"the worker died in a command, {self._worker.process.exit_now() or error}"
                )
            )
        # It may have said why, and never have come to ring.
        words = self._worker.last_words(0.0)
        if words is None and not 0 <= self._request[_SEQUENCE] - self._answered <= 2:
            words = ProtocolError(_SCRIBBLED)
        self._fail(
            words
            or WorkerTimeout(
                f"the worker did not answer within {self._timeout_s:g} s "
                "(step_timeout_s); it was killed"
            )
        )

    def _fail(self, error: OutboardError) -> NoReturn:
        """The first cause: kept, with the report, for every later call."""
        self._phase = Phase.FAILED
        self._worker.talk.state.fail()
        error.report = launch.error_report(self._order, self._worker, Phase.BUSY.value)
        self._cause = copy.copy(error)  # without the traceback, whose frames hold the block
        launch.failed(self._worker, Phase.BUSY.value, error)
        self._finalizer.detach()
        self._worker.end(0.0, keep_log=True)
        try:
            raise error from None
        finally:
            del error  # else this frame and its own traceback would keep each other, and the block

    def _note_flagged(self, flags: NDArray[np.uint8], when: str = "") -> None:
        flagged = np.flatnonzero(flags)
        ids = ", ".join(map(str, flagged[:20])) + (", ..." if len(flagged) > 20 else "")
        what = (
            "the engine reset by itself, after its state became invalid,"
            if (flags & ENV_ENGINE_RESET).any()
            else "the state is not finite in"
        )
        text = f"{what} environments {ids} {when}".rstrip()
        if self._raise_on_bad_env:
            self._fail(WorkerFailed(text))
        LOG.warning("rank %d: %s", self._order.init.rank, text)

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
        self._worker.end(0.0, keep_log=False)
        self._finalizer.detach()
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
            self._worker.end(grace_s if live else 0.0, keep_log=self._cause is not None)
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
