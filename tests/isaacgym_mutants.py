"""Runs the Isaac Gym worker with one mistake in it, over the stand-in, and tells what came of that.

Run under Python 3.8: `isaacgym_mutants.py JOBS.json OUT.json`. One fork per job, since a process has one
simulation. A job is {"edits": [[module, old, new], ...], "settings": text, "pipeline": "cpu" or "gpu",
"scene": name, "torch": bool, "lives": int}; its result is {"end": "ok", "differs", "raised" or the name of a
signal, "said": text, "log": text}.
"""

# pyright: reportMissingImports=false, reportMissingModuleSource=false

from __future__ import annotations

import functools
import importlib
import json
import os
import sys
import types
from typing import Any

import numpy as np

from direct import Direct
from mutants import NUM_ENVS, compare, forked, install, scenario
from outboard.ipc.device import CPU, GPU, PlannedDevice
from outboard.ipc.layout import PUBLISHABLE

UUID = "GPU-ce08eab0-0000-4000-8000-000000000006"

# Without a driver: the bridge over host memory, which calls itself GPU 0.
NO_DRIVER = [
    ["isaacgym_tensors", "return DriverBridge(gymapi, tensor.data_address, tensor.device)",
     "bridge = HostBridge(gymapi); bridge._device = 0; return bridge"],
    ["isaacgym_worker", "        device_probe.check_device(init)\n", ""],
]  # fmt: skip


def run(job: dict[str, Any], scenes: dict[str, Any], reference: str) -> dict[str, str]:
    gpu, scene = job["pipeline"] == "gpu", scenes[job["scene"]]
    os.environ["ISAACGYM_STANDIN"] = "gpu=host;" + job["settings"]
    os.environ["CUDA_VISIBLE_DEVICES"] = UUID if gpu else ""
    if job["torch"]:
        sys.modules["torch"] = types.ModuleType("torch")
    device = PlannedDevice(GPU, UUID, "cuda:0") if gpu else PlannedDevice(CPU, "", CPU)
    install(job["edits"] + (NO_DRIVER if gpu else []))
    module = importlib.import_module("outboard.workers.isaacgym_worker")
    frames: dict[str, np.ndarray] = {}
    for _ in range(job["lives"]):
        with Direct(
            module.IsaacGymSimulator, scene["flat"], NUM_ENVS, options=scene["options"],
            device=device, decimation=2, publish=PUBLISHABLE,
        ) as sim:  # fmt: skip
            frames = scenario(sim)
    return compare(frames, f"{reference}-{job['scene']}.npz")


def main(argv: list[str]) -> None:
    with open(argv[0], encoding="utf-8") as file:
        work = json.load(file)
    if "jobs" in work:
        importlib.import_module("mujoco")  # once, for all forks

        results = [
            forked(functools.partial(run, job, work["scenes"], work["reference"]))
            for job in work["jobs"]
        ]
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
