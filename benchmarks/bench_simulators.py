"""A real GPU simulator, end to end: where several ranks are, how fast, and what another process costs.

    python benchmarks/bench_simulators.py --simulator mjwarp --worker-python PATH [--json PATH]

ranks      one rank per GPU under torchrun, each with a simulator and a learner's arithmetic: planned UUID,
           reported, and the learner's; NVML's lists of all GPUs while they live; each rank's throughput
           alone (the others wait, open) and with 2, 4, ... all running. Needs two GPUs.
defects    every rank narrowed to GPU 0, compared with one another and not: must be refused.
hand-over  milliseconds per step, out of process through the arena against the same simulator in this
           process, in turn; both compute new targets from the state on the GPU in each step, and nobody
           waits until the end.

Exit code 1 when a placement is not as it must be. Speed is reported and not judged.
"""

from __future__ import annotations

import argparse
import json
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import in_process
import placement
import simulator_rank

from outboard.backends import registry, witness
from outboard.backends.arguments import find_scene

SELF = Path(__file__).resolve()
PARTS = ("ranks", "defects", "hand-over")
# The goals of the work this belongs to.
GOAL_ALONE, GOAL_IN_PROCESS = 0.03, 1.05
_RANKS_S = 420.0


# -- ranks -----------------------------------------------------------------------------------------


def ranks(args: Any, count: int) -> dict[str, Any]:
    """Start one rank per GPU, look at them from outside while they live, and let them go."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        command = [
            *(sys.executable, "-m", "torch.distributed.run", "--standalone"),
            *(f"--nproc-per-node={count}", str(SELF), "--rank", name),
            *("--simulator", args.simulator, "--scene", args.scene),
            *("--worker-python", args.worker_python, "--steps", str(args.steps)),
            *("--rank-envs", str(args.rank_envs), "--device", args.device),
        ]
        started_s = time.monotonic()
        launcher = subprocess.Popen(command)
        files = [folder / f"rank{rank}.json" for rank in range(count)]
        try:
            end = started_s + _RANKS_S
            while not all(file.exists() for file in files) and launcher.poll() is None:
                if time.monotonic() > end:
                    launcher.kill()
                    break
                time.sleep(0.1)
            seen = {uuid: sorted(pids) for uuid, pids in witness.pids_by_gpu().items()}
            found = [json.loads(file.read_text()) for file in files if file.exists()]
        finally:
            (folder / "go").touch()
            launcher.wait(90)
    wrong = [] if len(found) == count else [f"{count - len(found)} ranks did not answer"]
    for rank in found:
        wrong += placement.judge_running(rank, seen)
    on_cpu = args.device == "cpu"
    if len({rank["reported"] for rank in found}) != len(found) and not on_cpu:
        wrong.append("two ranks are on one GPU")
    return {
        "as_it_should_be": not wrong,
        "wrong": wrong,
        "seconds": round(time.monotonic() - started_s, 1),
        "ranks": [placement.public(rank, seen) for rank in found],
        "throughput": throughput(found, args.rank_envs) if not wrong else {},
    }


def throughput(found: list[dict[str, Any]], num_envs: int) -> dict[str, Any]:
    """Milliseconds per step of each rank alone and with all, the better of its rounds; environment steps
    per second of the whole by how many run."""
    everyone = sorted(rank["rank"] for rank in found)
    best: dict[int, dict[int, float]] = {}  # rank -> how many run -> ms
    for rank in found:
        mine = best.setdefault(rank["rank"], {})
        for each in rank["rounds"]:
            size = len(each["running"])
            mine[size] = min(mine.get(size, float("inf")), each["ms"])
    slower = {r: best[r][len(everyone)] / best[r][1] - 1 for r in everyone}
    scaling = {
        size: sum(num_envs / best[r][size] * 1e3 for r in everyone[:size])
        for size in sorted(best[0])
    }
    return {
        "ms_alone": {r: round(best[r][1], 4) for r in everyone},
        "ms_together": {r: round(best[r][len(everyone)], 4) for r in everyone},
        "slower_together": {r: round(slower[r], 4) for r in everyone},
        "within_goal": max(slower.values()) <= GOAL_ALONE,
        "env_steps_per_s": {size: round(rate) for size, rate in scaling.items()},
        "parallel_efficiency": {
            size: round(rate / (size * scaling[1]), 4) for size, rate in scaling.items()
        },
    }


# -- the original defect ---------------------------------------------------------------------------


def defects(args: Any, uuids: list[str]) -> list[dict[str, Any]]:
    """Of those that are refused by comparing, nobody runs; else one rank has the GPU, the others are told."""
    results: list[dict[str, Any]] = []
    for scenario in placement.scenarios(uuids):
        if "masked to GPU 0" not in scenario.name:
            continue
        result = placement.run(scenario, uuids, args.worker_python, args.simulator)
        may_run = 0 if scenario.refused == "all" else 1
        refused = [rank for rank in result["ranks"] if rank["error"]]
        running = len(result["ranks"]) - len(refused)
        if running != may_run:
            result["wrong"].append(f"{running} ranks ran, {may_run} should have")
        result["wrong"] += [
            f"rank {rank['rank']} failed for another reason: {rank['error']}"
            for rank in refused
            if not rank["error"].startswith("DevicePlanError")
        ]
        result["as_it_should_be"] = not result["wrong"]
        results.append(result)
    return results


# -- hand-over -------------------------------------------------------------------------------------


def hand_over(args: Any, num_envs: int, decimation: int) -> dict[str, Any]:
    """Rounds of each way in turn; each round starts from the keyframe."""
    row: dict[str, Any] = {"num_envs": num_envs, "decimation": decimation}
    with registry.find(args.simulator)(
        device=args.device,
        scene=args.scene,
        num_envs=num_envs,
        decimation=decimation,
        worker_python=args.worker_python or None,
        check_finite=False,
    ) as sim:
        row.update(transport=sim.report["transport"], opened_s=round(sim.report["opened_s"], 2))
        device = sim.torch.device
        out_step = simulator_rank.learner_step(sim)
        ways: dict[str, list[float]] = {"out": [], "in": []}

        def out_of_process() -> None:
            sim.torch.reset()
            ways["out"].append(simulator_rank.timed(out_step, args.steps, device) * 1e3)

        make = in_process.IN_PROCESS.get(args.simulator)
        simulator_rank.timed(out_step, 20, device)
        if make is None:
            for _ in range(2 * args.rounds):
                out_of_process()
        else:
            with make(find_scene(args.scene), sim, decimation) as (reset, step):
                simulator_rank.timed(step, 20, device)
                for _ in range(args.rounds):
                    reset()
                    ways["in"].append(simulator_rank.timed(step, args.steps, device) * 1e3)
                    out_of_process()
        row["finite"] = bool(sim.torch.qpos.isfinite().all())
        row["sim_us"] = round(sim.timings.sim_us, 1)
    for way, found in ways.items():
        if found:
            row[f"{way}_ms"] = round(statistics.median(found), 4)
            row[f"{way}_all_ms"] = [round(ms, 4) for ms in found]
    if ways["in"]:
        row["out_over_in"] = round(row["out_ms"] / row["in_ms"], 4)
        row["within_goal"] = row["out_over_in"] <= GOAL_IN_PROCESS
    return row


# -- report ----------------------------------------------------------------------------------------


def markdown(facts: dict[str, Any]) -> str:
    gpus = ", ".join(f"{gpu['uuid'][:12]} {gpu['name']}" for gpu in facts["gpus"])
    lines = [
        f"# {facts['simulator']} on real GPUs",
        "",
        f"Scene `{facts['scene']}`, GPUs {gpus}. Made by:",
        "",
        f"    python benchmarks/bench_simulators.py --simulator {facts['simulator']} "
        "--worker-python PATH",
        "",
    ]
    if facts.get("ranks"):
        lines += _ranks_lines(facts["ranks"], facts["rank_envs"])
    for result in facts.get("defects", ()):
        errors = [rank["error"].split(";")[0][:150] for rank in result["ranks"] if rank["error"]]
        verdict = "refused" if result["as_it_should_be"] else f"**wrong**: {result['wrong']}"
        lines += [f"* {result['scenario']}: {verdict}. {' / '.join(errors)}"]
    if facts.get("hand_over"):
        lines += [
            "",
            "Milliseconds per step, medians of interleaved rounds:",
            "",
            "| environments | decimation | in process | out of process | out / in |",
            "|---|---|---|---|---|",
        ]
        for row in facts["hand_over"]:
            cells = (row["num_envs"], row["decimation"], row.get("in_ms", "-"), row["out_ms"],
                     row.get("out_over_in", "-"))  # fmt: skip
            lines.append("| " + " | ".join(map(str, cells)) + " |")
    return "\n".join([*lines, ""])


def _ranks_lines(found: dict[str, Any], num_envs: int) -> list[str]:
    lines = [
        f"One rank per GPU under torchrun, {num_envs:,} environments each:",
        "",
        "| rank | planned | learner | state | NVML: rank | NVML: worker | ms alone | ms together |",
        "|---|---|---|---|---|---|---|---|",
    ]
    speed = found["throughput"]
    for rank in found["ranks"]:
        number = rank["rank"]
        cells = [rank[key][:12] for key in ("planned", "learner", "reported")]
        cells += [", ".join(uuid[:12] for uuid in rank[k]) for k in ("nvml_rank", "nvml_worker")]
        cells += [str(speed.get(k, {}).get(number, "-")) for k in ("ms_alone", "ms_together")]
        lines.append(f"| {number} | " + " | ".join(cells) + " |")
    verdict = "All on their planned GPU and nowhere else."
    lines += ["", verdict if found["as_it_should_be"] else f"**Wrong**: {found['wrong']}", ""]
    for size, rate in speed.get("env_steps_per_s", {}).items():
        efficiency = speed["parallel_efficiency"][size]
        lines.append(f"* {size} ranks: {rate:,} environment steps/s, efficiency {efficiency:.3f}")
    return [*lines, ""]


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--rank", default="", help=argparse.SUPPRESS)
    parser.add_argument("--simulator", default="mjwarp")
    parser.add_argument("--worker-python", default="")
    parser.add_argument("--scene", default="humanoid29")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--rank-envs", type=int, default=4096)
    parser.add_argument("--envs", type=int, nargs="+", default=[1024, 4096, 8192])
    parser.add_argument("--decimation", type=int, nargs="+", default=[1])
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--device", default="cuda:0", help='of the hand-over; "cpu" rehearses all')
    parser.add_argument("--json", type=Path)
    parser.add_argument("--markdown", type=Path)
    return parser.parse_args()


def main() -> int:
    args = arguments()
    if args.rank:
        return simulator_rank.run(Path(args.rank), args)
    gpus, why_not = witness.inventory()
    facts: dict[str, Any] = {
        "simulator": args.simulator,
        "scene": args.scene,
        "rank_envs": args.rank_envs,
        "steps": args.steps,
        "gpus": [{"uuid": gpu.uuid, "name": gpu.name} for gpu in gpus],
    }
    uuids = [gpu.uuid for gpu in gpus]
    good = True
    rehearsal = args.device == "cpu"
    if len(gpus) < 2 and {"ranks", "defects"} & set(args.parts) and not rehearsal:
        print(f"ranks need two GPUs, this machine has {len(gpus)} {why_not}", file=sys.stderr)
        good = False
    else:
        if "ranks" in args.parts:
            facts["ranks"] = ranks(args, 2 if rehearsal else len(gpus))
            good = good and facts["ranks"]["as_it_should_be"]
        if "defects" in args.parts:
            facts["defects"] = defects(args, uuids)
            good = good and all(result["as_it_should_be"] for result in facts["defects"])
    if "hand-over" in args.parts:
        facts["hand_over"] = []
        for decimation in args.decimation:
            for num_envs in args.envs:
                facts["hand_over"].append(hand_over(args, num_envs, decimation))
    text = json.dumps(facts, indent=1, default=str).replace(socket.gethostname(), "HOST")
    print(markdown(facts))
    if args.json:
        args.json.write_text(text + "\n")
    if args.markdown:
        args.markdown.write_text(markdown(facts))
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
