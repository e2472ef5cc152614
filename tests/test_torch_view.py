"""`sim.torch` over the shared block: tensors that are the numpy views' memory.

Over the arena: test_arena_gpu.py.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from outboard.backends import FakeBackend, UsageError

torch: Any = pytest.importorskip("torch", reason="needs torch, which is not installed")


@pytest.fixture
def sim(fake: Callable[..., FakeBackend]) -> FakeBackend:
    return fake(4)


def test_tensors_are_the_memory_of_the_arrays(sim: FakeBackend) -> None:
    assert sim.torch.qpos.data_ptr() == sim.state.qpos.ctypes.data
    assert sim.torch.ctrl.data_ptr() == sim.ctrl_view.ctypes.data
    assert sim.torch.device.type == "cpu"
    sim.step(np.ones((4, 4), np.float32))
    assert np.array_equal(sim.torch.qpos.numpy(), sim.state.qpos)


def test_commands_take_and_give_tensors(sim: FakeBackend, fake: Callable[..., FakeBackend]) -> None:
    other = fake(4)
    ctrl = torch.rand(4, 4, requires_grad=True)
    mask = torch.tensor([True, False, False, True])
    rows = torch.rand(4, 4)
    plain = ctrl.detach().numpy()
    pairs = [
        (sim.torch.step(ctrl), other.step(plain)),
        (sim.torch.step(ctrl, reset=mask), other.step(plain, reset=mask.numpy())),
        (sim.torch.set_state(mask, rows, rows),
         other.set_state(mask.numpy(), rows[mask].numpy(), rows[mask].numpy())),
        (sim.torch.set_state([1], rows[:1], rows[:1]),
         other.set_state([1], rows[:1].numpy(), rows[:1].numpy())),
        (sim.torch.reset(mask), other.reset(mask.numpy())),
        (sim.torch.reset(), other.reset()),
    ]  # fmt: skip
    for tensors, arrays in pairs:
        assert torch.is_tensor(tensors.qpos)
        assert np.array_equal(tensors.qpos.numpy(), arrays.qpos)
        assert np.array_equal(tensors.qvel.numpy(), arrays.qvel)


def test_step_takes_a_tensor_that_is_not_on_a_gpu_as_an_array(sim: FakeBackend) -> None:
    state = sim.step(torch.ones(4, 4))
    assert isinstance(state.qpos, np.ndarray)
    assert np.all(sim.ctrl_view == 1)


def test_a_field_that_is_not_published_is_named(sim: FakeBackend) -> None:
    with pytest.raises(AttributeError, match=r"open with publish=\(..., 'body_pos'\)"):
        _ = sim.torch.body_pos


def test_after_close_there_is_none_but_a_tensor_stays(sim: FakeBackend) -> None:
    held, view = sim.torch.qpos, sim.torch
    sim.close()
    assert float(held.sum()) == pytest.approx(0.0, abs=1e-6)
    with pytest.raises(UsageError, match="closed"):
        _ = sim.torch
    with pytest.raises(UsageError, match="closed"):
        view.step()
