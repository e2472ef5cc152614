"""`sim.torch`: the state as torch tensors, over the arena on the planned GPU or over the block on the CPU.

The tensors are the shared memory itself: each command overwrites them, `clone()` keeps a value. They
live in memory that torch did not allocate, so `torch.multiprocessing` cannot send them (torch refuses with
"invalid device pointer"): send a clone.

Nothing here waits for the GPU except where it says so. Order is kept in the caller's *current* stream:
a command starts after everything enqueued there, and what is enqueued there after it sees its state. Who
reads the state in another stream makes the current one wait for that stream before the next command.
"""

from __future__ import annotations

import weakref
from typing import Any

import numpy as np
import torch

from ..ipc import shm
from ..ipc.arena import MASK, DeviceField
from ..ipc.errors import UsageError
from ..ipc.layout import PUBLISHABLE
from ..ipc.messages import Opcode
from ..ipc.states import Phase
from . import arguments
from .arena_plane import ArenaPlane
from .tensor_checks import Checks

Tensor = torch.Tensor


class TensorState:
    """The published fields as tensors, named, shaped and meant as in `State`."""

    __slots__ = PUBLISHABLE

    qpos: Tensor
    qvel: Tensor
    body_pos: Tensor
    body_quat: Tensor
    body_linvel: Tensor
    body_angvel: Tensor
    contact_force: Tensor

    def __init__(self, tensors: dict[str, Tensor]) -> None:
        for name in PUBLISHABLE:
            if name in tensors:
                setattr(self, name, tensors[name])

    def __getattr__(self, name: str) -> Any:
        # Only called for slots that are empty and for names that do not exist.
        if name in PUBLISHABLE:
            raise AttributeError(f"{name!r} is not published; open with publish=(..., {name!r})")
        raise AttributeError(f"a state has no {name!r}; its fields are {', '.join(PUBLISHABLE)}")

    def fields(self) -> dict[str, Tensor]:
        return {name: getattr(self, name) for name in PUBLISHABLE if hasattr(self, name)}


class TorchView:
    """What both transports offer. Attributes named like the fields give the newest state.

    ctrl: (num_envs, nu) write here and call `step()` for no copy at all.
    """

    ctrl: Tensor
    device: torch.device
    qpos: Tensor
    qvel: Tensor
    body_pos: Tensor
    body_quat: Tensor
    body_linvel: Tensor
    body_angvel: Tensor
    contact_force: Tensor

    def __init__(self, backend: Any) -> None:
        self._backend = weakref.ref(backend)

    def restarted(self) -> None:
        """Another worker over the same memory."""

    def report(self) -> None:
        """Raise, or log, what the GPU found in earlier commands and is known by now."""

    def _sim(self) -> Any:
        backend = self._backend()
        if backend is None or backend._phase is Phase.CLOSED:
            raise UsageError("this backend is closed")
        return backend

    def __getattr__(self, name: str) -> Any:
        if name in PUBLISHABLE:
            return getattr(self.state, name)
        raise AttributeError(f"sim.torch has no {name!r}")

    @property
    def state(self) -> TensorState:
        """The newest state."""
        raise NotImplementedError

    def step(self, ctrl: Tensor | None = None, *, reset: Any = None) -> TensorState:
        """As `Backend.step`, with `ctrl` as a tensor; None takes what is in `ctrl` of this view.

        reset: a bool mask (num_envs,), best on the GPU, or ids that are not on the GPU.
        """
        self.step_async(ctrl, reset=reset)
        return self.step_wait()

    def step_async(self, ctrl: Tensor | None = None, *, reset: Any = None) -> None:
        raise NotImplementedError

    def step_wait(self) -> TensorState:
        raise NotImplementedError

    def reset(self, envs: Any = None) -> TensorState:
        """Mask or ids as in `step`; None for all."""
        raise NotImplementedError

    def set_state(self, envs: Any, qpos: Tensor, qvel: Tensor) -> TensorState:
        """With ids: one row per id. With a mask: a row for *every* environment, (num_envs, nq) and
        (num_envs, nv), of which those under the mask count; so nobody needs `nonzero()`."""
        raise NotImplementedError


class BlockTensors(TorchView):
    """Over the shared block, in host memory. Tensors from a GPU are copied, which waits for it."""

    def __init__(self, backend: Any) -> None:
        super().__init__(backend)
        self.device = torch.device("cpu")
        fields = backend._fields
        with torch.inference_mode(False):
            self.ctrl = torch.from_numpy(fields[0]["ctrl"])
            self._states = tuple(
                TensorState({n: torch.from_numpy(a) for n, a in bank.items()}) for bank in fields
            )

    @property
    def state(self) -> TensorState:
        sim = self._sim()
        return self._states[sim._answered & sim._last_bank]

    def step_async(self, ctrl: Tensor | None = None, *, reset: Any = None) -> None:
        sim = self._sim()
        sim.step_async(None if ctrl is None else _on_host(ctrl), reset=_on_host(reset))

    def step_wait(self) -> TensorState:
        self._sim().step_wait()
        return self.state

    def reset(self, envs: Any = None) -> TensorState:
        self._sim().reset(_on_host(envs))
        return self.state

    def set_state(self, envs: Any, qpos: Tensor, qvel: Tensor) -> TensorState:
        envs, rows = _on_host(envs), [_on_host(qpos), _on_host(qvel)]
        mask = np.asarray(envs)
        if mask.dtype == np.bool_:
            rows = [
                row[mask] if np.ndim(row) == 2 and len(row) == len(mask) else row for row in rows
            ]
        self._sim().set_state(envs, *rows)
        return self.state


def _on_host(value: Any) -> Any:
    return value.detach().cpu().numpy() if isinstance(value, Tensor) else value


class ArenaTensors(TorchView):
    """Over the arena, on the planned GPU."""

    def __init__(self, backend: Any, plane: ArenaPlane) -> None:
        super().__init__(backend)
        self._plane = plane
        self.device = device = torch.device("cuda", plane.ordinal)
        with torch.inference_mode(False):
            slots = [{n: _tensor(f, device) for n, f in slot.items()} for slot in plane.slots]
            self._checks = Checks(
                slots[0]["ctrl"], [slot["env_flags"] for slot in slots], backend._check_finite
            )
        self._states = tuple(TensorState(slot) for slot in slots)
        first = slots[0]
        self.ctrl, self._mask = first["ctrl"], first[MASK]
        self._set_qpos, self._set_qvel = first["set_qpos"], first["set_qvel"]
        self._shape = self.ctrl.shape
        plane.current_stream = lambda: torch.cuda.current_stream(device).cuda_stream
        plane.collected = self._states.__getitem__
        plane.renew(backend._answered, backend._answered & backend._last_bank)

    @property
    def state(self) -> TensorState:
        """The newest state. After a numpy command it is copied from the block first."""
        sim = self._sim()
        self._plane.renew(sim._answered, sim._answered & sim._last_bank)
        return self._states[self._plane.slot]

    @property
    def flagged(self) -> Tensor:
        """Environments whose state was not finite, or that the engine reset, in the last command. Waits
        for the GPU."""
        return torch.from_numpy(self._sim().flagged)

    def step_async(self, ctrl: Tensor | None = None, *, reset: Any = None) -> None:
        sim = self._ready()
        if ctrl is not None and ctrl is not self.ctrl:
            self._put_ctrl(ctrl)
        opcode = Opcode.ARENA_STEP
        if reset is not None:
            self._put_mask(reset)
            opcode = Opcode.ARENA_STEP_RESET
        slot = self._plane.ring(sim, opcode)
        self._checks.after_ring(sim._request[shm.SEQUENCE], slot, stepped=True)

    def step_wait(self) -> TensorState:
        return self._sim().step_wait()

    def reset(self, envs: Any = None) -> TensorState:
        sim = self._ready()
        self._put_mask(envs)
        return self._run(sim, Opcode.ARENA_RESET)

    def set_state(self, envs: Any, qpos: Tensor, qvel: Tensor) -> TensorState:
        sim = self._ready()
        ids = self._put_mask(envs)
        for name, field, rows in (("qpos", self._set_qpos, qpos), ("qvel", self._set_qvel, qvel)):
            self._put_rows(name, field, rows, ids)
        return self._run(sim, Opcode.ARENA_SET_STATE)

    def restarted(self) -> None:
        self._checks.restarted()

    # -- pieces ----------------------------------------------------------------------------------

    def _ready(self) -> Any:
        sim = self._sim()
        if sim._phase is not Phase.READY:
            sim._not_ready()
        return sim

    def _run(self, sim: Any, opcode: Opcode) -> TensorState:
        slot = self._plane.ring(sim, opcode)
        self._checks.after_ring(sim._request[shm.SEQUENCE], slot, stepped=False)
        return self.step_wait()

    def _put_ctrl(self, ctrl: Any) -> None:
        if not isinstance(ctrl, Tensor):
            ctrl = torch.from_numpy(np.asarray(ctrl, np.float32))
        if ctrl.shape != self._shape:
            raise UsageError(
                f"ctrl has shape {tuple(ctrl.shape)}; this backend takes (num_envs, nu) = "
                f"{tuple(self._shape)}"
            )
        if not ctrl.dtype.is_floating_point:
            raise UsageError(f"ctrl has dtype {ctrl.dtype}; float32 belongs")
        self.ctrl.copy_(ctrl.detach(), non_blocking=True)

    def _put_mask(self, envs: Any) -> Tensor | None:
        """Fill `env_mask`. The ids on this GPU when ids were given, else None."""
        mask = self._mask
        if envs is None:
            mask.fill_(1)
            return None
        if isinstance(envs, Tensor) and envs.dtype == torch.bool:
            if envs.shape != mask.shape:
                raise UsageError(
                    f"a mask has shape {tuple(mask.shape)}, this one {tuple(envs.shape)}"
                )
            mask.copy_(envs, non_blocking=True)
            return None
        if isinstance(envs, Tensor) and envs.is_cuda:
            raise UsageError(
                "ids on the GPU cannot be checked without waiting for it: give a bool mask "
                "(num_envs,), or ids that are not on the GPU"
            )
        given = np.asarray(_on_host(envs))
        ids = arguments.env_ids(given, np.arange(len(mask), dtype=np.int32))
        at = torch.from_numpy(ids.astype(np.int64)).to(self.device)
        mask.zero_()
        mask.index_fill_(0, at, 1)
        return None if given.dtype == np.bool_ else at

    def _put_rows(self, name: str, field: Tensor, rows: Any, ids: Tensor | None) -> None:
        count = len(field) if ids is None else len(ids)
        rows = torch.as_tensor(rows, dtype=torch.float32, device=self.device).detach()
        width = field.shape[1]
        if rows.shape not in ((count, width), (width,), (1, width)):
            raise UsageError(f"{name} has shape {tuple(rows.shape)}; ({count}, {width}) belongs")
        rows = rows.expand(count, width)
        if ids is None:
            field.copy_(rows, non_blocking=True)
        else:
            field.index_copy_(0, ids, rows)

    def report(self) -> None:
        news = self._checks.news
        if news is None:
            return
        self._checks.forget()
        if len(news.ctrl):
            raise UsageError(
                f"ctrl was NaN or infinite in environments {news.ids(news.ctrl)} {news.when}; the "
                "simulator was given it. reset() puts them right"
            )
        self._sim()._note_flagged(news.flags, news.when)


def _tensor(field: DeviceField, device: torch.device) -> Tensor:
    """A tensor over the arena; it keeps the memory alive."""
    tensor = torch.as_tensor(field, device=device)
    if field.nbytes and tensor.data_ptr() != field.pointer:
        raise UsageError(f"torch made a copy of {field.name} instead of a view")
    return tensor


def view(backend: Any) -> TorchView:
    """The view that fits the backend's transport."""
    plane = backend._plane
    if plane is None:
        return BlockTensors(backend)
    if torch.version.cuda is None:
        raise UsageError(
            "the torch of this process is built without CUDA, and the state is on a GPU"
        )
    return ArenaTensors(backend, plane)
