"""Dataclass <-> msgpack, strict both ways: the same check meets our own and the far side's data.

A frame body is `[name, {field: value}]`. Every field must be there, none may be extra, every value must
have the declared type; numpy scalars are refused at the sender by field name. Nothing is pickled.
"""

import dataclasses
import functools
from typing import (
    Any,
    Dict,
    List,
    Mapping,
    Optional,
    Tuple,
    Union,
    get_args,
    get_origin,
    get_type_hints,
)

import msgpack

from .errors import ProtocolError
from .messages import MESSAGES, Message

# 2048 x 2048 RGB is the largest thing that travels (12.6 MB); more is a corrupt length.
MAX_BODY = 16 << 20

_SCALARS = (bool, int, float, str, bytes)


class _Wrong(ValueError):
    """A value that does not fit its declaration; `where` is the dotted path of the field."""

    def __init__(self, where: str, text: str) -> None:
        super().__init__(f"{where}: {text}")


@functools.lru_cache(maxsize=None)
def _fields(cls: type) -> Mapping[str, Any]:
    hints = get_type_hints(cls)
    return {field.name: hints[field.name] for field in dataclasses.fields(cls)}


def _walk(kind: Any, value: Any, where: str, down: bool) -> Any:
    """Check `value` against the declared type and convert it: to plain data when `down`, else back."""
    if kind in _SCALARS:
        # type() and not isinstance(): True is not an int here, numpy.float64 is not a float.
        if type(value) is not kind:
            raise _Wrong(where, f"{type(value).__name__} where {kind.__name__} belongs")
        if kind is int and not -(1 << 63) <= int(value) < 1 << 64:
            raise _Wrong(where, "integer beyond 64 bits")
        if kind is str and down and value != str(value).encode("utf-8", "replace").decode("utf-8"):
            raise _Wrong(where, f"{value!r} is not text: a file name that is not UTF-8?")
        return value
    if isinstance(kind, type) and dataclasses.is_dataclass(kind):
        return _lower(kind, value, where) if down else _raise(kind, value, where)
    origin, args = get_origin(kind), get_args(kind)
    if origin is Union:
        return _walk_union(args, value, where, down)
    if origin is tuple:  # only Tuple[X, ...] is used
        if not isinstance(value, tuple if down else list):
            raise _Wrong(where, f"{type(value).__name__} where a list belongs")
        items = [_walk(args[0], item, f"{where}[{i}]", down) for i, item in enumerate(value)]
        return items if down else tuple(items)
    if origin is dict:
        if type(value) is not dict:
            raise _Wrong(where, f"{type(value).__name__} where a map belongs")
        return {
            _walk(str, key, where, down): _walk(args[1], item, f"{where}.{key}", down)
            for key, item in value.items()
        }
    raise TypeError(f"{where}: no rule for {kind!r}")  # a mistake in messages.py


def _walk_union(args: Tuple[Any, ...], value: Any, where: str, down: bool) -> Any:
    if value is None and type(None) in args:
        return None
    for kind in args:
        # A record is a map on the wire; no union has two of them.
        on_the_wire = dict if dataclasses.is_dataclass(kind) and not down else kind
        if type(value) is on_the_wire:
            return _walk(kind, value, where, down)
    raise _Wrong(where, f"{type(value).__name__} is not one of the types allowed")


def _lower(cls: type, value: Any, where: str) -> Dict[str, Any]:
    if type(value) is not cls:
        raise _Wrong(where, f"{type(value).__name__} where {cls.__name__} belongs")
    return {
        name: _walk(kind, getattr(value, name), f"{where}.{name}", True)
        for name, kind in _fields(cls).items()
    }


def _raise(cls: type, value: Any, where: str) -> Any:
    if type(value) is not dict:
        raise _Wrong(where, f"{type(value).__name__} where a map belongs")
    fields = _fields(cls)
    missing = [name for name in fields if name not in value]
    unknown = [str(name) for name in value if name not in fields]
    if missing:
        raise _Wrong(where, "field {} is missing".format(", ".join(missing)))
    if unknown:
        raise _Wrong(where, "unknown field {}".format(", ".join(unknown)[:200]))
    raised = {
        name: _walk(kind, value[name], f"{where}.{name}", False) for name, kind in fields.items()
    }
    try:
        return cls(**raised)
    except ValueError as error:  # the constructor's own check
        raise _Wrong(where, str(error)) from None


def encode(message: Message) -> bytes:
    """The frame body of `message`. TypeError names the field that holds something else than declared."""
    name = type(message).__name__
    try:
        plain = _lower(MESSAGES[name], message, name)
    except _Wrong as error:
        raise TypeError(str(error)) from None
    body: Optional[bytes] = msgpack.packb([name, plain], use_bin_type=True, strict_types=True)
    if body is None:  # says the stub of msgpack; the packer returns None only when it streams
        raise TypeError(f"{name} was not packed")
    if len(body) > MAX_BODY:
        raise TypeError(f"{name} takes {len(body)} bytes, over the limit of {MAX_BODY}")
    return body


def _each_once(pairs: List[Tuple[Any, Any]]) -> Dict[Any, Any]:
    fields = dict(pairs)
    if len(fields) != len(pairs):
        raise ValueError("a map names a field twice")
    return fields


def _refuse_extension(code: int, data: bytes) -> Any:
    raise ValueError(f"msgpack extension type {code}")


def decode(body: bytes) -> Message:
    """The message in one frame body; ProtocolError says what is wrong with it."""
    if len(body) > MAX_BODY:
        raise ProtocolError(f"a frame of {len(body)} bytes is over the limit of {MAX_BODY}")
    try:
        # Sizes inside the frame are bounded by its length: unpackb sets max_*_len to it.
        parts = msgpack.unpackb(
            body,
            raw=False,
            use_list=True,
            strict_map_key=True,
            timestamp=0,
            ext_hook=_refuse_extension,
            object_pairs_hook=_each_once,
        )
    # msgpack raises ValueError and its own subclasses of Exception (ExtraData, StackError, ...).
    except (ValueError, msgpack.UnpackException, RecursionError, TypeError, OverflowError) as error:
        raise ProtocolError(
            f"a frame of {len(body)} bytes is not msgpack: {type(error).__name__} {str(error)[:200]}"
        ) from None
    if type(parts) is not list or len(parts) != 2 or type(parts[0]) is not str:
        raise ProtocolError("a frame is not [name, fields]")
    cls = MESSAGES.get(parts[0])
    if cls is None:
        raise ProtocolError(f"unknown message {parts[0][:80]!r}")
    try:
        return _raise(cls, parts[1], parts[0])
    except _Wrong as error:
        raise ProtocolError(f"bad message: {str(error)[:500]}") from None
