"""Workers that break the protocol: each gets its exact error, within its bound, and nothing stays."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hosts import ROOT
from outboard.backends import (
    DeviceMismatchError,
    FakeBackend,
    OutboardError,
    ProtocolError,
    SceneError,
    UsageError,
    WorkerDied,
    WorkerLaunchError,
    WorkerTimeout,
)
from rogue import BEHAVIOURS, GPU

# behaviour -> (error, how its message begins or what it matches, phase in the report)
WHILE_OPENING: dict[str, tuple[type[OutboardError], str, str]] = {
    "says nothing and leaves": (
        WorkerLaunchError, "the worker ended before it said a word: exit code 0", "SPAWNED"),
    "speaks something else": (
        ProtocolError, "the worker does not speak this protocol: its first bytes are b'HTTP'",
        "SPAWNED"),
    "stops inside the preamble": (
        WorkerLaunchError, "the worker ended before it said a word: exit code 0", "SPAWNED"),
    "another version": (
        ProtocolError, r"the worker speaks protocol version 99, this host version \d+ \(.*ipc\)",
        "SPAWNED"),
    "truncated frame": (
        WorkerLaunchError, "the worker ended before it said a word: exit code 0", "SPAWNED"),
    "oversized length": (
        ProtocolError, "a frame announces 2147483648 bytes; 1 to 16777216 are allowed", "SPAWNED"),
    "length zero": (
        ProtocolError, "a frame announces 0 bytes; 1 to 16777216 are allowed", "SPAWNED"),
    "not msgpack": (ProtocolError, "a frame of 3 bytes is not msgpack", "SPAWNED"),
    "unknown message": (ProtocolError, "unknown message 'Gossip'", "SPAWNED"),
    "unknown field": (ProtocolError, "bad message: Progress: unknown field x", "SPAWNED"),
    "missing field": (
        ProtocolError, "bad message: Progress: field done, total is missing", "SPAWNED"),
    "wrong type": (
        ProtocolError, "bad message: Progress.stage: int where str belongs", "SPAWNED"),
    "trailing bytes": (ProtocolError, "a frame of .* bytes is not msgpack: ExtraData", "SPAWNED"),
    "INIT_REPLY before INIT": (
        ProtocolError, "the worker sent InitReply in phase SPAWNED", "SPAWNED"),
    "BYE in SPAWNED": (ProtocolError, "the worker sent Bye in phase SPAWNED", "SPAWNED"),
    "BYE in INIT": (ProtocolError, "the worker sent Bye in phase INIT", "INIT"),
    "another source": (ProtocolError, "the worker runs /somewhere/else/ipc, this host /", "HELLO"),
    "another mask": (
        DeviceMismatchError, "CUDA_VISIBLE_DEVICES was sent as '' and arrived as '3'", "HELLO"),
    "READY in INIT": (ProtocolError, "the worker sent Ready in phase INIT", "INIT"),
    "replayed HELLO": (ProtocolError, "the worker sent Hello in phase INIT", "INIT"),
    "replayed INIT_REPLY": (ProtocolError, "the worker sent InitReply in phase ATTACHED", "ATTACHED"),
    "lies about its device": (
        DeviceMismatchError, f"planned cpu but the state lies on {GPU}", "VERIFIED"),
    "sees a GPU though on the CPU": (
        DeviceMismatchError, f"the CPU was planned, but the worker sees {GPU}", "VERIFIED"),
    "another number of environments": (
        ProtocolError, "3 environments were asked for, 4 built", "VERIFIED"),
    "publishes less than asked": (UsageError, "rogue cannot publish qvel", "VERIFIED"),
    "READY with another nonce": (
        ProtocolError, "READY carries another nonce or fingerprint than ATTACH", "READY"),
    "READY with another fingerprint": (
        ProtocolError, "READY carries another nonce or fingerprint than ATTACH", "READY"),
    "ERROR of the scene in INIT": (SceneError, "no such body", "INIT"),
    "leaves in ATTACHED": (
        WorkerDied, "the worker died in phase ATTACHED: exit code 0", "ATTACHED"),
}  # fmt: skip
IN_A_STEP: dict[str, tuple[type[OutboardError], str]] = {
    "answers with another number": (WorkerTimeout, r"did not answer within 0\.5 s"),
    "fails without an ERROR": (ProtocolError, "a command ended with status 2"),
    "status out of range": (ProtocolError, "a command ended with status 77"),
    "garbage while in a step": (ProtocolError, "a frame announces 4294967295 bytes"),
    "BYE in a step": (WorkerDied, "the worker died in a command, exit code 0"),
}
HARMLESS = ("rings without an answer first", "scribbles over the header")
IN_MAIL = ("reply to mail of another kind",)

Open = Callable[[str], FakeBackend]


@pytest.fixture
def open_rogue(tmp_path: Path, request: pytest.FixtureRequest) -> Any:
    opened: list[FakeBackend] = []

    def open_one(behaviour: str, python: str = sys.executable) -> FakeBackend:
        wrapper = tmp_path / "rogue-python"
        wrapper.write_text(
            f'#!/bin/sh\ncase "$*" in *__main__*) ;; *) exec {python} "$@";; esac\n'
            f"export PYTHONPATH={ROOT / '.src'}\n"
            f'exec {python} {ROOT / "tests" / "rogue.py"} "{behaviour}" -- "$@"\n'
        )
        wrapper.chmod(0o755)
        sim = FakeBackend(device="cpu", num_envs=3, worker_python=wrapper, step_timeout_s=0.5)
        opened.append(sim)
        return sim

    yield open_one
    for sim in opened:
        sim.close()


def test_every_behaviour_has_its_expectation() -> None:
    assert {*WHILE_OPENING, *IN_A_STEP, *HARMLESS, *IN_MAIL} == set(BEHAVIOURS)


@pytest.mark.parametrize("behaviour", WHILE_OPENING)
def test_while_opening_the_fault_is_named_with_its_phase(open_rogue: Open, behaviour: str) -> None:
    error, text, phase = WHILE_OPENING[behaviour]
    started = time.monotonic()
    with pytest.raises(OutboardError, match=text) as caught:
        open_rogue(behaviour)
    assert time.monotonic() - started < 30.0  # half of the shortest deadline: nobody waited for one
    assert type(caught.value) is error
    report = caught.value.report
    assert report is not None
    assert report.phase == phase
    assert report.pid is not None
    with pytest.raises(ProcessLookupError):
        os.kill(report.pid, 0)


@pytest.mark.parametrize("behaviour", IN_A_STEP)
def test_in_a_step_the_fault_is_named(open_rogue: Open, behaviour: str) -> None:
    error, text = IN_A_STEP[behaviour]
    sim = open_rogue(behaviour)
    started = time.monotonic()
    with pytest.raises(OutboardError, match=text) as caught:
        sim.step([[0.0]] * 3)
    assert time.monotonic() - started < 2.0
    assert type(caught.value) is error
    assert sim.report["phase"] == "FAILED"


@pytest.mark.parametrize("behaviour", HARMLESS)
def test_what_a_worker_can_write_into_the_block_does_not_mislead_the_host(
    open_rogue: Open, behaviour: str
) -> None:
    sim = open_rogue(behaviour)
    state = sim.step(np.zeros((3, 1), np.float32))
    assert state.qpos.shape == (3, 1)
    assert sim.timings.commands == 1
    with pytest.raises(WorkerTimeout):
        sim.step()


def test_a_reply_of_another_kind_is_refused(open_rogue: Open) -> None:
    sim = open_rogue("reply to mail of another kind")
    with pytest.raises(ProtocolError, match="the worker sent Ready in phase BUSY"):
        sim.where()


@pytest.mark.parametrize("behaviour", ["another version", "READY with another nonce"])
def test_an_old_python_is_no_less_refused(
    open_rogue: Callable[..., FakeBackend], behaviour: str, python38: str
) -> None:
    with pytest.raises(ProtocolError):
        open_rogue(behaviour, python38)
