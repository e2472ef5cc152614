"""What the `isaacgym-stubs` wheel says of gymapi, and whether a source file keeps to it.

The stub was made from the real library's bindings by somebody else; neither our worker nor our stand-in had
a part in it. Parameters of pybind functions are mostly called arg0, arg1, ...: those take no keyword.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path

from conftest import missing

PACKAGE = "isaacgym-stubs"
_UNNAMED = re.compile(r"arg\d+\Z")


@dataclass(frozen=True)
class Signature:
    """least, most: how many positional arguments; most is None for *args. names: that may be keywords."""

    least: int
    most: int | None
    names: tuple[str, ...]
    parameters: tuple[str, ...]

    @staticmethod
    def of(function: ast.FunctionDef) -> Signature:
        arguments = function.args
        names = [argument.arg for argument in (*arguments.posonlyargs, *arguments.args)]
        names = names[1:] if names[:1] == ["self"] else names
        least = len(names) - len(arguments.defaults)
        keywords = tuple(name for name in names if not _UNNAMED.match(name))
        most = None if arguments.vararg else len(names)
        return Signature(least, most, keywords, tuple(names))


@dataclass
class Oracle:
    """methods: of Gym; properties: of every other class; names: of the module."""

    methods: dict[str, Signature] = field(default_factory=dict[str, Signature])
    properties: dict[str, dict[str, str]] = field(default_factory=dict[str, dict[str, str]])
    constructors: dict[str, Signature] = field(default_factory=dict[str, Signature])
    names: set[str] = field(default_factory=set[str])


def read_stub() -> Oracle:
    """The oracle; skips the calling test when the wheel is not installed."""
    try:
        files = metadata.files(PACKAGE) or []
    except metadata.PackageNotFoundError:
        missing(f"the {PACKAGE} wheel is not installed: pip install '{PACKAGE}==1.1rc4'")
        raise
    (stub,) = (file for file in files if file.name == "gymapi.pyi")
    # Two definitions in it are named by a keyword of Python.
    source = Path(str(stub.locate())).read_text().replace("def lambda(", "def lambda_(")
    oracle = Oracle()
    for node in ast.parse(source).body:
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            oracle.names.add(node.target.id)
        elif isinstance(node, ast.FunctionDef):
            oracle.names.add(node.name)
        elif isinstance(node, ast.ClassDef):
            oracle.names.add(node.name)
            _read_class(oracle, node)
    return oracle


def _read_class(oracle: Oracle, node: ast.ClassDef) -> None:
    properties = oracle.properties.setdefault(node.name, {})
    for member in node.body:
        if isinstance(member, ast.AnnAssign) and isinstance(member.target, ast.Name):
            properties[member.target.id] = ast.unparse(member.annotation)
        elif isinstance(member, ast.FunctionDef) and member.name == "__init__":
            oracle.constructors[node.name] = Signature.of(member)
        elif isinstance(member, ast.FunctionDef) and member.decorator_list:
            properties[member.name] = ""  # read-only
        elif isinstance(member, ast.FunctionDef) and node.name == "Gym":
            oracle.methods.setdefault(member.name, Signature.of(member))


# -- judging a worker's source ---------------------------------------------------------------------


def faults(oracle: Oracle, source: str, known: dict[str, str]) -> list[str]:
    """What in `source` the oracle contradicts. `gym` and `gymapi` are called so, also as attributes
    (`self._gym.simulate`); `known`: variables that hold an object of a gymapi class -> that class."""
    tree = ast.parse(source)
    classes = {**known, **_constructed(tree)}
    found: list[str] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            found += _judge_call(oracle, node)
        if isinstance(node, ast.Attribute):
            found += _judge_attribute(oracle, node, classes)
    return found


def _owner(node: ast.expr) -> str:
    """`gym` of gym.x, self.gym.x and scene._gym.x."""
    name = node.id if isinstance(node, ast.Name) else getattr(node, "attr", "")
    return name.lstrip("_")


def _constructed(tree: ast.AST) -> dict[str, str]:
    """Variables that are assigned the result of gymapi.Class(...)."""
    found: dict[str, str] = {}
    for node in ast.walk(tree):
        if not isinstance(node, ast.Assign):
            continue
        for target, value in _pairs(node):
            call = value.func if isinstance(value, ast.Call) else None
            made = isinstance(call, ast.Attribute) and _owner(call.value) == "gymapi"
            if isinstance(target, ast.Name) and isinstance(call, ast.Attribute) and made:
                found[target.id] = call.attr
    return found


def _pairs(node: ast.Assign) -> Iterator[tuple[ast.expr, ast.expr]]:
    for target in node.targets:
        if isinstance(target, ast.Tuple) and isinstance(node.value, ast.Tuple):
            yield from zip(target.elts, node.value.elts, strict=False)
        else:
            yield target, node.value


def _judge_call(oracle: Oracle, node: ast.Call) -> list[str]:
    function = node.func
    if not isinstance(function, ast.Attribute):
        return []
    owner, name = _owner(function.value), function.attr
    if owner == "gym" and name in oracle.methods:
        signature = oracle.methods[name]
    elif owner == "gymapi" and name in oracle.constructors:
        signature = oracle.constructors[name]
    else:
        return []
    if any(isinstance(argument, ast.Starred) for argument in node.args):
        return []
    where = f"line {node.lineno}: {name}"
    keywords = [keyword.arg or "**" for keyword in node.keywords]
    wrong = [
        f"{where} has no keyword {keyword}"
        for keyword in keywords
        if signature.most is not None and keyword not in signature.names
    ]
    count = len(node.args) + len(keywords)
    if signature.most is not None and not signature.least <= count <= signature.most:
        wrong.append(f"{where} takes {signature.least} to {signature.most} arguments, not {count}")
    return wrong


def _judge_attribute(oracle: Oracle, node: ast.Attribute, classes: dict[str, str]) -> list[str]:
    owner, where = _owner(node.value), f"line {node.lineno}: "
    if owner == "gym" and node.attr not in oracle.methods:
        return [f"{where}Gym has no {node.attr}"]
    if owner == "gymapi" and node.attr not in oracle.names:
        return [f"{where}gymapi has no {node.attr}"]
    kind = classes.get(node.value.id, "") if isinstance(node.value, ast.Name) else ""
    if isinstance(node.value, ast.Attribute) and isinstance(node.value.value, ast.Name):
        # one level down: params.physx.dt
        outer = classes.get(node.value.value.id, "")
        kind = oracle.properties.get(outer, {}).get(node.value.attr, "")
    if kind in oracle.properties and node.attr not in oracle.properties[kind]:
        return [f"{where}{kind} has no {node.attr}"]
    return []
