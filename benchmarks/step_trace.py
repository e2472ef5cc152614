"""Where the time of a step goes: `python benchmarks/step_trace.py [--worker-python PYTHON]`

Both sides read the same monotonic clock, so a step is cut at four moments: the host calls `step` (a), the
simulator starts (b), it is done (c), `step` returns (d). a to b and c to d are the protocol's; b to c is the
simulator's own. Beside it, for steps long enough for a nap: how late the nap ended after the time it
asked for, and whether it ended before the simulator did (else the whole lateness is in c to d).
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / ".src"))

from outboard.backends import CustomBackend, CustomCfg  # noqa: E402
from outboard.ipc import doorbell  # noqa: E402

SIMULATOR = """
import time
import numpy as np
from outboard.workers.fake_worker import FakeSimulator

class Traced(FakeSimulator):
    def build(self, init, progress):
        facts = super().build(init, progress)
        self.work_ns, self.path = int(init.options["trace_ns"]), init.options["trace_to"]
        self.started, self.ended, vary = [], [], init.options["vary"]
        self.vary = np.random.default_rng(0).uniform(1 - vary, 1 + vary, 65536)
        return facts

    def step(self, bank):
        begin = time.monotonic_ns()
        end = begin + int(self.work_ns * self.vary[len(self.started) % 65536])
        while self.work_ns and time.monotonic_ns() < end:
            pass
        self.started.append(begin)
        self.ended.append(time.monotonic_ns())
        return 0

    def close(self):
        np.save(self.path, np.array([self.started, self.ended]))
        super().close()
"""
# name: work in us, variation, steps
CASES = {"empty": (0, 0.0, 20000), "100 us": (100, 0.0, 5000), "1 ms": (1000, 0.0, 1500),
         "1 ms +-20 %": (1000, 0.2, 1500), "5 ms": (5000, 0.0, 400)}  # fmt: skip


Bell: Any = doorbell.Doorbell  # its inside is looked at here


class Naps:
    """What each timed sleep of the bell asked for and when it came back."""

    def __init__(self) -> None:
        self.asked: list[tuple[int, int]] = []  # the moment it should end, the moment it did
        self._nap: Any = Bell._nap

    def __enter__(self) -> Naps:
        nap, asked = self._nap, self.asked

        def traced(bell: Any, seconds: float) -> bool:
            due = time.monotonic_ns() + int(seconds * 1e9)
            found = nap(bell, seconds)
            asked.append((due, time.monotonic_ns()))
            return found

        Bell._nap = traced
        return self

    def __exit__(self, *_: object) -> None:
        Bell._nap = self._nap


def middle(values: Any) -> str:
    found = np.asarray(values)
    if not len(found):
        return "-"
    return f"{np.median(found) / 1e3:.1f} / {np.quantile(found, 0.99) / 1e3:.0f}"


def trace(folder: Path, work_us: float, vary: float, steps: int, python: str) -> list[str]:
    simulator, path = folder / "traced.py", folder / "trace.npy"
    simulator.write_text(SIMULATOR)
    called, returned = np.zeros(steps, np.int64), np.zeros(steps, np.int64)
    clock = time.monotonic_ns
    with CustomBackend(
        simulator=f"{simulator}:Traced", device="cpu", num_envs=1, worker_python=python,
        cfg=CustomCfg({"nu": 4, "trace_ns": int(work_us * 1000), "trace_to": str(path), "vary": vary}),
    ) as sim:  # fmt: skip
        ctrl = np.zeros((1, 4), np.float32)
        with Naps() as naps:
            cpu = time.process_time()
            for i in range(steps):
                called[i] = clock()
                sim.step(ctrl)
                returned[i] = clock()
            cpu = (time.process_time() - cpu) / ((returned[-1] - called[0]) * 1e-9)
    started, ended = np.load(path)
    warm = slice(steps // 10, None)
    before, after = (started - called)[warm], (returned - ended)[warm]
    added = before + after
    late = [back - due for due, back in naps.asked if back >= due]
    ends = np.sort(ended)
    overslept = [
        back for due, back in naps.asked
        if np.searchsorted(ends, back) != np.searchsorted(ends, due)
    ]  # fmt: skip
    return [
        middle(before), middle(after), middle(added), f"{100 * cpu:.0f} %",
        middle(late), f"{len(overslept)} of {len(naps.asked)}",
    ]  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    worker = ROOT / ".venv-worker38" / "bin" / "python"
    parser.add_argument(
        "--worker-python", default=str(worker if worker.exists() else sys.executable)
    )
    parser.add_argument("--only", default="", help="one case")
    arguments = parser.parse_args()
    print("median / p99 in us | call to simulator | simulator to return | both | host CPU | nap late by | "
          "naps that ended after the simulator did")  # fmt: skip
    for name, (work_us, vary, steps) in CASES.items():
        if arguments.only in ("", name):
            with tempfile.TemporaryDirectory() as folder:
                row = trace(Path(folder), work_us, vary, steps, arguments.worker_python)
            print(f"{name:12s} | " + " | ".join(row), flush=True)


if __name__ == "__main__":
    main()
