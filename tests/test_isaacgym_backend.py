"""IsaacGymBackend: where it finds Isaac Gym, what it refuses, and the stand-in behind the public API."""

from __future__ import annotations

import dataclasses
import logging
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from isaacgym_home import gym_home, write_scene
from outboard.backends import (
    Backend,
    IsaacGymBackend,
    IsaacGymCfg,
    MuJoCoBackend,
    OutboardError,
    SceneError,
    UsageError,
    WorkerLaunchError,
    WorkerTimeout,
    conformance,
)
from outboard.backends import (
    isaacgym_home as table,
)
from outboard.ipc.layout import PUBLISHABLE
from standin_gpu import standin_folder
from standin_host import Host

__all__ = ["gym_home"]

pytestmark = pytest.mark.usefixtures("logs_may_stay")  # the log of a failed worker stays

STEPS = 50


@pytest.fixture
def home(gym_home: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for row in table.TABLE:
        monkeypatch.delenv(row.variable, raising=False)
    monkeypatch.setenv("OUTBOARD_ISAACGYM_HOME", str(gym_home))
    return gym_home


# -- where it is -----------------------------------------------------------------------------------


def folders(path: Path, *names: str) -> dict[str, str]:
    """Homes of these names, each with an interpreter and a package."""
    for name in names:
        python = path / name / "miniconda3" / "envs" / "hsgym" / "bin" / "python3.8"
        python.parent.mkdir(parents=True)
        python.write_text("#!/bin/sh\n")
        python.chmod(0o755)
        (path / name / "miniconda3" / "envs" / "hsgym" / "lib").mkdir()
        (path / name / "isaacgym" / "python").mkdir(parents=True)
    return {name: str(path / name) for name in names}


def test_homes_are_taken_in_the_order_of_the_table(tmp_path: Path) -> None:
    homes = [row.variable for row in table.TABLE if row.names == table.HOME]
    assert homes == [
        "OUTBOARD_ISAACGYM_HOME", "UNISIM_ISAACGYM_HOME", "UNILAB_BENCHMARK_HOLOSOMA_DEPS",
        "UNILAB_ISAACGYM_HOME",
    ]  # fmt: skip
    env = folders(tmp_path, *homes)
    while homes:
        found = table.find(env)
        assert found.python == f"{env[homes[0]]}/miniconda3/envs/hsgym/bin/python3.8"
        assert found.package_root == f"{env[homes[0]]}/isaacgym/python"
        assert found.libraries == (f"{env[homes[0]]}/miniconda3/envs/hsgym/lib",)
        assert all(homes[0] in line or "beside" in line for line in found.why)
        assert bool(found.notices) == (homes[0] == "UNILAB_ISAACGYM_HOME")
        del env[homes.pop(0)]


def test_the_default_is_unisims(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    with pytest.raises(WorkerLaunchError, match=r"outboard setup\s+isaacgym.*UNISIM_ISAACGYM_HOME"):
        table.find({})
    folders(tmp_path / ".cache" / "unisim", "isaacgym")
    assert table.find({}).python.startswith(str(tmp_path / ".cache/unisim/isaacgym/miniconda3"))


def test_interpreter_and_libraries_complete_the_homes_after_them(tmp_path: Path) -> None:
    homes = folders(tmp_path, "ours", "theirs", "bench")
    python = f"{homes['bench']}/miniconda3/envs/hsgym/bin/python3.8"
    env = {"UNISIM_ISAACGYM_HOME": homes["theirs"], "UNILAB_BENCHMARK_HSGYM_PYTHON": python,
           "UNILAB_BENCHMARK_HSGYM_LIB": "/a/lib"}  # fmt: skip
    found = table.find(env)
    assert (found.python, found.libraries) == (python, ("/a/lib",))
    assert found.package_root == f"{homes['theirs']}/isaacgym/python"
    # UniSim's own variable stands before the benchmarks'.
    theirs = f"{homes['theirs']}/miniconda3/envs/hsgym/bin/python3.8"
    assert table.find({**env, "UNISIM_ISAACGYM_PYTHON": theirs}).python == theirs
    # Outboard's home is whole, and the caller's interpreter stands before everything.
    whole = table.find({**env, "OUTBOARD_ISAACGYM_HOME": homes["ours"]})
    assert whole.python.startswith(homes["ours"]) and whole.libraries[0].startswith(homes["ours"])
    assert table.find(env, python=theirs).python == theirs


def test_the_callers_interpreter_may_be_a_name_in_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    python = Path(folders(tmp_path, "one")["one"]) / "miniconda3/envs/hsgym/bin/python3.8"
    monkeypatch.setenv("PATH", f"{python.parent}:{os.environ['PATH']}")
    found = table.find({}, python="python3.8")
    assert found.python == str(python) and found.libraries == (str(python.parent.parent / "lib"),)


def test_a_home_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(
        WorkerLaunchError, match=r"no Isaac Gym interpreter at /none/.*UNISIM_ISAACGYM_HOME"
    ):
        table.find({"UNISIM_ISAACGYM_HOME": "/none"})


def test_search_paths_are_the_workers_alone(tmp_path: Path) -> None:
    env = folders(tmp_path, "UNISIM_ISAACGYM_HOME")
    found = table.find(env)
    variables = found.variables({"PATH": "/bin"}, {"LD_LIBRARY_PATH": "/mine"})
    assert variables == {
        "PATH": f"{Path(found.python).parent}:/bin",
        "LD_LIBRARY_PATH": f"/mine:{found.libraries[0]}",
    }
    assert "hsgym" not in os.environ.get("LD_LIBRARY_PATH", "") + os.environ["PATH"]


# -- settings --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("key", "instead"),
    [
        ("isaacgym_device_id", 'device="cuda:1"'),
        ("device_id", 'device="cpu"'),
        ("sim_dt", "dt="),
        ("worker_timeout_s", "step_timeout_s="),
        ("worker_command", "worker_python="),
    ],
)
def test_an_old_key_is_answered_with_the_new_one(key: str, instead: str) -> None:
    made: Any = IsaacGymCfg
    with pytest.raises(UsageError, match=instead):
        made(**{key: 1})
    with pytest.raises(UsageError, match=instead):
        made(**{f"env.{key}": 1})


def test_a_key_that_nobody_ever_had_is_a_type_error() -> None:
    with pytest.raises(TypeError, match="no_such_key"):
        IsaacGymCfg(no_such_key=1)  # type: ignore[call-arg]


@pytest.mark.parametrize(
    "values",
    [
        {"tensor_bridge": "torch"}, {"num_position_iterations": 0}, {"solver_type": 2},
        {"rest_offset": 0.5}, {"substeps": 0}, {"env_spacing": -1.0}, {"num_threads": True},
    ],
)  # fmt: skip
def test_a_setting_out_of_range_is_refused(values: dict[str, Any]) -> None:
    with pytest.raises(UsageError):
        IsaacGymCfg(**values)


def test_the_cfg_is_frozen_and_sends_floats_as_floats() -> None:
    cfg = IsaacGymCfg(contact_offset=1, env_spacing=5)
    with pytest.raises(dataclasses.FrozenInstanceError):
        cfg.substeps = 2  # type: ignore[misc]
    options = cfg.options()
    assert (options["contact_offset"], type(options["contact_offset"])) == (1.0, float)
    assert type(options["substeps"]) is int
    assert dataclasses.replace(cfg, substeps=2).substeps == 2


# -- what the host refuses -------------------------------------------------------------------------


def test_no_scene_and_no_pictures(home: Path) -> None:
    with pytest.raises(UsageError, match="needs a scene"):
        IsaacGymBackend(device="cpu", num_envs=1)
    with pytest.raises(UsageError, match="renders no pictures"):
        IsaacGymBackend(device="cpu", scene="arm7", num_envs=1, render=True)


def test_a_scene_outside_the_contract_is_refused_by_rule(home: Path, tmp_path: Path) -> None:
    path = write_scene(tmp_path, "floating")
    path.write_text(path.read_text().replace('<joint name="hip"', '<joint damping="2" name="hip"'))
    with pytest.raises(SceneError, match=r"rule C2\.5"):
        IsaacGymBackend(device="cpu", scene=path, num_envs=1)
    cfg = IsaacGymCfg(fold_joint_damping=True)
    with IsaacGymBackend(device="cpu", scene=path, num_envs=1, cfg=cfg) as sim:
        assert sim.model.kv[2] == 6.0
        assert any("folded into kv" in note for note in sim.report["notes"])


def test_a_floor_that_is_not_at_zero_is_refused(home: Path, tmp_path: Path) -> None:
    path = write_scene(tmp_path, "floating")
    path.write_text(path.read_text().replace('name="floor"', 'name="floor" pos="0 0 -1"'))
    with pytest.raises(SceneError, match=r"floor is at height -1\.0 m"):
        IsaacGymBackend(device="cpu", scene=path, num_envs=1)


# -- stepping --------------------------------------------------------------------------------------


def beside_mujoco(sim: Backend, scene: Path, python: str) -> dict[str, float]:
    """The largest difference in each field, over STEPS steps from a spinning start in the air."""
    with MuJoCoBackend(
        device="cpu", scene=scene, num_envs=sim.num_envs, publish=PUBLISHABLE, worker_python=python
    ) as other:
        model = sim.model
        assert model.body_names == other.model.body_names
        for name in ("kp", "kv", "ctrl_range", "joint_range", "force_range", "default_qpos"):
            assert np.array_equal(getattr(model, name), getattr(other.model, name)), name
        qpos, qvel = model.default_qpos.copy(), np.linspace(-2, 3, model.nv)
        qpos[2] += 1.5
        worst = dict.fromkeys(PUBLISHABLE, 0.0)
        states = [each.set_state([1], qpos, qvel) for each in (sim, other)]
        for t in range(STEPS):
            for name, off in worst.items():
                ours, theirs = (getattr(state, name) for state in states)
                scale = max(1.0, float(np.abs(theirs).max())) if name == "contact_force" else 1.0
                worst[name] = max(off, float(np.abs(ours - theirs).max()) / scale)
            swing = 0.4 * np.sin(0.3 * t + np.arange(model.nu))
            ctrl = np.tile((model.default_ctrl + swing).astype(np.float32), (sim.num_envs, 1))
            # The floor and a reset come in too.
            reset = [0] if t == 30 else None
            states = [each.step(ctrl, reset=reset) for each in (sim, other)]
        return worst


@pytest.mark.parametrize("scene", ["floating", "humanoid29"])
def test_it_moves_as_mujoco_does(scene: str, home: Path, tmp_path: Path, python38: str) -> None:
    path: Any = write_scene(tmp_path, scene) if scene == "floating" else scene
    with IsaacGymBackend(device="cpu", scene=path, num_envs=3, publish=PUBLISHABLE) as sim:
        worst = beside_mujoco(sim, path, python38)
        assert sim.device == "cpu; dof_state lies in host memory"
        assert "CPU pipeline, state through host memory" in sim.report["notes"]
        assert sim.model.env_origins.tolist() == [[0, 0, 0], [4, 0, 0], [0, 4, 0]]
    assert max(worst.values()) <= 1e-4, worst


def test_what_is_not_reproduced_is_said(home: Path, tmp_path: Path) -> None:
    path = write_scene(tmp_path, "floating")
    with IsaacGymBackend(device="cpu", scene=path, num_envs=1) as sim:
        assert "joint limits: 3 written and read back" in sim.report["notes"]
        assert any(said.startswith("frictionloss: ") for said in sim.model.not_reproduced)
    cfg, env = IsaacGymCfg(enforce_joint_limits=False), {"ISAACGYM_STANDIN": "limits=lost"}
    with IsaacGymBackend(device="cpu", scene=path, num_envs=1, cfg=cfg) as sim:
        assert "joint limits: 3, switched off by the Cfg" in sim.model.not_reproduced
    with IsaacGymBackend(device="cpu", scene=path, num_envs=1, env=env) as sim:
        said = "joint limits: not kept by the engine: shoulder, reach, hip"
        assert said in sim.model.not_reproduced
        assert np.isfinite(sim.model.joint_range[0]).all()  # the model's, whatever the engine does


def test_it_needs_no_compiler_no_ninja_and_no_torch(home: Path, tmp_path: Path) -> None:
    """The worker's PATH holds the environment's own bin, with nothing in it but its Python."""
    (tmp_path / "empty").mkdir()
    env = {"PATH": str(tmp_path / "empty")}
    with IsaacGymBackend(device="cpu", scene="arm7", num_envs=2, env=env) as sim:
        pid = sim.report["pid"]
        environ = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
        found = next(each for each in environ if each.startswith(b"PATH=")).decode()[5:].split(":")
        maps = Path(f"/proc/{pid}/maps").read_text()
        sim.step()
    programs = {entry.name for folder in found for entry in Path(folder).iterdir()}
    assert programs == {"python3.8"}
    assert "torch" not in maps


def test_a_slow_engine_is_waited_for_as_long_as_it_makes_progress(
    home: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Twelve environments at 0.2 s are 2.4 s; the worker may be silent for 1.5 s."""
    monkeypatch.setattr(
        IsaacGymBackend, "traits", dataclasses.replace(IsaacGymBackend.traits, init_s=1.5)
    )
    env = {"ISAACGYM_STANDIN": "actor_s=0.2"}
    with (
        caplog.at_level(logging.INFO, "outboard"),
        IsaacGymBackend(device="cpu", scene="arm7", num_envs=12, env=env) as sim,
    ):
        sim.step()
    stages = [line for line in caplog.messages if "creating environments" in line]
    assert len(stages) >= 5
    env = {"ISAACGYM_STANDIN": "import_s=20"}
    with pytest.raises(WorkerTimeout, match="last progress was importing isaacgym 0/1"):
        IsaacGymBackend(device="cpu", scene="arm7", num_envs=1, env=env)


@pytest.mark.parametrize("settings", ["destroy=hang", "destroy=segv", "child=1"])
def test_however_it_ends_nothing_is_left(
    settings: str, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The leak guards around every test look for the processes."""
    monkeypatch.setattr(
        IsaacGymBackend, "traits", dataclasses.replace(IsaacGymBackend.traits, close_s=0.5)
    )
    env = {"ISAACGYM_STANDIN": settings}
    with IsaacGymBackend(device="cpu", scene="arm7", num_envs=1, env=env) as sim:
        sim.step()


def test_a_legacy_home_works_with_one_line_of_notice(
    gym_home: Path, home: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.delenv("OUTBOARD_ISAACGYM_HOME")
    monkeypatch.setenv("UNILAB_ISAACGYM_HOME", str(gym_home))
    with (
        caplog.at_level(logging.WARNING, "outboard"),
        IsaacGymBackend(device="cpu", scene="arm7", num_envs=1),
    ):
        pass
    assert len([line for line in caplog.messages if "legacy name" in line]) == 1


@pytest.mark.slow
@pytest.mark.timeout(240)
@pytest.mark.parametrize("scene", ["humanoid29", "arm7"])
def test_it_conforms(scene: str, home: Path) -> None:
    target = conformance.make_target(backend="isaacgym", device="cpu", scene=scene)
    outcomes = conformance.run_kit(target)
    failed = [(each.name, each.why) for each in outcomes if each.verdict == conformance.FAILED]
    assert failed == []
    assert conformance.tally(outcomes)[conformance.HELD] >= 48


# -- on stand-in GPUs ------------------------------------------------------------------------------
# The stand-in Isaac Gym allocates with cuMemAlloc of the stand-in libcuda, whose addresses the CPU
# cannot touch: the driver bridge, the pointer's device and the verdict are the real ones.

OPEN = """
os.environ["OUTBOARD_ISAACGYM_HOME"] = home
def isaacgym(device, settings="", num_envs=2, **more):
    env = {**standin(), "ISAACGYM_STANDIN": settings}
    return IsaacGymBackend(device=device, scene=scene, num_envs=num_envs, env=env, **more)
"""


@pytest.fixture(scope="module")
def host(tmp_path_factory: pytest.TempPathFactory, private_folders: Path) -> Iterator[Host]:
    standin_folder()  # skips when it cannot be built
    with Host(tmp_path_factory.mktemp("state")).started() as started:
        yield started


def on_gpu(host: Host, home: Path, code: str, **names: Any) -> Any:
    names = {"scene": "arm7", "home": str(home), **names}
    return host.run(OPEN + code, **names)


def test_two_ranks_are_each_on_their_planned_gpu(host: Host, gym_home: Path) -> None:
    words, reports, masks = on_gpu(
        host,
        gym_home,
        """
with isaacgym("cuda:0") as a, isaacgym("cuda:1") as b:
    a.step_async(); b.step_async(); a.step_wait(); b.step_wait()
    a.where(); b.where()
    answer = [[s.device for s in (a, b)], [s.report["device_report"] for s in (a, b)],
              [s.report["device_plan"]["mask"] for s in (a, b)]]
""",
    ).answer
    assert masks == [host.u0, host.u1]
    for i, uuid in enumerate((host.u0, host.u1)):
        said = (
            f"cuda:{i} = {uuid} (worker cuda:0); dof_state is there (derived_copy); NVML confirmed"
        )
        assert words[i] == said
        assert (reports[i]["uuid"], reports[i]["local"]) == (uuid, "cuda:0")
        assert reports[i]["visible"] == [uuid]


def test_on_the_gpu_pipeline_it_moves_as_mujoco_does(
    host: Host, gym_home: Path, tmp_path: Path, python38: str
) -> None:
    worst = on_gpu(
        host,
        gym_home,
        """
sys.path.insert(0, tests)
from test_isaacgym_backend import PUBLISHABLE, beside_mujoco
with isaacgym("cuda:1", num_envs=3, publish=PUBLISHABLE) as sim:
    answer = beside_mujoco(sim, scene, python38)
""",
        scene=str(write_scene(tmp_path, "floating")),
        tests=str(Path(__file__).parent),
        python38=python38,
    ).answer
    assert max(worst.values()) <= 1e-4, worst


@pytest.mark.parametrize(
    ("settings", "error", "saying"),
    [
        ("create=none", "DevicePlanError", "create_sim returned None on cuda:0 = {uuid}"),
        ("create=segv", "WorkerDied", "INIT (creating the simulation on cuda:0 0/1): SIGSEGV"),
        ("create=bad_ordinal", "DevicePlanError", "and went on: .*invalid device ordinal"),
        ("create=cpu", "DevicePlanError", "PhysX fell back to the CPU without failing"),
        ("create=zeros", "DevicePlanError", "after one step on cuda:0 = {uuid}"),
    ],
)
def test_a_wrong_device_is_refused_with_a_message_of_its_own(
    settings: str, error: str, saying: str, host: Host, gym_home: Path
) -> None:
    """The four manners of trap 2, and zeros without a word."""
    done = on_gpu(host, gym_home, 'isaacgym("cuda:1", settings)', settings=settings)
    assert done.error == error, done
    first, _, rest = saying.format(uuid=host.u1).partition(".*")
    assert first in done.message and rest in done.message
    assert done.pid and not os.path.exists(f"/proc/{done.pid}")


def test_a_lie_about_the_device_is_seen_by_the_driver(host: Host, gym_home: Path) -> None:
    """Tensors that say GPU 0 and lie in host memory: the pointer is asked, not the descriptor."""
    done = on_gpu(host, gym_home, 'isaacgym("cuda:1", "gpu=host")')
    assert isinstance(done.error, str) and done.error, "it was believed"


def test_with_gymtorch_the_mask_is_an_integer(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch before 2.0 reads no UUIDs, and its extension is compiled for minutes."""
    from outboard.backends import arguments

    given: dict[str, Any] = dict(
        simulator="isaacgym", traits=IsaacGymBackend.traits, device="cpu", scene="arm7", num_envs=1,
        dt=None, decimation=1, publish=("qpos",), seed=0, banks=1, transport="auto",
        worker_python=None, env=None, rank=None, render=False, share=False,
    )  # fmt: skip
    driver = IsaacGymBackend.prepare(arguments.order(cfg=IsaacGymCfg(), **given))
    torch = IsaacGymBackend.prepare(
        arguments.order(cfg=IsaacGymCfg(tensor_bridge="gymtorch"), **given)
    )
    assert driver.traits.uuid_tokens and not torch.traits.uuid_tokens
    assert torch.traits.init_s > driver.traits.init_s
    assert Path(str(driver.init.options["contract"])).is_file()
    assert Path(driver.init.scene).name == "robot.xml"


def test_gymtorch_where_there_is_no_torch_says_so(home: Path) -> None:
    cfg = IsaacGymCfg(tensor_bridge="gymtorch")
    with pytest.raises(OutboardError, match='tensor_bridge="driver" needs none of them'):
        IsaacGymBackend(device="cpu", scene="arm7", num_envs=1, cfg=cfg)
