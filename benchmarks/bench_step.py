"""What a step costs, beside everyone else: `python benchmarks/bench_step.py [--quick] [--json PATH] ...`

Every measurement is a process of its own; the next one is picked at random among those with the fewest runs,
so all schemes are interleaved and a busy minute of the machine hits all of them. Results and goals:
benchmarks/results/step.md, written by this program.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import peer_env
import step_report
from step_cells import BY_NAME, THINK_US, TWO_CORES_US, Cell, cells
from step_work import hash_bytes_for

HERE = Path(__file__).resolve().parent
_CELL_TIMEOUT_S = 90


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="the most important rows, a minute")
    parser.add_argument("--rounds", type=int, default=0, help="runs of each cell [5; quick: 2]")
    parser.add_argument("--minutes", type=float, default=60.0, help="stop after this long")
    parser.add_argument("--only", default="", help="schemes, separated by ';'")
    parser.add_argument("--json", type=Path, help="write everything here")
    parser.add_argument("--markdown", type=Path, help="write the tables and the goals here")
    parser.add_argument("--plot", type=Path, help="write a picture here (PNG)")
    parser.add_argument("--report", type=Path, help="measure nothing; report this JSON")
    parser.add_argument("--worker-python", default="", help="the old Python of the workers")
    args = parser.parse_args(argv)
    if args.report:
        result = json.loads(args.report.read_text())
    else:
        only = tuple(name.strip() for name in args.only.split(";") if name.strip())
        unknown = [name for name in only if name not in BY_NAME]
        if unknown:
            parser.error(f"{', '.join(unknown)}: not one of {'; '.join(BY_NAME)}")
        result = measure(
            cells(args.quick, only),
            rounds=args.rounds or (2 if args.quick else 5),
            seconds=0.2 if args.quick else 0.4,
            minutes=args.minutes,
            worker_python=args.worker_python,
        )
    step_report.show(result)
    if args.json:
        args.json.write_text(json.dumps(result, indent=1) + "\n")
    if args.markdown:
        args.markdown.write_text(step_report.markdown(result, args.markdown))
    if args.plot:
        step_report.plot(result, args.plot)
    return 0


def measure(
    todo: list[Cell], rounds: int, seconds: float, minutes: float, worker_python: str
) -> dict[str, Any]:
    """The runs of every cell, with the machine they were made on and what could not run."""
    old = worker_python or os.environ.get("OUTBOARD_PYTHON38", "")
    default = HERE.parent / ".venv-worker38" / "bin" / "python"
    old = old or (str(default) if os.access(default, os.X_OK) else "")
    peers = peer_env.prepare() if any(BY_NAME[cell.scheme].peer for cell in todo) else {}
    runs: dict[str, list[dict[str, Any]]] = {cell.key: [] for cell in todo}
    skipped: dict[str, str] = {}
    for cell in todo:
        scheme = BY_NAME[cell.scheme]
        if scheme.peer and not peers.get(scheme.peer):
            skipped[cell.scheme] = f"{scheme.peer} did not install"
        elif scheme.kind and scheme.old and not old:
            skipped[cell.scheme] = "no old Python for the worker; --worker-python names one"
    todo = [cell for cell in todo if cell.scheme not in skipped]
    with tempfile.TemporaryDirectory() as folder:
        floor = _compile_floor(Path(folder))
        if not floor:
            skipped.update({name: "no C compiler" for name in ("C spin", "C futex")})
            todo = [cell for cell in todo if not cell.scheme.startswith("C ")]
        common = {"seconds": seconds, "floor": floor, "hash_bytes": hash_bytes_for(TWO_CORES_US)}
        end = time.monotonic() + minutes * 60
        tried = dict.fromkeys(todo, 0)
        while todo and time.monotonic() < end:
            fewest = min(tried.values())
            if fewest >= rounds:
                break
            cell = random.choice([cell for cell, times in tried.items() if times == fewest])
            tried[cell] += 1
            run = _run(cell, old, common)
            if "error" in run:
                skipped[cell.key] = run["error"]
            else:
                runs[cell.key].append(run)
            step_report.progress(sum(tried.values()), rounds * len(todo), cell.key)
    return {
        "machine": step_report.machine(old),
        "peers": peers,
        "cells": {cell.key: cell.as_dict() for cell in todo},
        "runs": {key: value for key, value in runs.items() if value},
        "skipped": skipped,
    }


def _run(cell: Cell, old: str, common: dict[str, Any]) -> dict[str, Any]:
    scheme = BY_NAME[cell.scheme]
    host = str(peer_env.python()) if scheme.peer else sys.executable
    options: dict[str, Any] = dict(scheme.options)
    if cell.work_us:
        options.update(work_us=cell.work_us, vary=cell.vary)
    if cell.two_cores:
        options["hash_bytes"] = common["hash_bytes"]
    asked = {
        "scheme": cell.scheme,
        "kind": scheme.kind,
        "num_envs": cell.num_envs,
        "where": cell.where,
        "options": options,
        "think_us": THINK_US[cell.work_us],
        "seconds": common["seconds"] * (1 if cell.work_us < 1000 and not cell.two_cores else 3),
        "floor": common["floor"],
        "worker_python": old if scheme.old else host,
    }
    argv = [host, str(HERE / "step_cell.py"), json.dumps(asked)]
    try:
        done = subprocess.run(argv, capture_output=True, text=True, timeout=_CELL_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        return {"error": f"no answer within {_CELL_TIMEOUT_S} s"}
    try:
        return json.loads(done.stdout.strip().splitlines()[-1])
    except (IndexError, ValueError):
        last = done.stderr.strip().splitlines()[-1:] or ["no output"]
        return {"error": last[0][:200]}


def _compile_floor(folder: Path) -> str:
    """The path of the compiled floor.c, "" when there is no compiler."""
    out = folder / "floor"
    compiler = os.environ.get("CC", "cc")
    try:
        argv = [compiler, "-O2", "-o", str(out), str(HERE / "floor.c")]
        subprocess.run(argv, check=True, capture_output=True, timeout=60)
    except (OSError, subprocess.SubprocessError):
        return ""
    return str(out)


if __name__ == "__main__":
    sys.exit(main())
