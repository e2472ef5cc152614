"""`outboard run`: one host process, one worker per rank, all in flight at once."""

from __future__ import annotations

import contextlib
import functools
import json
import logging
import sys
import time
from collections.abc import Generator
from dataclasses import dataclass
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.text import Text

from ..ipc.device import CPU
from ..ipc.errors import OutboardError, UsageError
from . import registry, terminal
from .backend import Backend
from .fleet import Fleet
from .policy import SmoothPolicy
from .state import Timings

# The bar is drawn between two steps, by this thread: a thread of its own would take the GIL in the
# middle of what is measured.
_REDRAW_S = 0.2


@dataclass(frozen=True)
class RunCfg:
    """The main job, as it was asked for."""

    devices: tuple[str, ...]
    backend: str = registry.EMBEDDED
    simulator: str = ""  # FILE:CLASS instead of `backend`
    scene: str = ""  # "": the backend's default; nothing for a simulator that is not ours
    num_envs: int = 256  # per rank
    steps: int = 1000
    ranks: int | None = None  # None: one per device
    worker_python: str | None = None
    decimation: int = 1
    seed: int = 0  # rank N gets seed + N
    publish: tuple[str, ...] = ("qpos", "qvel")
    json_path: str = ""  # "-": standard output, which then holds nothing else

    def __post_init__(self) -> None:
        if self.ranks not in (None, len(self.devices)):
            raise UsageError(
                f"--devices names {len(self.devices)} and --ranks {self.ranks}: give one device per "
                f"rank, as in --devices {','.join(['cpu'] * (self.ranks or 1))}"
            )

    @property
    def scene_or_default(self) -> str:
        return self.scene or ("" if self.simulator else registry.default_scene(self.backend))

    def open(self, rank: int) -> Backend:
        return registry.open_backend(
            self.backend,
            self.simulator,
            device=self.devices[rank],
            scene=self.scene_or_default,
            num_envs=self.num_envs,
            decimation=self.decimation,
            publish=self.publish,
            seed=self.seed + rank,
            worker_python=self.worker_python,
            rank=rank,
        )


class Rank:
    """One backend, its policy, and what was counted."""

    def __init__(self, rank: int, backend: Backend, cfg: RunCfg) -> None:
        self.rank = rank
        self.backend = backend
        self.facts = backend.report
        step_s = backend.model.timestep * cfg.decimation
        self.policy = SmoothPolicy(backend.model, cfg.num_envs, step_s, cfg.seed + rank)
        self.flagged = 0  # environments that went bad, summed over the steps
        self._measured = Timings(0, 0.0, 0.0)

    def measure(self, before: Timings) -> None:
        """Note the protocol's cost of the step since `before`. Only of the rank that was rung last
        and waited for first: the others' answers lie ready while this process looks elsewhere, and
        that is no cost of the protocol."""
        step = self.backend.timings.since(before)
        so_far = self._measured
        self._measured = Timings(
            so_far.commands + step.commands,
            so_far.wall_s + step.wall_s,
            so_far.sim_s + step.sim_s,
        )

    @property
    def sim_us(self) -> float:
        return self.backend.timings.sim_us

    @property
    def overhead_us(self) -> float:
        return (self._measured if self._measured.commands else self.backend.timings).overhead_us

    def result(self, steps: int, seconds: float) -> dict[str, Any]:
        facts = self.facts
        rate = self.backend.num_envs * steps / seconds if seconds else 0.0
        return {
            "rank": self.rank,
            "planned": facts["device_plan"]["uuid"] or facts["device_plan"]["kind"],
            "reported": facts["device_report"]["uuid"] or facts["device_report"]["kind"],
            "verified": facts["verified"],
            "python": facts["python"],
            "pid": facts["pid"],
            "env_steps_per_s": round(rate, 1),
            "sim_us": round(self.sim_us, 2),
            "overhead_us": round(self.overhead_us, 2),
            "steps": steps,
            "evidence": facts["evidence"],
            "interpreter": facts["executable"],
            "flagged": self.flagged,
        }


class Job:
    """The loop over all ranks, which can be stopped at any instruction and still be counted."""

    def __init__(self, cfg: RunCfg, ranks: list[Rank]) -> None:
        self.cfg = cfg
        self.ranks = ranks
        self.done = 0
        self.seconds = 0.0

    def run(self, console: Console) -> None:
        with _bar(console) as bar:
            task = bar.add_task("", total=self.cfg.steps, speed="", cost="")
            started_s = drawn_s = time.perf_counter()
            try:
                while self.done < self.cfg.steps:
                    self.step()
                    now_s = time.perf_counter()
                    if now_s - drawn_s > _REDRAW_S:
                        drawn_s = now_s
                        self.seconds = now_s - started_s
                        bar.update(task, completed=self.done, **self._words())
                        bar.refresh()
            finally:
                self.seconds = time.perf_counter() - started_s
                bar.update(task, completed=self.done, **self._words())

    def step(self) -> None:
        """One step of all ranks: all are rung before any is waited for."""
        for rank in self.ranks:
            rank.policy.write(self.done, rank.backend.ctrl_view)
        last = self.done % len(self.ranks)
        ring_order = self.ranks[last + 1 :] + self.ranks[: last + 1]
        measured, before = ring_order[-1], ring_order[-1].backend.timings
        for rank in ring_order:
            rank.backend.step_async()
        measured.backend.step_wait()
        measured.measure(before)
        for rank in ring_order[:-1]:
            rank.backend.step_wait()
        for rank in ring_order:
            rank.flagged += len(rank.backend.flagged)
        self.done += 1

    def env_steps_per_s(self) -> float:
        total = self.cfg.num_envs * len(self.ranks) * self.done
        return total / self.seconds if self.seconds else 0.0

    def mean(self, name: str) -> float:
        """Mean over the ranks of `sim_us` or `overhead_us`."""
        return sum(getattr(rank, name) for rank in self.ranks) / len(self.ranks)

    def _words(self) -> dict[str, Any]:
        sim, overhead = self.mean("sim_us"), self.mean("overhead_us")
        return {
            "speed": f"{self.env_steps_per_s():,.0f} env-steps/s",
            "cost": f"simulator {_time(sim)}, protocol {_time(overhead)} per step",
        }

    def result(self, stopped_by: str) -> dict[str, Any]:
        answer: dict[str, Any] = {
            "ranks": [rank.result(self.done, self.seconds) for rank in self.ranks],
            "total": {
                "ranks": len(self.ranks),
                "num_envs": self.cfg.num_envs * len(self.ranks),
                "steps": self.done,
                "seconds": round(self.seconds, 3),
                "env_steps_per_s": round(self.env_steps_per_s(), 1),
                "sim_us": round(self.mean("sim_us"), 2),
                "overhead_us": round(self.mean("overhead_us"), 2),
            },
        }
        if stopped_by:
            answer["stopped_by"] = stopped_by
        return answer


def run(cfg: RunCfg) -> int:
    """The whole job; returns 0. Errors of ours and Stopped leave as exceptions, with all closed."""
    console = terminal.console(stderr=cfg.json_path == "-")
    fleet = Fleet([functools.partial(cfg.open, rank) for rank in range(len(cfg.devices))])
    try:
        _run(cfg, fleet, console)
    except OutboardError as error:
        _write(cfg.json_path, {"error": type(error).__name__, "message": error.message})
        raise
    return 0


def _run(cfg: RunCfg, fleet: Fleet, console: Console) -> None:
    what = cfg.simulator or cfg.backend
    count = f"{len(cfg.devices)} worker{'s' if len(cfg.devices) > 1 else ''}"
    try:
        with _narrated(console, f"opening {count}: {what} {cfg.scene_or_default}".rstrip()):
            fleet.open()
        job = Job(cfg, [Rank(i, backend, cfg) for i, backend in enumerate(fleet.backends)])
        console.print(_acknowledgements(job.ranks))
        stopped_by = ""
        try:
            job.run(console)
        except terminal.Stopped as stop:
            stopped_by = stop.name
            raise
        finally:
            if stopped_by or job.done == cfg.steps:
                _write(cfg.json_path, job.result(stopped_by))
        console.print()
        console.print(_summary(job))
        _explain_flagged(job, console)
    finally:
        terminal.ignore_signals()
        fleet.close()


def _write(path: str, answer: dict[str, Any]) -> None:
    """The JSON, where it was asked for. UsageError when the file cannot be written."""
    text = json.dumps(answer, indent=2) + "\n"
    if path == "-":
        sys.stdout.write(text)
        sys.stdout.flush()
    elif path:
        try:
            with open(path, "w", encoding="utf-8") as file:
                file.write(text)
        except OSError as error:
            raise UsageError(f"--json {path}: {error.strerror}") from None


# -- the screen ------------------------------------------------------------------------------------


class _Narrator(logging.Handler):
    """Shows on the spinner what the workers say while they are opened."""

    def __init__(self, status: Any, words: str) -> None:
        super().__init__(logging.INFO)
        self._status, self._words = status, words

    def emit(self, record: logging.LogRecord) -> None:
        self._status.update(Text(f"{self._words} ({record.getMessage()[:60]})"))


@contextlib.contextmanager
def _narrated(console: Console, words: str) -> Generator[None, None, None]:
    log = logging.getLogger("outboard")
    # What is logged is also shown, or raised: without a handler Python would print it a second time.
    log.addHandler(logging.NullHandler())
    log.propagate = False
    log.setLevel(logging.INFO)
    with console.status(Text(words)) as status:
        narrator = _Narrator(status, words)
        log.addHandler(narrator)
        try:
            yield
        finally:
            log.removeHandler(narrator)
            log.setLevel(logging.WARNING)


def _bar(console: Console) -> Progress:
    return Progress(
        BarColumn(bar_width=20),
        MofNCompleteColumn(),
        TextColumn("{task.fields[speed]}"),
        TextColumn("{task.fields[cost]}", style="dim"),
        TimeRemainingColumn(compact=True),
        console=console,
        auto_refresh=False,
    )


def _acknowledgements(ranks: list[Rank]) -> Any:
    """Beside what was planned, what each worker measured of itself."""
    table = terminal.table(title="Plan and acknowledgement")
    table.add_column("rank", justify="right")
    table.add_column("planned", no_wrap=True)
    table.add_column("worker-local", no_wrap=True)
    table.add_column("evidence", overflow="fold")
    table.add_column("interpreter", overflow="fold")
    table.add_column("pid", justify="right")
    for rank in ranks:
        facts = rank.facts
        plan, report = facts["device_plan"], facts["device_report"]
        table.add_row(
            str(rank.rank),
            Text(f"{plan['host'] or 'hidden'} {plan['uuid'][:12]}".rstrip()),
            Text(f"{report['local']} {report['uuid'][:12]}".rstrip()),
            Text(_evidence(facts)),
            Text(f"{facts['python']} {terminal.short_path(facts['executable'])}"),
            str(facts["pid"]),
        )
    return table


def _evidence(facts: dict[str, Any]) -> str:
    """In few words; the full sentence is in the JSON."""
    report = facts["device_report"]
    words = f"{report['buffer']}: {report['evidence'].replace('_', ' ')}"
    return words if report["kind"] == CPU else f"{words}; {facts['witness']}"


def _summary(job: Job) -> Any:
    seconds = f"{job.seconds:,.1f} s"
    table = terminal.table(title=f"Done: {job.done:,} steps in {seconds}")
    for name in ("rank", "envs", "steps", "env-steps/s", "simulator", "protocol"):
        table.add_column(name, justify="right")
    for rank in job.ranks:
        one = rank.result(job.done, job.seconds)
        table.add_row(
            str(rank.rank),
            f"{job.cfg.num_envs:,}",
            f"{job.done:,}",
            f"{one['env_steps_per_s']:,.0f}",
            _time(rank.sim_us),
            _time(rank.overhead_us),
            end_section=rank is job.ranks[-1],
        )
    table.add_row(
        "all",
        f"{job.cfg.num_envs * len(job.ranks):,}",
        f"{job.done:,}",
        f"{job.env_steps_per_s():,.0f}",
        _time(job.mean("sim_us")),
        _time(job.mean("overhead_us")),
        style="bold",
    )
    return table


def _explain_flagged(job: Job, console: Console) -> None:
    for rank in job.ranks:
        if rank.flagged:
            console.print(
                f"rank {rank.rank}: {rank.flagged:,} times an environment's state became invalid or "
                "the engine reset it by itself",
                style="yellow",
            )


def _time(us: float) -> str:
    return f"{us / 1e3:,.2f} ms" if us >= 1000 else f"{us:,.1f} us"
