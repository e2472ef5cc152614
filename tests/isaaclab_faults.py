"""Whether a source file of ours keeps to what an `isaaclab_wheel.Oracle` says: every Cfg's keywords, every
method and its parameters, every attribute of the objects that we know by name."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from isaaclab_wheel import Oracle

# How our files call objects of Isaac Lab -> their class there.
OBJECTS = {
    "robot": "Articulation",
    "_robot": "Articulation",
    "data": "ArticulationData",
    "sim": "SimulationContext",
    "_sim": "SimulationContext",
    "sensor": "ContactSensor",
    "_sensor": "ContactSensor",
    "_camera": "Camera",
    "AppLauncher": "AppLauncher",
}
# What is not in the wheel: members that Isaac Lab's classes inherit from Isaac Sim's, and Isaac Sim's own
# functions. From the API of Isaac Sim 5.1, by hand: the facts' table D.2.
INHERITED = {
    "SimulationContext": {
        "is_playing": (), "is_stopped": (), "stop": (), "clear_all_callbacks": (),
        "get_physics_dt": (),
    },
}  # fmt: skip
OF_ISAAC_SIM = {
    "GridCloner": ("spacing", "num_per_row", "stage"),
    "define_base_env": ("base_env_path",),
    "generate_paths": ("root_path", "num_paths"),
    "clone": (
        "source_prim_path", "prim_paths", "position_offsets", "orientation_offsets",
        "replicate_physics", "base_env_path", "root_path", "copy_from_source", "enable_env_ids",
        "clone_in_fabric",
    ),
    "filter_collisions": ("physicsscene_path", "collision_root_path", "prim_paths", "global_paths"),
    "enable_extension": ("extension_name",),
    "close": ("wait_for_replicator", "skip_cleanup"),
}  # fmt: skip
VIEW = {
    "count", "prim_paths", "shared_metatype", "get_root_transforms", "get_dof_limits",
    "get_dof_max_forces", "get_dof_max_velocities", "get_dof_stiffnesses", "get_dof_dampings",
    "get_dof_armatures", "get_dof_friction_properties", "get_masses", "set_masses", "get_coms",
    "set_coms", "get_inertias", "set_inertias", "get_material_properties",
    "set_material_properties",
}  # fmt: skip
_ISAAC = ("isaaclab", "isaacsim")


def imported(tree: ast.AST) -> dict[str, str]:
    """Local name -> the name it has in Isaac Lab or Isaac Sim; "" for a module."""
    names: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] in _ISAAC:
            names.update({alias.asname or alias.name: alias.name for alias in node.names})
        elif isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.split(".")[0] in _ISAAC:
                    names[alias.asname or alias.name] = ""
    return names


def faults(oracle: Oracle, source: str) -> list[str]:
    """What in `source` the oracle contradicts, one sentence each."""
    tree = ast.parse(source)
    names = imported(tree)
    variables = _views(tree)
    found: list[str] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            found += _judge_call(oracle, node, names)
        if isinstance(node, ast.Attribute):
            found += _judge_attribute(oracle, node, names, variables)
    return found


def looked_at(oracle: Oracle, source: str) -> set[str]:
    """What was compared: a checker that looks at nothing finds no fault."""
    tree = ast.parse(source)
    names, variables = imported(tree), _views(tree)
    calls = {_called(node, names)[0] for node in ast.walk(tree) if isinstance(node, ast.Call)}
    members = {
        f"{owner}.{node.attr}"
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and (owner := _owner(node, variables))
    }
    known = {call for call in calls if call in oracle.classes or call in OF_ISAAC_SIM}
    return known | members


def _views(tree: ast.AST) -> set[str]:
    """Variables that hold a physics view; further ones that hold the robot's data or the robot itself are
    called `data`, `robot`."""
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign):
            targets, values = node.targets[0], node.value
            pairs = (
                zip(targets.elts, values.elts, strict=False)
                if isinstance(targets, ast.Tuple) and isinstance(values, ast.Tuple)
                else [(targets, values)]
            )
            for target, value in pairs:
                if isinstance(target, ast.Name) and ast.unparse(value).endswith("root_physx_view"):
                    found.add(target.id)
    return found


def _called(node: ast.Call, names: dict[str, str]) -> tuple[str, bool]:
    """The name in Isaac Lab of what is called, and whether it was reached through one of its modules."""
    function = node.func
    if isinstance(function, ast.Name):
        return names.get(function.id, ""), function.id in names
    if not isinstance(function, ast.Attribute):
        return "", False
    if isinstance(function.value, ast.Name) and function.value.id in names:
        outer = names[function.value.id]
        return (f"{outer}.{function.attr}" if outer else function.attr), True
    return function.attr, False


def _owner(node: ast.Attribute, views: set[str]) -> str:
    """The class of what the attribute is asked of, "" when it is none of theirs."""
    value = node.value
    name = value.id if isinstance(value, ast.Name) else getattr(value, "attr", "")
    if name in views or name == "root_physx_view":
        return "view"
    if name == "data" and isinstance(value, ast.Attribute):
        inner = _owner(value, views)
        return {"ContactSensor": "ContactSensorData", "Camera": "CameraData"}.get(
            inner, "ArticulationData"
        )
    return OBJECTS.get(name, "")


def _judge_call(oracle: Oracle, node: ast.Call, names: dict[str, str]) -> Iterator[str]:
    called, through = _called(node, names)
    given = {keyword.arg for keyword in node.keywords if keyword.arg}
    where = f"line {node.lineno}: {called}"
    if through and called in oracle.classes and called.endswith("Cfg"):
        wrong = given - oracle.fields(called)
        yield from (f"{where} has no field {name}" for name in sorted(wrong))
        if node.args:
            yield f"{where} takes keywords"
    elif called in OF_ISAAC_SIM and (through or not _known(oracle, node)):
        wrong = given - set(OF_ISAAC_SIM[called])
        yield from (f"{where} has no parameter {name}" for name in sorted(wrong))
    elif through and called in oracle.functions:
        yield from _judge_arguments(where, node, oracle.functions[called])
    elif through and called in oracle.classes:
        _, init = oracle.method(called, "__init__")
        yield from _judge_arguments(where, node, init)
    elif through:
        yield f"{where} is not in the wheel"
    elif _known(oracle, node) and isinstance(node.func, ast.Attribute):
        owner = _owner(node.func, set())
        there, parameters = oracle.method(owner, called)
        if not there:
            parameters = INHERITED.get(owner, {}).get(called)
        yield from _judge_arguments(where, node, parameters)


def _known(oracle: Oracle, node: ast.Call) -> bool:
    return isinstance(node.func, ast.Attribute) and _owner(node.func, set()) in oracle.classes


def _judge_arguments(
    where: str, node: ast.Call, parameters: tuple[str, ...] | None
) -> Iterator[str]:
    if parameters is None:
        return
    for keyword in node.keywords:
        if keyword.arg and keyword.arg not in parameters:
            yield f"{where} has no parameter {keyword.arg}"
    if len(node.args) > len(parameters):
        yield f"{where} takes {len(parameters)} arguments, not {len(node.args)}"


def _judge_attribute(
    oracle: Oracle, node: ast.Attribute, names: dict[str, str], views: set[str]
) -> Iterator[str]:
    owner, where = _owner(node, views), f"line {node.lineno}: "
    if isinstance(node.value, ast.Name) and names.get(node.value.id) == "":
        known = node.attr in oracle.classes or node.attr in oracle.functions
        if not known:
            yield f"{where}Isaac Lab has no {node.attr}"
    elif owner == "view":
        if node.attr not in VIEW:
            yield f"{where}the physics view has no {node.attr}"
    elif owner in oracle.classes:
        there, _ = oracle.method(owner, node.attr)
        inherited = node.attr in INHERITED.get(owner, {})
        if not (there or inherited or node.attr in oracle.fields(owner)):
            yield f"{where}{owner} has no {node.attr}"
