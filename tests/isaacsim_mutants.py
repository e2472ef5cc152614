"""Runs the Isaac Sim worker with one mistake in it, over the stand-in: `isaacsim_mutants.py JOBS.json
OUT.json`.

A job is that of `mutants.py`; its result is {"end": "ok", "differs", "raised" or the name of a signal,
"said": text, "log": text}.
"""

# pyright: reportMissingImports=false

from __future__ import annotations

import functools
import importlib
import json
import os
import signal
import sys
import tempfile
import time
from typing import Any

from direct import Direct
from mutants import DIFFERS, NUM_ENVS, OK, compare, forked, install, scenario
from outboard.ipc.device import CPU, GPU, PlannedDevice
from outboard.ipc.layout import PUBLISHABLE

UUID = "GPU-ce08eab0-0000-4000-8000-000000000006"

# A plan for a GPU on a machine without one: the driver is not asked.
NO_DRIVER = [["isaacsim_worker", "        device_probe.check_device(init)\n", ""]]


def run(job: dict[str, Any], scenes: dict[str, Any], reference: str) -> dict[str, str]:
    gpu, scene = job["pipeline"] == "gpu", scenes[job["scene"]]
    os.environ["ISAACSIM_STANDIN"] = "close=return;" + job["settings"]
    os.environ["OMNI_KIT_ACCEPT_EULA"] = "YES"
    os.environ.update(job["env"])
    work_folder = os.path.dirname(reference)
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    sys.argv = ["worker", "--fd", "200", "--simulator", "isaacsim"]  # as a worker's are
    device = PlannedDevice(GPU, UUID, "cuda:0") if gpu else PlannedDevice(CPU, "", CPU)
    install(job["edits"] + (NO_DRIVER if gpu else []))
    module = importlib.import_module("outboard.workers.isaacsim_worker")
    # A cache of its own: a mistake in the import must not outlive its job.
    options = {**scene["options"], "usd_cache": tempfile.mkdtemp(prefix="usd-", dir=work_folder)}
    sim = Direct(
        module.IsaacSimSimulator, scene["flat"], NUM_ENVS, options=options, device=device,
        decimation=2, publish=PUBLISHABLE, render=job["render"],
    )  # fmt: skip
    if job["signal"]:
        signal.alarm(5)  # a handler that hangs ends by this one
        os.kill(os.getpid(), job["signal"])
        time.sleep(10)
    if job["render"]:
        picture = sim.render(1, width=40, height=30)
        seen = f"{picture.shape} {picture[0, 0].tolist()}"
        return {"end": OK if picture[..., 0].all() else DIFFERS, "said": seen}
    return compare(scenario(sim), f"{reference}-{job['scene']}.npz")


def main(argv: list[str]) -> None:
    with open(argv[0], encoding="utf-8") as file:
        work = json.load(file)
    if "jobs" in work:
        for name in ("mujoco", "torch"):  # once, for all forks; not pxr, which must come after Kit
            importlib.import_module(name)
        importlib.import_module("torch").set_num_threads(1)
        results = [
            forked(functools.partial(run, job, work["scenes"], work["reference"]))
            for job in work["jobs"]
        ]
        with open(argv[1], "w", encoding="utf-8") as file:
            json.dump(results, file)
        return
    import numpy as np

    for name, scene in work["scenes"].items():  # the reference: MuJoCo's own worker
        with Direct(
            "mujoco", scene["original"], NUM_ENVS, decimation=2, publish=PUBLISHABLE
        ) as sim:
            frames: Any = scenario(sim)
            np.savez(f"{work['reference']}-{name}.npz", **frames)


if __name__ == "__main__":
    main(sys.argv[1:])
