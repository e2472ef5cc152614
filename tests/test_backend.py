"""The Python API of a backend: what each call does, returns, leaves alone and refuses."""

from __future__ import annotations

import gc
import json
import os
import pickle
import select
import signal
import time
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from outboard.backends import (
    CustomBackend,
    FakeBackend,
    FakeCfg,
    OutboardError,
    SceneError,
    State,
    UsageError,
    WorkerDied,
    WorkerFailed,
    WorkerTimeout,
    launch,
)

Fake = Callable[..., FakeBackend]
Custom = Callable[..., CustomBackend]

# `fake` with the default time step: qpos += 0.01 s * 2/s * (ctrl - qpos)
RATE = np.float32(0.02)
DEFAULT = np.linspace(-0.2, 0.2, 4, dtype=np.float32)
ONES = np.ones((3, 4), np.float32)


@pytest.fixture(scope="module")
def shared(private_folders: Any) -> Iterator[FakeBackend]:
    """One open backend for the tests that change nothing in it."""
    with FakeBackend(device="cpu", num_envs=3) as backend:
        yield backend


def after_one_step(ctrl: Any) -> Any:
    return DEFAULT + RATE * (np.asarray(ctrl, np.float32) - DEFAULT)


# -- step -----------------------------------------------------------------------------------------


def test_step_advances_every_environment(fake: Fake, worker_python: str) -> None:
    sim = fake(worker_python=worker_python)
    state = sim.step(ONES)
    np.testing.assert_allclose(state.qpos, np.tile(after_one_step(1.0), (3, 1)), rtol=1e-6)


def test_a_backend_starts_at_the_keyframe(fake: Fake) -> None:
    assert (fake().state.qpos == DEFAULT).all()


def test_step_without_ctrl_uses_what_is_in_the_block(fake: Fake) -> None:
    sim = fake()
    sim.step(ONES)
    state = sim.step()
    expected = after_one_step(1.0) + RATE * (1 - after_one_step(1.0))
    np.testing.assert_allclose(state.qpos[0], expected, rtol=1e-6)


def test_ctrl_view_is_written_in_place(fake: Fake) -> None:
    sim = fake()
    sim.ctrl_view[:] = ONES
    np.testing.assert_allclose(sim.step(sim.ctrl_view).qpos[0], after_one_step(1.0), rtol=1e-6)


@pytest.mark.parametrize("ctrl", [ONES.tolist(), ONES.astype(np.float64), ONES.astype(np.int64)])
def test_ctrl_may_be_anything_that_is_numbers_of_that_shape(fake: Fake, ctrl: Any) -> None:
    np.testing.assert_allclose(fake().step(ctrl).qpos[0], after_one_step(1.0), rtol=1e-6)


def test_ctrl_may_be_a_strided_view(fake: Fake) -> None:
    wide = np.zeros((3, 8), np.float32)
    wide[:, ::2] = 1
    np.testing.assert_allclose(fake().step(wide[:, ::2]).qpos[0], after_one_step(1.0), rtol=1e-6)


def test_decimation_and_dt_reach_the_simulator(fake: Fake) -> None:
    state = fake(dt=0.002, decimation=10).step(ONES)
    expected = DEFAULT + (1 - (1 - 2 * 0.002) ** 10) * (1 - DEFAULT)
    np.testing.assert_allclose(state.qpos[0], expected, rtol=1e-5)


def test_one_environment_keeps_its_leading_axis(fake: Fake) -> None:
    sim = fake(num_envs=1)
    assert sim.ctrl_view.shape == sim.state.qpos.shape == sim.step([[1] * 4]).qvel.shape == (1, 4)


def test_step_async_returns_before_the_answer(fake: Fake) -> None:
    sim = fake(cfg=FakeCfg(work_us=200_000))
    started = time.monotonic()
    sim.step_async(ONES)
    assert time.monotonic() - started < 0.1
    np.testing.assert_allclose(sim.step_wait().qpos[0], after_one_step(1.0), rtol=1e-6)


def test_two_backends_are_in_flight_at_once(fake: Fake) -> None:
    nap = FakeCfg(fault="slow:0.4")
    one, two = fake(cfg=nap), fake(cfg=nap)
    started = time.monotonic()
    one.step_async(ONES)
    two.step_async(2 * ONES)
    second, first = two.step_wait().qpos[0].copy(), one.step_wait().qpos[0].copy()
    assert time.monotonic() - started < 0.7  # 0.8 one after the other
    np.testing.assert_allclose(first, after_one_step(1.0), rtol=1e-6)
    np.testing.assert_allclose(second, after_one_step(2.0), rtol=1e-6)


@pytest.mark.parametrize("command", ["step", "step_async", "reset", "set_state", "where", "render"])
def test_a_command_while_one_is_in_flight_is_refused_and_changes_nothing(
    fake: Fake, command: str
) -> None:
    sim = fake()
    sim.step_async(ONES)
    arguments = {"set_state": ([0], ONES[0], ONES[0])}.get(command, ())
    with pytest.raises(UsageError, match=r"in flight: step_wait\(\) collects its answer"):
        getattr(sim, command)(*arguments)
    np.testing.assert_allclose(sim.step_wait().qpos[0], after_one_step(1.0), rtol=1e-6)


def test_step_wait_without_a_step_is_refused(shared: FakeBackend) -> None:
    with pytest.raises(UsageError, match=r"nothing is in flight: step_async\(\) comes before"):
        shared.step_wait()


def test_not_finite_ctrl_passes_when_the_check_is_off(fake: Fake) -> None:
    sim = fake(check_finite=False)
    sim.step(np.full((3, 4), np.nan, np.float32))
    assert sim.flagged.tolist() == [0, 1, 2]


def test_flagged_names_the_environments_of_the_last_command_only(fake: Fake) -> None:
    sim = fake(check_finite=False)
    ctrl = ONES.copy()
    ctrl[1] = np.inf
    sim.step(ctrl)
    assert sim.flagged.tolist() == [1]
    sim.reset([1])
    assert sim.flagged.tolist() == []


def test_a_bad_environment_is_an_error_when_the_caller_wants_it_to_be(fake: Fake) -> None:
    sim = fake(check_finite=False, raise_on_bad_env=True)
    ctrl = ONES.copy()
    ctrl[2] = np.nan
    with pytest.raises(WorkerFailed, match="the state is not finite in environments 2"):
        sim.step(ctrl)


# -- set_state, reset -----------------------------------------------------------------------------


def test_set_state_by_ids_is_visible_at_once_and_touches_no_other(fake: Fake) -> None:
    sim = fake(publish=("qpos", "qvel", "body_pos"))
    state = sim.set_state([2, 0], [[2.0] * 4, [1.0] * 4], np.full((2, 4), 3.0))
    np.testing.assert_array_equal(state.qpos, [[1.0] * 4, DEFAULT, [2.0] * 4])
    np.testing.assert_array_equal(state.qvel[:, 0], [3, 0, 3])
    np.testing.assert_array_equal(state.body_pos[2], np.full((4, 3), 2.0))


def test_set_state_by_mask_takes_the_environments_in_order(fake: Fake) -> None:
    sim = fake()
    mask = np.array([True, False, True])
    state = sim.set_state(mask, [[1.0] * 4, [2.0] * 4], np.zeros((2, 4)))
    np.testing.assert_array_equal(state.qpos[:, 0], [1, DEFAULT[0], 2])


def test_set_state_takes_one_row_for_all(fake: Fake) -> None:
    state = fake().set_state([0, 1], [5.0] * 4, [0.0] * 4)
    np.testing.assert_array_equal(state.qpos[:, 0], [5, 5, DEFAULT[0]])


@pytest.mark.parametrize(
    ("envs", "back"),
    [
        (None, [0, 1, 2]),
        ([1], [1]),
        (1, [1]),
        (np.array([2, 0], np.uint8), [0, 2]),
        (np.array([False, True, True]), [1, 2]),
        ([True, False, False], [0]),
        ([], []),
        (np.zeros(3, bool), []),
    ],
)
def test_reset_puts_exactly_those_environments_to_the_keyframe(
    fake: Fake, envs: Any, back: list[int]
) -> None:
    sim = fake()
    sim.step(ONES)
    state = sim.reset(envs)
    assert np.flatnonzero((state.qpos == DEFAULT).all(axis=1)).tolist() == back


def test_step_with_reset_resets_first_and_then_steps(fake: Fake) -> None:
    sim = fake()
    sim.step(ONES)
    before = sim.step(ONES).qpos.copy()
    state = sim.step(ONES, reset=np.array([False, True, False]))
    np.testing.assert_allclose(state.qpos[1], after_one_step(1.0), rtol=1e-6)
    np.testing.assert_allclose(state.qpos[0], before[0] + RATE * (1 - before[0]), rtol=1e-6)


def test_step_with_reset_rings_once(fake: Fake) -> None:
    sim = fake()
    sim.step(ONES, reset=[0])
    assert sim.timings.commands == 1


# -- banks and views ------------------------------------------------------------------------------


def test_with_one_bank_a_view_taken_once_stays_good(fake: Fake) -> None:
    sim = fake()
    view = sim.state.qpos
    for _ in range(3):
        assert sim.step(ONES).qpos is view
    np.testing.assert_array_equal(view, sim.state.qpos)


def test_with_two_banks_a_result_outlives_the_next_command(fake: Fake) -> None:
    sim = fake(banks=2)
    first = sim.step(ONES)
    kept = first.qpos.copy()
    second = sim.step(ONES)
    np.testing.assert_array_equal(first.qpos, kept)
    assert not np.shares_memory(first.qpos, second.qpos)
    assert sim.step(ONES).qpos is first.qpos  # the second-next command overwrites it


def test_with_two_banks_state_is_the_last_collected_one_while_a_step_is_in_flight(
    fake: Fake,
) -> None:
    sim = fake(banks=2, cfg=FakeCfg(fault="slow:0.2", fault_step=2))
    first = sim.step(ONES)
    sim.step_async(ONES)
    assert sim.state is first
    assert sim.step_wait() is sim.state is not first


def test_two_banks_share_ctrl(fake: Fake) -> None:
    sim = fake(banks=2)
    sim.ctrl_view[:] = 1
    sim.step()
    expected = after_one_step(1.0)
    np.testing.assert_allclose(sim.step().qpos[0], expected + RATE * (1 - expected), rtol=1e-6)


def test_views_survive_close_and_the_backend_itself(fake: Fake) -> None:
    sim = FakeBackend(device="cpu", num_envs=3)
    view, ctrl = sim.step(ONES).qpos, sim.ctrl_view
    kept = view.copy()
    sim.close()
    del sim
    np.testing.assert_array_equal(view, kept)
    ctrl[:] = 7  # writes to memory that is still there
    assert view.sum() == kept.sum()


def test_the_state_is_frozen(shared: FakeBackend) -> None:
    with pytest.raises(AttributeError, match=r"read-only; use set_state\(\) to change 'qpos'"):
        shared.state.qpos = ONES
    with pytest.raises(AttributeError):
        del shared.state.qpos
    assert shared.state.qpos.shape == (3, 4)


def test_a_field_that_is_not_published_says_how_to_publish_it(shared: FakeBackend) -> None:
    with pytest.raises(AttributeError, match=r"publish=\(\.\.\., 'body_pos'\)"):
        _ = shared.state.body_pos
    with pytest.raises(AttributeError, match="a state has no 'torque'"):
        _ = shared.state.torque  # type: ignore[attr-defined]


def test_fields_lists_what_is_published(fake: Fake) -> None:
    sim = fake(publish=("body_pos", "qpos"))
    assert list(sim.state.fields()) == ["qpos", "body_pos"]
    assert repr(sim.state) == "State(qpos(3, 4), body_pos(3, 4, 3))"


# -- copies and allocations -----------------------------------------------------------------------

# Instead of `fake`'s step: works in the block itself, and counts what numpy copies on the way.
IN_PLACE = """
def bind(self, banks):
    super().bind(banks)
    owners = []
    for view in (self.ctrl, banks[0]["qpos"]):
        while isinstance(view, np.ndarray):
            view = view.base
        owners.append(view.obj if isinstance(view, memoryview) else view)
    self.same_block = owners[0] is not None and owners[0] is owners[1]

def step(self, bank):
    self.steps += 1
    fields = self.banks[bank]
    np.multiply(self.ctrl, 2, out=fields["qpos"])
    fields["qvel"][:] = self.same_block
    fields["env_flags"][:] = 0
    return 0
"""


def test_state_is_read_where_the_worker_wrote_it_and_ctrl_where_the_host_did(
    custom: Custom,
) -> None:
    sim = custom(IN_PLACE)
    state = sim.step(ONES)
    assert (state.qvel == 1).all()  # in the worker, ctrl and qpos are views of one mapping
    np.testing.assert_array_equal(state.qpos, 2 * ONES)
    # in the host, what step() returns is the block itself
    assert np.shares_memory(state.qpos, sim.state.qpos)
    assert state.qpos.base is not None and not state.qpos.flags.owndata


@pytest.mark.parametrize(("in_place", "copies"), [(False, 1), (True, 0)])
def test_a_step_copies_ctrl_once_and_in_place_writing_never(
    custom: Custom, in_place: bool, copies: int
) -> None:
    sim = custom(IN_PLACE)
    written: list[Any] = []

    class Counting:
        """Stands where the block's ctrl is, and notes every write into it."""

        def __init__(self, view: Any) -> None:
            self.view = view
            self.dtype, self.shape = view.dtype, view.shape

        def __setitem__(self, where: Any, value: Any) -> None:
            written.append(value)
            self.view[where] = value

    counting: Any = Counting(sim.ctrl_view)
    sim._ctrl = counting  # pyright: ignore[reportPrivateUsage]
    mine = ONES.copy()
    if in_place:
        counting.view[:] = mine
    state = sim.step(None if in_place else mine)
    assert len(written) == copies
    assert all(value is mine for value in written)  # not a copy of it
    np.testing.assert_array_equal(state.qpos, 2 * ONES)


@pytest.mark.parametrize("in_place", [False, True])
def test_a_step_allocates_nothing_of_the_size_of_its_data(fake: Fake, in_place: bool) -> None:
    sim = fake(num_envs=4096)  # 65,536 bytes of ctrl
    ctrl = None if in_place else np.ones((4096, 4), np.float32)
    for _ in range(20):
        sim.step(ctrl)
    tracemalloc.start()
    try:
        before, _ = tracemalloc.get_traced_memory()
        tracemalloc.reset_peak()
        for _ in range(200):
            sim.step(ctrl)
        after, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak - before < 4096  # a few integers and floats, freed at once
    assert after - before < 2048


# -- facts ----------------------------------------------------------------------------------------


def test_the_report_is_plain_data(fake: Fake, worker_python: str) -> None:
    sim = fake(worker_python=worker_python, rank=5)
    report = json.loads(json.dumps(sim.report))
    assert report["phase"] == "READY"
    assert (report["simulator"], report["engine"], report["rank"]) == ("fake", "fake 1", 5)
    assert report["executable"] == worker_python
    assert report["device_plan"]["kind"] == report["device_report"]["kind"] == "cpu"
    assert report["transport"] == "block"
    assert os.path.exists(report["log_path"])
    os.kill(report["pid"], 0)


def test_the_report_follows_the_phase(fake: Fake) -> None:
    sim = fake()
    sim.step_async(ONES)
    assert sim.report["phase"] == "BUSY"
    sim.step_wait()
    sim.close()
    assert sim.report["phase"] == "CLOSED"


def test_the_model_says_what_the_simulator_built(shared: FakeBackend) -> None:
    model = shared.model
    assert (model.nq, model.nv, model.nu, model.nbody) == (4, 4, 4, 4)
    assert model.actuator_names == ("joint0", "joint1", "joint2", "joint3")
    assert model.not_reproduced == ("physics",)
    np.testing.assert_allclose(model.default_qpos, DEFAULT)
    assert model.env_origins.shape == (3, 3)
    with pytest.raises(ValueError, match="read-only"):
        model.default_qpos[0] = 1


def test_device_says_where_the_simulator_is(shared: FakeBackend) -> None:
    assert shared.device == shared.where() == "cpu; qpos lies in host memory"


def test_where_measures_again_and_refuses_a_simulator_that_moved(custom: Custom) -> None:
    sim = custom("""
def report_device(self):
    uuid = "GPU-ce08eab0-0000-4000-8000-000000000006"
    if not self.steps:
        return cpu_report("qpos")
    return DeviceReport("gpu", uuid, "cuda:0", "0000:00:06.0", "liar", "engine_buffer", "qpos",
                        (uuid,), (), "")
""")
    sim.where()
    sim.step(ONES)
    with pytest.raises(
        OutboardError, match="planned cpu but the state lies on GPU-ce08eab0"
    ) as one:
        sim.where()
    assert type(one.value).__name__ == "DeviceMismatchError"


def test_timings_add_up(fake: Fake) -> None:
    sim = fake(cfg=FakeCfg(work_us=2_000))
    for _ in range(10):
        sim.step(ONES)
    timings = sim.timings
    assert timings.commands == 10
    assert 0.02 <= timings.sim_s <= timings.wall_s
    assert timings.sim_us >= 2_000
    assert timings.overhead_us == pytest.approx((timings.wall_s - timings.sim_s) * 1e5)


def test_timings_of_a_fresh_backend_are_zero(fake: Fake) -> None:
    timings = fake().timings
    assert (timings.commands, timings.sim_us, timings.overhead_us) == (0, 0, 0)


def test_render_gives_a_picture_of_one_environment(shared: FakeBackend) -> None:
    picture = shared.render(env_id=2, width=8, height=6)
    assert picture.shape == (6, 8, 3)
    assert picture.dtype == np.uint8
    assert (picture[..., 0] == 2).all()


def test_set_property_reaches_the_simulator(fake: Fake) -> None:
    sim = fake()
    sim.set_property("rate", [1], [0.5] * 4)
    state = sim.set_state([], np.zeros((0, 4)), np.zeros((0, 4)))
    np.testing.assert_allclose(state.qpos[1], DEFAULT + np.float32(0.5))
    np.testing.assert_allclose(state.qpos[0], DEFAULT)


@pytest.mark.parametrize("values", ["fast", [[1], [1, 2]], np.ones((2, 4)), np.ones((1, 1, 4))])
def test_a_bad_property_value_is_refused_and_the_backend_goes_on(
    shared: FakeBackend, values: Any
) -> None:
    with pytest.raises(UsageError):
        shared.set_property("rate", [0, 1, 2], values)
    with pytest.raises(UsageError, match="has no property 'mass'"):
        shared.set_property("mass", [0], [1.0])
    shared.step(ONES)


@pytest.mark.parametrize(
    "arguments",
    [{"env_id": 3}, {"env_id": -1}, {"env_id": 1.0}, {"width": 0}, {"height": 4096}, {"width": 1.5},
     {"distance": "far"}],
)  # fmt: skip
def test_a_bad_render_request_is_refused_and_the_backend_goes_on(
    shared: FakeBackend, arguments: dict[str, Any]
) -> None:
    with pytest.raises(UsageError):
        shared.render(**arguments)
    assert shared.render(width=2, height=2, distance=2).shape == (2, 2, 3)


# -- close, death, restart ------------------------------------------------------------------------


def test_close_is_idempotent_and_leaves_no_log(fake: Fake) -> None:
    sim = fake()
    log = sim.report["log_path"]
    for _ in range(3):
        sim.close()
    assert not os.path.exists(log)


def test_the_context_manager_closes_after_an_exception_too() -> None:
    with pytest.raises(ZeroDivisionError), FakeBackend(device="cpu", num_envs=1) as sim:
        raise ZeroDivisionError
    assert sim.report["phase"] == "CLOSED"


@pytest.mark.parametrize("name", ["state", "ctrl_view", "flagged"])
def test_a_closed_backend_has_no_data(fake: Fake, name: str) -> None:
    sim = fake()
    sim.close()
    with pytest.raises(UsageError, match="this backend is closed"):
        getattr(sim, name)


def test_a_closed_backend_keeps_no_memory_though_it_is_kept_itself() -> None:
    def mapped() -> int:
        return Path("/proc/self/maps").read_text().count("memfd:outboard")

    before = mapped()
    sim = FakeBackend(device="cpu", num_envs=3)
    assert mapped() == before + 1
    sim.close()
    assert mapped() == before
    assert sim.timings.commands == 0  # what it knows, it still says
    assert sim.model.nu == 4


@pytest.mark.parametrize("command", ["step", "step_wait", "reset", "where", "restart"])
def test_use_after_close_is_refused(fake: Fake, command: str) -> None:
    sim = fake()
    sim.close()
    with pytest.raises(UsageError, match="this backend is closed"):
        getattr(sim, command)()


def test_close_while_a_step_is_in_flight_waits_for_it(fake: Fake) -> None:
    sim = fake(cfg=FakeCfg(fault="slow:0.2"))
    log = sim.report["log_path"]
    sim.step_async(ONES)
    sim.close()
    assert not os.path.exists(log)  # it left well: nobody had to kill it


def test_close_is_bounded_when_the_worker_hangs(fake: Fake) -> None:
    sim = fake(cfg=FakeCfg(fault="hang"))
    log = sim.report["log_path"]
    sim.step_async(ONES)
    started = time.monotonic()
    sim.close(timeout_s=0.3)
    assert time.monotonic() - started < 1.0
    assert os.path.exists(log)  # a worker that had to be killed leaves its log
    os.unlink(log)


def test_a_dropped_backend_takes_its_worker_with_it() -> None:
    sim = FakeBackend(device="cpu", num_envs=1)
    pid = sim.report["pid"]
    del sim
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


def test_a_failed_and_dropped_backend_leaves_nothing() -> None:
    sim = FakeBackend(device="cpu", num_envs=1, cfg=FakeCfg(fault="raise"))
    with pytest.raises(WorkerFailed):
        sim.step()
    del sim  # the guard finds a descriptor of the block, if it is left


def test_a_worker_that_raises_is_named_with_its_traceback(fake: Fake) -> None:
    sim = fake(cfg=FakeCfg(fault="raise:too bad"))
    with pytest.raises(WorkerFailed, match="RuntimeError in phase BUSY: too bad") as caught:
        sim.step(ONES)
    assert "in _misbehave" in caught.value.remote_traceback
    assert caught.value.report is not None and caught.value.report.phase == "BUSY"


@pytest.mark.parametrize("method", ["build", "bind"])
def test_an_error_before_ready_names_its_phase(custom: Custom, method: str) -> None:
    phase = {"build": "INIT", "bind": "ATTACHED"}[method]
    with pytest.raises(WorkerFailed, match=f"in phase {phase}: too early") as caught:
        custom(f"def {method}(self, *args):\n    raise RuntimeError('too early')")
    assert caught.value.report is not None and caught.value.report.phase == phase


def test_every_later_call_gets_the_first_cause(fake: Fake) -> None:
    sim = fake(cfg=FakeCfg(fault="exit:3"))
    with pytest.raises(WorkerDied, match="exit code 3") as first:
        sim.step(ONES)
    for command in (sim.step, sim.step_wait, sim.reset, sim.where):
        with pytest.raises(WorkerDied) as later:
            command()
        assert str(later.value) == str(first.value)


def test_a_silent_worker_is_a_timeout_and_is_killed(fake: Fake) -> None:
    sim = fake(cfg=FakeCfg(fault="hang"), step_timeout_s=0.3)
    pid = sim.report["pid"]
    started = time.monotonic()
    with pytest.raises(WorkerTimeout, match=r"did not answer within 0\.3 s"):
        sim.step(ONES)
    assert time.monotonic() - started < 1.0
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


def test_restart_keeps_addresses_and_gives_a_new_worker_at_the_keyframe(fake: Fake) -> None:
    sim = fake()
    view, ctrl, pid = sim.step(ONES).qpos, sim.ctrl_view, sim.report["pid"]
    state = sim.restart()
    assert state.qpos is view and sim.ctrl_view is ctrl
    assert (view == DEFAULT).all()
    assert sim.report["pid"] != pid
    np.testing.assert_allclose(sim.step(ONES).qpos[0], after_one_step(1.0), rtol=1e-6)


def test_restart_works_after_sigkill(fake: Fake) -> None:
    sim = fake()
    view = sim.step(ONES).qpos
    os.kill(sim.report["pid"], signal.SIGKILL)
    with pytest.raises(WorkerDied, match="SIGKILL"):
        sim.step(ONES)
    assert sim.restart().qpos is view
    np.testing.assert_allclose(sim.step(ONES).qpos[0], after_one_step(1.0), rtol=1e-6)


def test_restart_is_allowed_while_a_step_is_in_flight(fake: Fake) -> None:
    sim = fake(cfg=FakeCfg(fault="hang"))
    sim.step_async(ONES)
    assert (sim.restart().qpos == DEFAULT).all()


def test_restart_with_two_banks_starts_at_bank_zero(fake: Fake) -> None:
    sim = fake(banks=2)
    sim.step(ONES)
    assert (sim.restart().qpos == DEFAULT).all()
    np.testing.assert_allclose(sim.step(ONES).qpos[0], after_one_step(1.0), rtol=1e-6)


def test_restarts_leave_no_logs_of_the_workers_before(fake: Fake) -> None:
    sim = fake()
    logs = [sim.report["log_path"]]
    for _ in range(3):
        sim.restart()
        logs.append(sim.report["log_path"])
    assert [os.path.exists(log) for log in logs] == [False, False, False, True]


def test_restart_after_a_failed_restart_works(custom: Custom, tmp_path: Any) -> None:
    block = tmp_path / "broken"
    sim = custom(f"""
def build(self, init, progress):
    if os.path.exists({str(block)!r}):
        raise RuntimeError("not now")
    return super().build(init, progress)
""")
    view = sim.state.qpos
    block.touch()
    with pytest.raises(WorkerFailed, match="not now"):
        sim.restart()
    with pytest.raises(WorkerFailed, match="not now"):
        sim.step(ONES)
    block.unlink()
    assert sim.restart().qpos is view
    np.testing.assert_allclose(sim.step(ONES).qpos[0], after_one_step(1.0), rtol=1e-6)


# -- other processes ------------------------------------------------------------------------------


def test_a_backend_cannot_be_pickled(shared: FakeBackend) -> None:
    with pytest.raises(UsageError, match="cannot be pickled: open one in the process that uses it"):
        pickle.dumps(shared)


def in_fork(job: Callable[[], object]) -> str:
    """What `job` raises in a forked child, as "ClassName: text"; "" when it returns."""
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            job()
            said = ""
        except BaseException as error:  # noqa: BLE001 - all of it goes to the parent
            said = f"{type(error).__name__}: {error}"
        os.write(write, said.encode()[:4000] or b"-")
        os._exit(0)
    os.close(write)
    try:
        assert select.select([read], [], [], 10)[0], "the forked child hangs"
        said = os.read(read, 4096).decode()
        return "" if said == "-" else said
    finally:
        os.close(read)
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


@pytest.mark.filterwarnings("ignore:.*use of fork:DeprecationWarning")
@pytest.mark.parametrize("command", ["step", "step_wait", "reset", "where", "restart"])
def test_a_forked_child_may_not_use_the_backend(fake: Fake, command: str) -> None:
    sim = fake()
    said = in_fork(getattr(sim, command))
    assert said.startswith("UsageError: this backend belongs to the process that opened it")
    np.testing.assert_allclose(sim.step(ONES).qpos[0], after_one_step(1.0), rtol=1e-6)


@pytest.mark.filterwarnings("ignore:.*use of fork:DeprecationWarning")
def test_a_forked_child_may_not_collect_an_answer(fake: Fake) -> None:
    sim = fake()
    sim.step_async(ONES)
    assert "belongs to the process that opened it" in in_fork(sim.step_wait)
    np.testing.assert_allclose(sim.step_wait().qpos[0], after_one_step(1.0), rtol=1e-6)


@pytest.mark.filterwarnings("ignore:.*use of fork:DeprecationWarning")
@pytest.mark.parametrize("ending", ["close", "collect", "exit hooks"])
def test_a_forked_child_that_ends_takes_nothing_from_its_host(fake: Fake, ending: str) -> None:
    sim = fake()
    log = sim.report["log_path"]

    def job() -> None:
        if ending == "close":
            sim.close()
        elif ending == "collect":
            sim.__dict__.clear()
        else:
            launch._close_all()  # pyright: ignore[reportPrivateUsage]

    assert in_fork(job) == ""
    np.testing.assert_allclose(sim.step(ONES).qpos[0], after_one_step(1.0), rtol=1e-6)
    assert os.path.exists(log)


@pytest.mark.filterwarnings("ignore:.*use of fork:DeprecationWarning")
def test_a_forked_child_may_open_a_backend_of_its_own(fake: Fake) -> None:
    fake()  # so that the spawner thread exists, which the child does not have

    def job() -> None:
        with FakeBackend(device="cpu", num_envs=1) as sim:
            sim.step([[1.0] * 4])

    assert in_fork(job) == ""


# -- what is refused before anything starts -------------------------------------------------------


def test_device_is_required() -> None:
    with pytest.raises(TypeError, match="device"):
        FakeBackend(num_envs=1)  # type: ignore[call-arg]


@pytest.mark.parametrize("device", [None, 0, 1, True, "cuda", "", "gpu", "cuda:", "cuda:-1", 1.5])
def test_a_device_that_names_none_is_refused_with_what_to_write(device: object) -> None:
    with pytest.raises(UsageError, match=r'write device="cuda:1"'):
        FakeBackend(device=device, num_envs=1)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"num_envs": 0}, "num_envs=0 must be 1 to"),
        ({"num_envs": 1.0}, "num_envs=1.0 must be a whole number"),
        ({"num_envs": True}, "num_envs=True must be a whole number"),
        ({"dt": 0}, "dt=0 must be a positive number"),
        ({"dt": float("nan")}, "dt=nan must be a positive number"),
        ({"dt": float("inf")}, "dt=inf must be a positive number"),
        ({"dt": "fast"}, "dt='fast' must be a positive number"),
        ({"decimation": 0}, "decimation=0 must be 1 to"),
        ({"seed": -1}, "seed=-1 must be 0 to"),
        ({"banks": 3}, "banks=3 must be 1 to 2"),
        ({"rank": -1}, "rank=-1 must be 0 to"),
        ({"transport": "pigeon"}, "transport='pigeon' must be 'auto', 'block' or 'cuda'"),
        ({"step_timeout_s": 0}, "step_timeout_s=0 must be a positive number"),
        ({"publish": ("qpos", "torque")}, "cannot publish 'torque'; the fields are qpos, qvel"),
        ({"publish": "qpos"}, r"write publish=\('qpos',\)"),
        ({"publish": ("ctrl",)}, "cannot publish 'ctrl'"),
        ({"env": {"A": 1}}, "must map variable names to text"),
        ({"env": {"A=B": "1"}}, "must map variable names to text"),
        ({"env": {"A\0": "1"}}, "must map variable names to text"),
        ({"env": {"": "1"}}, "must map variable names to text"),
    ],
)
def test_a_bad_argument_is_named(arguments: dict[str, Any], text: str) -> None:
    with pytest.raises(UsageError, match=text):
        FakeBackend(**dict[str, Any](device="cpu", num_envs=1) | arguments)


def test_a_cfg_of_another_backend_is_refused() -> None:
    from outboard.backends import MuJoCoCfg

    with pytest.raises(UsageError, match="cfg is a MuJoCoCfg; this backend takes FakeCfg"):
        FakeBackend(device="cpu", num_envs=1, cfg=MuJoCoCfg())


def test_a_field_that_this_simulator_does_not_have_is_refused(fake: Fake) -> None:
    with pytest.raises(UsageError, match="fake cannot publish contact_force; it publishes qpos"):
        fake(publish=("qpos", "contact_force"))


def test_an_unknown_option_of_a_custom_simulator_is_the_simulators_to_read(custom: Custom) -> None:
    from outboard.backends import CustomCfg

    sim = custom("steps = 0", cfg=CustomCfg({"nu": 2}))
    assert sim.model.nu == 2


@pytest.mark.parametrize(
    "simulator", ["nowhere.py:Sim", "fake", __file__, f"{__file__}:not a name"]
)
def test_a_custom_simulator_must_be_file_and_class(simulator: str) -> None:
    with pytest.raises(UsageError, match="must be FILE:CLASS, and FILE must exist"):
        CustomBackend(simulator=simulator, device="cpu", num_envs=1)


def test_a_custom_class_that_is_no_simulator_is_named(tmp_path: Any) -> None:
    path = tmp_path / "other.py"
    path.write_text("class Sim: pass\n")
    with pytest.raises(UsageError, match="names no subclass of Simulator"):
        CustomBackend(simulator=f"{path}:Sim", device="cpu", num_envs=1)


def test_a_scene_that_does_not_exist_is_named_with_those_that_do() -> None:
    with pytest.raises(
        SceneError, match=r"'nowhere\.xml' is neither a file nor one of ours \(arm7"
    ):
        FakeBackend(device="cpu", num_envs=1, scene="nowhere.xml")


def test_a_state_is_made_of_what_is_given() -> None:
    assert State({"qpos": ONES}).qpos is ONES


def test_a_property_larger_than_the_sockets_buffer_is_set() -> None:
    with FakeBackend(device="cpu", num_envs=60_000) as sim:
        before = sim.state.qpos.copy()
        sim.set_property("rate", np.arange(60_000), np.ones((60_000, 4), np.float32))
        assert (sim.reset([]).qpos == before + 1).all()


def test_a_backend_that_is_dropped_after_its_worker_died_gives_its_gpu_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    released: list[object] = []
    monkeypatch.setattr(launch, "released", released.append)
    sim = FakeBackend(device="cpu", num_envs=1, cfg=FakeCfg(fault="exit:3"))
    with pytest.raises(WorkerDied):
        sim.step()
    del sim
    gc.collect()
    assert len(released) == 1
