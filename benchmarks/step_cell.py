"""One measurement in a process of its own: one scheme, one payload, one circumstance.

    python step_cell.py JSON        (started by bench_step.py; prints one JSON line)

JSON: a `step_cells.Cell` as a dict, `seconds`, `worker_python`, `floor` (path of the compiled floor.c).
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
import zlib
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

import numpy as np
import peers
import peers_forked
from peers import Link
from step_work import NU, WIDTH

_MIN_SAMPLES = 30


def main(cell: dict[str, Any]) -> dict[str, Any]:
    with _circumstance(cell["where"]):
        measure = _floor if cell["scheme"].startswith("C ") else _scheme
        before = _jiffies()
        samples_us, waiting, own_s = measure(cell)
        busy, total = (now - then for now, then in zip(_jiffies(), before, strict=True))
    tick_s = 1.0 / os.sysconf("SC_CLK_TCK")
    foreign = max(0.0, busy * tick_s - own_s) / max(tick_s, total * tick_s)
    p50, p99 = np.percentile(samples_us, [50, 99])
    return {
        "median_us": float(p50),
        "p99_us": float(p99),
        "mean_us": float(samples_us.mean()),
        "samples": len(samples_us),
        "host_cpu": waiting,
        "foreign": foreign,
    }


def _scheme(cell: dict[str, Any]) -> tuple[Any, float, float]:
    """(samples in us, share of a core spent while waiting, CPU seconds that were ours)."""
    links = {**peers.LINKS, **peers_forked.LINKS}
    link = links[cell["kind"]](cell["num_envs"], cell["worker_python"], cell["options"])
    try:
        return _loop(link, cell)
    finally:
        link.close()


def _loop(link: Link, cell: dict[str, Any]) -> tuple[Any, float, float]:
    step, clock, cpu_clock = link.step, time.perf_counter_ns, time.thread_time_ns
    added = bool(cell["options"].get("work_us"))
    think_ns, seconds = int(cell["think_us"] * 1e3), cell["seconds"]
    samples: list[float] = []
    on_cpu = in_steps = own = i = 0
    warm = clock() + int(seconds * 0.25e9)
    end = warm + int(seconds * 1e9)
    hard_end = end + int(10e9)
    while True:
        i += 1
        if think_ns:
            until = clock() + think_ns
            while clock() < until:
                pass
        cpu = cpu_clock() if added else 0
        started = clock()
        step(i)
        now = clock()
        if started < warm:
            own = _own_ns(link.pid) if i & 255 == 1 or not own else own
            continue
        took = now - started
        samples.append(took * 1e-3 - link.worked_us() if added else took * 1e-3)
        in_steps += took
        if added:
            on_cpu += cpu_clock() - cpu
        if now > end and (len(samples) >= _MIN_SAMPLES or now > hard_end):
            break
    own_s = (_own_ns(link.pid) - own) * 1e-9
    return np.array(samples), on_cpu / in_steps if added else -1.0, own_s


def _own_ns(worker_pid: int) -> int:
    """CPU nanoseconds of this process and its worker so far."""
    ticks = 0
    if worker_pid:
        with open(f"/proc/{worker_pid}/stat") as file:
            fields = file.read().rsplit(")", 1)[1].split()
        ticks = int(fields[11]) + int(fields[12])
    return time.process_time_ns() + ticks * 1_000_000_000 // os.sysconf("SC_CLK_TCK")


def _floor(cell: dict[str, Any]) -> tuple[Any, float, float]:
    options, envs = cell["options"], cell["num_envs"]
    ctrl, state = str(envs * NU * 4), str(envs * WIDTH * 4)
    mode = cell["scheme"].split()[1]
    work, think = int(options.get("work_us", 0) * 1e3), int(cell["think_us"] * 1e3)
    argv = [cell["floor"], mode, ctrl, state, str(cell["seconds"]), str(work)]
    argv += [str(options.get("vary", 0.0)), str(think), str(int(cell["where"] == "one core"))]
    before = os.times()
    out = subprocess.run(argv, stdout=subprocess.PIPE, check=True, timeout=60).stdout
    after = os.times()
    in_steps, on_cpu, *samples = np.frombuffer(out, np.int64)
    own_s = sum(after[2:4]) - sum(before[2:4])
    return np.array(samples) * 1e-3, float(on_cpu / in_steps) if work else -1.0, own_s


def _jiffies() -> tuple[int, int]:
    """(busy, all) ticks of the machine since it started; stolen ones count as neither."""
    with open("/proc/stat") as file:
        user, nice, system, idle, iowait, irq, softirq = map(int, file.readline().split()[1:8])
    busy = user + nice + system + irq + softirq
    return busy, busy + idle + iowait


# -- circumstances ------------------------------------------------------------------------------------


@contextmanager
def _circumstance(where: str) -> Generator[None, None, None]:
    """ "", "one core", "Python thread", "zlib thread", "two hogs"."""
    hogs: list[subprocess.Popen[bytes]] = []
    if where == "one core":
        os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})  # the worker inherits it
    elif where == "Python thread":
        threading.Thread(target=_count, daemon=True).start()
    elif where == "zlib thread":
        threading.Thread(target=_compress, daemon=True).start()
    elif where == "two hogs":
        # Ordinary processes, even under a measurement with real-time priority: else nothing else runs.
        endless = [
            sys.executable,
            "-c",
            "import os\nos.sched_setscheduler(0, os.SCHED_OTHER, os.sched_param(0))\nwhile True: pass",
        ]
        hogs = [subprocess.Popen(endless) for _ in range(2)]
    try:
        yield
    finally:
        for hog in hogs:
            hog.kill()
            hog.wait()


def _count() -> None:
    number = 0
    while True:
        number += 1


def _compress() -> None:
    data = os.urandom(200_000)
    while True:
        zlib.compress(data, 6)


if __name__ == "__main__":
    print(json.dumps(main(json.loads(sys.argv[1]))), flush=True)
    os._exit(0)  # a busy thread must not hold up the end
