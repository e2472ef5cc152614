"""The CUDA arena on real GPUs, with torch on the host and a worker that has none (Python 3.8 when
OUTBOARD_PYTHON38 names one). The host processes are children: see arena_gpu_host.py.

    python -m pytest -m "gpu and not slow" tests/test_arena_gpu.py
    OUTBOARD_ARENA_RESTARTS=200 python -m pytest -m "gpu and slow" -o timeout=600 tests/test_arena_gpu.py
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest

from hosts import alive, gone_after
from standin_gpu import bare_environment, real_gpus, run_child

HOST = Path(__file__).resolve().parent / "arena_gpu_host.py"
# The driver keeps some of what it took for a context for the next one.
NOISE_BYTES = 64 << 20

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(180),
    pytest.mark.usefixtures("logs_may_stay"),  # of workers that die here
]

QUIET = (
    *("correct_with_one_bank", "correct_with_two_banks", "on_a_side_stream"),
    *("without_the_hosts_wait", "without_the_workers_wait", "masks_and_states"),
    *("a_bad_ctrl_is_told", "nobody_waits", "memory_and_tensors", "sending_a_tensor"),
    "auto_and_block",
)


def environment(**extra: str) -> dict[str, str]:
    kept = (
        *("OUTBOARD_PYTHON38", "OUTBOARD_ARENA_ROUNDS", "OUTBOARD_ARENA_RESTARTS"),
        *("PYTHONPATH", "XDG_RUNTIME_DIR", "XDG_CACHE_HOME"),
    )
    env = bare_environment(**{n: os.environ[n] for n in kept if n in os.environ}, **extra)
    # This suite's own packages first, whatever else is in the path.
    own = str(HOST.parent.parent / ".src")
    env["PYTHONPATH"] = os.pathsep.join([own, *filter(None, [env.get("PYTHONPATH")])])
    return env


def need(count: int) -> tuple[str, ...]:
    if importlib.util.find_spec("torch") is None:
        pytest.skip("needs torch with CUDA on the host, which is not installed")
    return real_gpus(count)


def started(device: str, *names: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, str(HOST), device, *names],
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def ended(host: subprocess.Popen[str], within_s: float = 150.0) -> dict[str, dict[str, Any]]:
    """What each scenario found. Never leaves a process, and shows what there is when one hangs."""
    try:
        out, err = host.communicate(timeout=within_s)
    except subprocess.TimeoutExpired:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(host.pid, signal.SIGKILL)
        out, err = host.communicate()
        pytest.fail(f"not done after {within_s} s; so far:\n{out[-3000:]}\n{err[-3000:]}")
    found = [json.loads(line) for line in out.splitlines() if line.startswith("{")]
    assert host.returncode == 0, f"exit {host.returncode}\n{out[-2000:]}\n{err[-3000:]}"
    return {each["scenario"]: each for each in found}


USED = """
import pynvml, sys
pynvml.nvmlInit()
handle = pynvml.nvmlDeviceGetHandleByUUID(sys.argv[1])
print(pynvml.nvmlDeviceGetMemoryInfo(handle).used)
"""


def memory_used(uuid: str) -> int:
    """Of one GPU, by NVML; in a child, because NVML keeps descriptors open."""
    command = [sys.executable, "-c", USED, uuid]
    return int(subprocess.run(command, env=environment(), capture_output=True, check=True).stdout)


@contextlib.contextmanager
def memory_comes_back(*gpus: str) -> Generator[None, None, None]:
    before = {uuid: memory_used(uuid) for uuid in gpus}
    yield
    end, left = time.monotonic() + 15.0, before
    while time.monotonic() < end:
        left = {uuid: memory_used(uuid) - before[uuid] for uuid in gpus}
        if max(left.values()) < NOISE_BYTES:
            return
        time.sleep(0.2)
    pytest.fail(f"more GPU memory is in use than before, by GPU: {left}")


@pytest.fixture(scope="module")
def quiet() -> dict[str, dict[str, Any]]:
    """All scenarios in which nobody dies, in one host process: torch takes seconds to start."""
    (uuid,) = need(1)[:1]
    with memory_comes_back(uuid):
        return ended(started("cuda:0", *QUIET), 170.0)


def of(found: dict[str, dict[str, Any]], name: str) -> dict[str, Any]:
    facts = found[name]
    assert "crash" not in facts, facts["crash"]
    return facts


@pytest.mark.parametrize("name", QUIET[:3])
def test_nothing_is_torn_or_late_in_thousands_of_rounds(
    quiet: dict[str, dict[str, Any]], name: str
) -> None:
    facts = of(quiet, name)
    assert facts["wrong"] == 0, facts
    assert facts.get("transport", "cuda") == "cuda", facts


def test_a_missing_wait_is_seen(quiet: dict[str, dict[str, Any]]) -> None:
    host, worker = of(quiet, "without_the_hosts_wait"), of(quiet, "without_the_workers_wait")
    assert host["right"] == 0 and host["wrong"] > 0, host
    assert worker["wrong"] > 0, worker


def test_masks_values_and_numpy_give_the_right_states(quiet: dict[str, dict[str, Any]]) -> None:
    facts = of(quiet, "masks_and_states")
    assert facts["right"] == [True] * len(facts["right"]), facts


def test_a_ctrl_that_is_not_finite_is_told_soon_after(quiet: dict[str, dict[str, Any]]) -> None:
    facts = of(quiet, "a_bad_ctrl_is_told")
    assert facts["said"].startswith("UsageError: ctrl was NaN or infinite in environments 3, 6"), (
        facts
    )
    assert facts["bells"] <= 2, facts


def test_the_host_never_waits_for_the_gpu(quiet: dict[str, dict[str, Any]]) -> None:
    facts = of(quiet, "nobody_waits")
    assert facts["trapped"] == [], facts
    # The profiler waits at its two ends; a wait of ours would be there 100 times.
    assert sum(facts["waits"].values()) < 10, facts


def test_memory_goes_with_the_last_tensor_over_it(quiet: dict[str, dict[str, Any]]) -> None:
    facts = of(quiet, "memory_and_tensors")
    free = facts["free_mb"]
    assert facts["still"], facts
    assert free["start"] - free["closed"] > 300, facts  # several fields of 64 MB
    assert abs(free["dropped"] - free["start"]) < 140, facts  # torch's cache holds the ctrl


def test_sending_a_tensor_to_another_process_is_an_error(quiet: dict[str, dict[str, Any]]) -> None:
    facts = of(quiet, "sending_a_tensor")
    assert facts["said"] != "it was pickled", facts
    assert facts["wrong"] == 0, facts


def test_auto_takes_the_arena_and_the_block_still_works(quiet: dict[str, dict[str, Any]]) -> None:
    facts = of(quiet, "auto_and_block")
    assert facts["auto"][0] == "cuda" and facts["block"][0] == "block", facts
    assert facts["auto"][2:] == facts["block"][2:] == [True] * 3, facts


# -- deaths -----------------------------------------------------------------------------------------


def test_a_graph_captured_before_a_crash_replays_after_the_restart() -> None:
    (uuid,) = need(1)[:1]
    with memory_comes_back(uuid):
        facts = of(ended(started("cuda:0", "graph_over_a_crash"), 60.0), "graph_over_a_crash")
    assert facts["first"] and facts["same_addresses"] and facts["replays"], facts
    assert facts["rounds_wrong"] == 0, facts
    assert facts["died"]["said"] == "WorkerDied" and facts["died"]["stream_is_free"], facts


def check_restarts(within_s: float) -> None:
    (uuid,) = need(1)[:1]
    with memory_comes_back(uuid):
        facts = of(ended(started("cuda:0", "restarts"), within_s), "restarts")
    assert facts["same_addresses"] and facts["wrong"] == 0, facts
    assert abs(facts["free_mb"][-1] - facts["free_mb"][1]) < 32, facts


def test_restarts_keep_addresses_and_leave_no_memory() -> None:
    check_restarts(80.0)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_many_restarts_keep_addresses_and_leave_no_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OUTBOARD_ARENA_RESTARTS", "200")
    check_restarts(580.0)


@pytest.mark.parametrize("victim", ["host", "worker"])
def test_a_death_in_a_step_leaves_no_gpu_memory(victim: str) -> None:
    (uuid,) = need(1)[:1]
    with memory_comes_back(uuid):
        host = started("cuda:0", "forever")
        try:
            assert host.stdout is not None
            worker = int(json.loads(host.stdout.readline())["pid"])
            time.sleep(0.5)
            os.kill(host.pid if victim == "host" else worker, signal.SIGKILL)
            if victim == "worker":
                found = ended(host, 40.0)["forever"]
                assert "WorkerDied" in found["crash"], found
            gone_after(worker, 20.0)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(host.pid, signal.SIGKILL)
            host.communicate()
        assert not alive(worker)


# -- two GPUs ---------------------------------------------------------------------------------------


def test_two_ranks_on_two_gpus_at_once() -> None:
    uuids = need(2)[:2]
    with memory_comes_back(*uuids):
        hosts = [started(f"cuda:{i}", "correct_with_one_bank") for i in range(2)]
        found = [of(ended(host, 90.0), "correct_with_one_bank") for host in hosts]
    assert [facts["wrong"] for facts in found] == [0, 0], found


OFFER = """
import sys
from outboard.ipc import arena
from outboard.ipc.layout import Layout, Sizes
owner = arena.HostArena(Layout(Sizes(2, 1, 1, 1, 1), ("qpos",)), {uuid!r})
owner.offer(bytes(range(16)))
o = owner.offered
print(o.memory.hex(), flush=True)
sys.stdin.readline()
"""
TAKE = """
from outboard.ipc import arena, cuda_driver, cuda_memory
from outboard.ipc.layout import Layout, Sizes
from outboard.ipc.messages import ArenaOffer
layout, opened = Layout(Sizes(2, 1, 1, 1, 1), ("qpos",)), []
really = cuda_memory.ipc_open
cuda_memory.ipc_open = lambda handle: opened.append(1) or really(handle)
offer = ArenaOffer({uuid!r}, arena.ArenaLayout(layout).nbytes, bytes.fromhex({handle!r}))
try:
    arena.WorkerArena(offer, layout, bytes(range(16)))
    print("taken", len(opened))
except arena.NoArena as error:
    print("refused", len(opened), error)
"""


def test_a_handle_of_a_hidden_gpu_is_refused_by_uuid_before_it_is_opened() -> None:
    first, second = need(2)[:2]
    python = os.environ.get("OUTBOARD_PYTHON38") or sys.executable
    with subprocess.Popen(
        [sys.executable, "-c", OFFER.format(uuid=first)],
        env=environment(),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as owner:
        assert owner.stdin is not None and owner.stdout is not None
        handle = owner.stdout.readline().strip()
        code = TAKE.format(uuid=first, handle=handle)
        hidden = run_child(code, environment(CUDA_VISIBLE_DEVICES=second), python)
        right = run_child(code, environment(CUDA_VISIBLE_DEVICES=first), python)
        owner.stdin.close()
    assert hidden.startswith(f"refused 0 the arena lies on {first}"), hidden
    assert right == "taken 1"
