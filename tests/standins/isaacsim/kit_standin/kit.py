"""Kit's state in this process, its log lines and its deliberate deaths."""

import ctypes
import os
import signal
import time
from typing import Any, List, Tuple

from .settings import SETTINGS

_libc: Any = ctypes.CDLL(None)


class Kit:
    """One for the process."""

    def __init__(self) -> None:
        self.running = False
        self.cameras = False
        self.stage: Any = None
        self.context: Any = None  # the SimulationContext
        self.extensions: List[str] = []
        self.playing = False
        # Of the cloner: environments with their origins, and what the collision filter lets through.
        self.env_paths: List[str] = []
        self.origins: List[Tuple[float, float, float]] = []
        self.filtered_for: Any = None  # None: no filter at all


KIT = Kit()


def require(module: str) -> None:
    """At the import of whatever needs a running Kit."""
    if not KIT.running:
        raise ImportError(f"{module} was imported before AppLauncher had started Kit")


def info(text: str) -> None:
    os.write(1, (text + "\n").encode())


def error(text: str) -> None:
    """As carb logs it, through the C library's buffer: whoever reads the log must have it flushed."""
    _libc.printf(b"%s\n", ("[Error] [omni.physx.plugin] " + text).encode())


def die(why: str) -> None:
    """What is undefined, or hurts others on the machine, in the original."""
    os.write(2, f"isaacsim stand-in: {why}\n".encode())
    signal.signal(signal.SIGABRT, signal.SIG_DFL)
    os.kill(os.getpid(), signal.SIGABRT)


def segfault() -> None:
    os.kill(os.getpid(), signal.SIGSEGV)


def hang() -> None:
    while True:
        time.sleep(3600)


def torch_device(device: str) -> str:
    """Where tensors of `device` are made."""
    return "cpu" if SETTINGS.physics == "cpu" else device
