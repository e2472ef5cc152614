"""Ray actors on a real local cluster with two logical GPUs: Ray writes the mask, hardware or not.

Ray is installed into an environment of the test's own, under the checkout's cache folder: it pins
packages that the project's environment must not inherit. The GPUs are stand-ins.
"""

from __future__ import annotations

import fcntl
import json
import secrets
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from standin_gpu import ROOT
from standin_host import Host

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(400),  # the first run downloads Ray
    pytest.mark.usefixtures("logs_may_stay"),
]

PACKAGES = ("ray", "numpy", "msgpack", "posix_ipc", "nvidia-ml-py", "click", "rich")

# Three pairs of actors, one after the other; both of a pair hold their backend at once.
CLUSTER = """
import json, os, sys
import ray

NOSET = {"env_vars": {"RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES": "1"}}

@ray.remote(num_cpus=0)
class Learner:
    def open(self, device, python):
        from outboard.backends import FakeBackend, OutboardError, RankPlan
        said = {"ids": [int(one) for one in ray.get_gpu_ids()]}
        said["mask"] = os.environ.get("CUDA_VISIBLE_DEVICES")
        try:
            plan = RankPlan.from_env()
            said["source"], said["why"] = plan.source, plan.why
            standin = {k: v for k, v in os.environ.items() if k.startswith("OUTBOARD_STANDIN_")}
            self.sim = FakeBackend(device=plan.device if device == "plan" else device, num_envs=2,
                                   worker_python=python, env=standin)
            self.sim.step(self.sim.ctrl_view)
            said["uuid"] = self.sim.report["device_report"]["uuid"]
            said["worker_mask"] = self.sim.report["device_plan"]["mask"]
        except OutboardError as error:
            said["error"], said["message"] = type(error).__name__, error.message
        return said

    def close(self):
        if hasattr(self, "sim"):
            self.sim.close()

def pair(device, **options):
    actors = [Learner.options(**options).remote() for _ in range(2)]
    said = ray.get([actor.open.remote(device, sys.argv[2]) for actor in actors], timeout=90)
    ray.get([actor.close.remote() for actor in actors])
    for actor in actors:
        ray.kill(actor)
    return sorted(said, key=lambda one: one["ids"])

ray.init(num_cpus=2, num_gpus=2, include_dashboard=False, log_to_driver=False,
         configure_logging=False, _temp_dir=sys.argv[1], _node_ip_address="127.0.0.1")
answer = {
    "masked": pair("plan", num_gpus=1),
    "noset": pair("plan", num_gpus=1, runtime_env=NOSET),
    "literal": pair("cuda:0", num_gpus=1, runtime_env=NOSET),
}
ray.shutdown()
print(json.dumps(answer))
"""


def install(*arguments: str, python: str = sys.executable) -> None:
    """One step of the installation; skips the calling test when it does not work here."""
    try:
        done = subprocess.run([python, *arguments], capture_output=True, text=True, timeout=300)
    except subprocess.TimeoutExpired:
        pytest.skip("needs Ray, which was not installed within 300 s")
    if done.returncode != 0:
        why = (done.stderr or done.stdout).strip().splitlines() or ["pip said nothing"]
        pytest.skip(f"needs Ray, which cannot be installed here: {why[-1]}")


def python_with_ray() -> str:
    """The interpreter of an environment that has Ray; made once per checkout and Python. Skips the
    calling test when Ray cannot be installed."""
    folder = ROOT / ".cache" / f"ray-{sys.version_info[0]}.{sys.version_info[1]}"
    python, stamp = folder / "bin" / "python", folder / "complete"
    folder.parent.mkdir(exist_ok=True)
    with open(f"{folder}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # two sessions of this suite may run at once
        if not stamp.exists():
            shutil.rmtree(folder, ignore_errors=True)
            install("-m", "venv", str(folder))
            pip = ("-m", "pip", "install", "--quiet", "--prefer-binary")
            install(*pip, *PACKAGES, python=str(python))
            stamp.touch()
    return str(python)


@pytest.fixture(scope="module")
def machine(tmp_path_factory: pytest.TempPathFactory, private_folders: Path) -> Host:
    return Host(tmp_path_factory.mktemp("state"))


@pytest.fixture(scope="module")
def cluster(machine: Host, python38: str) -> Iterator[dict[str, list[dict[str, Any]]]]:
    """What the actors said, by pair, each pair in the order of Ray's ids."""
    python = python_with_ray()
    # Its sockets lie below this folder, and the path of a socket has 107 characters at most.
    folder = tempfile.mkdtemp(prefix="ray-")
    try:
        done = subprocess.run(
            [python, "-c", CLUSTER, folder, python38],
            env=machine.environment(
                RAY_USAGE_STATS_ENABLED="0",
                RAY_AUTH_TOKEN=secrets.token_hex(32),  # else Ray writes one into the home folder
            ),
            capture_output=True, text=True, timeout=200,
        )  # fmt: skip
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    assert done.returncode == 0, done.stderr[-4000:]
    yield json.loads(done.stdout.splitlines()[-1])


def landed(said: dict[str, Any]) -> str:
    """Where an actor's simulator is, or why it is nowhere."""
    return said["uuid"] if "uuid" in said else said["message"]


def test_each_actor_gets_the_gpu_that_ray_gave_it(
    cluster: dict[str, list[dict[str, Any]]], machine: Host
) -> None:
    first, second = cluster["masked"]
    assert (first["mask"], second["mask"]) == ("0", "1")  # Ray's work
    assert [landed(first), landed(second)] == [machine.u0, machine.u1]
    assert (first["worker_mask"], second["worker_mask"]) == (machine.u0, machine.u1)
    assert first["source"] == "Ray"


def test_actors_that_ray_did_not_narrow_take_what_it_assigned(
    cluster: dict[str, list[dict[str, Any]]], machine: Host
) -> None:
    first, second = cluster["noset"]
    assert (first["mask"], second["mask"]) == (None, None)
    assert [landed(first), landed(second)] == [machine.u0, machine.u1]
    assert second["why"].startswith("Ray: Ray assigned id 1 to this actor")


def test_of_two_actors_that_both_say_cuda_0_one_is_refused(
    cluster: dict[str, list[dict[str, Any]]], machine: Host
) -> None:
    """Ray numbers nobody, so no rank contradicts them: it is the lock that stops the second."""
    ran = [one for one in cluster["literal"] if "uuid" in one]
    (refused,) = [one for one in cluster["literal"] if "error" in one]
    assert [one["uuid"] for one in ran] == [machine.u0]
    assert refused["error"] == "DevicePlanError"
    assert f"{machine.u0} is already open in rank 0" in refused["message"]
