"""Several backends of one process: opened at once, closed at once, nothing left when one fails."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait

from . import keeper, process
from .backend import Backend

# How often the opening threads are looked at: bounds how late a failure or a signal is acted on.
_LOOK_S = 0.05
# Enough for a worker to finish a step and say goodbye; one that does not is killed, so that Ctrl-C
# ends everything within two seconds.
CLOSE_S = 1.0


class Fleet:
    """One backend per rank. `close()` is due whatever `open()` did.

    Futures, not threads: up to Python 3.12 a `Thread.join` that ^C interrupts takes the thread for ended,
    and a worker that it was opening would belong to nobody.
    """

    def __init__(self, openers: Sequence[Callable[[], Backend]]) -> None:
        self._openers = openers
        self._pool = ThreadPoolExecutor(max(1, len(openers)), "outboard-fleet")
        self._opening: list[Future[None]] = []
        self._opened: dict[int, Backend] = {}
        self._failures: list[BaseException] = []  # the first cause first

    @property
    def backends(self) -> list[Backend]:
        return [self._opened[rank] for rank in range(len(self._openers))]

    def open(self) -> None:
        """Open all at once. Raises the first failure; `close()` then takes the others down."""
        for rank in range(len(self._openers)):
            # By the keeper: ^C inside `submit` would lose the future of an opener that already runs.
            keeper.uninterrupted(functools.partial(self._start, rank))
        while not self._failures and not all(future.done() for future in self._opening):
            wait(self._opening, _LOOK_S, FIRST_EXCEPTION)
        if self._failures:
            raise self._failures[0]

    def _start(self, rank: int) -> None:
        self._opening.append(self._pool.submit(self._open_one, rank))

    def _open_one(self, rank: int) -> None:
        try:
            self._opened[rank] = self._openers[rank]()
        except BaseException as error:
            self._failures.append(error)
            raise

    def close(self) -> None:
        """Close all at once; end what is still being opened. Bounded, idempotent."""
        while not all(future.done() for future in self._opening):
            process.kill_all(spare=[opened.report["pid"] for opened in list(self._opened.values())])
            wait(self._opening, _LOOK_S)
        self._opening.clear()
        if self._opened:
            wait([self._pool.submit(backend.close, CLOSE_S) for backend in self._opened.values()])
        self._opened.clear()
        self._pool.shutdown()
