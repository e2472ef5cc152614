"""Four workers stepped, reset, restarted and killed without mercy for a long time, and nothing lost.

    python benchmarks/soak.py --minutes 60        `make soak`; writes benchmarks/results/soak.md

Beside every worker runs its twin: the same deterministic `fake`, in this process, which nobody
disturbs. After every command that returned, the two states must be equal bit for bit. At the end: every step
that was asked for was acknowledged, the checksums agree, and this process has what it had before.
"""

from __future__ import annotations

import argparse
import gc
import logging
import os
import random
import signal
import sys
import tempfile
import threading
import time
import zlib
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / ".src"), str(ROOT / "tests")]

from leak_guards import Residue, look  # noqa: E402
from outboard.backends import FakeBackend, FakeCfg, OutboardError, WorkerDied, WorkerLaunchError  # noqa: E402
from outboard.ipc.device import PlannedDevice  # noqa: E402
from outboard.ipc.layout import DEFAULT_PUBLISH, Layout, Sizes  # noqa: E402
from outboard.ipc.messages import Init  # noqa: E402
from outboard.workers.fake_worker import FakeSimulator  # noqa: E402

WORKERS = 4
ENVS, NU = 16, 4
KILLS_PER_MINUTE = 20
# After each round: this is about deaths and time, and others may be using the machine.
PAUSE_S = 0.005
# What one turn of one worker is, and how often of a thousand.
MIX = {"step": 900, "step with reset": 40, "reset": 20, "set_state": 20, "where": 15, "restart": 5}


class Twin:
    """The undisturbed run: the simulator itself, called as `serve.py` calls it."""

    def __init__(self) -> None:
        layout = Layout(Sizes(ENVS, NU, NU, NU, NU), DEFAULT_PUBLISH)
        self.fields = {f.name: np.zeros(f.shape, f.dtype) for f in layout.fields}
        self.restart()

    def restart(self) -> None:
        self.simulator = FakeSimulator()
        self.simulator.build(init(), lambda stage, done, total: None)
        self.simulator.bind([self.fields])
        self.simulator.publish(0)

    def step(self, ctrl: np.ndarray, reset: np.ndarray | None = None) -> None:
        if reset is not None:
            self.simulator.reset(reset)
        self.fields["ctrl"][:] = ctrl
        self.simulator.step(0)

    def reset(self, ids: np.ndarray) -> None:
        self.simulator.reset(ids)
        self.simulator.publish(0)

    def set_state(self, ids: np.ndarray, qpos: np.ndarray, qvel: np.ndarray) -> None:
        self.simulator.set_state(ids, qpos, qvel)
        self.simulator.publish(0)


def init() -> Init:
    return Init(
        nonce=bytes(16), device=PlannedDevice("cpu", "", "cpu"), rank=0, scene="", num_envs=ENVS, dt=0.01,
        decimation=2, publish=DEFAULT_PUBLISH, transport="block", render=False, seed=0, terrain="flat",
        control="position", options={"nu": NU},
    )  # fmt: skip


@dataclass
class Count:
    asked: int = 0
    acknowledged: int = 0
    commands: int = 0
    restarts: int = 0
    deaths: int = 0
    recovery_s: list[float] = field(default_factory=list[float])
    checksum: int = 0
    twin_checksum: int = 0


class Pair:
    """One worker and its twin."""

    def __init__(self, index: int, chance: random.Random) -> None:
        self.chance = chance
        self.random = np.random.default_rng(index)
        self.twin = Twin()
        self.count = Count()
        self.sim = FakeBackend(
            device="cpu", num_envs=ENVS, dt=0.01, decimation=2, rank=index,
            cfg=FakeCfg(nu=NU, work_us=200.0),
        )  # fmt: skip
        self.counted = 0  # acknowledged in this worker's life

    def turn(self) -> None:
        """One command, repeated after a death until it is acknowledged."""
        [kind] = self.chance.choices(list(MIX), list(MIX.values()))
        ids = self.random.permutation(ENVS)[: self.chance.randrange(1, ENVS)].astype(np.int32)
        ctrl = self.random.uniform(-1, 1, (ENVS, NU)).astype(np.float32)
        rows = self.random.uniform(-1, 1, (2, len(ids), NU)).astype(np.float32)
        self.count.asked += kind.startswith("step")
        while True:
            try:
                self._do(kind, ids, ctrl, rows)
                break
            except (WorkerDied, WorkerLaunchError):  # the second when it was killed in a restart
                self._recover()
        self.count.acknowledged += kind.startswith("step")
        self.compare()

    def _do(self, kind: str, ids: np.ndarray, ctrl: np.ndarray, rows: np.ndarray) -> None:
        if kind == "restart":
            self._restart()
        elif kind == "where":
            self.sim.where()
        elif kind == "reset":
            self.sim.reset(ids)
            self.twin.reset(ids)
        elif kind == "set_state":
            self.sim.set_state(ids, rows[0], rows[1])
            self.twin.set_state(ids, rows[0], rows[1])
        else:
            reset = ids if kind == "step with reset" else None
            self.sim.step(ctrl, reset=reset)
            self.twin.step(ctrl, reset)

    def compare(self) -> None:
        self.count.commands += 1
        state, twin = self.sim.state, self.twin.fields
        for mine, its in ((state.qpos, twin["qpos"]), (state.qvel, twin["qvel"])):
            if not np.array_equal(mine, its):
                raise SystemExit(f"the state is another one after {self.count}")
            self.count.checksum = zlib.crc32(mine.tobytes(), self.count.checksum)
            self.count.twin_checksum = zlib.crc32(its.tobytes(), self.count.twin_checksum)

    def _recover(self) -> None:
        started = time.monotonic()
        self.count.deaths += 1
        while True:
            try:
                self._restart()
                break
            except OutboardError:  # killed again while it was starting
                self.count.deaths += 1
        self.count.recovery_s.append(time.monotonic() - started)

    def _restart(self) -> None:
        self.sim.restart()
        self.twin.restart()
        self.count.restarts += 1

    def close(self) -> None:
        self.sim.close()


class Killer(threading.Thread):
    """SIGKILL at random moments, on average so many a minute."""

    def __init__(self, pairs: list[Pair], chance: random.Random) -> None:
        super().__init__(daemon=True)
        self.pairs, self.chance = pairs, chance
        self.stop = threading.Event()
        self.kills = 0

    def run(self) -> None:
        while not self.stop.wait(self.chance.expovariate(KILLS_PER_MINUTE / 60.0)):
            pid = self.chance.choice(self.pairs).sim.report["pid"]
            try:
                os.kill(pid, signal.SIGKILL)
                self.kills += 1
            except ProcessLookupError:
                pass


@dataclass
class Result:
    seconds: float
    kills: int
    counts: list[Count]
    left: list[str]
    grew_bytes: int

    def wrong(self) -> list[str]:
        """What did not hold, in words."""
        found = [f"left behind: {thing}" for thing in self.left]
        for rank, count in enumerate(self.counts):
            if count.asked != count.acknowledged:
                found.append(
                    f"worker {rank}: {count.asked} asked, {count.acknowledged} acknowledged"
                )
            if count.checksum != count.twin_checksum:
                found.append(f"worker {rank}: another checksum than the undisturbed run's")
        if self.grew_bytes > 64 << 20:
            found.append(f"the host grew by {self.grew_bytes >> 20} MiB")
        return found


def _rss_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def soak(seconds: float, seed: int = 0) -> Result:
    """Everything, in a runtime folder of its own."""
    runtime = os.environ["XDG_RUNTIME_DIR"]
    FakeBackend(device="cpu", num_envs=1).close()  # what a process has once, it has now
    gc.collect()
    before: Residue = look(runtime)
    chance = random.Random(seed)
    pairs = [Pair(index, random.Random(seed * WORKERS + index)) for index in range(WORKERS)]
    killer = Killer(pairs, chance)
    started, rss = time.monotonic(), 0
    killer.start()
    try:
        while time.monotonic() - started < seconds:
            for pair in pairs:
                pair.turn()
            time.sleep(PAUSE_S)
            if not rss and time.monotonic() - started > min(20.0, seconds / 4):
                rss = _rss_bytes()  # warm by now: from here on it may not grow
    finally:
        killer.stop.set()
        killer.join()
        lasted = time.monotonic() - started
        for pair in pairs:
            pair.close()
    grew = max(0, _rss_bytes() - rss)
    counts = [pair.count for pair in pairs]
    pairs.clear()
    del killer
    gc.collect()
    time.sleep(1.0)
    after = look(runtime).beyond(before)
    deaths = sum(count.deaths for count in counts)
    left = [words for words in after.words() if not words.startswith("logs:")]
    if len(after.logs) > deaths:  # each error named one, and that one stays
        left.append(f"{len(after.logs)} logs of {deaths} deaths")
    return Result(lasted, deaths, counts, left, grew)


def table(result: Result, loads: tuple[float, float, float]) -> str:
    counts = result.counts
    recoveries = sorted(s for count in counts for s in count.recovery_s)
    middle = recoveries[len(recoveries) // 2] if recoveries else 0.0
    lines = [
        "# Soak: what is left after kills, restarts and resets",
        "",
        f"Written by `python benchmarks/soak.py` on {time.strftime('%Y-%m-%d', time.gmtime())}: "
        f"**{result.seconds / 60:.1f} minutes**, {WORKERS} workers of {ENVS} environments, "
        f"{result.kills} deaths ({result.kills / result.seconds * 60:.0f} a minute), {os.cpu_count()} cores, "
        f"load {loads[0]:.1f}.",
        "",
        "| worker | steps asked | acknowledged | commands | restarts | deaths | checksum | undisturbed |",
        "|---|---|---|---|---|---|---|---|",
    ]
    lines += [
        f"| {rank} | {c.asked:,} | {c.acknowledged:,} | {c.commands:,} | {c.restarts} | {c.deaths} | "
        f"{c.checksum:08x} | {c.twin_checksum:08x} |"
        for rank, c in enumerate(counts)
    ]
    lines += [
        "",
        f"From the error to the next READY: median {middle:.2f} s, longest {max(recoveries or [0]):.2f} s. "
        f"The host grew by {result.grew_bytes / (1 << 20):.1f} MiB after it was warm. "
        f"Left behind: {'; '.join(result.left) or 'nothing'}.",
        "",
        "**" + ("; ".join(result.wrong()) or "Everything held.") + "**",
    ]
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--no-result", action="store_true", help="do not write results/soak.md")
    arguments = parser.parse_args()
    logging.getLogger("outboard").setLevel(logging.CRITICAL)
    with tempfile.TemporaryDirectory() as runtime:
        os.environ["XDG_RUNTIME_DIR"] = runtime
        result = soak(arguments.minutes * 60, arguments.seed)
    text = table(result, os.getloadavg())
    print(text)
    if not arguments.no_result:
        (ROOT / "benchmarks" / "results" / "soak.md").write_text(text)
    if result.wrong():
        sys.exit(1)


if __name__ == "__main__":
    main()
