"""The placement proof: every rank's simulator on its planned GPU, shown from three sides.

    python benchmarks/placement.py --worker-python PATH [--simulator fake] [--json PATH]

For each scenario it starts one process per GPU, as a launcher would, and each of those opens a worker. While
all of them live it compares the plan's UUID, the UUID that the worker measured on its state buffer, the UUID
of the rank's own torch device, and NVML's lists of who has a context where. The scenarios that must fail
(the original defect) must be refused before a worker starts. Exit code 1 when anything is not as it must be.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from outboard.backends import Backend, OutboardError, RankPlan, plan_together, witness
from outboard.backends.registry import default_scene, find

SELF = Path(__file__).resolve()
HOLD_S = 120.0


@dataclass(frozen=True)
class Scenario:
    """How the ranks are started, and what must come of it."""

    name: str
    device: str  # what the rank's code does: "plan", "literal" (device="cuda:0"), "together"
    refused: str = ""  # "" when every rank must run, else the ranks that must not: "all", "others"
    launcher: str = "torchrun"  # or "plain": variables set by hand, LOCAL_RANK=0 everywhere
    masks: list[str] | None = None  # per rank for "plain", one for all for "torchrun"


def scenarios(uuids: list[str]) -> list[Scenario]:
    count = len(uuids)
    back = [str(i) for i in reversed(range(count))]
    each = [str(i) for i in range(count)]
    return [
        Scenario("torchrun, no mask", "plan"),
        Scenario("torchrun, mask reversed", "plan", masks=[",".join(back)]),
        Scenario("torchrun, UUID mask reversed", "plan", masks=[",".join(reversed(uuids))]),
        Scenario("one GPU per rank, LOCAL_RANK=0", "plan", launcher="plain", masks=each),
        Scenario("defect: literal cuda:0", "literal", refused="others"),
        Scenario(
            "defect: all masked to GPU 0, compared", "together", "all", "plain", ["0"] * count
        ),
        Scenario(
            "defect: all masked to GPU 0, not compared", "plan", "others", "plain", ["0"] * count
        ),
    ]


# -- one rank --------------------------------------------------------------------------------------


def rank_main(folder: Path, device: str, worker_python: str, simulator: str) -> int:
    """What a training process does; writes what it found to `folder`."""
    rank = int(os.environ["RANK"])
    mine: dict[str, Any] = {"rank": rank, "pid": os.getpid(), "worker_pid": None, "error": ""}
    try:
        if device == "literal":
            opened = _open("cuda:0", worker_python, simulator, seed=rank)
        elif device == "together":
            plan = plan_together(timeout_s=60.0)
            opened = _open(plan.device, worker_python, simulator, seed=plan.seed(1))
        else:
            plan = RankPlan.from_env()
            mine["planned"], mine["why"] = plan.device.device.uuid, plan.why
            mine["learner"] = _learner(plan)
            opened = _open(plan.device, worker_python, simulator, seed=plan.seed(1))
        with opened as sim:
            sim.step(sim.ctrl_view)
            report = sim.report
            mine.update(
                worker_pid=report["pid"],
                python=report["python"],
                reported=report["device_report"]["uuid"],
                local=report["device_report"]["local"],
                evidence=sim.where(),
                witness=report["witness"],
            )
            _write(folder, rank, mine)
            _wait_for(folder / "go", HOLD_S)
    except OutboardError as error:
        mine["error"] = f"{type(error).__name__}: {error.message}"
        _write(folder, rank, mine)
        _wait_for(folder / "go", HOLD_S)
    return 0


def _open(device: Any, worker_python: str, simulator: str, seed: int) -> Backend:
    passed = {k: v for k, v in os.environ.items() if k.startswith("OUTBOARD_STANDIN_")}
    return find(simulator)(
        device=device,
        scene=default_scene(simulator),
        num_envs=64,
        seed=seed,
        worker_python=worker_python or None,
        env=passed,
    )


def _learner(plan: RankPlan) -> str:
    """The UUID of this rank's torch device, on which it takes a context as a learner does; "" where
    torch sees no GPU (the stand-in)."""
    try:
        import torch
    except ImportError:
        return ""
    if not torch.cuda.is_available():
        return ""
    plan.activate()
    torch.zeros(1, device=plan.torch_device)
    return f"GPU-{torch.cuda.get_device_properties(torch.cuda.current_device()).uuid}"


def _write(folder: Path, rank: int, data: dict[str, Any]) -> None:
    part = folder / f"rank{rank}.part"
    part.write_text(json.dumps(data))
    part.rename(folder / f"rank{rank}.json")


def _wait_for(path: Path, seconds: float) -> bool:
    end = time.monotonic() + seconds
    while not path.exists() and time.monotonic() < end:
        time.sleep(0.02)
    return path.exists()


# -- all ranks -------------------------------------------------------------------------------------


def start(scenario: Scenario, count: int, argv: list[str]) -> list[subprocess.Popen[bytes]]:
    env = {k: v for k, v in os.environ.items() if k != "CUDA_VISIBLE_DEVICES"}
    if scenario.launcher == "torchrun":
        if scenario.masks:
            env["CUDA_VISIBLE_DEVICES"] = scenario.masks[0]
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        return [
            subprocess.Popen([*torchrun, f"--nproc-per-node={count}", *argv], env=env),
        ]
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    processes: list[subprocess.Popen[bytes]] = []
    for rank in range(count):
        own = {
            **env,
            "RANK": str(rank),
            "WORLD_SIZE": str(count),
            "LOCAL_RANK": "0",
            "LOCAL_WORLD_SIZE": "1",
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": port,
            "CUDA_VISIBLE_DEVICES": (scenario.masks or [])[rank],
        }
        processes.append(subprocess.Popen([sys.executable, *argv], env=own))
    return processes


def run(scenario: Scenario, uuids: list[str], worker_python: str, simulator: str) -> dict[str, Any]:
    """Start the ranks, look at them from outside while they live, let them go."""
    count = len(uuids)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        argv = [str(SELF), "--rank", name, "--device", scenario.device, "--simulator", simulator]
        argv += ["--worker-python", worker_python]
        started_s = time.monotonic()
        processes = start(scenario, count, argv)
        try:
            files = [folder / f"rank{rank}.json" for rank in range(count)]
            complete = all(_wait_for(file, HOLD_S) for file in files)
            seen = {uuid: sorted(pids) for uuid, pids in witness.pids_by_gpu().items()}
            ranks = [json.loads(file.read_text()) for file in files if file.exists()]
        finally:
            (folder / "go").touch()
            for process in processes:
                process.wait(60)
    wrong = [] if complete else ["not every rank answered"]
    for rank in ranks:
        wrong.extend(_judge(rank, scenario, seen))
    return {
        "scenario": scenario.name,
        "as_it_should_be": not wrong,
        "wrong": wrong,
        "seconds": round(time.monotonic() - started_s, 1),
        "ranks": [public(rank, seen) for rank in ranks],
    }


def _judge(rank: dict[str, Any], scenario: Scenario, seen: dict[str, list[int]]) -> list[str]:
    name = f"rank {rank['rank']}"
    # Of several that want one GPU one may have it; which one is a matter of who comes first.
    must_fail = scenario.refused == "all"
    if scenario.refused == "others":
        return (
            [] if rank["error"] or rank["worker_pid"] else [f"{name} neither ran nor was refused"]
        )
    if must_fail:
        return [] if rank["error"] and not rank["worker_pid"] else [f"{name} was not refused"]
    if rank["error"]:
        return [f"{name}: {rank['error']}"]
    return judge_running(rank, seen)


def judge_running(rank: dict[str, Any], seen: dict[str, list[int]]) -> list[str]:
    """What is wrong with a rank whose simulator runs. seen: by GPU, the pids that NVML lists there."""
    wrong: list[str] = []
    name = f"rank {rank['rank']}"
    for what in ("reported", "learner"):
        if rank[what] and rank[what] != rank["planned"]:
            wrong.append(f"{name}: {what} {rank[what]}, planned {rank['planned']}")
    for pid in (rank["pid"], rank["worker_pid"]):
        on = [uuid for uuid, pids in seen.items() if pid in pids]
        if [uuid for uuid in on if uuid != rank["planned"]]:
            wrong.append(f"{name}: NVML sees pid {pid} on {on}")
    return wrong


def public(rank: dict[str, Any], seen: dict[str, list[int]]) -> dict[str, Any]:
    """Without pids, with where NVML saw them."""
    on = {
        who: [uuid for uuid, pids in seen.items() if rank[who] in pids]
        for who in ("pid", "worker_pid")
    }
    rest = {key: value for key, value in rank.items() if key not in on}
    rest["error"] = str(rest.get("error", "")).replace(socket.gethostname(), "HOST")
    return {**rest, "nvml_rank": on["pid"], "nvml_worker": on["worker_pid"]}


def check_running(results: list[dict[str, Any]]) -> None:
    """Of the defects that are stopped by the lock or the launcher check, at most one rank may run."""
    for result in results:
        running = [rank for rank in result["ranks"] if not rank["error"]]
        gpus = [rank.get("reported") for rank in running]
        if len(set(gpus)) != len(gpus):
            result["as_it_should_be"] = False
            result["wrong"].append(f"{len(gpus)} ranks ran on {len(set(gpus))} GPUs")


def markdown(facts: dict[str, Any]) -> str:
    """The result as a page. UUIDs are cut to their first eight digits."""
    names = ", ".join(f"{gpu['uuid'][:12]} {gpu['name']}" for gpu in facts["gpus"])
    lines = [
        "# Placement proof",
        "",
        f"Simulator `{facts['simulator']}`, GPUs {names}. Made by:",
        "",
        f"    python benchmarks/placement.py --worker-python PYTHON38 --simulator {facts['simulator']} \\",
        "        --json benchmarks/results/placement.json --markdown benchmarks/results/placement.md",
        "",
        "Every UUID is measured: planned by the launcher's variables, learner from the rank's torch, state",
        "from the driver by the address of the worker's state buffer, NVML from the lists of all GPUs.",
        "",
        "| scenario | rank | planned | learner | state | NVML: rank | NVML: worker | worker | verdict |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for result in facts["results"]:
        for rank in result["ranks"]:
            where = [(rank.get(key) or "")[:12] for key in ("planned", "learner", "reported")]
            where += [", ".join(uuid[:12] for uuid in rank[key]) for key in _NVML]
            worker = (
                f"Python {rank['python']}, {rank['local']}" if rank.get("python") else "not started"
            )
            verdict = rank["error"].split(";")[0].split(". ")[0][:160].replace("\n", " ") or "runs"
            cells = [result["scenario"], str(rank["rank"]), *(cell[:30] for cell in where)]
            lines.append("| " + " | ".join([*(c[:60] for c in cells), worker, verdict]) + " |")
    good = all(result["as_it_should_be"] for result in facts["results"])
    lines += [
        "",
        "All scenarios ended as they should." if good else "**Not all ended as they should.**",
        "",
    ]
    return "\n".join(lines)


_NVML = ("nvml_rank", "nvml_worker")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--rank", default="", help=argparse.SUPPRESS)
    parser.add_argument("--device", default="plan", help=argparse.SUPPRESS)
    parser.add_argument("--worker-python", default="")
    parser.add_argument("--simulator", default="fake")
    parser.add_argument("--json", default="")
    parser.add_argument("--markdown", default="")
    parser.add_argument("--without-torchrun", action="store_true", help="where torch is missing")
    args = parser.parse_args()
    if args.rank:
        return rank_main(Path(args.rank), args.device, args.worker_python, args.simulator)
    gpus, why_not = witness.inventory()
    if len(gpus) < 2:
        print(f"needs two GPUs, sees {len(gpus)} {why_not}", file=sys.stderr)
        return 2
    results: list[dict[str, Any]] = []
    for scenario in scenarios([gpu.uuid for gpu in gpus]):
        if scenario.launcher == "torchrun" and args.without_torchrun:
            continue
        result = run(scenario, [gpu.uuid for gpu in gpus], args.worker_python, args.simulator)
        results.append(result)
    check_running(results)
    for result in results:
        print("ok  " if result["as_it_should_be"] else "FAIL", result["scenario"], result["wrong"])
    facts = {
        "gpus": [{"uuid": gpu.uuid, "name": gpu.name, "pci": gpu.pci} for gpu in gpus],
        "simulator": args.simulator,
        "results": results,
    }
    if args.json:
        Path(args.json).write_text(json.dumps(facts, indent=1) + "\n")
    if args.markdown:
        Path(args.markdown).write_text(markdown(facts))
    return 0 if all(result["as_it_should_be"] for result in results) else 1


if __name__ == "__main__":
    sys.exit(main())
