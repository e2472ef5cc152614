"""The Isaac Sim worker and its stand-in against the `isaaclab` wheel: names by its syntax trees, buffers
and frames by its own Python over the stand-in's physics view."""

from __future__ import annotations

import ast
import subprocess
from pathlib import Path

import pytest

from isaaclab_faults import INHERITED, OF_ISAAC_SIM, VIEW, faults, looked_at
from isaaclab_wheel import Oracle, parameters, sources
from isaacsim_home import sim_home

__all__ = ["sim_home"]

ROOT = Path(__file__).resolve().parent.parent
WORKER = sorted((ROOT / "workers").glob("isaacsim_*.py"))
STANDIN = ROOT / "tests" / "standins" / "isaacsim"

pytestmark = pytest.mark.timeout(330)  # a first run fetches 3 MB


@pytest.fixture(scope="module")
def oracle() -> Oracle:
    return Oracle(sources())


def test_the_oracle_knows_what_it_is_asked(oracle: Oracle) -> None:
    assert len(oracle.classes) > 300
    assert {"asset_path", "fix_base", "force_usd_conversion"} <= oracle.fields("MjcfConverterCfg")
    assert {"joint_names_expr", "effort_limit_sim"} <= oracle.fields("ImplicitActuatorCfg")
    assert oracle.method("Articulation", "write_joint_state_to_sim") == (
        True, ("position", "velocity", "joint_ids", "env_ids"),
    )  # fmt: skip


@pytest.mark.parametrize("path", WORKER, ids=[path.stem for path in WORKER])
def test_the_worker_names_what_there_is(path: Path, oracle: Oracle) -> None:
    assert faults(oracle, path.read_text()) == []


def test_the_worker_is_looked_at_where_it_calls(oracle: Oracle) -> None:
    seen = set[str]().union(*(looked_at(oracle, path.read_text()) for path in WORKER))
    assert seen >= {
        "SimulationCfg", "PhysxCfg", "UsdFileCfg", "RigidBodyPropertiesCfg", "ArticulationCfg",
        "CollisionPropertiesCfg", "ArticulationRootPropertiesCfg", "ImplicitActuatorCfg",
        "ArticulationCfg.InitialStateCfg", "MjcfConverterCfg", "MjcfConverter", "AppLauncher",
        "RigidBodyMaterialCfg", "ContactSensorCfg", "CameraCfg", "GridCloner", "clone",
        "filter_collisions", "enable_extension", "Articulation.write_data_to_sim",
        "Articulation.write_root_link_pose_to_sim", "ArticulationData.body_link_vel_w",
        "SimulationContext.step", "ContactSensor.update", "ContactSensorData.net_forces_w",
        "CameraData.output", "view.set_coms",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("line", "fault"),
    [
        ("sim_utils.PhysxCfg(solver=1)", "PhysxCfg has no field solver"),
        ("sim_utils.PhysicsCfg()", "Isaac Lab has no PhysicsCfg"),
        ("sim_utils.PhysxCfg(1)", "PhysxCfg takes keywords"),
        ("ArticulationCfg.InitialStateCfg(joints=1)", "InitialStateCfg has no field joints"),
        ("self._robot.write_joint_states_to_sim(1, 2)", "has no write_joint_states_to_sim"),
        ("robot.write_joint_state_to_sim(p, v, env_id=1)", "has no parameter env_id"),
        ("robot.write_root_link_pose_to_sim(1, 2, 3)", "takes 2 arguments, not 3"),
        ("sim.step(rendering=False)", "step has no parameter rendering"),
        ("self._sim.halt()", "SimulationContext has no halt"),
        ("x = self._robot.data.joint_position", "ArticulationData has no joint_position"),
        ("x = self._sensor.data.net_forces", "ContactSensorData has no net_forces"),
        ("view = robot.root_physx_view\nview.get_mass()", "the physics view has no get_mass"),
        ("cloner.clone(source_prim='x')", "clone has no parameter source_prim"),
        ("sim_utils.bind_physics_material(1, 2, material=3)", "has no parameter material"),
    ],
)
def test_a_fault_is_found(line: str, fault: str, oracle: Oracle) -> None:
    source = (
        "import isaaclab.sim as sim_utils\nfrom isaaclab.assets import ArticulationCfg\n" + line
    )
    found = faults(oracle, source)
    assert any(fault in each for each in found), found


# -- the stand-in ----------------------------------------------------------------------------------

# Of the stand-in's own making; everything else that is public must be in the wheel.
_OURS = {"initialize", "rendered", "assets", "stale", "now", "robots"}
_CLASSES = ("AppLauncher", "SimulationContext", "Articulation", "ArticulationData", "ContactSensor",
            "Camera", "MjcfConverter")  # fmt: skip


def standin_classes() -> list[ast.ClassDef]:
    paths = sorted((STANDIN / "isaaclab").rglob("*.py"))
    nodes = [node for path in paths for node in ast.parse(path.read_text()).body]
    return [node for node in nodes if isinstance(node, ast.ClassDef)]


def test_the_standins_configurations_have_the_wheels_fields(oracle: Oracle) -> None:
    wrong: list[str] = []
    seen = 0
    for node in standin_classes():
        if not node.name.endswith("Cfg"):
            continue
        seen += 1
        name = "ArticulationCfg.InitialStateCfg" if node.name == "InitialStateCfg" else node.name
        ours = {m.target.id for m in node.body if isinstance(m, ast.AnnAssign)}  # type: ignore[union-attr]
        wrong += [f"{name} has no {one}" for one in sorted(ours - oracle.fields(name))]
    assert wrong == [] and seen >= 14


def test_the_standin_speaks_no_dialect_of_its_own(oracle: Oracle) -> None:
    """Its public methods are the wheel's, with the wheel's parameters in the wheel's order."""
    wrong: list[str] = []
    for node in standin_classes():
        if node.name not in _CLASSES:
            continue
        for member in node.body:
            if not isinstance(member, ast.FunctionDef) or member.name[0] == "_":
                continue
            there, wanted = oracle.method(node.name, member.name)
            if not there:
                wanted = INHERITED.get(node.name, {}).get(member.name)
            property_there = member.name in oracle.fields(node.name)
            if member.name in _OURS or property_there:
                continue
            ours = parameters(member)
            if wanted is None or ours is None or ours != wanted[: len(ours)]:
                wrong.append(f"{node.name}.{member.name}{ours}, in the wheel {wanted}")
    assert wrong == []


def test_the_standin_of_isaac_sim_has_the_tables_parameters() -> None:
    source = (STANDIN / "isaacsim" / "core" / "cloner.py").read_text()
    (cloner,) = (n for n in ast.parse(source).body if isinstance(n, ast.ClassDef))
    for member in cloner.body:
        if isinstance(member, ast.FunctionDef):
            name = "GridCloner" if member.name == "__init__" else member.name
            ours = parameters(member)
            assert ours is not None and set(OF_ISAAC_SIM[name]) <= set(ours), name


def test_the_standins_view_has_what_the_wheel_asks_of_one() -> None:
    """`VIEW` is the facts' list of names; each is called somewhere in the wheel."""
    text = "\n".join(path.read_text() for path in (sources() / "assets").rglob("*.py"))
    text += "\n".join(path.read_text() for path in (sources() / "envs").rglob("*.py"))
    assert sorted(name for name in VIEW if name not in text) == []
    view = (STANDIN / "kit_standin" / "view.py").read_text()
    assert sorted(name for name in VIEW if name not in view) == []


# -- buffers and frames ----------------------------------------------------------------------------


def test_the_standins_data_are_those_of_the_wheel(sim_home: Path) -> None:
    """The wheel's own `ArticulationData`, and its own writers, beside the stand-in's over equal simulations:
    after every kind of write, step and update each property is the same, stale ones too."""
    python = sim_home / "venv" / "bin" / "python"
    script = ROOT / "tests" / "isaaclab_beside.py"
    done = subprocess.run(
        [str(python), str(script), str(sources())],
        capture_output=True, text=True, timeout=100, stdin=subprocess.DEVNULL,
        env={"PYTHONPATH": f"{ROOT / '.src'}:{ROOT / 'tests'}", "OMNI_KIT_ACCEPT_EULA": "YES",
             "PATH": "/usr/bin:/bin", "ISAACSIM_STANDIN": "close=return"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]
    compared, differing, stale = done.stdout.splitlines()[-1].split()
    assert int(compared) > 150 and differing == "0", done.stdout[-4000:]
    assert int(stale) > 10  # reads that were old on purpose, and old in both
