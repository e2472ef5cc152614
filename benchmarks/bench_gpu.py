"""What it costs to hand ctrl to a GPU simulator and its state to a learner on the same GPU, by transport.

    python benchmarks/bench_gpu.py [--json PATH] [--worker-python PATH] [--envs 64 4096 ...] [--device cuda:0]

The simulator is empty: it copies ctrl in and a state like a Unitree G1's (7 + 6 + 58 + 390 floats per
environment) out of its own GPU memory, so what is measured is the hand-over. Three ways: the arena, the block
page-locked on both sides, the block pageable. Beside them, in the same run, what the GPU itself needs: the
same bytes copied within it by one call, and by one call per field, each between two event waits.

latency: from the call of step() until the new state is on the learner's GPU, each step waited for, median.
call: how long step() holds the caller. pipelined: time per step when nobody waits until the end.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from outboard.backends import CustomBackend
from outboard.ipc import cuda_memory as cuda
from outboard.ipc.layout import PUBLISHABLE, Layout, Sizes

SIMULATORS = Path(__file__).resolve().parent.parent / "tests" / "gpu_simulators.py"
FIELDS = ("qpos", "qvel", "body_pos", "body_quat", "body_linvel", "body_angvel")
WARM_UP = 20
# The issue's own goals, at this many environments.
GOAL_ENVS, GOAL_OF_BARE, GOAL_OF_PAGEABLE = 4096, 1.5, 20.0

Step = Callable[[], object]


def measured(step: Step, seconds: float) -> dict[str, float]:
    """Microseconds of one way to step, at most twice `seconds`."""
    for _ in range(WARM_UP):
        step()
    torch.cuda.synchronize()
    calls: list[float] = []
    whole: list[float] = []
    end = time.perf_counter() + seconds
    while time.perf_counter() < end or len(whole) < 10:
        started = time.perf_counter()
        step()
        called = time.perf_counter()
        torch.cuda.synchronize()
        whole.append(time.perf_counter() - started)
        calls.append(called - started)
    count = max(10, min(2000, int(seconds / statistics.median(whole))))
    started = time.perf_counter()
    for _ in range(count):
        step()
    torch.cuda.synchronize()
    pipelined = (time.perf_counter() - started) / count
    return {
        "latency_us": round(statistics.median(whole) * 1e6, 2),
        "call_us": round(statistics.median(calls) * 1e6, 2),
        "pipelined_us": round(pipelined * 1e6, 2),
        "samples": len(whole),
    }


def opened(kind: str, transport: str, num_envs: int, args: Any, **more: Any) -> CustomBackend:
    return CustomBackend(
        simulator=f"{SIMULATORS}:{kind}",
        device=args.device,
        num_envs=num_envs,
        publish=FIELDS,
        transport=transport,
        worker_python=args.worker_python,
        share=True,
        **more,
    )


def arena(num_envs: int, args: Any, check_finite: bool) -> dict[str, float]:
    with opened("G1Like", "cuda", num_envs, args, check_finite=check_finite) as sim:
        view = sim.torch
        ctrl = torch.zeros_like(view.ctrl)
        return measured(lambda: view.step(ctrl), args.seconds)


def block(num_envs: int, args: Any, *, locked: bool) -> dict[str, float]:
    """ctrl comes from the GPU and the state goes there, as a learner on it needs."""
    with opened("G1Like" if locked else "G1LikePageable", "block", num_envs, args) as sim:
        if not locked and sim._page_lock is not None:  # pyright: ignore[reportPrivateUsage]
            sim._page_lock.release()  # pyright: ignore[reportPrivateUsage]
        view = sim.torch
        device = torch.device(args.device)
        ctrl = torch.zeros(view.ctrl.shape, device=device)
        here = view.state.fields()
        there = {name: torch.zeros_like(field, device=device) for name, field in here.items()}
        pinned = {name: field.is_pinned() for name, field in here.items()}
        if set(pinned.values()) != {locked}:
            print(f"warning: page-locked is {pinned}, {locked} was meant", file=sys.stderr)

        def step() -> None:
            view.ctrl.copy_(ctrl)
            view.step()
            for name, field in there.items():
                field.copy_(here[name], non_blocking=True)

        return measured(step, args.seconds)


def bare(num_envs: int, args: Any, *, one_call: bool) -> dict[str, float]:
    """The same bytes within the GPU through the driver, no second process."""
    layout = Layout(Sizes(num_envs, 36, 35, 29, 30), FIELDS)
    sizes = [f.nbytes for f in layout.fields if f.name == "ctrl" or f.name in PUBLISHABLE]
    if one_call:
        sizes = [sum(sizes)]
    device = torch.device(args.device)
    buffers = [torch.zeros(2, size, dtype=torch.uint8, device=device) for size in sizes]
    copies = [(pair[0].data_ptr(), pair[1].data_ptr(), pair.shape[1]) for pair in buffers]
    other = torch.cuda.Stream(device)
    there, here = other.cuda_stream, torch.cuda.current_stream(device)

    def step() -> None:
        other.wait_stream(here)
        for to, pointer, size in copies:
            cuda.copy_dtod_async(to, pointer, size, there)
        here.wait_stream(other)

    return measured(step, args.seconds)


WAYS: dict[str, Callable[[int, Any], dict[str, float]]] = {
    "bare copy": lambda n, args: bare(n, args, one_call=True),
    "bare copies": lambda n, args: bare(n, args, one_call=False),
    "arena": lambda n, args: arena(n, args, True),
    "arena, unchecked": lambda n, args: arena(n, args, False),
    "block, locked": lambda n, args: block(n, args, locked=True),
    "block, pageable": lambda n, args: block(n, args, locked=False),
}


def table(rows: list[dict[str, Any]]) -> str:
    lines = [
        "| environments | MB | way | latency us | call us | pipelined us | of bare copy |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        of_bare = row["latency_us"] / row["bare_us"] if row["bare_us"] else float("nan")
        lines.append(
            f"| {row['num_envs']:,} | {row['mb']:.2f} | {row['way']} | {row['latency_us']:.1f} | "
            f"{row['call_us']:.1f} | {row['pipelined_us']:.1f} | {of_bare:.2f} |"
        )
    return "\n".join(lines)


def goals(rows: list[dict[str, Any]]) -> dict[str, Any]:
    at = {row["way"]: row for row in rows if row["num_envs"] == GOAL_ENVS}
    if not {"arena", "bare copy", "block, pageable"} <= set(at):
        return {}
    of_bare = at["arena"]["latency_us"] / at["bare copy"]["latency_us"]
    less = at["block, pageable"]["latency_us"] / at["arena"]["latency_us"]
    return {
        "arena_of_bare_copy": round(of_bare, 2),
        "arena_of_bare_copy_goal": GOAL_OF_BARE,
        "pageable_of_arena": round(less, 1),
        "pageable_of_arena_goal": GOAL_OF_PAGEABLE,
        "pageable_of_arena_pipelined": round(
            at["block, pageable"]["pipelined_us"] / at["arena"]["pipelined_us"], 1
        ),
        "met": of_bare <= GOAL_OF_BARE and less >= GOAL_OF_PAGEABLE,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--envs", type=int, nargs="+", default=[64, 1024, 4096, 16384, 65536])
    parser.add_argument("--seconds", type=float, default=0.4)
    parser.add_argument("--json", type=Path)
    parser.add_argument(
        "--worker-python", default=os.environ.get("OUTBOARD_PYTHON38") or sys.executable
    )
    args = parser.parse_args()
    torch.cuda.set_device(args.device)
    torch.zeros(1, device=args.device)
    rows: list[dict[str, Any]] = []
    for num_envs in args.envs:
        bare_us = 0.0
        for way, measure in WAYS.items():
            try:
                found: dict[str, Any] = dict(measure(num_envs, args))
            except Exception as error:  # noqa: BLE001 - the other ways are still worth their numbers
                print(f"{num_envs} {way}: {type(error).__name__}: {error}", file=sys.stderr)
                continue
            bare_us = found["latency_us"] if way == "bare copy" else bare_us
            mb = num_envs * 4 * (7 + 6 + 58 + 390) / 1e6
            rows.append({"num_envs": num_envs, "mb": mb, "way": way, "bare_us": bare_us, **found})
            print(f"{num_envs:6d} {way:18s} {found}", file=sys.stderr, flush=True)
    result = {
        "device": torch.cuda.get_device_name(args.device),
        "torch": torch.__version__,
        "numpy": np.__version__,
        "worker_python": args.worker_python if args.worker_python == sys.executable else "other",
        "goals": goals(rows),
        "rows": rows,
    }
    if args.json:
        args.json.write_text(json.dumps(result, indent=1) + "\n")
    print(table(rows))
    print(json.dumps(result["goals"], indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
