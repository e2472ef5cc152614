"""A training process on two GPUs, stand-ins or real: one child for many tests, a start takes a second.

NVML is loaded into the host's own process, so that process must have been started with the stand-in
in its search path; a test process never is.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import uuid as uuids
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from standin_gpu import bare_environment, standin_environment

# Executes one piece of code per line, with these names: `fake(...)` and `custom(FILE, ...)` open
# backends whose workers see the stand-in too; `answer` is what the code wants to say.
_CHILD = """
import json, os, sys, traceback
from outboard.backends import *
from outboard.backends import Traits, witness

said = os.fdopen(os.dup(1), "w")
os.dup2(2, 1)

def standin():
    return {k: v for k, v in os.environ.items() if k.startswith("OUTBOARD_STANDIN_")}

def fake(device="cuda:1", lie="", **more):
    return FakeBackend(device=device, num_envs=2, cfg=FakeCfg(lie=lie), env=standin(), **more)

def custom(file, device="cuda:1", **more):
    return CustomBackend(simulator=file + ":Sim", device=device, num_envs=2, env=standin(), **more)

for line in sys.stdin:
    code, env, names = json.loads(line)
    before = dict(os.environ)
    os.environ.update(env)
    names = {**globals(), **names, "answer": None}
    reply = {}
    try:
        exec(code, names)
        reply["answer"] = names["answer"]
    except OutboardError as error:
        reply["error"], reply["message"] = type(error).__name__, error.message
        reply["pid"] = error.report.pid if error.report else None
    except BaseException:
        reply["crash"] = traceback.format_exc()
    for name in set(os.environ) - set(before):
        del os.environ[name]
    os.environ.update(before)
    print(json.dumps(reply), file=said, flush=True)
"""


@dataclass(frozen=True)
class Outcome:
    """What a piece of code answered, or the Outboard error that it ended with."""

    answer: Any = None
    error: str = ""
    message: str = ""
    pid: int | None = None  # of the worker that the error is about


@dataclass
class Host:
    """Two stand-in GPUs that no other session on this machine has, and a process that sees them.

    With `real`, the UUIDs given are those of real GPUs.
    """

    state: Path  # the stand-in's folder: see standins/libcuda/standin.h
    u0: str = field(default_factory=lambda: f"GPU-ce08eab0-0000-4000-8000-{uuids.uuid4().hex[:12]}")
    u1: str = field(default_factory=lambda: f"GPU-d11fe77a-0000-4000-8000-{uuids.uuid4().hex[:12]}")

    real: bool = False

    @property
    def gpus(self) -> str:
        return f"{self.u0}@0000:00:06.0,{self.u1}@0000:00:07.0"

    def environment(self, **extra: str) -> dict[str, str]:
        """Of a process that sees these two; its logs go where the suite looks for them."""
        folders = {n: os.environ[n] for n in ("XDG_RUNTIME_DIR", "XDG_CACHE_HOME")}
        if self.real:
            return bare_environment(**folders, **extra)
        return standin_environment(self.gpus, self.state, **folders, **extra)

    @contextmanager
    def started(self) -> Generator[Host, None, None]:
        with subprocess.Popen(
            [sys.executable, "-c", _CHILD],
            env=self.environment(),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        ) as self.process:
            try:
                yield self
            finally:
                assert self.process.stdin is not None
                self.process.stdin.close()
                self.process.wait(20)

    def run(self, code: str, env: Mapping[str, str] | None = None, **names: Any) -> Outcome:
        """Run `code` there with `names`, under variables added for it alone. An error that is not
        Outboard's fails the test."""
        assert self.process.stdin is not None and self.process.stdout is not None
        print(json.dumps([code, env or {}, names]), file=self.process.stdin, flush=True)
        reply = json.loads(self.process.stdout.readline() or '{"crash": "the host is gone"}')
        assert "crash" not in reply, reply["crash"]
        return Outcome(**reply)
