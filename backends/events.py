"""The log of this library: one logger, and one line for each event of a worker's life.

    READY rank=0 pid=4711 phase=READY seconds=0.412 simulator=mujoco device="cpu; qpos lies in host memory"

`seconds` counts from the start of the process. A value with anything but plain characters is JSON text.
"""

from __future__ import annotations

import json
import logging
import re
import time
from typing import TYPE_CHECKING

from ..ipc.states import Phase

if TYPE_CHECKING:
    from .process import WorkerProcess

LOG = logging.getLogger("outboard")

_PLAIN = re.compile(r"[\w.:/+-]+")


def _word(value: object) -> str:
    text = str(value)
    return text if _PLAIN.fullmatch(text) else json.dumps(text, ensure_ascii=False)


def tell(
    level: int, event: str, process: WorkerProcess, phase: Phase | str, **more: object
) -> None:
    """One of SPAWNED, HELLO, INIT, READY, FAILED, RESTART, CLOSED."""
    if not LOG.isEnabledFor(level):
        return
    facts = {
        "rank": process.command.rank,
        "pid": process.pid,
        "phase": phase.value if isinstance(phase, Phase) else phase,
        "seconds": f"{time.monotonic() - process.started_s:.3f}",
        **more,
    }
    LOG.log(
        level, "%s %s", event, " ".join(f"{key}={_word(value)}" for key, value in facts.items())
    )
