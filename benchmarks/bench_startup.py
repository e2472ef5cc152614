"""From spawn to READY: what a worker costs above an interpreter that imports what a worker imports.

    python benchmarks/bench_startup.py --worker-python PYTHON38 [--rounds 21] [--write]

Interleaved rounds, medians. The goal: at most 150 ms above `python -c "import numpy, msgpack, posix_ipc"`.
`--write` puts the table into benchmarks/results/startup.md.
"""

from __future__ import annotations

import argparse
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from outboard.backends import FakeBackend

RESULT = Path(__file__).resolve().parent / "results" / "startup.md"
GOAL_MS = 150.0


def bare(python: str) -> float:
    """Seconds of an interpreter that imports the worker's packages and ends."""
    started = time.perf_counter()
    subprocess.run([python, "-E", "-s", "-c", "import numpy, msgpack, posix_ipc"], check=True)
    return time.perf_counter() - started


def ready(python: str) -> float:
    """Seconds from the constructor's first line to READY: spawn, HELLO, INIT, verdict, ATTACH."""
    started = time.perf_counter()
    sim = FakeBackend(device="cpu", num_envs=4096, worker_python=python)
    took = time.perf_counter() - started
    sim.close()
    return took


def measure(python: str, rounds: int) -> dict[str, list[float]]:
    ways: dict[str, Callable[[str], float]] = {"bare": bare, "ready": ready}
    samples: dict[str, list[float]] = {name: [] for name in ways}
    for turn in range(rounds + 1):
        for name, way in ways.items():
            seconds = way(python)
            if turn:  # the first round fills caches
                samples[name].append(seconds * 1e3)
    return samples


def page(python_version: str, samples: dict[str, list[float]]) -> str:
    medians = {name: statistics.median(values) for name, values in samples.items()}
    above = medians["ready"] - medians["bare"]
    verdict = "met" if above <= GOAL_MS else "MISSED"
    return "\n".join(
        [
            "# Start-up",
            "",
            "    python benchmarks/bench_startup.py --worker-python PYTHON38 --write",
            "",
            f"Worker Python {python_version}, host Python {platform.python_version()}, "
            f"{len(samples['bare'])} interleaved rounds, medians in milliseconds.",
            "",
            "| what | median | best | worst |",
            "|---|---|---|---|",
            *(
                f"| {label} | {medians[name]:.0f} | {min(samples[name]):.0f} | {max(samples[name]):.0f} |"
                for name, label in (
                    ("bare", 'python -c "import numpy, msgpack, posix_ipc"'),
                    ("ready", "spawn to READY, `fake`, 4096 environments"),
                )
            ),
            "",
            f"{above:.0f} ms above the bare interpreter; the goal of at most {GOAL_MS:.0f} ms is {verdict}.",
            "",
        ]
    )


def main() -> int:
    parser = argparse.ArgumentParser(description="spawn to READY")
    parser.add_argument("--worker-python", default=sys.executable)
    parser.add_argument("--rounds", type=int, default=21)
    parser.add_argument("--write", action="store_true")
    args = parser.parse_args()
    version = subprocess.run(
        [args.worker_python, "-c", "import platform; print(platform.python_version())"],
        check=True,
        capture_output=True,
        text=True,
    ).stdout.strip()
    text = page(version, measure(args.worker_python, args.rounds))
    print(text)
    if args.write:
        RESULT.write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
