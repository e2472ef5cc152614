"""The simulators that can be opened by name: the one place that lists them."""

from __future__ import annotations

from typing import Any

from ..ipc.errors import UsageError
from .backend import Backend
from .custom import CustomBackend
from .fake import FakeBackend
from .isaacgym import IsaacGymBackend
from .isaacsim import IsaacSimBackend
from .mjwarp import MJWarpBackend
from .mujoco import MuJoCoBackend

BACKENDS: dict[str, type[Backend]] = {
    backend.simulator: backend
    for backend in (
        MuJoCoBackend,
        MJWarpBackend,
        IsaacGymBackend,
        IsaacSimBackend,
        FakeBackend,
    )
}

# What a plain installation can run; the others need an environment or hardware of their own.
EMBEDDED = MuJoCoBackend.simulator

_SCENE = "humanoid29"


def default_scene(name: str) -> str:
    """The scene that is taken when none is named: a robot of ours, or none where nothing is loaded
    but our own arithmetic."""
    return _SCENE if find(name).traits.packages else ""


def find(name: str) -> type[Backend]:
    """The backend of that name. UsageError lists those there are."""
    if name not in BACKENDS:
        raise UsageError(f"there is no backend {name!r}; there are: {', '.join(BACKENDS)}")
    return BACKENDS[name]


def open_backend(name: str, simulator: str, **arguments: Any) -> Backend:
    """A backend by name or, where `simulator` is not empty, by FILE:CLASS."""
    if simulator:
        return CustomBackend(simulator=simulator, **arguments)
    return find(name)(**arguments)
