"""The README's code runs as it stands, and its picture of the states is the table's."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from outboard.backends import CustomBackend, FakeBackend
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
        for _ in range(500):
            state = sim.step()
        # At rest the spring's pull equals gravity's: 20 (0.5 - q) = 9.81 sin q.
        assert state.qpos[:, 0] == pytest.approx([0.3381] * 3, abs=1e-3)


def test_the_plan_example_uses_names_that_exist() -> None:
    assert FakeBackend.simulator == "fake"
    assert "plan.check_unique()" in python_blocks()[1]
