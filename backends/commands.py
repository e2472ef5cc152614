"""The commands of an open backend, and what becomes of them: the half of `Backend` that is called in a loop.

`backend.py` opens the worker, fills in what is declared here, and closes it.
"""

from __future__ import annotations

import contextlib
import copy
import os
import sys
import weakref
from collections.abc import Callable
from time import perf_counter_ns as _clock
from typing import TYPE_CHECKING, Any, ClassVar, NoReturn, cast

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ..ipc import shm
from ..ipc.deadline import Deadline
from ..ipc.doorbell import Doorbell, History
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
from ..ipc.layout import ENV_ENGINE_RESET
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
from .arena_plane import ArenaPlane
from .events import LOG
from .launch import Opened, Order
from .state import Floats, State
from .worker import Worker

if TYPE_CHECKING:
    from .torch_view import TorchView

_READY, _BUSY = Phase.READY, Phase.BUSY
_STEP, _STEP_RESET = int(Opcode.STEP), int(Opcode.STEP_RESET)
_SEQUENCE, _OPCODE, _COUNT, _STATUS = shm.SEQUENCE, shm.OPCODE, shm.COUNT, shm.STATUS
_DONE, _FAILED = int(Status.DONE), int(Status.FAILED)
_ENQUEUED, _FIRST_ARENA = int(Status.ENQUEUED), int(Opcode.ARENA_STEP)
OPCODES = 7  # a mask: whatever stands in the block, it is an index
_SCRIBBLED = "the worker wrote over the request line of the block, which is the host's"
_F32 = np.dtype(np.float32)
# The sockets of a process that is killed close before it can be asked how it ended.
_DEATH_S = 1.0


class Commands:
    """Step, reset, set state, ask; and the first cause when a worker falls silent."""

    simulator: ClassVar[str] = ""

    # Filled in by `Backend` when a worker has become READY.
    _phase: Phase
    _order: Order
    _opened: Opened
    _worker: Worker
    _cause: OutboardError | None
    _bell: Doorbell
    _ring: Callable[[], None]
    _wait: Callable[[int, History, float], None]
    _request: memoryview
    _reply: memoryview
    _fields: list[dict[str, NDArray[Any]]]
    _states: tuple[State, ...]
    _ctrl: Floats
    _ctrl_shape: tuple[int, ...]
    _all_ids: NDArray[np.int32]
    _histories: list[History]  # index = opcode
    _plane: ArenaPlane | None
    _tensors: TorchView | None
    _finalizer: weakref.finalize[Any, Any]
    _require_finite: Callable[[], None]
    _check_finite: bool
    _raise_on_bad_env: bool
    _timeout_s: float
    _answered: int  # sequence number of the last command whose answer was collected
    _last_bank: int
    _wall_ns: int
    _rang_ns: int

    if TYPE_CHECKING:

        @property
        def capabilities(self) -> tuple[str, ...]: ...
        @property
        def device(self) -> str: ...
        @property
        def num_envs(self) -> int: ...
        @property
        def torch(self) -> TorchView: ...

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
            self._wait(sequence, self._histories[request[_OPCODE] & OPCODES], self._timeout_s)
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
            launch.require_verified(self._order, self._opened)
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
        self._end_worker(0.0, keep_log=True)
        self._hold_only_the_lock()
        try:
            raise error from None
        finally:
            del error  # else this frame and its own traceback would keep each other, and the block

    def _end_worker(self, grace_s: float, keep_log: bool) -> None:
        """Whatever ends it, and also when ^C ends the wait for it: no stream of ours waits for it after."""
        try:
            self._worker.end(grace_s, keep_log=keep_log)
        finally:
            if self._plane is not None:
                self._plane.release()

    def _hold_only_the_lock(self) -> None:
        """The worker is gone and the GPU is still ours: for restart(), until close() or collection."""
        self._finalizer.detach()
        self._finalizer = weakref.finalize(self, launch.released, self._opened)
        self._finalizer.atexit = False

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
