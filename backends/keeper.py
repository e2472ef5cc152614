"""The one thread that starts workers and takes them apart. It lives as long as the process.

For two reasons. The kernel sends a worker's parent-death signal when the *thread* that started it ends, and
training code may open a backend from a short-lived thread. And ^C strikes the main thread between any
two instructions: what must not be left half done is not done there.
"""

from __future__ import annotations

import contextlib
import os
import queue
import threading
from collections.abc import Callable


class _Task:
    """A call that another thread makes, and what became of it."""

    def __init__(self, job: Callable[[], None]) -> None:
        self._job = job
        self._bell: queue.SimpleQueue[None] = queue.SimpleQueue()
        self.done = False
        self.error: BaseException | None = None

    def run(self) -> None:
        if self.done:
            return
        try:
            self._job()
        except BaseException as error:  # noqa: BLE001 - handed to the thread that asked
            self.error = error
        self.done = True
        self._bell.put(None)

    def wait(self) -> None:
        """Looks at `done` again and again: an interrupt can swallow what a queue has given."""
        while not self.done:
            with contextlib.suppress(queue.Empty):
                self._bell.get(timeout=0.05)


class _Keeper:
    def __init__(self) -> None:
        self._tasks: queue.SimpleQueue[_Task] = queue.SimpleQueue()
        self.thread = threading.Thread(target=self._run, name="outboard-keeper", daemon=True)
        self.thread.start()

    def _run(self) -> None:
        while True:
            self._tasks.get().run()

    def call(self, job: Callable[[], None]) -> None:
        task, queued = _Task(job), False
        interrupt: KeyboardInterrupt | None = None
        while True:
            try:
                if not queued:
                    self._tasks.put(task)  # perhaps for the second time, after an interrupt
                    queued = True
                task.wait()
                break
            except KeyboardInterrupt as caught:
                interrupt = caught
        if interrupt is not None:
            raise interrupt
        if task.error is not None:
            raise task.error


_keeper: _Keeper | None = None
_lock = threading.Lock()


def _forget() -> None:
    """In a forked child: the thread does not exist there."""
    global _keeper, _lock
    _keeper, _lock = None, threading.Lock()


os.register_at_fork(after_in_child=_forget)


def uninterrupted(job: Callable[[], None]) -> None:
    """Run `job` on the keeper, to its end: an interrupt of the caller is raised after it."""
    global _keeper
    with _lock:
        if _keeper is None:
            _keeper = _Keeper()
    if threading.current_thread() is _keeper.thread:  # a finalizer that the collector runs here
        job()
    else:
        _keeper.call(job)
