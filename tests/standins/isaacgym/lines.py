"""The stand-in's log lines, and its deliberate deaths."""

import ctypes
import os
import signal
from typing import Any, Dict

from .settings import SETTINGS

_libc: Any = ctypes.CDLL(None)
COUNTS: Dict[str, int] = {}


def info(text: str) -> None:
    os.write(1, (text + "\n").encode())


def error(text: str, plugin: str = "[Error] [carb.gym.plugin] ") -> None:
    """As carb logs it, through the C library's buffer: whoever reads the log must have it flushed."""
    _libc.printf(b"%s\n", (plugin + text).encode())


def die(why: str) -> None:
    """What is undefined behaviour in the original."""
    os.write(2, f"isaacgym stand-in: {why}\n".encode())
    os.kill(os.getpid(), signal.SIGABRT)


def segfault() -> None:
    os.kill(os.getpid(), signal.SIGSEGV)


def entered(name: str) -> None:
    """At the start of a method: counts it, and complains where the test wants that."""
    COUNTS[name] = COUNTS.get(name, 0) + 1
    if SETTINGS.complain == name:
        error(f"Function {name} met something it did not like")


def refused(name: str) -> bool:
    if SETTINGS.refuse == name:
        error(f"Function {name} failed")
        return True
    return False
