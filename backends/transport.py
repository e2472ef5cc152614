"""Which data plane a backend gets, and why not the other one: one decision, before ATTACH.

The block is always there. An arena is added to it when both sides can have one; whoever never asks for a
tensor notices nothing of it, so "auto" cannot break code that works on numpy arrays. Still "auto" makes
none in a process that has not imported torch: it would start CUDA in a process that may never want it (half a
gigabyte of GPU memory per rank, and no fork() afterwards), for tensors that nobody there can ask for.
"""

from __future__ import annotations

import os
import sys

from ..ipc.arena import HostArena, NoArena
from ..ipc.cuda_driver import CudaError
from ..ipc.device import CPU
from ..ipc.errors import UsageError
from ..ipc.layout import Layout
from ..ipc.messages import Hello, Init, InitReply

AUTO, BLOCK, CUDA = "auto", "block", "cuda"


def wanted(init: Init, hello: Hello, reply: InitReply) -> str:
    """Why there will be no arena, as far as can be told without one; "" to try."""
    if init.transport == BLOCK:
        return 'transport="block" was asked for'
    if init.device.kind == CPU:
        return "the simulator runs on the CPU"
    if CUDA not in reply.transports:
        return f"{reply.engine} publishes through the block only"
    if init.transport == AUTO and (why := _no_torch_here()):
        return why
    return _other_namespace(hello.pid)


def _no_torch_here() -> str:
    torch = sys.modules.get("torch")
    if torch is None:
        return (
            "torch was not imported before the backend was opened; import it, or ask for the arena: "
            'transport="cuda"'
        )
    if getattr(getattr(torch, "version", None), "cuda", None) is None:
        return "the torch of this process is built without CUDA"
    return ""


def _other_namespace(pid: int) -> str:
    """CUDA IPC does not cross pid namespaces; a worker behind a container's entry point is in one."""
    try:
        same = os.readlink(f"/proc/{pid}/ns/pid") == os.readlink("/proc/self/ns/pid")
    except OSError as error:
        return (
            f"the worker's pid {pid} means nothing here: another pid namespace? ({error.strerror})"
        )
    return "" if same else "the worker runs in another pid namespace, which CUDA IPC does not cross"


def offer(
    init: Init, hello: Hello, reply: InitReply, layout: Layout, old: HostArena | None
) -> tuple[HostArena | None, str]:
    """The arena to put into ATTACH (after a restart the one there is), or None and why not.

    UsageError when the caller insists on one; CudaError when the old one cannot be offered again.
    """
    if old is not None:
        old.offer(init.nonce)
        return old, ""
    why = wanted(init, hello, reply)
    if not why:
        try:
            arena = HostArena(layout, init.device.uuid)
            arena.offer(init.nonce)
            return arena, ""
        except (NoArena, CudaError) as error:
            why = str(error)
    refuse_if_asked(init, why)
    return None, why


def refuse_if_asked(init: Init, why: str, *, again: bool = False) -> None:
    """An explicit "cuda" that cannot be had is an error, and so is an arena that a restart would lose."""
    if init.transport == CUDA or again:
        raise UsageError(
            f'transport="cuda" cannot be had: {why}. transport="block" needs none of it'
        )
