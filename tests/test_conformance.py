"""The conformance kit: our simulators pass it, and for each of its checks there is a simulator that fails.

A bad simulator must fail its own check and no other; where one mistake breaks several rules by its
nature, the set says so.
"""

from __future__ import annotations

import io
import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from bad_simulators import MASS_KG
from outboard.backends import UsageError, process
from outboard.backends.conformance import (
    CHECKS,
    FAILED,
    HELD,
    SKIPPED,
    Outcome,
    Target,
    as_json,
    exit_code,
    make_target,
    print_outcomes,
    run_kit,
    tally,
)
from outboard.backends.conformance_kit import PROTOCOL, SIMULATOR

pytestmark = pytest.mark.usefixtures("logs_may_stay")  # of checks that fail, which is what we want

SOURCE = Path(__file__).parent / "bad_simulators.py"

# Each mistake in the simulator, and the checks that see it.
BAD: dict[str, set[str]] = {
    "SharedTargets": {"targets_are_independent"},
    "SharedStates": {"states_are_independent"},
    "UnequalEnvironments": {"equal_environments"},
    "Deaf": {"targets_are_independent"},
    "Alone": {"one_environment"},
    # Noise is seen wherever two runs are compared.
    "Random": {"same_trajectory", "targets_are_independent", "states_are_independent",
               "step_with_reset", "restart_restores_all", "one_environment", "two_banks",
               "decimation_is_steps"},
    # A wrong start is seen wherever one that was opened anew is compared with one that was reset.
    "OffKeyframe": {"starts_at_keyframe", "restart_restores_all", "seeds_keep_keyframe",
                    "one_environment", "two_banks", "decimation_is_steps"},
    "ResetTouchesOthers": {"reset_leaves_others"},
    # A reset that does not reset, of all and of some, and before the steps that are compared.
    "ResetKeepsVelocity": {"reset_restores_keyframe", "reset_is_visible", "nonfinite_is_flagged",
                           "decimation_is_steps"},
    # The kit looks at a state again by such a reset.
    "ResetOfNobodyIsAll": {"reset_of_nobody", "set_state_moves_bodies", "set_state_in_order",
                           "set_state_leaves_others", "root_body_is_root",
                           "root_quaternion_is_wxyz"},
    "LateReset": {"step_with_reset"},
    "StalePoses": {"set_state_moves_bodies"},
    # What moved from a state that was not published did not start there.
    "StaleState": {"set_state_is_visible", "root_spin_is_body", "time_step_takes_effect"},
    "RowsSorted": {"set_state_in_order"},
    "SetStateTouchesOthers": {"set_state_leaves_others"},
    "Unwritten": {"fields_are_written"},
    "NeedsCompany": {"every_field_alone"},
    "ChokesOnFields": {"unknown_field_refused"},
    "OneBank": {"two_banks"},
    "SilentNaN": {"nonfinite_is_flagged"},
    "FlagsNeighbour": {"nonfinite_is_flagged"},
    "PicturesMoveTime": {"pictures_have_the_size_asked"},
    "SmallSeeds": {"seeds_keep_keyframe"},
    "WithOrigins": {"origins_are_subtracted", "equal_environments", "root_body_is_root"},
    "Wanders": {"where_repeats_verdict"},
    "NoTime": {"timings_are_positive"},
    # Turning is seen through the quaternions.
    "Xyzw": {"root_body_is_root", "body_angvel_is_rate"},
    "ReadsXyzw": {"root_quaternion_is_wxyz", "body_linvel_is_rate"},
    "NotUnit": {"quaternions_are_unit"},
    "BodyVelocity": {"root_velocity_is_world"},
    "WorldSpin": {"root_spin_is_body"},
    "OtherPoint": {"body_linvel_is_rate"},
    "BodyAngvel": {"body_angvel_is_rate"},
    "LyingTimeStep": {"velocity_is_rate"},
    "DeafToTimeStep": {"time_step_takes_effect"},
    "LyingDecimation": {"decimation_is_steps"},
    "Backwards": {"targets_are_approached"},
    "HalfWeight": {"contact_carries_weight"},
    "FloatingForces": {"contact_carries_weight"},
}  # fmt: skip

# Simulators that reach into the worker around them.
BAD_WORKER: dict[str, set[str]] = {
    "OutOfTotal": {"progress_while_building"},
    # Whatever comes after INIT_REPLY meets what was not asked for.
    "ChattyAfterwards": {"opens", "progress_while_building", "second_init_is_refused",
                         "other_fingerprint_is_refused", "other_nonce_is_refused",
                         "replies_match_requests", "stray_ring_is_no_command",
                         "unknown_opcode_is_refused", "close_when_ready"},
    "TwinJoints": {"facts_fit_together"},
    "AnyFingerprint": {"other_fingerprint_is_refused"},
    "AnyNonce": {"other_nonce_is_refused"},
    "EveryRingCounts": {"stray_ring_is_no_command"},
    "AnyOpcode": {"unknown_opcode_is_refused"},
    "TakesOutput": {"output_goes_to_the_log"},
    "Orphan": {"host_gone_worker_gone"},
    "NoTime": {"replies_match_requests"},
    "LooseAttach": {"second_init_is_refused"},
    "DeepBuild": {"host_gone_worker_gone", "end_of_channel_while_building"},
}  # fmt: skip

# Patches of the worker before it says HELLO.
BAD_START: dict[str, tuple[str, set[str]]] = {
    "pid": (
        "hello = serve.hello\nserve.hello = lambda name: dataclasses.replace(hello(name), pid=1)",
        {"hello_comes_first"},
    ),
    "device": (
        "decode = codec.decode\n"
        "def lenient(body):\n"
        "    try:\n"
        "        return decode(body)\n"
        "    except errors.ProtocolError:\n"
        "        name, values = msgpack.unpackb(body)\n"
        "        cpu = dict(kind='cpu', uuid='', local='cpu')\n"
        "        return decode(msgpack.packb([name, dict(values, device=cpu)]))\n"
        "codec.decode = lenient",
        # Three bytes of garbage are then a crash and not a refusal.
        {"device_is_mandatory", "garbage_is_refused"},
    ),
    "bye": (
        "send = serve.Worker.send\n"
        "def silent(self, message):\n"
        "    if not isinstance(message, messages.Bye):\n"
        "        send(self, message)\n"
        "serve.Worker.send = silent",
        {"close_after_hello", "close_while_building", "close_after_building", "close_when_ready"},
    ),
}

# Enough to see in each run that the kit works; all are in the slow lane.
QUICK = ("SharedTargets", "ResetTouchesOthers", "StalePoses", "Xyzw", "LyingTimeStep",
         "LyingDecimation", "Random", "SilentNaN")  # fmt: skip
QUICK_START = ("pid",)
QUICK_WORKER = ("AnyFingerprint", "TakesOutput", "Orphan")


def bad(name: str, **more: Any) -> Target:
    return make_target(simulator=f"{SOURCE}:{name}", device="cpu", mass_kg=MASS_KG, **more)


def names(outcomes: list[Outcome], verdict: str) -> set[str]:
    return {outcome.name for outcome in outcomes if outcome.verdict == verdict}


def whys(outcomes: list[Outcome]) -> str:
    return "\n".join(f"{o.name}: {o.why}" for o in outcomes if o.verdict == FAILED)


def quick_and(cases: tuple[str, ...], table: dict[str, set[str]]) -> list[Any]:
    return [pytest.param(n, marks=() if n in cases else pytest.mark.slow) for n in table]


# -- ours hold --------------------------------------------------------------------------------------


def test_fake_holds() -> None:
    outcomes = run_kit(make_target(backend="fake", device="cpu"))
    assert not names(outcomes, FAILED), whys(outcomes)
    assert len(names(outcomes, HELD)) > 45
    assert all(outcome.why for outcome in outcomes if outcome.verdict == SKIPPED)
    assert exit_code(outcomes) == 0


def test_fake_holds_on_python38(python38: str) -> None:
    target = make_target(backend="fake", device="cpu", worker_python=python38)
    outcomes = run_kit(target, groups=[PROTOCOL])
    assert not names(outcomes, FAILED), whys(outcomes)


@pytest.mark.slow
def test_fake_holds_on_python38_in_full(python38: str) -> None:
    outcomes = run_kit(make_target(backend="fake", device="cpu", worker_python=python38))
    assert not names(outcomes, FAILED), whys(outcomes)


def test_mujoco_holds_on_a_floating_base() -> None:
    outcomes = run_kit(
        make_target(backend="mujoco", device="cpu", scene="quadruped12"), groups=[SIMULATOR]
    )
    assert not names(outcomes, FAILED), whys(outcomes)
    # What it cannot be asked: pictures (it was opened without), and where joints on a floor go.
    assert names(outcomes, SKIPPED) == {"pictures_have_the_size_asked", "targets_are_approached"}


@pytest.mark.slow
@pytest.mark.parametrize("scene", ["arm7", "humanoid29"])
def test_mujoco_holds(scene: str) -> None:
    outcomes = run_kit(make_target(backend="mujoco", device="cpu", scene=scene))
    assert not names(outcomes, FAILED), whys(outcomes)


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_mujoco_holds_on_python38(python38: str) -> None:
    for scene in ("arm7", "quadruped12"):
        target = make_target(backend="mujoco", device="cpu", scene=scene, worker_python=python38)
        outcomes = run_kit(target)
        assert not names(outcomes, FAILED), whys(outcomes)


@pytest.mark.slow
def test_a_simulator_that_is_not_ours_holds() -> None:
    outcomes = run_kit(bad("Glider"))
    assert not names(outcomes, FAILED), whys(outcomes)
    assert names(outcomes, SKIPPED) == {"pictures_have_the_size_asked", "targets_are_approached"}


# -- every check can fail ---------------------------------------------------------------------------


@pytest.mark.parametrize("name", QUICK)
def test_a_bad_simulator_fails_its_checks(name: str) -> None:
    outcomes = run_kit(bad(name), only=BAD[name])
    assert names(outcomes, FAILED) == BAD[name], whys(outcomes)
    assert exit_code(outcomes) == 1


@pytest.mark.slow
@pytest.mark.parametrize("name", BAD)
def test_a_bad_simulator_fails_its_checks_and_no_other(name: str) -> None:
    outcomes = run_kit(bad(name), groups=[SIMULATOR])
    assert names(outcomes, FAILED) == BAD[name], whys(outcomes)


@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", quick_and(QUICK_WORKER, BAD_WORKER))
def test_a_bad_worker_fails_its_checks(name: str) -> None:
    only = BAD_WORKER[name] if name in QUICK_WORKER else ()
    outcomes = run_kit(bad(name), groups=[PROTOCOL], only=only)
    assert names(outcomes, FAILED) == BAD_WORKER[name], whys(outcomes)


def bad_python(folder: Path, patch: str) -> str:
    """An interpreter that patches the worker before it says HELLO."""
    path = folder / "python"
    path.write_text(
        f"#!{sys.executable}\n"
        "import dataclasses, os, sys, types\n"
        "import msgpack\n"
        "entry = next(part for part in sys.argv if part.endswith('__main__.py'))\n"
        "package = sys.modules['outboard'] = types.ModuleType('outboard')\n"
        "package.__path__ = [os.path.dirname(os.path.dirname(entry))]\n"
        "from outboard.ipc import codec, errors, messages\n"
        "from outboard.workers import serve\n"
        f"{patch}\n"
        "serve.main(sys.argv[sys.argv.index(entry) + 1:])\n"
    )
    path.chmod(0o755)
    return str(path)


@pytest.mark.parametrize("what", quick_and(QUICK_START, {n: e for n, (_, e) in BAD_START.items()}))
def test_a_bad_start_fails_its_checks(what: str, tmp_path: Path) -> None:
    patch, expected = BAD_START[what]
    target = make_target(backend="fake", device="cpu", worker_python=bad_python(tmp_path, patch))
    only = expected if what in QUICK_START else ()
    outcomes = run_kit(target, groups=[PROTOCOL], only=only)
    assert names(outcomes, FAILED) == expected, whys(outcomes)


def test_what_close_leaves_behind_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """The host kills the worker's whole group, so this takes a host that does not."""

    def reap_only(self: process.WorkerProcess, number: int) -> None:
        os.kill(self.pid, number)

    monkeypatch.setattr(process.WorkerProcess, "signal_group", reap_only)
    groups: list[int] = []
    end = process.WorkerProcess.end

    def noting(self: process.WorkerProcess, grace_s: float = 0.0) -> str:
        groups.append(self.pid)
        return end(self, grace_s)

    monkeypatch.setattr(process.WorkerProcess, "end", noting)
    try:
        outcomes = run_kit(bad("HasChild"), only=["close_leaves_nothing"])
    finally:
        for group in set(groups):
            os.killpg(group, signal.SIGKILL)
    assert names(outcomes, FAILED) == {"close_leaves_nothing"}, whys(outcomes)


def test_every_check_has_a_simulator_that_fails_it() -> None:
    seen = set[str]().union(
        *BAD.values(), *BAD_WORKER.values(), *(expected for _, expected in BAD_START.values())
    )
    assert set(CHECKS) - seen == {"close_leaves_nothing"}  # which has a test of its own, above


# -- what the kit says ------------------------------------------------------------------------------


def test_what_does_not_open_is_not_judged() -> None:
    target = make_target(backend="mujoco", device="cpu", scene="no_such_scene.xml")
    outcomes = run_kit(target, only=["same_trajectory", "hello_comes_first"])
    assert names(outcomes, FAILED) == {"opens", "hello_comes_first"}
    assert names(outcomes, SKIPPED) == {"same_trajectory"}
    assert "no_such_scene.xml" in outcomes[0].why
    assert exit_code(outcomes) == 1


def test_table_and_json_tell_the_three_verdicts_apart() -> None:
    outcomes = [
        Outcome("first", HELD, "", "The first rule.", SIMULATOR),
        Outcome("second", FAILED, "off by [3]", "The second rule.", SIMULATOR),
        Outcome("third", SKIPPED, "the model has a fixed base", "The third rule.", SIMULATOR),
    ]
    console = Console(file=io.StringIO(), width=120)
    print_outcomes(outcomes, console)
    text = console.file.getvalue()  # type: ignore[attr-defined]
    for part in ("off by [3]", "rule: The second rule.", "the model has a fixed base"):
        assert part in text
    assert "1 held, 1 failed, 1 skipped" in text
    assert tally(outcomes) == {HELD: 1, FAILED: 1, SKIPPED: 1}
    plain = json.loads(json.dumps(as_json(make_target(backend="fake", device="cpu"), outcomes)))
    assert plain["skipped"] == 1
    assert plain["outcomes"][1]["why"] == "off by [3]"


def test_outcomes_come_one_by_one_and_names_are_checked() -> None:
    target = make_target(backend="fake", device="cpu")
    heard: list[str] = []
    run_kit(target, only=["reset_of_nobody"], on_outcome=lambda outcome: heard.append(outcome.name))
    assert heard == ["opens", "reset_of_nobody"]
    with pytest.raises(ValueError, match="no_such_check"):
        run_kit(target, only=["no_such_check"])


def test_target_is_a_backend_or_a_file() -> None:
    for wrong in ({}, {"backend": "fake", "simulator": "x.py:X"}, {"backend": "no_such"}):
        with pytest.raises(UsageError):
            make_target(device="cpu", **wrong)
