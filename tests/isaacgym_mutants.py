"""Runs the Isaac Gym worker with one mistake in it, over the stand-in, and tells what came of that.

Run under Python 3.8: `isaacgym_mutants.py JOBS.json OUT.json`. One fork per job, since a process has one
simulation. A job is {"edits": [[module, old, new], ...], "settings": text, "pipeline": "cpu" or "gpu",
"scene": name, "torch": bool, "lives": int}; its result is {"end": "ok", "differs", "raised" or the name of a
signal, "said": text, "log": text}.
"""

# pyright: reportMissingImports=false, reportMissingModuleSource=false

from __future__ import annotations

import importlib
import importlib.util
import json
import os
import signal
import sys
import tempfile
import traceback
import types
from typing import Any

import numpy as np

from direct import Direct
from outboard.ipc.device import CPU, GPU, PlannedDevice
from outboard.ipc.layout import PUBLISHABLE

UUID = "GPU-ce08eab0-0000-4000-8000-000000000006"
NUM_ENVS = 3


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
    origins = np.frombuffer(facts.env_origins or bytes(12 * NUM_ENVS), "<f4").reshape(-1, 3)
    flat = bool(origins[:, 2].any())
    result = {name: np.stack([frame[name] for frame in frames]) for name in frames[0]}
    return {**result, "origins_off_the_ground": np.array([flat], np.float32)}


def edited(module: str, edits: list[list[str]]) -> types.ModuleType:
    """The module `outboard.workers.MODULE`, its source edited."""
    name = f"outboard.workers.{module}"
    spec = importlib.util.find_spec(name)
    assert spec is not None and spec.origin is not None
    with open(spec.origin, encoding="utf-8") as file:
        source = file.read()
    for _, old, new in edits:
        if old not in source:
            raise LookupError(f"{module} has no {old!r} any more")
        source = source.replace(old, new)
    made = types.ModuleType(name)
    made.__package__, made.__file__ = "outboard.workers", spec.origin
    exec(compile(source, spec.origin, "exec"), made.__dict__)
    return made


# From the leaves up, so that each imports the ones before it as they are edited.
ORDER = ("engine_log", "contract", "kinematics", "isaacgym_frames", "isaacgym_tensors",
         "isaacgym_properties", "isaacgym_build", "isaacgym_state", "isaacgym_worker")  # fmt: skip

# Without a driver: the bridge over host memory, which calls itself GPU 0.
NO_DRIVER = [
    ["isaacgym_tensors", "return DriverBridge(gymapi, tensor.data_address, tensor.device)",
     "bridge = HostBridge(gymapi); bridge._device = 0; return bridge"],
    ["isaacgym_worker", "        device_probe.check_device(init)\n", ""],
]  # fmt: skip


def simulator(edits: list[list[str]]) -> Any:
    package = importlib.import_module("outboard.workers")
    for module in ORDER:
        mine = [edit for edit in edits if edit[0] == module]
        if mine:
            made = edited(module, mine)
            sys.modules[made.__name__] = made
            setattr(package, module, made)
        else:
            importlib.import_module(f"outboard.workers.{module}")
    return sys.modules["outboard.workers.isaacgym_worker"].IsaacGymSimulator


def run(job: dict[str, Any], scenes: dict[str, Any], reference: str) -> dict[str, str]:
    gpu, scene = job["pipeline"] == "gpu", scenes[job["scene"]]
    os.environ["ISAACGYM_STANDIN"] = "gpu=host;" + job["settings"]
    os.environ["CUDA_VISIBLE_DEVICES"] = UUID if gpu else ""
    if job["torch"]:
        sys.modules["torch"] = types.ModuleType("torch")
    device = PlannedDevice(GPU, UUID, "cuda:0") if gpu else PlannedDevice(CPU, "", CPU)
    cls = simulator(job["edits"] + (NO_DRIVER if gpu else []))
    frames: dict[str, np.ndarray] = {}
    for _ in range(job["lives"]):
        with Direct(
            cls, scene["flat"], NUM_ENVS, options=scene["options"], device=device, decimation=2,
            publish=PUBLISHABLE,
        ) as sim:  # fmt: skip
            frames = scenario(sim)
    with np.load(f"{reference}-{job['scene']}.npz") as wanted:
        for name in frames:
            want = wanted[name]
            scale = np.abs(want).max() if name == "contact_force" else 1.0
            if not np.allclose(frames[name], want, rtol=0, atol=1e-4 * max(1.0, scale)):
                off = np.abs(frames[name] - want).reshape(len(want), -1).max(axis=1)
                at = int(np.argmax(~(off <= 1e-4 * max(1.0, scale))))
                return {"end": "differs", "said": f"{name} in frame {at} by {off[at]:.3g}"}
    return {"end": "ok", "said": ""}


def forked(job: dict[str, Any], scenes: dict[str, Any], reference: str) -> dict[str, str]:
    with tempfile.TemporaryFile() as said, tempfile.TemporaryFile() as log:
        pid = os.fork()
        if pid == 0:
            os.dup2(log.fileno(), 1)
            os.dup2(log.fileno(), 2)
            try:
                result = run(job, scenes, reference)
            except BaseException as error:  # noqa: BLE001 - whatever it is, it is the result
                traceback.print_exc()
                result = {"end": "raised", "said": f"{type(error).__name__}: {error}"}
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


def main(argv: list[str]) -> None:
    with open(argv[0], encoding="utf-8") as file:
        work = json.load(file)
    if "jobs" in work:
        importlib.import_module("mujoco")  # once, for all forks

        results = [forked(job, work["scenes"], work["reference"]) for job in work["jobs"]]
        with open(argv[1], "w", encoding="utf-8") as file:
            json.dump(results, file)
        return
    for name, scene in work[
        "scenes"
    ].items():  # the reference: MuJoCo's own worker, the model as it is
        with Direct(
            "mujoco", scene["original"], NUM_ENVS, decimation=2, publish=PUBLISHABLE
        ) as sim:
            frames: Any = scenario(sim)
            np.savez(f"{work['reference']}-{name}.npz", **frames)


if __name__ == "__main__":
    main(sys.argv[1:])
