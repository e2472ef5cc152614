"""`outboard doctor --probe isaacgym`: what nobody here knows of Isaac Gym, and a real installation can tell.

The list is part of the output, so that whoever runs it knows what each answer means. The cheap ones are
run through the public API, on the CPU and, where there is a GPU, on `cuda:0`; the others say so.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass

import click
import numpy as np
from rich.console import Console
from rich.markup import escape

from ..ipc.errors import OutboardError, WorkerLaunchError
from . import examination, isaacgym_check, isaacgym_home, terminal
from .isaacgym import IsaacGymBackend

_SCENE = "humanoid29"
_STEPS = 20
# A pose written in by set_state; far above what 20 steps of falling could mix up with it.
_LIFT_M, _TURN_RAD = 1.0, 0.1
SEND = (
    "To send the result: outboard doctor --probe isaacgym --json > probes.json, and attach that file, the "
    "GPU's name and the driver's version to an issue of Outboard. It holds no names of users or machines, "
    "but paths of the installation; look through it first."
)


@dataclass(frozen=True)
class Probe:
    """`number`s are fixed: results that are sent refer to them."""

    number: int
    question: str
    shows: str  # what the answer would settle
    by_hand: str = ""  # "" when it is run here, else why it is not


PROBES = (
    Probe(1, "In which CUDA context lie Gym's buffers, and is a read right after a refresh ever old?",
          "whether the driver bridge must synchronise", "takes 100,000 steps, twice"),
    Probe(2, "Do the setters take a tensor that the driver bridge made?",
          "whether tensor_bridge=\"driver\" can stay the default"),
    Probe(3, "Do joint limits survive their setter?", "whether enforce_joint_limits does what it says"),
    Probe(4, "Is the joint friction a force or a coefficient?",
          "whether frictionloss can be reproduced", "needs the free swing of one joint beside MuJoCo's"),
    Probe(5, "Does the importer keep the inertial quaternion, joint pos, shape sizes and mesh pose?",
          "whether the flat MJCF is read as it was written", "needs torque tests, joint by joint"),
    Probe(6, "Do shapes that only show, and contype/conaffinity, collide?",
          "whether what does not collide in MuJoCo does not collide there", "needs a scene of its own"),
    Probe(7, "Are positions told in the environment's frame or in the world's?",
          "whether env_origins must be taken off"),
    Probe(8, "Are pictures RGBA or BGRA, and can a camera be made after prepare_sim?",
          "what a renderer would need", "the worker runs without graphics"),
    Probe(9, "Can a centre of mass be changed on the GPU pipeline?",
          "whether it can be randomised at run time", "needs an engine of its own: it may end the process"),
    Probe(10, "What does create_sim do with GPU 1 under a mask of one GPU?",
          "which manner of a wrong device is real: None, SIGSEGV or a log line",
          "may end the process; nothing of ours asks for such a GPU"),
    Probe(11, 'Does the CPU pipeline start with CUDA_VISIBLE_DEVICES=""?',
          'whether device="cpu" can hide every GPU'),
)  # fmt: skip


def run(as_json: bool, worker_python: str | None) -> int:
    """The command; 0 when an installation was found and could be asked."""
    try:
        found = isaacgym_home.find(os.environ, worker_python)
        silent = ""
    except WorkerLaunchError as error:
        found, silent = None, error.message
    answers: dict[int, list[str]] = {}
    facts: dict[str, list[str]] = {}
    if found is not None:
        seen = isaacgym_check.check(found, os.environ)
        facts["found by"] = list(found.why)
        silent = isaacgym_check.with_help(seen.failed) if seen.failed else ""
    if found is not None and not silent:
        gpus = examination.gpu_facts()
        facts["GPUs"] = [gpu.name for gpu in gpus.driver] or [gpus.driver_silent]
        for device in ("cpu", "cuda:0") if gpus.visible else ("cpu",):
            ask(device, worker_python, answers, facts)
    if as_json:
        rows = {str(one.number): answers.get(one.number, []) for one in PROBES}
        click.echo(json.dumps({"silent": silent, "facts": facts, "answers": rows}, indent=2))
    else:
        show(answers, facts, silent, terminal.console())
    return 1 if silent else 0


def ask(
    device: str, python: str | None, answers: dict[int, list[str]], facts: dict[str, list[str]]
) -> None:
    """One worker, two environments. What fails is an answer too."""

    def say(number: int, words: str) -> None:
        answers.setdefault(number, []).append(f"{device}: {words}")

    try:
        with IsaacGymBackend(device=device, scene=_SCENE, num_envs=2, worker_python=python) as sim:
            facts[device] = [*map(str, sim.report["notes"]), *sim.model.not_reproduced]
            if device == "cpu":
                say(11, "it starts")
            for words in facts[device]:
                if words.startswith("joint limits"):
                    say(3, words)
            ctrl = np.tile(sim.model.default_ctrl.astype(np.float32), (2, 1))
            state = sim.reset()
            for _ in range(_STEPS):
                state = sim.step(ctrl)
            apart = state.qpos[1, :2] - state.qpos[0, :2]
            origins = sim.model.env_origins[1, :2] - sim.model.env_origins[0, :2]
            say(7, f"environment 1 is told {np.round(apart, 4).tolist()} m beside environment 0, and "
                f"their origins are {np.round(origins, 4).tolist()} m apart")  # fmt: skip
            qpos = sim.model.default_qpos.copy()
            qpos[2] += _LIFT_M
            qpos[7] += _TURN_RAD
            sim.set_state([1], qpos, np.zeros(sim.model.nv))
            state = sim.step(ctrl)
            kept = state.qpos[1, 2] - qpos[2], state.qpos[1, 7] - qpos[7]
            say(2, f"one step after set_state the root is {kept[0]:+.4f} m and the first joint "
                f"{kept[1]:+.4f} rad from where they were put")  # fmt: skip
    except OutboardError as error:
        facts.setdefault(device, []).append(f"failed: {error.message}")
        say(11 if device == "cpu" else 2, f"failed: {error.message}")


def show(
    answers: dict[int, list[str]], facts: dict[str, list[str]], silent: str, console: Console
) -> None:
    if silent:
        console.print(f"Nothing was asked: {escape(silent)}", soft_wrap=True)
    for name, lines in facts.items():
        for line in lines:
            console.print(f"{name}: {escape(line)}", soft_wrap=True)
    for one in PROBES:
        console.print(f"[bold]{one.number:2}[/] {escape(one.question)}", soft_wrap=True)
        console.print(f"   shows {escape(one.shows)}", soft_wrap=True)
        if one.by_hand:
            console.print(f"   not asked here: {escape(one.by_hand)}", soft_wrap=True)
        for line in answers.get(one.number, () if one.by_hand else ("no answer",)):
            console.print(f"   [green]->[/] {escape(line)}", soft_wrap=True)
    console.print(SEND, soft_wrap=True)
