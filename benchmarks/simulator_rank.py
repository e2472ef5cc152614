"""One rank of `bench_simulators.py`: a simulator on the planned GPU and a learner's arithmetic beside it.

All ranks open, meet, and run in rounds as `schedule` says: each alone, some together, all. A round in which a
rank does not run it waits in, with its simulator open. What it measured goes to a file.
"""

from __future__ import annotations

import datetime
import json
import os
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from outboard.backends import Backend, RankPlan, plan_together, registry


def learner_step(sim: Backend) -> Any:
    """A step with targets that follow from the last state on the GPU; nobody waits."""
    view, nu = sim.torch, sim.model.nu
    base = torch.tensor(sim.model.default_ctrl, dtype=torch.float32, device=view.device)
    gain = 0.01

    def step() -> None:
        view.step(base + gain * view.qvel[:, -nu:])

    return step


def finish(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def timed(step: Any, count: int, device: torch.device) -> float:
    """Seconds per step of `count`, waited for before and at the end."""
    finish(device)
    started = time.perf_counter()
    for _ in range(count):
        step()
    finish(device)
    return (time.perf_counter() - started) / count


def schedule(count: int) -> list[list[int]]:
    """Which ranks run in each round: each alone, then 2, 4, ... together, all; and all that once more."""
    alone = [[rank] for rank in range(count)]
    sizes = [size for size in (2, 4, 8, 16) if size < count]
    together = [list(range(size)) for size in (*sizes, count)]
    return 2 * [*alone, *together]


def run(folder: Path, args: Any) -> int:
    if args.device == "cpu":  # a rehearsal: everything but the GPU
        plan = RankPlan.explicit(int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), "cpu")
    else:
        plan = plan_together(timeout_s=120.0)
        plan.activate()
    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=300))
    rank, count = dist.get_rank(), dist.get_world_size()
    mine: dict[str, Any] = {"rank": rank, "pid": os.getpid(), "planned": plan.device.device.uuid}
    with registry.find(args.simulator)(
        device=plan.device,
        scene=args.scene,
        num_envs=args.rank_envs,
        rank=plan.rank,
        seed=plan.seed(1),
        worker_python=args.worker_python or None,
        check_finite=False,
    ) as sim:
        step = learner_step(sim)
        sim.torch.reset()
        timed(step, 20, sim.torch.device)
        rounds: list[dict[str, Any]] = []
        for running in schedule(count):
            dist.barrier()
            if rank in running:
                sim.torch.reset()
                seconds = timed(step, args.steps, sim.torch.device)
                rounds.append({"running": running, "ms": seconds * 1e3})
        report = sim.report
        learner = ""
        if sim.torch.device.type == "cuda":
            learner = f"GPU-{torch.cuda.get_device_properties(torch.cuda.current_device()).uuid}"
        mine.update(
            rounds=rounds,
            worker_pid=report["pid"],
            python=report["python"],
            engine=report["engine"],
            transport=report["transport"],
            reported=report["device_report"]["uuid"],
            buffer=report["device_report"]["buffer"],
            kind=report["device_report"]["evidence"],
            learner=learner,
            evidence=sim.where(),
            witness=report["witness"],
            opened_s=round(report["opened_s"], 2),
        )
        part = folder / f"rank{rank}.part"
        part.write_text(json.dumps(mine))
        part.rename(folder / f"rank{rank}.json")
        end = time.monotonic() + 60
        while not (folder / "go").exists() and time.monotonic() < end:
            time.sleep(0.02)
    dist.destroy_process_group()
    return 0
