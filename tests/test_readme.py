"""The README's code runs as it stands, and its picture of the states is the table's."""

from __future__ import annotations

import ast
import dataclasses
import importlib
import inspect
import re
from pathlib import Path
from typing import Any

import pytest

from outboard.backends import CustomBackend, RankPlan
from outboard.ipc.states import picture

README = (Path(__file__).resolve().parent.parent / "README.md").read_text()


def python_blocks() -> list[str]:
    return re.findall(r"```python\n(.*?)```", README, re.S)


def test_the_picture_of_the_states_is_drawn_from_the_table() -> None:
    assert picture() in README


def test_the_first_example_runs_as_it_stands(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("mujoco", reason="the example needs MuJoCo")
    exec(compile(python_blocks()[0], "README.md", "exec"), {})
    assert "cpu" in capsys.readouterr().out


def test_the_worker_of_forty_lines_runs_and_follows_its_target(tmp_path: Path) -> None:
    file = tmp_path / "pendulum.py"
    file.write_text(next(block for block in python_blocks() if "class Pendulum" in block))
    with CustomBackend(simulator=f"{file}:Pendulum", device="cpu", num_envs=3) as sim:
        sim.ctrl_view[:] = 0.5
        state = sim.reset()
        for _ in range(500):
            state = sim.step()
        # At rest the spring's pull equals gravity's: 20 (0.5 - q) = 9.81 sin q.
        assert state.qpos[:, 0] == pytest.approx([0.3381] * 3, abs=1e-3)


def unknown_names(block: str) -> set[str]:
    """What a block imports, asks of `plan` or passes to a backend, and there is not."""
    tree, names, unknown = ast.parse(block), dict[str, Any](), set[str]()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            module = importlib.import_module(node.module or "")
            names |= {one.name: getattr(module, one.name, None) for one in node.names}
    members = {*dir(RankPlan), *(field.name for field in dataclasses.fields(RankPlan))}
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and getattr(node.value, "id", "") == "plan":
            unknown |= {node.attr} - members
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            known = inspect.signature(names[node.func.id]).parameters if names[node.func.id] else {}
            unknown |= {word.arg for word in node.keywords if word.arg} - set(known)
    return unknown | {name for name, value in names.items() if value is None}


def plan_example() -> str:
    return next(block for block in python_blocks() if "plan_together" in block)


def test_the_plan_example_uses_names_that_exist() -> None:
    assert unknown_names(plan_example()) == set()


@pytest.mark.parametrize("name", ["plan_together", "activate", "device", "num_envs"])
def test_a_name_that_does_not_exist_is_found(name: str) -> None:
    assert f"{name}_x" in unknown_names(plan_example().replace(name, f"{name}_x"))
