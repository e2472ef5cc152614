"""What this process's torch and Ray already say about its GPU. Starts neither of them."""

from __future__ import annotations

import importlib
import sys
from typing import Any

from ..ipc.device import GPU, VisibleGpu, normalise_uuid
from ..ipc.errors import DevicePlanError, UsageError
from .visibility import Visibility


def import_torch() -> Any:
    try:
        return importlib.import_module("torch")
    except ImportError as error:
        raise UsageError(f"this needs torch in the training interpreter: {error}") from error


def gpu_in_use(seen: Visibility) -> VisibleGpu | None:
    """The GPU that torch uses in this process, None while that is open. DevicePlanError.

    Never imports or initialises torch. Current device 0 is where torch starts, so it counts only
    once something was allocated there.
    """
    torch: Any = sys.modules.get("torch")
    cuda = getattr(torch, "cuda", None)
    if cuda is None or not cuda.is_initialized():
        return None
    ordinal = int(cuda.current_device())
    if ordinal == 0 and not cuda.memory_reserved(0):
        return None
    gpu = seen.at(ordinal)
    if gpu.kind == GPU:  # what torch prints for a MIG instance is not documented
        same_to_torch(cuda, gpu.uuid, ordinal)
    return gpu


def same_to_torch(cuda: Any, uuid: str, ordinal: int) -> None:
    """torch keeps the mask with which it first asked the driver. torch < 2.5 cannot be asked."""
    told = getattr(cuda.get_device_properties(ordinal), "uuid", None)
    if told is None or uuid.startswith("MIG-"):
        return
    if normalise_uuid(str(told)) != uuid:
        raise DevicePlanError(
            f"cuda:{ordinal} should be {uuid}, but to torch it is GPU-{told}: the mask or the order "
            "was changed after torch had asked the driver. Set them before Python starts"
        )


def ray_gpu_ids() -> tuple[str, ...]:
    ray: Any = sys.modules.get("ray")
    if ray is None or not ray.is_initialized():
        return ()
    return tuple(str(one) for one in ray.get_gpu_ids())
