"""Opens a worker, end to end, and says what is known about it. `backend.py` drives it afterwards."""

from __future__ import annotations

import atexit
import dataclasses
import logging
import os
import time
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import posix_ipc

from ..ipc.cuda_driver import CudaError
from ..ipc.device import CPU, DeviceReport
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
from . import handshake, interpreters, keeper, process, transport, witness
from .device_plan import DevicePlan
from .events import LOG as LOG
from .events import tell
from .gpu_lock import GpuLock
from .traits import Traits
from .verdict import Verdict, judge
from .visibility import MASK
from .worker import Worker

# A worker whose socket closed is on its way out; an interpreter's teardown on a loaded machine takes time.
_EXIT_S = 5.0


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
    verdict: Verdict
    lock: GpuLock | None
    opened_s: float  # from spawn to READY
    why_no_arena: str = ""  # "" when there is one


def worker_command(order: Order) -> process.Command:
    """Interpreter, arguments and environment of the worker that `order` asks for."""
    python = interpreters.locate_for(order.traits, order.python)
    site = interpreters.site_folder(python)
    env = process.environment(
        os.environ,
        device=order.plan.worker_variables(
            uuid_tokens=order.traits.uuid_tokens, graphics=order.init.render
        ),
        libraries=process.driver_folders(os.environ),
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


def open_worker(order: Order, before: Opened | None, adopt: Callable[[Opened], None]) -> None:
    """Spawn to READY, and hand the worker to `adopt`. On any failure nothing is left behind, and the
    error carries the report.

    before: the same backend's last worker, whose memory and lock the new one takes over.
    adopt: called at the end, so that an interrupt never finds a worker that belongs to nobody.
    """
    if before is not None:
        _open_locked(order, before.lock, before, adopt)
        return
    lock = _lock(order)
    try:
        _open_locked(order, lock, None, adopt)
    except BaseException:
        if lock is not None:
            lock.release()
        raise


def _lock(order: Order) -> GpuLock | None:
    """A GPU belongs to one process of this host, before anything is started on it."""
    if order.plan.device.kind == CPU:
        return None
    return GpuLock.acquire(order.plan.device.uuid, order.init.rank, share=order.share)


def _open_locked(
    order: Order, lock: GpuLock | None, before: Opened | None, adopt: Callable[[Opened], None]
) -> None:
    started_s = time.monotonic()
    command = worker_command(order)
    started: list[Worker] = []
    try:
        keeper.uninterrupted(lambda: started.append(Worker(command)))
        [worker] = started
        tell(logging.INFO, "SPAWNED", worker.process, worker.phase, python=command.python)
        hello = _hear(worker, order)
        init = dataclasses.replace(order.init, nonce=handshake.new_nonce())
        reply = handshake.initialise(worker.talk, init, order.traits, _log_progress(worker))
        handshake.check_facts(init, reply)
        verdict = _verdict(order, hello, reply.device)
        _require(order, worker, hello, reply.device, verdict)
        layout = Layout(reply.model.sizes, init.publish, order.banks)
        why_no_arena = _attach(worker, init, hello, reply, layout, before)
        opened_s = time.monotonic() - started_s
        opened = Opened(worker, hello, reply, verdict, lock, opened_s, why_no_arena)
        adopt(opened)
    except OutboardError as error:
        for worker in started:
            _failed(order, worker, error)
        raise
    except PeerGone as gone:
        error = _obituary(order, started[0], gone)
        _failed(order, started[0], error)
        raise error from None
    # Short of descriptors, of memory, of room in /dev/shm.
    except (OSError, posix_ipc.Error, CudaError) as short:
        error = WorkerLaunchError(f"this process cannot get what a worker needs: {short}")
        for worker in started:
            _failed(order, worker, error)
        raise error from short
    except BaseException:  # KeyboardInterrupt while building
        for worker in started:
            worker.end(0.0, keep_log=False)
        raise
    tell(
        logging.INFO,
        "READY",
        worker.process,
        worker.phase,
        simulator=order.simulator,
        device=device_words(order, opened),
    )


def _attach(
    worker: Worker,
    init: Init,
    hello: Hello,
    reply: InitReply,
    layout: Layout,
    before: Opened | None,
) -> str:
    """Give the worker its data planes: new ones, or those of the worker before it. Why there is no
    arena, "" when there is one."""
    old = None if before is None else before.worker.data
    if old is not None and old.arena is None:
        arena, why = None, before.why_no_arena if before is not None else ""
    else:
        arena, why = transport.offer(init, hello, reply, layout, None if old is None else old.arena)
    block = None if old is None else old.block
    data = handshake.attach(worker.talk, init, layout, block, arena)
    worker.attached(data, hello.pid)
    if data.no_arena:
        transport.refuse_if_asked(init, data.no_arena, again=old is not None)
    return why or data.no_arena


def _verdict(order: Order, hello: Hello, report: DeviceReport) -> Verdict:
    """What a report and the outside witness say together; it may contradict the plan."""
    sighting = witness.look(hello.pid, has_context=report.kind != CPU)
    return judge(order.plan, hello, report, sighting, order.traits)


def _require(
    order: Order, worker: Worker, hello: Hello, report: DeviceReport, verdict: Verdict
) -> None:
    """DeviceMismatchError when the verdict contradicts the plan."""
    mask = worker.process.command.env[MASK]
    handshake.require(order.plan, mask, hello, report, verdict.wrong)


def judged_again(order: Order, opened: Opened, report: DeviceReport) -> Opened:
    """A later measurement of the same worker, with the verdict on it."""
    verdict = _verdict(order, opened.hello, report)
    reply = dataclasses.replace(opened.reply, device=report)
    return dataclasses.replace(opened, reply=reply, verdict=verdict)


def require_verified(order: Order, opened: Opened) -> None:
    """DeviceMismatchError when the last measurement contradicts the plan."""
    _require(order, opened.worker, opened.hello, opened.reply.device, opened.verdict)


def _hear(worker: Worker, order: Order) -> Hello:
    source = str(process.entry_file().parent.parent / "ipc")
    hello = handshake.hear_hello(worker.talk, worker.process.command.env[MASK], source)
    tell(logging.INFO, "HELLO", worker.process, worker.phase, python=hello.python)
    return hello


def _log_progress(worker: Worker) -> Callable[[Progress], None]:
    def note(progress: Progress) -> None:
        done = f"{progress.done}/{progress.total}"
        tell(logging.INFO, "INIT", worker.process, worker.phase, stage=progress.stage, done=done)

    return note


def _obituary(order: Order, worker: Worker, gone: PeerGone) -> OutboardError:
    """The worker fell silent before it was READY: its own words, else how it ended."""
    if worker.process.unwanted:
        return WorkerDied("this process ended the worker while it was being opened")
    # Before HELLO nothing is left to read: what it sent last may be half a preamble.
    words = None if worker.phase is Phase.SPAWNED else worker.last_words()
    if words is not None:
        return words
    worker.process.dead(_EXIT_S)
    how = worker.process.exit_now() or f"still running, but {gone}"
    if worker.phase is Phase.SPAWNED:
        why = interpreters.explain(worker.process.command.python, order.traits)
        return WorkerLaunchError(why or f"the worker ended before it said a word: {how}")
    at = f" ({worker.talk.progress})" if worker.talk.progress else ""
    return WorkerDied(f"the worker died in phase {worker.phase.value}{at}: {how}")


def _failed(order: Order, worker: Worker, error: OutboardError) -> None:
    phase = (worker.talk.reached if worker.phase is Phase.FAILED else worker.phase).value
    error.report = error_report(order, worker, phase)
    if not worker.process.unwanted:
        failed(worker, phase, error)
    worker.end(0.0, keep_log=not worker.process.unwanted)


def failed(worker: Worker, phase: str, error: OutboardError) -> None:
    """The log's line about an error that ended a worker."""
    tell(
        logging.ERROR,
        "FAILED",
        worker.process,
        phase,
        error=type(error).__name__,
        message=error.message,
    )


def closed(worker: Worker, asked: bool) -> None:
    """The log's line about the end of a backend; a warning when its worker was asked to leave and
    did not leave well."""
    tell(
        logging.WARNING if asked and not worker.left_well else logging.INFO,
        "CLOSED",
        worker.process,
        worker.phase,
        left_well=worker.left_well,
        exit=worker.process.exit_now(),
    )


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


def device_words(order: Order, opened: Opened) -> str:
    """Where the simulator is and how that is known, in one line."""
    report = opened.reply.device
    if opened.verdict.wrong:
        return f"CONTRADICTED: {opened.verdict.wrong}"
    if report.kind == CPU:
        return f"cpu; {report.buffer} lies in host memory"
    return (
        f"{order.plan} (worker {report.local}); {report.buffer} is there ({report.evidence}); "
        f"{opened.verdict.witness}"
    )


def report(order: Order, opened: Opened, phase: Phase) -> dict[str, Any]:
    """Everything that is known about a worker, as plain data."""
    return {
        "phase": phase.value,
        "simulator": order.simulator,
        "engine": f"{opened.reply.engine} {opened.reply.engine_version}",
        "rank": order.init.rank,
        "local_rank": order.plan.local_rank,
        "world_size": order.plan.world_size,
        "pid": opened.hello.pid,
        "python": opened.hello.python,
        "executable": opened.hello.executable,
        "device_plan": {
            **dataclasses.asdict(order.plan.device),
            "host": order.plan.host,
            "host_index": order.plan.host_index,
            "mask": opened.worker.process.command.env[MASK],
            "source": order.plan.source or "device=",
            "why": order.plan.why,
        },
        "device_report": dataclasses.asdict(opened.reply.device),
        "verified": not opened.verdict.wrong,
        "evidence": device_words(order, opened),
        "witness": opened.verdict.witness,
        "transport": transport.BLOCK if opened.why_no_arena else transport.CUDA,
        "transport_why": opened.why_no_arena
        or "this process and the worker share one GPU, and what each wrote there the other read",
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
    """After close(): the GPU is free for others."""
    if opened.lock is not None:
        opened.lock.release()


def abandon(opened: Opened) -> None:
    """A backend was collected, or the interpreter ends, without close()."""
    opened.worker.end(0.0, keep_log=False)
    closed(opened.worker, asked=False)
    released(opened)


@atexit.register
def _close_all() -> None:
    for backend in list(_open):
        backend.close()


def _disown_all() -> None:
    for backend in list(_open):
        backend._forked()
    _open.clear()


os.register_at_fork(after_in_child=_disown_all)
