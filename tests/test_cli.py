"""The command line, driven as a user drives it: a process, its output, its exit code."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

ROOT = Path(__file__).resolve().parent.parent
OUTBOARD = [sys.executable, "-m", "outboard.backends.cli"]
TWO_FAKES = ["run", "--backend", "fake", "--devices", "cpu,cpu", "--num-envs", "8"]
FOR_EVER = ["--steps", "100000000"]
RANK_FIELDS = {
    *("rank", "planned", "reported", "verified", "python", "pid"),
    *("env_steps_per_s", "sim_us", "overhead_us", "steps"),
}

# A simulator that is not ours: what a user would write, made short by inheriting.
FOREIGN = """
import time
from outboard.workers.fake_worker import FakeSimulator


class Mine(FakeSimulator):
    engine = "mine"


class SlowToBuild(FakeSimulator):
    def build(self, init, progress):
        time.sleep(60)


class Hangs(FakeSimulator):
    def step(self, bank):
        if self.steps == 3:
            time.sleep(60)
        return super().step(bank)


class RaisesInRankOne(FakeSimulator):
    def build(self, init, progress):
        self.rank = init.rank
        return super().build(init, progress)

    def step(self, bank):
        if self.rank == 1 and self.steps == 3:
            raise RuntimeError("the knee came off")
        return super().step(bank)


class OneFailsOneBuilds(FakeSimulator):
    def build(self, init, progress):
        if init.rank == 1:
            raise RuntimeError("the knee is missing")
        time.sleep(60)
"""


@pytest.fixture
def env(tmp_path: Path) -> dict[str, str]:
    """The environment of the command: its logs go to a folder of the test's own."""
    logs = tmp_path / "run"
    logs.mkdir(mode=0o700)
    kept = {name: os.environ[name] for name in ("PATH", "HOME") if name in os.environ}
    return {**kept, "PYTHONPATH": str(ROOT / ".src"), "XDG_RUNTIME_DIR": str(logs)}


@pytest.fixture
def foreign(tmp_path: Path) -> Path:
    path = tmp_path / "foreign.py"
    path.write_text(FOREIGN)
    return path


def outboard(env: dict[str, str], *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [*OUTBOARD, *arguments]
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=50)


def kept_logs(env: dict[str, str]) -> list[str]:
    return [path.name for path in Path(env["XDG_RUNTIME_DIR"]).glob("outboard/*.log")]


# -- the main job ----------------------------------------------------------------------------------


def test_prints_the_plan_beside_the_acknowledgement_and_ends_with_a_summary(
    env: dict[str, str],
) -> None:
    done = outboard(env, *TWO_FAKES, "--steps", "50")
    assert done.returncode == 0, done.stderr
    assert "Plan and acknowledgement" in done.stdout
    assert len(re.findall(r"^ *[01] +cpu +cpu +qpos: host memory", done.stdout, re.M)) == 2
    assert "Done: 50 steps" in done.stdout and "env-steps/s" in done.stdout
    assert max(map(len, done.stdout.splitlines())) <= 100
    assert not done.stderr and not kept_logs(env)


def test_json_on_standard_output_is_all_there_is(env: dict[str, str]) -> None:
    done = outboard(env, *TWO_FAKES, "--steps", "50", "--json", "-")
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout)
    assert "Plan and acknowledgement" in done.stderr
    assert [rank["rank"] for rank in answer["ranks"]] == [0, 1]
    for rank in answer["ranks"]:
        assert set(rank) >= RANK_FIELDS
        assert rank["planned"] == rank["reported"] == "cpu" and rank["verified"] is True
        assert rank["steps"] == 50 and rank["sim_us"] > 0 and rank["overhead_us"] > 0
    assert answer["ranks"][0]["pid"] != answer["ranks"][1]["pid"]
    total = answer["total"]
    assert total["num_envs"] == 16 and total["steps"] == 50
    # `seconds` is rounded to milliseconds.
    assert 16 * 50 / total["env_steps_per_s"] == pytest.approx(total["seconds"], abs=6e-4)


def test_runs_mujoco_on_a_robot_and_writes_the_result_to_a_file(
    env: dict[str, str], tmp_path: Path
) -> None:
    path = tmp_path / "result.json"
    done = outboard(
        env, "run", "--backend", "mujoco", "--scene", "humanoid29", "--num-envs", "4",
        "--steps", "20", "--ranks", "2", "--devices", "cpu,cpu", "--decimation", "2",
        "--json", str(path),
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    answer = json.loads(path.read_text())
    assert answer["total"]["steps"] == 20 and answer["ranks"][1]["flagged"] == 0
    assert "Done: 20 steps" in done.stdout


def test_the_workers_run_in_the_interpreter_that_was_asked_for(
    env: dict[str, str], python38: str
) -> None:
    done = outboard(env, *TWO_FAKES, "--steps", "5", "--worker-python", python38, "--json", "-")
    assert done.returncode == 0, done.stderr
    assert all(rank["python"].startswith("3.8.") for rank in json.loads(done.stdout)["ranks"])


def test_runs_a_simulator_that_is_not_ours(env: dict[str, str], foreign: Path) -> None:
    done = outboard(env, "run", "--simulator", f"{foreign}:Mine", "--devices", "cpu",
                    "--num-envs", "3", "--steps", "5", "--json", "-")  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["total"]["num_envs"] == 3


# -- being stopped ---------------------------------------------------------------------------------


@contextmanager
def started(
    env: dict[str, str], *arguments: str, in_background: bool = False
) -> Generator[subprocess.Popen[str], None, None]:
    """A running command whose standard output is read here; killed at the end if it still lives."""
    command = [*OUTBOARD, *arguments]
    if in_background:  # where POSIX shells ignore SIGINT on a job's behalf
        command = ["sh", "-c", '"$@" & echo "pid $!"; wait $!; echo "code $?"', "sh", *command]
    with subprocess.Popen(
        command, env={**env, "PYTHONUNBUFFERED": "1"}, text=True, stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True,
    ) as process:  # fmt: skip
        try:
            yield process
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)


def read_until(process: subprocess.Popen[str], word: str) -> str:
    assert process.stdout is not None
    text = ""
    while word not in text:
        line = process.stdout.readline()
        assert line, f"ended before it said {word!r}: {text}{process.communicate()[1]}"
        text += line
    return text


def workers_of(pid: int, count: int) -> list[psutil.Process]:
    """The worker processes below `pid`, once there are `count`."""
    until = time.monotonic() + 10
    while time.monotonic() < until:
        children = psutil.Process(pid).children(recursive=True)
        if len(children) == count:
            return children
        time.sleep(0.02)
    raise AssertionError(f"{pid} has no {count} workers")


def assert_ends_cleanly(
    process: subprocess.Popen[str],
    env: dict[str, str],
    number: int = signal.SIGINT,
    workers: int = 2,
) -> str:
    """Signal it; it must end within two seconds, with the right code, and leave nothing."""
    children = workers_of(process.pid, workers)
    sent_s = time.monotonic()
    process.send_signal(number)
    _, said = process.communicate(timeout=10)
    assert time.monotonic() - sent_s < 2.0
    assert process.returncode == 128 + number
    assert f"stopped by {signal.Signals(number).name}" in said and "Traceback" not in said
    assert not [child for child in children if child.is_running()]
    assert not kept_logs(env)
    return said


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_it_cleanly_and_what_was_counted_is_written(
    env: dict[str, str], tmp_path: Path, number: int
) -> None:
    path = tmp_path / "result.json"
    with started(env, *TWO_FAKES, *FOR_EVER, "--json", str(path)) as process:
        read_until(process, "host memory")
        time.sleep(0.3)
        assert_ends_cleanly(process, env, number)
    answer: dict[str, Any] = json.loads(path.read_text())
    assert answer["stopped_by"] == signal.Signals(number).name
    assert 0 < answer["total"]["steps"] < 100000000


def test_ctrl_c_also_ends_it_in_the_background_of_a_shell(env: dict[str, str]) -> None:
    with started(env, *TWO_FAKES, *FOR_EVER, in_background=True) as shell:
        pid = int(read_until(shell, "pid").split()[-1])
        read_until(shell, "host memory")
        children = workers_of(pid, 2)
        sent_s = time.monotonic()
        os.kill(pid, signal.SIGINT)
        assert "code 130" in read_until(shell, "code")
        assert time.monotonic() - sent_s < 2.0
        assert not [child for child in children if child.is_running()]
    assert not kept_logs(env)


def test_ctrl_c_ends_it_while_the_workers_are_being_opened(
    env: dict[str, str], foreign: Path
) -> None:
    slow = f"{foreign}:SlowToBuild"
    with started(env, "run", "--simulator", slow, "--devices", "cpu,cpu", *FOR_EVER) as process:
        workers_of(process.pid, 2)
        time.sleep(0.5)
        assert_ends_cleanly(process, env)


def test_ctrl_c_ends_it_while_a_step_hangs(env: dict[str, str], foreign: Path) -> None:
    hangs = f"{foreign}:Hangs"
    with started(env, "run", "--simulator", hangs, "--devices", "cpu", *FOR_EVER) as process:
        read_until(process, "host memory")
        time.sleep(0.5)
        children = workers_of(process.pid, 1)
        sent_s = time.monotonic()
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=10)
        assert time.monotonic() - sent_s < 2.0 and process.returncode == 130
        assert not children[0].is_running()


# -- what a user does wrong ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["--backend", "nonsense", "--devices", "cpu"], 2, "there is no backend 'nonsense'"),
        (["--devices", "cpu", "--ranks", "2"], 2, "--devices cpu,cpu"),
        (["--devices", "cuda"], 2, "does not say which GPU"),
        (["--devices", "cpu,,cpu"], 2, "empty entry"),
        (["--devices", "cpu", "--scene", "no-such.xml"], 1, "'no-such.xml' is neither a file nor"),
        (["--devices", "cpu", "--worker-python", "/no/python"], 1, "/no/python does not exist"),
        (["--devices", "cpu", "--simulator", "/no/file.py:Mine"], 2, "FILE must exist"),
        (["--devices", "cpu", "--backend", "fake", "--publish", "colour"], 2, "colour"),
        (["--devices", "cpu", "--num-envs", "0"], 2, "num_envs=0"),
        ([], 2, "Missing option '--devices'"),
    ],
)
def test_a_mistake_gets_one_readable_message(
    env: dict[str, str], arguments: list[str], code: int, words: str
) -> None:
    done = outboard(env, "run", *arguments)
    assert done.returncode == code, done.stderr
    assert words in done.stderr and "Traceback" not in done.stderr
    assert not done.stdout


def test_when_one_rank_fails_its_cause_is_shown_and_all_are_closed(
    env: dict[str, str], foreign: Path
) -> None:
    simulator = f"{foreign}:RaisesInRankOne"
    with started(env, "run", "--simulator", simulator, "--devices", "cpu,cpu,cpu") as process:
        said = process.communicate(timeout=30)[1]
    assert process.returncode == 1
    assert "error: the worker reported RuntimeError" in said and "the knee came off" in said
    assert said.count("error:") == 1 and "rank: 1" in said
    assert len(kept_logs(env)) == 1  # of the one that failed


def test_when_one_rank_cannot_be_opened_the_others_are_not_waited_for(
    env: dict[str, str], foreign: Path
) -> None:
    started_s = time.monotonic()
    done = outboard(env, "run", "--simulator", f"{foreign}:OneFailsOneBuilds",
                    "--devices", "cpu,cpu", "--json", "-")  # fmt: skip
    assert time.monotonic() - started_s < 20
    assert done.returncode == 1 and "the knee is missing" in done.stderr
    assert json.loads(done.stdout)["error"] == "WorkerFailed"


def test_a_reader_that_has_enough_is_no_error_of_ours(env: dict[str, str]) -> None:
    with started(env, *TWO_FAKES, "--steps", "200") as process:
        assert process.stdout is not None and process.stderr is not None
        process.stdout.close()
        said = process.stderr.read()
        process.wait(20)
    assert "Traceback" not in said and "Exception" not in said


# -- the other commands ----------------------------------------------------------------------------


def test_the_commands_are_listed_with_one_line_each(env: dict[str, str]) -> None:
    done = outboard(env, "--help")
    assert done.returncode == 0
    for command in ("run", "plan", "doctor", "conformance", "setup"):
        assert re.search(rf"^  {command} +\S", done.stdout, re.M)


def test_conformance_of_a_worker_that_was_not_written_here(
    env: dict[str, str], foreign: Path
) -> None:
    good = outboard(env, "conformance", "--simulator", f"{foreign}:Mine", "--json")
    assert good.returncode == 0, good.stdout + good.stderr
    answer = json.loads(good.stdout)
    assert answer["held"] > 10 and answer["failed"] == 0
    bad = outboard(env, "conformance", "--simulator", f"{foreign}:NoSuchClass")
    assert bad.returncode == 1 and "opens" in bad.stdout and "failed" in bad.stdout


def test_plan_of_a_machine_that_is_not_here(env: dict[str, str]) -> None:
    gpus = [f"GPU-{i:08d}-0000-4000-8000-000000000000" for i in range(2)]
    env |= {"RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    env |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    done = outboard(env, "plan", "--json", "--assume-gpus", ",".join(gpus))
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout)
    assert answer["rank"] == 1 and answer["device"]["uuid"] == gpus[1]
    table = outboard(env, "plan", "--assume-gpus", ",".join(gpus))
    assert table.returncode == 0 and gpus[1] in table.stdout


def test_plan_without_any_gpu_says_why_with_exit_code_2(env: dict[str, str]) -> None:
    done = outboard(env, "plan", "--json", "--assume-gpus", "nonsense")
    assert done.returncode == 2
    assert json.loads(done.stdout)["error"] == "UsageError"
