"""IsaacSimBackend: where it finds Isaac Sim, what it refuses, and the stand-in behind the public API."""

from __future__ import annotations

import dataclasses
import json
import logging
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from isaacgym_home import write_scene
from isaacsim_home import LICENCE, STANDIN, home, sim_home
from outboard.backends import (
    IsaacSimBackend,
    IsaacSimCfg,
    SceneError,
    UsageError,
    WorkerDied,
    WorkerLaunchError,
    WorkerTimeout,
    arguments,
    conformance,
    interpreters,
)
from outboard.backends import isaacsim_home as table
from outboard.ipc.layout import PUBLISHABLE
from standin_gpu import standin_folder
from standin_host import Host
from test_isaacgym_backend import beside_mujoco

__all__ = ["home", "sim_home"]

pytestmark = pytest.mark.usefixtures("logs_may_stay")  # the log of a failed worker stays


def standin(**settings: object) -> dict[str, str]:
    return {"ISAACSIM_STANDIN": ";".join(f"{name}={value}" for name, value in settings.items())}


# -- where it is -----------------------------------------------------------------------------------


def interpreter(path: Path) -> str:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("#!/bin/sh\n")
    path.chmod(0o755)
    return str(path)


def test_variables_are_taken_in_the_order_of_the_table(tmp_path: Path) -> None:
    env: dict[str, str] = {}
    for row in table.TABLE:
        python = interpreter(tmp_path / row.variable / "venv" / "bin" / "python")
        env[row.variable] = python if row.names == table.PYTHON else str(tmp_path / row.variable)
    assert list(env) == [
        "OUTBOARD_ISAACSIM_PYTHON", "OUTBOARD_ISAACSIM_HOME", "UNISIM_ISAACSIM_PYTHON",
        "UNISIM_ISAACSIM_HOME",
    ]  # fmt: skip
    given = interpreter(tmp_path / "given" / "python")
    assert table.find(env, given).python == given
    while env:
        first = next(iter(env))
        found = table.find(env)
        assert found.python == str(tmp_path / first / "venv" / "bin" / "python")
        assert first in found.why[0]
        del env[first]


@pytest.mark.parametrize("name", table.INTERPRETERS)
def test_a_home_is_unisims_a_pip_environment_or_a_binary_install(name: str, tmp_path: Path) -> None:
    python = interpreter(tmp_path / name)
    found = table.find({"UNISIM_ISAACSIM_HOME": str(tmp_path)})
    assert found.python == python and found.package_root == ""
    assert found.binary == (name == "python.sh")
    assert ("-E" in found.python_flags) != found.binary


def test_a_checkout_of_isaac_lab_in_the_home_is_found(tmp_path: Path) -> None:
    interpreter(tmp_path / "venv" / "bin" / "python")
    (tmp_path / table.CHECKOUT).mkdir(parents=True)
    env = {"UNISIM_ISAACSIM_HOME": str(tmp_path)}
    assert table.find(env).package_root == str(tmp_path / table.CHECKOUT)
    other = interpreter(tmp_path.parent / "elsewhere" / "python")
    assert table.find(env, other).package_root == ""


def test_nothing_there_names_every_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    with pytest.raises(
        WorkerLaunchError, match=r"OUTBOARD_ISAACSIM_PYTHON.*UNISIM_ISAACSIM_HOME, ~/.cache/unisim"
    ):
        table.find({})
    interpreter(tmp_path / ".cache" / "unisim" / "isaacsim" / "venv" / "bin" / "python")
    assert "the default" in table.find({}).why[0]


# -- settings --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("key", "instead"),
    [
        ("device_id", 'device="cuda:1"'), ("sim_dt", "dt="), ("render_mode", "render="),
        ("tensor_cuda_ipc", 'transport="cuda"'), ("worker_command", "worker_python="),
    ],
)  # fmt: skip
def test_an_old_key_is_answered_with_the_new_one(key: str, instead: str) -> None:
    made: Any = IsaacSimCfg
    with pytest.raises(UsageError, match=instead):
        made(**{f"env.{key}": 1})


def test_the_cfg_has_every_solver_setting_of_unisim() -> None:
    """Part F of the facts: whoever moves here must not lack one."""
    names = {field.name for field in dataclasses.fields(IsaacSimCfg)}
    assert names >= {
        "solver_position_iteration_count", "solver_velocity_iteration_count",
        "bounce_threshold_velocity", "contact_offset", "rest_offset", "max_depenetration_velocity",
        "gpu_max_rigid_contact_count", "gpu_max_rigid_patch_count", "env_spacing", "render_width",
        "render_height",
    }  # fmt: skip
    with pytest.raises(dataclasses.FrozenInstanceError):
        IsaacSimCfg().env_spacing = 1.0  # type: ignore[misc]
    assert type(IsaacSimCfg(contact_offset=1).options()["contact_offset"]) is float


@pytest.mark.parametrize(
    "values",
    [
        {"solver_position_iteration_count": 0}, {"solver_type": 2}, {"rest_offset": 0.5},
        {"env_spacing": -1.0}, {"render_width": 4096}, {"cache": "/a folder/x"},
        {"gpu_max_rigid_patch_count": True},
    ],
)  # fmt: skip
def test_a_setting_out_of_range_is_refused(values: dict[str, Any]) -> None:
    with pytest.raises(UsageError):
        IsaacSimCfg(**values)


# -- what the host prepares ------------------------------------------------------------------------


def order(**changes: Any) -> Any:
    given: dict[str, Any] = dict(
        simulator="isaacsim", traits=IsaacSimBackend.traits, device="cpu", scene="arm7", num_envs=1,
        dt=None, decimation=1, publish=("qpos",), seed=0, banks=1, transport="auto",
        worker_python=None, env=None, rank=None, render=False, share=False, cfg=IsaacSimCfg(),
    )  # fmt: skip
    return IsaacSimBackend.prepare(arguments.order(**{**given, **changes}))


def test_each_rank_has_caches_of_its_own(home: Path) -> None:
    folders = [order(rank=rank).env["XDG_CACHE_HOME"] for rank in (0, 1)]
    assert folders == [
        str(interpreters.cache_folder() / "isaacsim" / f"rank{rank}-cpu") for rank in (0, 1)
    ]
    assert order().init.options["cache"] == folders[0]
    mine = order(cfg=IsaacSimCfg(cache="/mine"), env={"WARP_CACHE_PATH": "/warp"})
    assert (mine.env["XDG_CACHE_HOME"], mine.env["WARP_CACHE_PATH"]) == ("/mine", "/warp")


def test_a_first_start_may_take_ten_minutes_and_more_with_progress() -> None:
    traits = IsaacSimBackend.traits
    assert traits.init_s == 600.0 and traits.init_hard_s > traits.init_s
    assert set(traits.pass_env) > {LICENCE} and not traits.set_env


def test_no_scene_and_no_pictures_on_the_cpu(home: Path) -> None:
    with pytest.raises(UsageError, match="needs a scene"):
        IsaacSimBackend(device="cpu", num_envs=1)
    with pytest.raises(UsageError, match="renders pictures on a GPU only"):
        IsaacSimBackend(device="cpu", scene="arm7", num_envs=1, render=True)


def test_a_scene_outside_the_contract_is_refused_by_rule(home: Path, tmp_path: Path) -> None:
    path = write_scene(tmp_path, "floating")
    path.write_text(path.read_text().replace('<joint name="hip"', '<joint damping="2" name="hip"'))
    with pytest.raises(SceneError, match=r"rule C2\.5"):
        IsaacSimBackend(device="cpu", scene=path, num_envs=1)


def test_the_licence_is_asked_for_by_name_and_never_accepted_here(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(LICENCE)
    with pytest.raises(UsageError, match=f"{LICENCE}=YES") as refused:
        IsaacSimBackend(device="cpu", scene="arm7", num_envs=1)
    assert refused.value.report is not None and refused.value.report.phase == "INIT"
    with pytest.raises(UsageError, match="does not accept it for anybody"):
        IsaacSimBackend(device="cpu", scene="arm7", num_envs=1, env={LICENCE: "no"})
    with IsaacSimBackend(device="cpu", scene="arm7", num_envs=1, env={LICENCE: "YES"}) as sim:
        sim.step()


def test_kit_is_started_as_it_must_be(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever the host's environment says: one GPU, no window, no stream, and nobody's rank."""
    for name, value in (("LOCAL_RANK", "3"), ("RANK", "3"), ("WORLD_SIZE", "8"), ("XR", "1"),
                        ("LIVESTREAM", "2"), ("HEADLESS", "0"), ("PYTHONPATH", "/none")):  # fmt: skip
        monkeypatch.setenv(name, value)
    seen, path = tmp_path / "seen.json", "/none"
    env = {**standin(record=seen), "LIVESTREAM": "1", "XR": "1", "ENABLE_CAMERAS": "1"}
    with IsaacSimBackend(device="cpu", scene="arm7", num_envs=1, env=env, rank=0):
        pass
    said = json.loads(seen.read_text())
    assert said["args"] == {
        "headless": True, "device": "cpu", "enable_cameras": False, "multi_gpu": False,
        "kit_args": "--/renderer/multiGpu/autoEnable=False --/renderer/multiGpu/maxGpuCount=1 "
        f"--portable-root {interpreters.cache_folder() / 'isaacsim' / 'rank0-cpu' / 'kit'}",
    }  # fmt: skip
    pinned = {
        name: said["env"][name] for name in ("HEADLESS", "ENABLE_CAMERAS", "LIVESTREAM", "XR")
    }
    assert pinned == {"HEADLESS": "1", "ENABLE_CAMERAS": "0", "LIVESTREAM": "0", "XR": "0"}
    assert not {"LOCAL_RANK", "RANK", "WORLD_SIZE", "PYTHONPATH"} & set(said["env"])
    assert said["env"]["CUDA_VISIBLE_DEVICES"] == "" and path not in said["argv"]


# -- stepping --------------------------------------------------------------------------------------


@pytest.mark.parametrize("scene", ["floating", "humanoid29"])
def test_it_moves_as_mujoco_does(scene: str, home: Path, tmp_path: Path) -> None:
    path: Any = write_scene(tmp_path, scene) if scene == "floating" else scene
    with IsaacSimBackend(device="cpu", scene=path, num_envs=3, publish=PUBLISHABLE) as sim:
        worst = beside_mujoco(sim, path, str(home / "venv" / "bin" / "python"))
        assert sim.device == "cpu; root transforms of the physics view lies in host memory"
        assert sim.report["engine"] == "Isaac Sim 5.1.0 (Isaac Lab 2.3.2)"
        assert np.abs(np.diff(sim.model.env_origins, axis=0)).max() == 4.0
    assert max(worst.values()) <= 1e-4, worst


def test_what_is_not_reproduced_is_said(home: Path, tmp_path: Path) -> None:
    path = write_scene(tmp_path, "floating")
    with IsaacSimBackend(device="cpu", scene=path, num_envs=1) as sim:
        assert "joint limits: 3 written and read back" in sim.report["notes"]
        assert not any(said.startswith("frictionloss") for said in sim.model.not_reproduced)
    env = standin(physics="renderer")
    with IsaacSimBackend(device="cpu", scene=path, num_envs=1, env=env) as sim:
        assert any("Defaulting to GPU0" in note for note in sim.report["notes"])
    lossy = standin(limits="stuck", friction="lost")
    text = path.read_text().replace('"0.4 0.005', '"0.3 0.005', 1)
    path.write_text(text)
    with IsaacSimBackend(device="cpu", scene=path, num_envs=1, env=lossy) as sim:
        said = sim.model.not_reproduced
        assert "joint limits: not kept by the engine: shoulder, reach, hip" in said
        assert "friction per shape: every shape has the largest, 0.4" in said
        assert "friction of shapes: not kept by the engine" in said


@pytest.mark.slow
@pytest.mark.timeout(240)
@pytest.mark.parametrize("scene", ["humanoid29", "arm7"])
def test_it_conforms(scene: str, home: Path) -> None:
    target = conformance.make_target(backend="isaacsim", device="cpu", scene=scene)
    outcomes = conformance.run_kit(target)
    failed = [(each.name, each.why) for each in outcomes if each.verdict == conformance.FAILED]
    assert failed == []
    assert conformance.tally(outcomes)[conformance.HELD] >= 48


def test_a_binary_install_runs_behind_its_script(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`python.sh` sets paths in PYTHONPATH and does not replace itself by Python."""
    python = home / "venv" / "bin" / "python"
    site = next((home / "venv" / "lib").glob("python3*/site-packages"))
    own = (site / "standin.pth").read_text().split()[1]
    script = tmp_path / "python.sh"
    real = os.path.realpath(python)
    script.write_text(f'#!/bin/bash\nexport PYTHONPATH="{site}:{STANDIN}:{own}"\n"{real}" "$@"\n')
    script.chmod(0o755)
    monkeypatch.setenv("OUTBOARD_ISAACSIM_HOME", str(tmp_path))
    with IsaacSimBackend(device="cpu", scene="arm7", num_envs=2) as sim:
        assert sim.report["executable"] == real
        sim.step()


# -- how it starts and ends ------------------------------------------------------------------------


def test_a_slow_start_is_waited_for_as_long_as_it_makes_progress(
    home: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Kit for two seconds and the clones for two more; the worker may be silent for three and a half."""
    traits = dataclasses.replace(IsaacSimBackend.traits, init_s=3.5)
    monkeypatch.setattr(IsaacSimBackend, "traits", traits)
    env = standin(launch_s=2, clone_s=0.5)
    with (
        caplog.at_level(logging.INFO, "outboard"),
        IsaacSimBackend(device="cpu", scene="arm7", num_envs=4, env=env) as sim,
    ):
        sim.step()
    for stage in ("starting Kit", "importing the model", "cloning environments"):
        assert any(stage in line for line in caplog.messages), stage
    with pytest.raises(WorkerTimeout, match="last progress was starting Kit 0/1"):
        IsaacSimBackend(device="cpu", scene="arm7", num_envs=1, env=standin(launch_s=30))


def test_an_importer_that_ends_the_process_is_told_by_its_stage(home: Path) -> None:
    with pytest.raises(WorkerDied, match=r"importing the model 0/1\).*(code|exit) 0"):
        IsaacSimBackend(device="cpu", scene="quadruped12", num_envs=1, env=standin(importer="exit"))


@pytest.mark.parametrize("close", ["exit", "hang", "return"])
def test_however_kit_closes_the_worker_has_left_well(
    close: str, home: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """BYE comes before Kit's close. A close that hangs is ended by the worker's own watchdog, before the host
    loses patience; the leak guards around every test look for the process."""
    with (
        caplog.at_level(logging.INFO, "outboard"),
        IsaacSimBackend(device="cpu", scene="arm7", num_envs=1, env=standin(close=close)) as sim,
    ):
        sim.step()
    (closed,) = (line for line in caplog.messages if "CLOSED" in line)
    assert "left_well=True" in closed and "SIGKILL" not in closed, closed


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGSEGV])
def test_a_signal_ends_a_worker_at_once(number: signal.Signals, home: Path) -> None:
    """Kit's launcher put handlers there that never return."""
    with IsaacSimBackend(device="cpu", scene="arm7", num_envs=1) as sim:
        os.kill(sim.report["pid"], number)
        with pytest.raises(WorkerDied, match=number.name):
            for _ in range(200):
                sim.step()
                time.sleep(0.02)


# -- on a stand-in GPU -----------------------------------------------------------------------------
# torch is a CPU build here, so a simulation cannot get onto the stand-in GPU. What can be shown is
# that it is refused: mask, driver and the place of the tensors are looked at in the real order.

OPEN = """
os.environ["OUTBOARD_ISAACSIM_HOME"] = home
os.environ["OMNI_KIT_ACCEPT_EULA"] = "YES"
def isaacsim(device, settings="", **more):
    env = {**standin(), "ISAACSIM_STANDIN": settings}
    return IsaacSimBackend(device=device, scene="arm7", num_envs=2, env=env, **more)
"""


@pytest.fixture(scope="module")
def host(tmp_path_factory: pytest.TempPathFactory, private_folders: Path) -> Iterator[Host]:
    standin_folder()  # skips when it cannot be built
    with Host(tmp_path_factory.mktemp("state")).started() as started:
        yield started


@pytest.mark.parametrize(
    ("settings", "saying"),
    [
        ("physics=cpu", "PhysX fell back to the CPU without failing"),
        ("physics=software", "GPU solver pipeline failed, switching to software"),
    ],
)
def test_a_simulation_that_is_not_on_its_gpu_is_refused(
    settings: str, saying: str, host: Host, sim_home: Path
) -> None:
    code = OPEN + "isaacsim('cuda:1', settings)"
    done = host.run(code, home=str(sim_home), settings=settings)
    assert done.error == "DevicePlanError", done
    assert saying in done.message and f"cuda:0 = {host.u1}" in done.message


def test_pictures_of_a_gpu_that_is_not_the_first_are_refused(host: Host, sim_home: Path) -> None:
    done = host.run(OPEN + "isaacsim('cuda:1', render=True)", home=str(sim_home))
    assert done.error == "UsageError", done
    assert "render=True on GPU 1 of this machine" in done.message and "2756" in done.message
