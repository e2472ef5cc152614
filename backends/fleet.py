"""Several backends of one process: opened at once, closed at once, nothing left when one fails."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

from . import process
from .backend import Backend

# How often the opening threads are looked at: bounds how late a failure or a signal is acted on.
_LOOK_S = 0.05
# Enough for a worker to finish a step and say goodbye; one that does not is killed, so that Ctrl-C
# ends everything within two seconds.
CLOSE_S = 1.0


class Fleet:
    """One backend per rank. `close()` is due whatever `open()` did."""

    def __init__(self, openers: Sequence[Callable[[], Backend]]) -> None:
        self._openers = openers
        self._opened: dict[int, Backend] = {}
        self._failures: list[BaseException] = []  # the first cause first
        self._threads: list[threading.Thread] = []

    @property
    def backends(self) -> list[Backend]:
        return [self._opened[rank] for rank in range(len(self._openers))]

    def open(self) -> None:
        """Open all at once. Raises the first failure; `close()` then takes the others down."""
        for rank in range(len(self._openers)):
            thread = threading.Thread(target=self._open_one, args=(rank,), name=f"open-rank{rank}")
            self._threads.append(thread)
            thread.start()
        while not self._failures and any(thread.is_alive() for thread in self._threads):
            for thread in self._threads:
                thread.join(_LOOK_S)
        if self._failures:
            raise self._failures[0]

    def _open_one(self, rank: int) -> None:
        try:
            self._opened[rank] = self._openers[rank]()
        except BaseException as error:  # noqa: BLE001 - raised by the thread that waits for all
            self._failures.append(error)

    def close(self) -> None:
        """Close all at once; end what is still being opened. Bounded, idempotent."""
        while any(thread.is_alive() for thread in self._threads):
            process.kill_all(spare=[opened.report["pid"] for opened in list(self._opened.values())])
            for thread in self._threads:
                thread.join(_LOOK_S)
        closers = [
            threading.Thread(target=backend.close, args=(CLOSE_S,))
            for backend in self._opened.values()
        ]
        for closer in closers:
            closer.start()
        for closer in closers:
            closer.join()
        self._opened.clear()
