"""The layout: every field in its own place, and a fingerprint that sees every difference."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from outboard.ipc import layout
from outboard.ipc.errors import UsageError
from outboard.ipc.layout import (
    ALIGN,
    FIELDS,
    HEADER_BYTES,
    HOST,
    PUBLISHABLE,
    WORKER,
    FieldSpec,
    Layout,
    Sizes,
)
from pair import SIZES

some_sizes = st.builds(
    Sizes,
    num_envs=st.integers(1, 300),
    nq=st.integers(0, 40),
    nv=st.integers(0, 40),
    nu=st.integers(0, 40),
    nbody=st.integers(0, 20),
)
some_layouts = st.builds(
    Layout, some_sizes, st.sets(st.sampled_from(PUBLISHABLE)), st.sampled_from([1, 2])
)


def places(table: Layout) -> list[tuple[int, int, str]]:
    """(start, end, name) of every array in the block, once per bank that it has."""
    return sorted(
        {
            (table.offset(field, bank), table.offset(field, bank) + field.nbytes, field.name)
            for field in table.fields
            for bank in range(table.banks)
        }
    )


@settings(deadline=None)
@given(some_layouts)
def test_no_field_overlaps_another_in_any_bank(table: Layout) -> None:
    end = HEADER_BYTES
    for start, stop, name in places(table):
        assert start >= end, name
        end = stop
    assert end <= table.total_bytes


@settings(deadline=None)
@given(some_layouts)
def test_every_field_starts_a_cache_line_of_its_own(table: Layout) -> None:
    for start, _, name in places(table):
        assert start % ALIGN == 0, name


@settings(deadline=None)
@given(some_layouts)
def test_host_fields_exist_once_and_worker_fields_once_a_bank(table: Layout) -> None:
    for field in table.fields:
        offsets = {table.offset(field, bank) for bank in range(table.banks)}
        assert len(offsets) == (table.banks if field.written_by == WORKER else 1)


@settings(deadline=None)
@given(some_sizes, st.permutations(PUBLISHABLE))
def test_the_order_in_which_fields_are_asked_for_is_nothing(sizes: Sizes, names: list[str]) -> None:
    assert Layout(sizes, names).fingerprint == Layout(sizes, PUBLISHABLE).fingerprint


def test_shapes_are_those_of_the_table() -> None:
    shapes = {field.name: field.shape for field in Layout(SIZES, PUBLISHABLE).fields}
    assert shapes["ctrl"] == (SIZES.num_envs, SIZES.nu)
    assert shapes["qpos"] == (SIZES.num_envs, SIZES.nq)
    assert shapes["body_quat"] == (SIZES.num_envs, SIZES.nbody, 4)


def test_the_flags_are_always_there() -> None:
    assert Layout(SIZES, ()).fields[-1].name == "env_flags"


# -- the fingerprint -----------------------------------------------------------------------------------


@pytest.mark.parametrize("size", ["num_envs", "nq", "nv", "nu", "nbody"])
def test_the_fingerprint_sees_each_size(size: str) -> None:
    other = dataclasses.replace(SIZES, **{size: getattr(SIZES, size) + 1})
    assert Layout(other, PUBLISHABLE).fingerprint != Layout(SIZES, PUBLISHABLE).fingerprint


def test_the_fingerprint_sees_the_banks() -> None:
    assert Layout(SIZES, ("qpos",), 1).fingerprint != Layout(SIZES, ("qpos",), 2).fingerprint


@pytest.mark.parametrize("name", PUBLISHABLE)
def test_the_fingerprint_sees_each_published_field(name: str) -> None:
    others = [other for other in PUBLISHABLE if other != name]
    assert Layout(SIZES, others).fingerprint != Layout(SIZES, PUBLISHABLE).fingerprint


def changed(spec: FieldSpec, what: str) -> FieldSpec:
    values: dict[str, Any] = {
        "dims": (*spec.dims, "2"),
        "dtype": "<f8",
        "unit": "furlongs",
        "written_by": HOST if spec.written_by == WORKER else WORKER,
    }
    return spec._replace(**{what: values[what]})


@pytest.mark.parametrize("what", ["dims", "dtype", "unit", "written_by"])
def test_the_fingerprint_sees_each_property_of_each_field(
    monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    before = Layout(SIZES, PUBLISHABLE).fingerprint
    for name, spec in FIELDS.items():
        with monkeypatch.context() as patch:
            patch.setitem(layout.FIELDS, name, changed(spec, what))
            assert Layout(SIZES, PUBLISHABLE).fingerprint != before, (name, what)


def test_the_fingerprint_sees_an_offset(monkeypatch: pytest.MonkeyPatch) -> None:
    before = Layout(SIZES, PUBLISHABLE).fingerprint
    monkeypatch.setattr(layout, "ALIGN", 128)
    assert Layout(SIZES, PUBLISHABLE).fingerprint != before


def test_the_fingerprint_is_the_same_on_every_machine() -> None:
    # A change here is a new PROTOCOL_VERSION.
    assert (
        Layout(SIZES, PUBLISHABLE, 2).fingerprint.hex()
        == "c8076e800b02f0be36294e268784c705300115bbbbf029456aa9c6484b1cafa7"
    )


# -- what cannot be asked for --------------------------------------------------------------------------


def test_an_unknown_field_is_refused_with_the_list_of_names() -> None:
    with pytest.raises(UsageError, match=r"'qacc'.*qpos, qvel"):
        Layout(SIZES, ("qpos", "qacc"))


@pytest.mark.parametrize("name", ["ctrl", "env_ids", "env_flags"])
def test_what_is_not_state_cannot_be_published(name: str) -> None:
    with pytest.raises(UsageError, match="cannot publish"):
        Layout(SIZES, (name,))


def test_a_single_name_is_refused_with_what_to_write() -> None:
    with pytest.raises(UsageError, match=r"publish=\('qpos',\)"):
        Layout(SIZES, "qpos")


@pytest.mark.parametrize("banks", [0, 3, -1])
def test_there_are_one_or_two_banks(banks: int) -> None:
    with pytest.raises(UsageError, match="banks"):
        Layout(SIZES, ("qpos",), banks)


def test_repeats_are_published_once() -> None:
    assert Layout(SIZES, ("qpos", "qpos")).publish == ("qpos",)
