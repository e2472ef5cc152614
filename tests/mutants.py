"""Running a worker with one mistake in it, over a stand-in of its simulator, and telling what came of that.

A mistake is an edit of a module's source, made when the module is imported. One fork per job, since a process
has one simulation. Runs on every Python that a worker runs on.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import json
import os
import re
import signal
import sys
import tempfile
import traceback
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

NUM_ENVS = 3
OK, DIFFERS, RAISED, ABORT, SEGV = "ok", "differs", "raised", "SIGABRT", "SIGSEGV"
_PACKAGE = "outboard.workers."


class Job(NamedTuple):
    """A worker, perhaps with a mistake in it, and how its life must end."""

    name: str
    module: str = ""
    old: str = ""
    new: str = ""
    end: str = DIFFERS
    said: str = ""  # a regular expression
    settings: str = ""  # of the stand-in
    pipeline: str = "gpu"
    scene: str = "floating"
    torch: bool = False
    lives: int = 1
    env: tuple[tuple[str, str], ...] = ()
    render: bool = False
    signal: int = 0  # sent by the job to itself at its end


def edit(name: str, module: str, old: str, new: str = "", **more: Any) -> Job:
    return Job(name, module, old, new, **more)


def as_data(jobs: Sequence[Job]) -> list[dict[str, Any]]:
    return [
        {**job._asdict(), "edits": [[job.module, job.old, job.new]] if job.module else []}
        for job in jobs
    ]


def check(job: Job, result: dict[str, str]) -> None:
    story = f"{result['end']}: {result['said']}\n{result['log'][-3000:]}"
    assert re.fullmatch(job.end, result["end"]), story
    assert re.search(job.said, result["said"], re.S), story


def scenario(sim: Any) -> dict[str, np.ndarray]:
    """Every published field at every point of a life in which each habit of the engine matters."""
    sizes, facts = sim.facts.sizes, sim.facts
    floating = facts.floating_base
    rng = np.random.default_rng(5)
    frames: list[dict[str, np.ndarray]] = [sim.copy()]

    def flying(seed: int) -> tuple[np.ndarray, np.ndarray]:
        qpos, qvel = np.array(facts.default_qpos), np.random.default_rng(seed).normal(size=sizes.nv)
        if floating:
            qpos[2] += 2.0
            qpos[3:7] = np.random.default_rng(seed).normal(size=4)
            qpos[3:7] /= np.linalg.norm(qpos[3:7])
        return qpos, 2 * qvel

    def steps(count: int, swing: float) -> None:
        for _ in range(count):
            targets = np.array(facts.default_ctrl) + swing * rng.normal(size=(NUM_ENVS, sizes.nu))
            sim.step(targets)
            frames.append(sim.copy())

    sim.set_state([1], *flying(1))
    frames.append(sim.copy())
    steps(10, 0.3)
    # Three commands between two steps, one of them for an environment that another one is about too.
    sim.reset([0])
    sim.set_state([2], *flying(2))
    frames.append(sim.copy())
    sim.set_state([1], *flying(3))
    sim.reset([2])
    frames.append(sim.copy())
    steps(6, 0.3)
    sim.reset()
    frames.append(sim.copy())
    steps(6, 5.0)  # far: at force limits and joint limits
    sim.reset([2, 0])
    steps(25, 0.0)  # down on the floor
    for env in range(NUM_ENVS):  # and up again: every contact ends at once
        sim.set_state([env], *flying(4 + env))
    steps(2, 0.3)
    origins = np.frombuffer(facts.env_origins or bytes(12 * NUM_ENVS), "<f4").reshape(-1, 3)
    flat = bool(origins[:, 2].any())
    result = {name: np.stack([frame[name] for frame in frames]) for name in frames[0]}
    return {**result, "origins_off_the_ground": np.array([flat], np.float32)}


# -- in the process that is edited ------------------------------------------------------------------


class Edits(importlib.abc.MetaPathFinder, importlib.abc.SourceLoader):
    """Imports modules of `outboard.workers` with their sources edited: [module, old, new] each."""

    def __init__(self, edits: Sequence[Sequence[str]]) -> None:
        self._edits = edits

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> Any:
        mine = [edit for edit in self._edits if _PACKAGE + edit[0] == fullname]
        if not mine:
            return None
        found = importlib.machinery.PathFinder.find_spec(fullname, path)
        assert found is not None and found.origin is not None
        self._file, self._mine = found.origin, mine
        return importlib.machinery.ModuleSpec(fullname, self, origin=found.origin)

    def get_filename(self, fullname: str) -> str:
        return self._file

    def get_data(self, path: Any) -> bytes:
        with open(path, encoding="utf-8") as file:
            source = file.read()
        for module, old, new in self._mine:
            if old not in source:
                raise LookupError(f"{module} has no {old!r} any more")
            source = source.replace(old, new)
        return source.encode()


def install(edits: Sequence[Sequence[str]]) -> None:
    early = [one for one, *_ in edits if _PACKAGE + one in sys.modules]
    if early:
        raise LookupError(f"{early} were imported before they could be edited")
    sys.meta_path.insert(0, Edits(edits))


def compare(frames: Any, reference: str) -> dict[str, str]:
    """Against MuJoCo's own worker: "ok", or the first field and frame that differ."""
    with np.load(reference) as wanted:
        for name in frames:
            want = wanted[name]
            scale = np.abs(want).max() if name == "contact_force" else 1.0
            if not np.allclose(frames[name], want, rtol=0, atol=1e-4 * max(1.0, scale)):
                off = np.abs(frames[name] - want).reshape(len(want), -1).max(axis=1)
                at = int(np.argmax(~(off <= 1e-4 * max(1.0, scale))))
                return {"end": DIFFERS, "said": f"{name} in frame {at} by {off[at]:.3g}"}
    return {"end": OK, "said": ""}


def forked(run: Callable[[], dict[str, str]]) -> dict[str, str]:
    """What `run` says, from a fork, and how the fork ended; with its log."""
    with tempfile.TemporaryFile() as said, tempfile.TemporaryFile() as log:
        pid = os.fork()
        if pid == 0:
            os.dup2(log.fileno(), 1)
            os.dup2(log.fileno(), 2)
            try:
                result = run()
            except BaseException as error:  # noqa: BLE001 - whatever it is, it is the result
                traceback.print_exc()
                result = {"end": RAISED, "said": f"{type(error).__name__}: {error}"}
            os.write(said.fileno(), json.dumps(result).encode())
            os._exit(0)
        _, status = os.waitpid(pid, 0)
        log.seek(0)
        words = log.read().decode(errors="replace")
        if os.WIFSIGNALED(status):
            lines = [line for line in words.splitlines() if "stand-in:" in line]
            name = signal.Signals(os.WTERMSIG(status)).name
            return {"end": name, "said": lines[-1] if lines else "", "log": words}
        said.seek(0)
        return {**json.loads(said.read() or b'{"end": "nothing", "said": ""}'), "log": words}
