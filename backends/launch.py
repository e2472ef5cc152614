"""Opens a worker, end to end, and says what is known about it. `backend.py` drives it afterwards."""

from __future__ import annotations

import atexit
import dataclasses
import logging
import os
import time
import weakref
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ..ipc import shm
from ..ipc.device import DeviceReport
from ..ipc.errors import (
    ErrorReport,
    OutboardError,
    PeerGone,
    WorkerDied,
    WorkerLaunchError,
)
from ..ipc.layout import Layout
from ..ipc.messages import Hello, Init, InitReply, Progress
from ..ipc.states import Phase
from . import handshake, interpreters, process
from .device_plan import DevicePlan
from .traits import Traits
from .worker import Worker

LOG = logging.getLogger("outboard")


@dataclass(frozen=True)
class Order:
    """What was asked for: checked arguments, before anything is started."""

    simulator: str  # registry name or FILE:CLASS
    traits: Traits
    plan: DevicePlan
    init: Init
    banks: int
    python: str | None
    env: Mapping[str, str]
    share: bool

    @property
    def words(self) -> str:
        return f"rank {self.init.rank} {self.simulator} on {self.plan}"


@dataclass(frozen=True)
class Opened:
    """A worker that became READY, and what it said of itself."""

    worker: Worker
    hello: Hello
    reply: InitReply
    device_words: str
    opened_s: float  # from spawn to READY


def _command(order: Order) -> process.Command:
    python = interpreters.locate(order.python)
    site = interpreters.site_folder(python)
    env = process.environment(
        os.environ,
        mask=order.plan.mask,
        passed=order.traits.pass_env,
        fixed=dict(order.traits.set_env),
        render=order.init.render,
        user=order.env,
    )
    return process.Command(
        python=python,
        flags=order.traits.python_flags,
        simulator=order.simulator,
        site=str(site) if site.is_dir() else "",
        env=env,
        rank=order.init.rank,
    )


def open_worker(order: Order, block: shm.Block | None) -> Opened:
    """Spawn to READY. On any failure nothing is left behind, and the error carries the report."""
    started_s = time.monotonic()
    worker = Worker(_command(order))
    try:
        hello = _hear(worker, order)
        init = dataclasses.replace(order.init, nonce=handshake.new_nonce())
        reply = handshake.initialise(worker.talk, init, order.traits, _log_progress(order))
        handshake.check_facts(init, reply)
        handshake.judge(order.plan, hello, reply.device)
        layout = Layout(reply.model.sizes, init.publish, order.banks)
        worker.attached(handshake.attach(worker.talk, init, layout, block))
    except OutboardError as error:
        _failed(order, worker, error)
        raise
    except PeerGone as gone:
        error = _obituary(order, worker, gone)
        _failed(order, worker, error)
        raise error from None
    except BaseException:  # KeyboardInterrupt while building
        worker.end(0.0, keep_log=True)
        raise
    opened = Opened(
        worker, hello, reply, _device_words(order.plan, reply.device), time.monotonic() - started_s
    )
    LOG.info(
        "READY rank=%d pid=%d simulator=%s device=%r seconds=%.3f",
        init.rank, hello.pid, order.simulator, opened.device_words, opened.opened_s,
    )  # fmt: skip
    return opened


def _hear(worker: Worker, order: Order) -> Hello:
    source = str(process.entry_file().parent.parent / "ipc")
    hello = handshake.hear_hello(worker.talk, order.plan, source)
    LOG.info("HELLO rank=%d pid=%d python=%s", order.init.rank, hello.pid, hello.python)
    return hello


def _log_progress(order: Order) -> Any:
    def note(progress: Progress) -> None:
        LOG.info(
            "INIT rank=%d %s %d/%d", order.init.rank, progress.stage, progress.done, progress.total
        )

    return note


def _obituary(order: Order, worker: Worker, gone: PeerGone) -> OutboardError:
    """The worker fell silent before it was READY: its own words, else how it ended."""
    words = worker.last_words()
    if words is not None:
        return words
    worker.process.dead(1.0)
    how = worker.process.exit_now() or f"still running, but {gone}"
    if worker.phase is Phase.SPAWNED:
        why = interpreters.explain(worker.process.command.python, order.traits)
        return WorkerLaunchError(why or f"the worker ended before it said a word: {how}")
    return WorkerDied(f"the worker died in phase {worker.phase.value}: {how}")


def _failed(order: Order, worker: Worker, error: OutboardError) -> None:
    phase = worker.phase.value
    if worker.phase is Phase.FAILED:
        phase = getattr(error, "phase", "") or phase
    error.report = error_report(order, worker, phase)
    LOG.error("FAILED rank=%d phase=%s %s", order.init.rank, phase, error.message)
    worker.end(0.0, keep_log=True)


def error_report(order: Order, worker: Worker, phase: str) -> ErrorReport:
    """The circumstances, as far as they are known now. Asked before the worker is taken apart."""
    return ErrorReport(
        phase=phase,
        simulator=order.simulator,
        rank=order.init.rank,
        pid=worker.process.pid,
        exit=worker.process.exit_now(),
        interpreter=worker.process.command.python,
        device=f"{order.plan} ({order.plan.why})",
        log_path=worker.process.log.path,
        log_tail=worker.process.log.tail(),
    )


def _device_words(plan: DevicePlan, report: DeviceReport) -> str:
    if report.kind == "cpu":
        return f"cpu; {report.buffer} lies in host memory"
    return (
        f"{plan.host or 'hidden here'} = {report.uuid} (worker {report.local}); "
        f"{report.buffer} is there ({report.evidence})"
    )


def judged_again(opened: Opened, report: DeviceReport, plan: DevicePlan | None = None) -> Opened:
    return dataclasses.replace(opened, reply=dataclasses.replace(opened.reply, device=report))


def report(order: Order, opened: Opened, phase: Phase) -> dict[str, Any]:
    """Everything that is known about a worker, as plain data."""
    return {
        "phase": phase.value,
        "simulator": order.simulator,
        "engine": f"{opened.reply.engine} {opened.reply.engine_version}",
        "rank": order.init.rank,
        "pid": opened.hello.pid,
        "python": opened.hello.python,
        "executable": opened.hello.executable,
        "device_plan": {
            **dataclasses.asdict(order.plan.device),
            "host": order.plan.host,
            "mask": order.plan.mask,
            "why": order.plan.why,
        },
        "device_report": dataclasses.asdict(opened.reply.device),
        "verified": True,
        "evidence": opened.device_words,
        "transport": "block",
        "notes": list(opened.reply.notes),
        "not_reproduced": list(opened.reply.model.not_reproduced),
        "log_path": opened.worker.process.log.path,
        "opened_s": opened.opened_s,
    }


# -- the end of the process -------------------------------------------------------------------------

_open: weakref.WeakSet[Any] = weakref.WeakSet()


def remember(backend: Any) -> None:
    _open.add(backend)


def released(opened: Opened) -> None:
    """After close(): nothing of this worker is left. (Locks of GPU backends end here.)"""


def abandon(opened: Opened) -> None:
    """A backend was collected, or the interpreter ends, without close()."""
    opened.worker.end(0.0, keep_log=False)


@atexit.register
def _close_all() -> None:
    for backend in list(_open):
        backend.close()


def _disown_all() -> None:
    for backend in list(_open):
        backend._forked()
    _open.clear()


os.register_at_fork(after_in_child=_disown_all)
