"""An invalid message cannot exist, and one that exists cannot change."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from outboard.ipc.layout import Sizes
from outboard.ipc.messages import (
    MAX_PIXELS,
    MESSAGES,
    Error,
    Init,
    Opcode,
    Render,
    RenderReply,
    SetProperty,
    Status,
)
from samples import FACTS, SAMPLES

INIT = SAMPLES["init"]
assert isinstance(INIT, Init)


@pytest.mark.parametrize("name", sorted(MESSAGES))
def test_every_message_is_frozen(name: str) -> None:
    message = next(m for m in SAMPLES.values() if type(m).__name__ == name)
    for field in dataclasses.fields(message):
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(message, field.name, None)
    assert dataclasses.is_dataclass(MESSAGES[name])


@pytest.mark.parametrize("name", ["Init", "WhereReply", "SetProperty", "Render", "Error"])
def test_no_field_has_a_default_to_fall_back_to(name: str) -> None:
    for field in dataclasses.fields(MESSAGES[name]):
        assert field.default is dataclasses.MISSING
        assert field.default_factory is dataclasses.MISSING


def test_an_init_without_a_device_is_a_type_error() -> None:
    values = {f.name: getattr(INIT, f.name) for f in dataclasses.fields(INIT)}
    del values["device"]
    with pytest.raises(TypeError, match="device"):
        Init(**values)


@pytest.mark.parametrize(
    "wrong",
    [
        {"nonce": b"short"},
        {"num_envs": 0},
        {"decimation": 0},
        {"dt": -0.1},
        {"dt": float("nan")},
        {"dt": float("inf")},
        {"terrain": "stairs"},
        {"control": "torque"},
    ],
    ids=str,
)
def test_an_impossible_init_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError):
        dataclasses.replace(INIT, **wrong)


@pytest.mark.parametrize(
    "field",
    [
        *("body_names", "actuator_names", "default_qpos", "default_qvel", "default_ctrl"),
        *("joint_range", "ctrl_range", "kp", "kv", "force_range"),
    ],
)
def test_facts_of_another_length_than_their_sizes_are_refused(field: str) -> None:
    for value in ((), getattr(FACTS, field) * 2):
        with pytest.raises(ValueError, match=field):
            dataclasses.replace(FACTS, **{field: value})


def test_origins_are_there_for_all_environments_or_for_none() -> None:
    assert dataclasses.replace(FACTS, env_origins=b"").env_origins == b""
    with pytest.raises(ValueError, match="env_origins"):
        dataclasses.replace(FACTS, env_origins=bytes(12))


@pytest.mark.parametrize("field", ["num_envs", "nq", "nv", "nu", "nbody"])
@pytest.mark.parametrize("value", [-1, 1 << 30])
def test_sizes_of_a_corrupt_message_are_refused(field: str, value: int) -> None:
    with pytest.raises(ValueError, match=field):
        dataclasses.replace(FACTS.sizes, **{field: value})


def test_there_is_at_least_one_environment() -> None:
    with pytest.raises(ValueError, match="num_envs"):
        Sizes(0, 1, 1, 1, 1)


@pytest.mark.parametrize("width", [0, -1, MAX_PIXELS + 1])
def test_a_picture_has_a_size_that_can_travel(width: int) -> None:
    with pytest.raises(ValueError, match="pixels"):
        Render(0, width, 10, {})
    with pytest.raises(ValueError, match="pixels"):
        Render(0, 10, width, {})


@pytest.mark.parametrize("size", [0, 23, 25])
def test_a_picture_has_three_bytes_a_pixel(size: int) -> None:
    with pytest.raises(ValueError, match="picture"):
        RenderReply(4, 2, bytes(size))


@pytest.mark.parametrize(("ids", "size"), [((), 4), ((0,), 3), ((0, 1), 4), ((0, 1, 2), 16)])
def test_property_values_are_whole_rows_of_float32(ids: tuple[int, ...], size: int) -> None:
    with pytest.raises(ValueError, match="bytes for"):
        SetProperty("rate", ids, bytes(size))


def test_a_property_may_be_set_for_nobody() -> None:
    assert SetProperty("rate", (), b"").env_ids == ()


def test_an_error_names_whose_fault_it_is() -> None:
    with pytest.raises(ValueError, match="fault"):
        Error("BUSY", "somebody", "E", "", "")


def test_opcodes_count_from_one_without_a_gap() -> None:
    # The worker's table of commands is a list; 0 is what a fresh block says.
    assert [int(code) for code in Opcode] == list(range(1, len(Opcode) + 1))


def test_no_status_is_what_a_fresh_block_says() -> None:
    assert 0 not in [int(status) for status in Status]
