"""What a caller may pass: every argument is checked here, before a process is started or a bell rung."""

from __future__ import annotations

import dataclasses
import math
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ..ipc.device import CPU
from ..ipc.errors import SceneError, UsageError
from ..ipc.layout import check_publish
from ..ipc.messages import MAX_PIXELS, NONCE_BYTES, TRANSPORTS, Init, Render, Scalar
from .device_plan import check_against_launcher, resolve_device
from .launch import Order
from .state import Floats
from .traits import Traits
from .visibility import MASK, ORDER

_SCENES = Path(__file__).parent / "scenes"
_MAX_ENVS = 1 << 26


@dataclass(frozen=True)
class Cfg:
    """A simulator's settings: frozen data, sent to the worker by field name."""

    def options(self) -> dict[str, Scalar]:
        return {
            field.name: getattr(self, field.name)
            for field in dataclasses.fields(self)
            if getattr(self, field.name) is not None
        }


def check_cfg(cfg: Cfg | None, kind: type[Cfg]) -> Cfg:
    if cfg is None:
        return kind()
    if not isinstance(cfg, kind):
        raise UsageError(f"cfg is a {type(cfg).__name__}; this backend takes {kind.__name__}")
    return cfg


def positive(name: str, value: float) -> float:
    number = isinstance(value, (int, float, np.integer, np.floating))
    if isinstance(value, bool) or not number or not 0 < value < math.inf:
        raise UsageError(f"{name}={value!r} must be a positive number")
    return float(value)


def whole(name: str, value: Any, low: int, high: int) -> int:
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)):
        raise UsageError(f"{name}={value!r} must be a whole number")
    if not low <= value <= high:
        raise UsageError(f"{name}={value} must be {low} to {high}")
    return int(value)


def scene_names() -> tuple[str, ...]:
    """The scenes that come with the package."""
    return tuple(sorted(path.stem for path in _SCENES.glob("*.xml")))


def find_scene(scene: str | os.PathLike[str]) -> str:
    """The absolute path of a scene given by path or by one of our names. SceneError."""
    text = os.fspath(scene)
    if text in scene_names():
        return str(_SCENES / f"{text}.xml")
    path = Path(text).expanduser()
    if path.is_file():
        return str(path.resolve())
    raise SceneError(
        f"scene {text!r} is neither a file nor one of ours ({', '.join(scene_names())})"
    )


def order(
    *,
    simulator: str,
    traits: Traits,
    cfg: Cfg,
    device: object,
    scene: str | os.PathLike[str],
    num_envs: int,
    dt: float | None,
    decimation: int,
    publish: tuple[str, ...],
    seed: int,
    banks: int,
    transport: str,
    worker_python: str | os.PathLike[str] | None,
    env: Mapping[str, str] | None,
    rank: int | None,
    render: bool,
    share: bool,
) -> Order:
    """The arguments of a Backend as one checked record."""
    plan = resolve_device(device)
    if not (traits.cpu if plan.device.kind == CPU else traits.gpu):
        other = "a GPU" if plan.device.kind == CPU else 'device="cpu"'
        raise UsageError(f"{simulator} cannot run on {plan}; give it {other}")
    plan = check_against_launcher(plan)
    if transport not in TRANSPORTS:
        raise UsageError(f"transport={transport!r} must be 'auto', 'block' or 'cuda'")
    if transport == "cuda" and plan.device.kind == CPU:
        raise UsageError('transport="cuda" needs a simulator on a GPU, and device="cpu" was given')
    for name, value in (env or {}).items():
        text = isinstance(name, str) and isinstance(value, str)
        if not text or not name or "=" in name or "\0" in name + value:
            raise UsageError(f"env={{{name!r}: ...}} must map variable names to text")
        if name in (MASK, ORDER):
            raise UsageError(f"{name} is decided by device=, not by env=")
    init = Init(
        nonce=bytes(NONCE_BYTES),  # a fresh one for every worker
        device=plan.planned,
        rank=plan.rank if rank is None else whole("rank", rank, 0, 1 << 20),
        scene=find_scene(scene) if scene else "",
        num_envs=whole("num_envs", num_envs, 1, _MAX_ENVS),
        dt=0.0 if dt is None else positive("dt", dt),
        decimation=whole("decimation", decimation, 1, 10_000),
        publish=check_publish(publish),
        transport=transport,
        render=bool(render),
        seed=whole("seed", seed, 0, (1 << 63) - 1),
        terrain="flat",
        control="position",
        options=cfg.options(),
    )
    return Order(
        simulator=simulator,
        traits=traits,
        plan=plan,
        init=init,
        banks=whole("banks", banks, 1, 2),
        python=None if worker_python is None else os.fspath(worker_python),
        env=dict(env or {}),
        share=share,
    )


def render_request(
    env_id: int, width: int, height: int, camera: Mapping[str, float], num_envs: int
) -> Render:
    """UsageError names the argument: on the wire a wrong type would be the end of the conversation."""
    for name, value in camera.items():
        if isinstance(value, bool) or not isinstance(value, (int, float, np.integer, np.floating)):
            raise UsageError(f"{name}={value!r} must be a number")
    return Render(
        whole("env_id", env_id, 0, num_envs - 1),
        whole("width", width, 1, MAX_PIXELS),
        whole("height", height, 1, MAX_PIXELS),
        {name: float(value) for name, value in camera.items()},
    )


# -- arrays -----------------------------------------------------------------------------------------


def _as_array(value: ArrayLike, name: str) -> NDArray[Any]:
    try:
        return np.asarray(value)
    except (ValueError, TypeError) as error:  # ragged lists, tensors on a GPU
        raise UsageError(f"{name} is no array of numbers: {error}") from None


def put_ctrl(into: Floats, ctrl: ArrayLike) -> None:
    """Copy `ctrl` into the block: the one copy on the way in. UsageError names shape or dtype."""
    if isinstance(ctrl, np.ndarray) and ctrl.dtype == into.dtype and ctrl.shape == into.shape:
        into[...] = ctrl
        return
    array = _as_array(ctrl, "ctrl")
    if array.shape != into.shape:
        raise UsageError(
            f"ctrl has shape {array.shape}; this backend takes (num_envs, nu) = {into.shape}"
        )
    if array.dtype.kind not in "fiu":
        raise UsageError(f"ctrl has dtype {array.dtype}; float32 belongs")
    np.copyto(into, array, casting="same_kind" if array.dtype.kind == "f" else "unsafe")


# OpenBLAS runs a dot product of more elements in several threads, whose wake-up would fight with the
# worker for its cores.
_DOT_LIMIT = 10_000
# As integers, +inf and every positive NaN are at least 0x7f800000, -inf and every negative NaN at
# least 0xff800000 unsigned.
_INF_BITS, _NEGATIVE_INF_BITS = 0x7F800000, 0xFF800000


def finite_check(ctrl: Floats) -> Callable[[], None]:
    """A function that raises UsageError when the block's `ctrl` holds NaN or infinity, naming the
    environments.

    Small arrays: one dot product of the array with itself (0.9 us; a large finite value may overflow it,
    so a bad product is only a reason to look closely). Large ones: two integer maxima, exact and without
    threads (14 us for 4096 x 29; isfinite().all() takes 23).
    """
    flat = ctrl.reshape(-1)
    as_int, as_uint = flat.view(np.int32), flat.view(np.uint32)
    # The method, not np.vdot: 390 ns instead of 530, because nothing is dispatched.
    maximum, dot, isfinite = np.maximum.reduce, flat.dot, math.isfinite

    def look() -> None:
        bad = np.flatnonzero(~np.isfinite(ctrl).all(axis=1))
        if len(bad):
            ids = ", ".join(map(str, bad[:20])) + (", ..." if len(bad) > 20 else "")
            raise UsageError(f"ctrl is NaN or infinite in environments {ids}; nothing was sent")

    def small() -> None:
        try:
            if isfinite(dot(flat)):
                return
        except RuntimeWarning:  # of an overflow, where the caller made warnings errors
            pass
        look()

    def large() -> None:
        if maximum(as_int) >= _INF_BITS or maximum(as_uint) >= _NEGATIVE_INF_BITS:
            look()

    return small if flat.size <= _DOT_LIMIT else large


def env_ids(envs: Any, everyone: NDArray[np.int32]) -> NDArray[np.int32]:
    """Environment ids (n,) from ids or a mask (num_envs,) of bool. UsageError."""
    array = _as_array(envs, "envs")
    if array.dtype == np.bool_:
        if array.shape != everyone.shape:
            raise UsageError(f"a mask has shape {everyone.shape}, this one {array.shape}")
        return everyone[array]
    array = np.atleast_1d(array)
    if array.size == 0:
        return everyone[:0]
    if array.dtype.kind not in "iu" or array.ndim != 1:
        raise UsageError(
            f"environments are ids (whole numbers) or a bool mask, not {array.dtype} {array.shape}"
        )
    outside = array[(array < 0) | (array >= len(everyone))]
    if len(outside):
        raise UsageError(f"environment {outside[0]} is outside 0 to {len(everyone) - 1}")
    if len(np.unique(array)) != len(array):
        raise UsageError("an environment is named twice")
    return array.astype(np.int32)


def property_rows(values: ArrayLike) -> Floats:
    """Values of a physical property, (n, width) or one row for all. UsageError."""
    array = np.atleast_2d(_as_array(values, "values"))
    if array.dtype.kind not in "fiu" or array.ndim != 2:
        raise UsageError(f"values are (n, width) numbers, not {array.dtype} {array.shape}")
    return array.astype("<f4")


def put_rows(into: Floats, rows: ArrayLike, count: int, name: str) -> None:
    """Copy `count` rows, or one row for all, into the head of a field. UsageError."""
    array = _as_array(rows, name)
    width = into.shape[1]
    if array.shape not in ((count, width), (width,), (1, width)):
        raise UsageError(f"{name} has shape {array.shape}; ({count}, {width}) belongs")
    if array.dtype.kind not in "fiu":
        raise UsageError(f"{name} has dtype {array.dtype}; float32 belongs")
    if not np.isfinite(array).all():
        raise UsageError(f"{name} holds NaN or infinity")
    into[:count] = array
