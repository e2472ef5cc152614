"""The worker and the stand-in against an oracle that nobody here wrote: the `isaacgym-stubs` wheel."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from gymapi_oracle import Oracle, Signature, faults, read_stub

ROOT = Path(__file__).resolve().parent.parent
WORKER = sorted((ROOT / "workers").glob("isaacgym_*.py"))
STANDIN = ROOT / "tests" / "standins" / "isaacgym"

# Variables that come out of lists or arguments, which no assignment explains.
KNOWN = {
    "body": "RigidBodyProperties",
    "shape": "RigidShapeProperties",
    "tensor": "Tensor",
    "origin": "Vec3",
    "row": "Vec3",
    "version": "Version",
}


@pytest.fixture(scope="module")
def oracle() -> Oracle:
    return read_stub()


def test_the_oracle_knows_what_it_is_asked(oracle: Oracle) -> None:
    assert len(oracle.methods) > 200 and {"SimParams", "AssetOptions"} <= set(oracle.properties)
    assert oracle.methods["simulate"] == Signature(1, 1, (), ("arg0",))
    assert oracle.methods["create_actor"].names[3:] == (
        "name", "group", "filter", "segmentationId",
    )  # fmt: skip


@pytest.mark.parametrize("path", WORKER, ids=[path.stem for path in WORKER])
def test_the_worker_calls_what_there_is(path: Path, oracle: Oracle) -> None:
    assert faults(oracle, path.read_text(), KNOWN) == []


def test_the_worker_is_looked_at_where_it_calls() -> None:
    """As many calls as A.4 and A.5 have: a checker that looks at nothing finds no fault."""
    called = {
        node.attr
        for path in WORKER
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Attribute) and ast.unparse(node.value).endswith("gym")
    }
    assert len(called) >= 30, sorted(called)


@pytest.mark.parametrize(
    ("line", "fault"),
    [
        ("gym.simulat(sim)", "Gym has no simulat"),
        ("self._gym.simulat(sim)", "Gym has no simulat"),
        ("f = gym.refresh_dof_states_tensor", "Gym has no refresh_dof_states_tensor"),
        ("gym.simulate(sim, True)", "simulate takes 1 to 1 arguments, not 2"),
        ("gym.fetch_results(sim)", "fetch_results takes 2 to 2 arguments, not 1"),
        ("gym.simulate(sim=sim)", "simulate has no keyword sim"),
        ("gym.create_actor(e, a, p, 'x', collision=1)", "create_actor has no keyword collision"),
        ("t = gymapi.DTYPE_INT32", "gymapi has no DTYPE_INT32"),
        ("p = gymapi.SimParams()\np.substep = 1", "SimParams has no substep"),
        ("p = gymapi.SimParams()\np.physx.contact_offse = 1", "PhysXParams has no contact_offse"),
        ("p, q = gymapi.Vec3(), gymapi.Quat()\nq.v = 1", "Quat has no v"),
        ("gymapi.Vec3(1, 2, 3, 4)", "Vec3 takes 0 to 3 arguments, not 4"),
        ("body.centre = 1", "RigidBodyProperties has no centre"),
    ],
)
def test_a_fault_is_found(line: str, fault: str, oracle: Oracle) -> None:
    assert any(fault in each for each in faults(oracle, line, KNOWN)), faults(oracle, line, KNOWN)


# -- the stand-in ----------------------------------------------------------------------------------


def test_the_standin_speaks_no_dialect_of_its_own(oracle: Oracle) -> None:
    """Every public method of its Gym is in the stub, with as many parameters; and where a parameter has
    a name there, it has that name here, else none."""
    wrong: list[str] = []
    for function in _gym_methods():
        name, arguments = function.name, function.args
        real = oracle.methods.get(name)
        if real is None:
            wrong.append(f"{name} is not in the stub")
        elif real.most is not None:
            ours = Signature.of(function)
            names = tuple(argument.arg for argument in arguments.args if argument.arg != "self")
            if (ours.least, ours.most) != (real.least, real.most):
                wrong.append(f"{name} takes {ours.least} to {ours.most}, not {real}")
            elif names != real.names:
                wrong.append(f"{name} has parameters {names}, the stub {real.names}")
    assert wrong == []


def _gym_methods() -> list[ast.FunctionDef]:
    tree = ast.parse((STANDIN / "gymapi.py").read_text())
    (gym,) = (n for n in tree.body if isinstance(n, ast.ClassDef) and n.name == "Gym")
    methods = [n for n in gym.body if isinstance(n, ast.FunctionDef) and n.name[0] != "_"]
    assert len(methods) > 40
    return methods


def test_the_standins_classes_have_the_stubs_properties(oracle: Oracle) -> None:
    wrong: list[str] = []
    for node in ast.parse((STANDIN / "kinds.py").read_text()).body:
        if not isinstance(node, ast.ClassDef) or node.name == "Record":
            continue
        if node.name not in oracle.properties:
            wrong.append(f"gymapi has no {node.name}")
            continue
        unknown = _defaults(node) - set(oracle.properties[node.name])
        wrong += [f"{node.name} has no {name}" for name in sorted(unknown)]
    assert wrong == []


def _defaults(node: ast.ClassDef) -> set[str]:
    for member in node.body:
        if isinstance(member, ast.AnnAssign) and isinstance(member.value, ast.Dict):
            return {key.value for key in member.value.keys if isinstance(key, ast.Constant)}  # type: ignore[misc]
    return set()


def test_the_standins_constants_are_the_stubs(oracle: Oracle) -> None:
    tree = ast.parse((STANDIN / "gymapi.py").read_text())
    names = {
        name.id
        for node in tree.body
        if isinstance(node, ast.Assign)
        for target in node.targets
        for name in ast.walk(target)
        if isinstance(name, ast.Name) and name.id.isupper() and name.id[0] != "_"
    }
    assert len(names) > 20
    assert names - oracle.names == set()
