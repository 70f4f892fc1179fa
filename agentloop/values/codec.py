"""Our dataclasses as MessagePack, checked against their types on the way in. Never pickle.

Arrays travel as `[dtype, bytes]`, one dimension. The encoding of 32k ids takes well under a millisecond.
"""

from __future__ import annotations

from typing import Any, TypeVar, get_origin

import msgspec
import numpy as np

from agentloop.errors import InvalidRequest

T = TypeVar("T")

MSGPACK = "application/msgpack"
"""The media type of what `encode` writes."""

_DTYPES = {"<i4": np.int32, "<f4": np.float32, "|b1": np.bool_}


def _to_wire(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return [value.dtype.str, value.tobytes()]
    raise TypeError(f"{type(value).__name__} has no wire form")


def _from_wire(kind: Any, value: Any) -> Any:
    if (get_origin(kind) or kind) is np.ndarray:
        name, data = value
        return np.frombuffer(data, dtype=_DTYPES[name])
    raise TypeError(f"{kind} has no wire form")


_encoder = msgspec.msgpack.Encoder(enc_hook=_to_wire)


def encode(value: Any) -> bytes:
    """Encode one of our dataclasses (or lists, tuples and dicts of them)."""
    return _encoder.encode(value)


def decode(data: bytes | bytearray, kind: type[T]) -> T:
    """Decode the value of type `kind` that `data` holds. Raises InvalidRequest if it does not hold one."""
    try:
        return msgspec.msgpack.decode(data, type=kind, dec_hook=_from_wire)
    except (msgspec.DecodeError, msgspec.ValidationError, KeyError, TypeError, ValueError) as error:
        raise InvalidRequest(f"not a {getattr(kind, '__name__', kind)}: {error}") from error


def to_builtins(value: Any) -> Any:
    """Convert to JSON-able dicts and lists; arrays become lists."""
    return msgspec.to_builtins(value, enc_hook=lambda v: v.tolist() if isinstance(v, np.ndarray) else _to_wire(v))


def from_builtins(value: Any, kind: type[T]) -> T:
    """Invert `to_builtins` for types without arrays. Raises InvalidRequest naming the field."""
    try:
        return msgspec.convert(value, type=kind, strict=True)
    except msgspec.ValidationError as error:
        raise InvalidRequest(str(error)) from error
