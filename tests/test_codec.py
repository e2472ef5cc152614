"""The codec: what goes in comes out, and nothing else gets in."""

from __future__ import annotations

import contextlib
import dataclasses
from typing import Any

import msgpack
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from outboard.ipc import codec
from outboard.ipc.errors import ProtocolError
from outboard.ipc.messages import Bye, Error, Hello, Init, Message, Progress
from samples import SAMPLES

each_message = pytest.mark.parametrize("message", SAMPLES.values(), ids=SAMPLES.keys())
INIT = SAMPLES["init"]
assert isinstance(INIT, Init)


def plain(message: Message) -> tuple[str, dict[str, Any]]:
    name, fields = msgpack.unpackb(codec.encode(message))
    return name, fields


def pack(name: Any, fields: Any) -> bytes:
    body: bytes | None = msgpack.packb([name, fields], use_bin_type=True)
    assert body is not None
    return body


@each_message
def test_a_message_survives_the_way(message: Message) -> None:
    assert codec.decode(codec.encode(message)) == message


@each_message
def test_each_missing_field_is_refused_by_name(message: Message) -> None:
    name, fields = plain(message)
    for field in fields:
        less = {key: value for key, value in fields.items() if key != field}
        with pytest.raises(ProtocolError, match=f"field {field} is missing"):
            codec.decode(pack(name, less))


@each_message
def test_an_unknown_field_is_refused_by_name(message: Message) -> None:
    name, fields = plain(message)
    with pytest.raises(ProtocolError, match="unknown field surprise"):
        codec.decode(pack(name, {**fields, "surprise": 1}))


@each_message
def test_a_value_of_another_type_is_refused_with_its_path(message: Message) -> None:
    name, fields = plain(message)
    for field in fields:
        with pytest.raises(ProtocolError, match=rf"{name}\.{field}"):
            codec.decode(pack(name, {**fields, field: msgpack.Timestamp(1)}))
        with pytest.raises(ProtocolError, match=rf"{name}\.{field}"):
            codec.decode(pack(name, {**fields, field: [[None]]}))


def test_an_init_without_a_device_does_not_decode() -> None:
    name, fields = plain(INIT)
    del fields["device"]
    with pytest.raises(ProtocolError, match="field device is missing"):
        codec.decode(pack(name, fields))


def test_an_init_whose_device_is_none_does_not_decode() -> None:
    name, fields = plain(INIT)
    with pytest.raises(ProtocolError, match=r"Init\.device"):
        codec.decode(pack(name, {**fields, "device": None}))


@pytest.mark.parametrize(
    ("field", "value"),
    [("uuid", ""), ("kind", "tpu"), ("uuid", "GPU-0"), ("local", "cpu")],
)
def test_a_device_that_is_no_identity_does_not_decode(field: str, value: str) -> None:
    name, fields = plain(INIT)
    with pytest.raises(ProtocolError, match=r"Init\.device"):
        codec.decode(pack(name, {**fields, "device": {**fields["device"], field: value}}))


@pytest.mark.parametrize(
    "value", [True, np.int64(1), np.float32(1), 1.0, "1", None, 1 << 64, -(1 << 63) - 1]
)
def test_the_sender_refuses_what_is_no_int(value: Any) -> None:
    with pytest.raises(TypeError, match=r"Progress\.done"):
        codec.encode(Progress("stage", value, 3))


@pytest.mark.parametrize("value", [1, np.float64(0.1), True, None])
def test_the_sender_refuses_what_is_no_float(value: Any) -> None:
    with pytest.raises(TypeError, match=r"Init\.dt"):
        codec.encode(dataclasses.replace(INIT, dt=value if value is not None else 1))


def test_the_sender_refuses_a_list_where_a_tuple_is_declared() -> None:
    with pytest.raises(TypeError, match=r"Init\.publish"):
        codec.encode(dataclasses.replace(INIT, publish=["qpos"]))  # type: ignore[arg-type]


@pytest.mark.parametrize("value", [None, b"bytes", (1,), np.float32(1)])
def test_the_sender_refuses_an_option_that_is_no_scalar(value: Any) -> None:
    with pytest.raises(TypeError, match=r"Init\.options\.odd"):
        codec.encode(dataclasses.replace(INIT, options={"odd": value}))


def test_the_sender_refuses_a_name_that_is_no_utf8() -> None:
    with pytest.raises(TypeError, match=r"Init\.scene.*UTF-8"):
        codec.encode(dataclasses.replace(INIT, scene="/scenes/\udcff.xml"))


def test_the_sender_refuses_what_is_over_the_limit() -> None:
    with pytest.raises(TypeError, match="over the limit"):
        codec.encode(Error("BUSY", "worker", "E", "x" * codec.MAX_BODY, ""))


@pytest.mark.parametrize(
    ("body", "says"),
    [
        (b"", "not msgpack"),
        (b"\xc1", "not msgpack"),
        (codec.encode(Bye()) + b"\x00", "not msgpack"),
        (codec.encode(Bye())[:-1], "not msgpack"),
        (b"\x92\xa3Bye\xc7\x01\x05x", "not msgpack"),  # an extension type
        (b"\x92\xa3Bye\xdf\xff\xff\xff\xff", "not msgpack"),  # a map of four thousand million
        (b"\x92\xa3Bye\x81\x01\x01", "not msgpack"),  # a key that is no text
        (b"\x92\xa2\xff\xfe\x80", "not msgpack"),  # text that is no UTF-8
        (b"\x91" * 100_000 + b"\xc0", "not msgpack"),
        (b"\x80", "not \\[name, fields\\]"),
        (b"\x93\xa3Bye\x80\x80", "not \\[name, fields\\]"),
        (b"\x92\xc4\x03Bye\x80", "not \\[name, fields\\]"),
        (b"\x92\xa3Byy\x80", "unknown message 'Byy'"),
        (b"\x92\xa3Bye\x90", "list where a map belongs"),
        (b"\x92\xa3Bye\xc0", "NoneType where a map belongs"),
    ],
)
def test_garbage_is_a_protocol_error(body: bytes, says: str) -> None:
    with pytest.raises(ProtocolError, match=says):
        codec.decode(body)


def test_a_field_that_comes_twice_is_refused() -> None:
    name, fields = plain(SAMPLES["set_property_reply"])
    twice = b"\x92" + b"".join(
        (msgpack.packb(name) or b"", b"\x82", (msgpack.packb(fields) or b"")[1:] * 2)
    )
    with pytest.raises(ProtocolError, match="twice"):
        codec.decode(twice)


def test_a_frame_over_the_limit_is_refused_before_it_is_read() -> None:
    with pytest.raises(ProtocolError, match="over the limit"):
        codec.decode(bytes(codec.MAX_BODY + 1))


@settings(deadline=None)
@given(st.binary(max_size=200))
def test_any_bytes_decode_or_are_a_protocol_error(body: bytes) -> None:
    try:
        message = codec.decode(body)
    except ProtocolError:
        return
    assert codec.decode(codec.encode(message)) == message


@settings(deadline=None, max_examples=300)
@given(st.sampled_from(sorted(SAMPLES)), st.data())
def test_a_message_with_one_byte_changed_decodes_or_is_a_protocol_error(
    name: str, data: st.DataObject
) -> None:
    body = bytearray(codec.encode(SAMPLES[name]))
    body[data.draw(st.integers(0, len(body) - 1))] = data.draw(st.integers(0, 255))
    with contextlib.suppress(ProtocolError):
        codec.encode(codec.decode(bytes(body)))


@settings(deadline=None)
@given(st.text(), st.one_of(st.none(), st.text()), st.integers(-(1 << 63), (1 << 64) - 1))
def test_all_text_and_all_integers_survive(text: str, mask: str | None, number: int) -> None:
    hello = SAMPLES["hello"]
    assert isinstance(hello, Hello)
    try:
        text.encode()
        (mask or "").encode()
    except UnicodeEncodeError:
        return
    changed = dataclasses.replace(hello, python=text, mask=mask, pid=number)
    assert codec.decode(codec.encode(changed)) == changed
